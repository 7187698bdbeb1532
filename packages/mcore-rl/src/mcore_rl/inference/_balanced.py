# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Several engines as one."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence

from mcore_rl._stability import experimental_api
from mcore_rl._types import InferenceRequest, InferenceResponse
from mcore_rl.inference._affinity import PromptAffinity
from mcore_rl.inference._interface import InferenceInterface


@experimental_api
class BalancedInference(InferenceInterface):
    """Gives each prompt to the engine that has the fewest answers to draw, and further answers to it to the same one, so that one cache
    holds the prompt, while that has not many more to draw than another. Event loops in several threads may ask, where those of the engines
    may.

    Args:
        interfaces: of one model and one tokenizer.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, interfaces: Sequence[InferenceInterface]) -> None:
        if not interfaces:
            raise ValueError("interfaces is empty; pass at least one")
        self.interfaces = tuple(interfaces)
        self._num_open = [0] * len(self.interfaces)
        self._lock = threading.Lock()
        """Of what is open."""
        self._affinity = PromptAffinity()

    def encode(self, text: str) -> Sequence[int]:
        return self.interfaces[0].encode(text)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """As of the engines; where one fails, the others' answers are cancelled and waited for."""
        tasks = [asyncio.ensure_future(self._answer(prompt, request)) for prompt in request.prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, prompt: Sequence[int], request: InferenceRequest) -> list[InferenceResponse]:
        with self._affinity.engine(prompt, self._num_open) as number:
            with self._lock:
                self._num_open[number] += request.n
            try:
                own = dataclasses.replace(request, prompts=[prompt])
                [answers] = await self.interfaces[number].agenerate(own)
                return answers
            finally:
                with self._lock:
                    self._num_open[number] -= request.n
