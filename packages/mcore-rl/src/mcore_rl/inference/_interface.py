# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The only thing an agent knows of a language model."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mcore_rl._stability import experimental_api
from mcore_rl._types import InferenceRequest, InferenceResponse


@experimental_api
class InferenceInterface(ABC):
    """Continues prompts; token ids in, token ids and log-probabilities out."""

    @abstractmethod
    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """``request.n`` continuations of every prompt, in the order of the prompts.

        Raises:
            LostError: this request failed, and others may succeed.
            TimeoutError: it was not answered in time; as for ``LostError``.
            Exception: any other error is of the engine, and ends the iteration.
        """

    def generate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """``agenerate`` for callers that await nothing. Inside a running event loop it blocks that, and works in a loop of another thread.

        Raises:
            Exception: as of ``agenerate``.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.agenerate(request))
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="mcore-generate") as pool:
            return pool.submit(lambda: asyncio.run(self.agenerate(request))).result()

    @abstractmethod
    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a prompt."""


async def answer_all(
    request: InferenceRequest, answer: Callable[[Sequence[int]], Awaitable[InferenceResponse]]
) -> list[list[InferenceResponse]]:
    """``request.n`` answers to every prompt at once, in the order of the prompts.

    Where the caller gives up, or one answer fails, the others are cancelled and waited for: nothing goes on in the engine.
    """
    if request.n == len(request.prompts) == 1:
        # As agents ask; tasks for each of many hundreds take time.
        return [[await answer(request.prompts[0])]]
    tasks = [asyncio.ensure_future(answer(prompt)) for prompt in request.prompts for _ in range(request.n)]
    try:
        flat = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [flat[i : i + request.n] for i in range(0, len(flat), request.n)]
