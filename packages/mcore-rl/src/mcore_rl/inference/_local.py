# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rollouts from an engine in this process."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_rl._types import GenericGenerationArgs, InferenceRequest, InferenceResponse
from mcore_rl.inference._interface import InferenceInterface

if TYPE_CHECKING:
    from mcore_inference import DynamicInferenceEngine, DynamicInferenceRequestRecord, SamplingParams


class MegatronLocal(InferenceInterface):
    """Submits to a `DynamicInferenceEngine` and steps it while anybody waits.

    All requests of one event loop are batched together; every answer carries the log-probabilities of its tokens, of the
    distribution that each was drawn from.

    Args:
        engine: with a tokenizer.

    Raises:
        ValueError: the engine has no tokenizer.
    """

    def __init__(self, engine: "DynamicInferenceEngine") -> None:
        if engine.tokenizer is None:
            raise ValueError("engine.tokenizer is None; build the engine with one, prompts and answers are texts here")
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self._waiting: dict[int, asyncio.Future[DynamicInferenceRequestRecord]] = {}
        self._pump: asyncio.Task[None] | None = None

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.tokenize(text)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """Continuations from the engine.

        Raises:
            RuntimeError: a request failed; carries the engine's reason.
            mcore_inference.RequestError: a prompt the engine cannot take.
        """
        params = _sampling_params(request.generation_args)
        futures = [[self._submit(prompt, params) for _ in range(request.n)] for prompt in request.prompts]
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._step_engine())
        try:
            return [[_response(await future) for future in row] for row in futures]
        finally:
            # Of a caller that gives up, or one of whose requests failed, nothing goes on in the engine.
            for future in itertools.chain.from_iterable(futures):
                future.cancel()

    def _submit(self, prompt: Sequence[int], params: "SamplingParams") -> "asyncio.Future[DynamicInferenceRequestRecord]":
        future = asyncio.get_running_loop().create_future()
        self._waiting[self.engine.add_request(prompt, params)] = future
        return future

    async def _step_engine(self) -> None:
        try:
            while self._waiting:
                for record in self.engine.step():
                    future = self._waiting.pop(record.request_id)
                    if not future.done():
                        future.set_result(record)
                for number in [number for number, future in self._waiting.items() if future.cancelled()]:
                    self.engine.abort(number)
                    del self._waiting[number]
                await asyncio.sleep(0)
        except BaseException as error:
            # Whoever waits learns why; nobody is left waiting for a pump that is gone.
            for number, future in self._waiting.items():
                self.engine.abort(number)
                if isinstance(error, asyncio.CancelledError):
                    future.cancel()
                elif not future.done():
                    future.set_exception(error)
            self._waiting.clear()
            if not isinstance(error, Exception):
                raise


def _sampling_params(args: GenericGenerationArgs) -> "SamplingParams":
    # Whoever has an engine has imported it already; agents without one need not.
    from mcore_inference import SamplingParams

    return SamplingParams(
        temperature=1.0 if args.temperature is None else args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p or 0.0,
        num_tokens_to_generate=args.max_tokens,
        return_log_probs=True,
        processed_log_probs=True,
    )


def _response(record: "DynamicInferenceRequestRecord") -> InferenceResponse:
    if record.error is not None:
        raise RuntimeError(f"request {record.request_id} failed: {record.error}") from record.error
    assert record.finish_reason is not None
    return InferenceResponse(
        response=record.generated_text,
        token_ids=[*record.prompt_tokens, *record.generated_tokens],
        prompt_length=len(record.prompt_tokens),
        logprobs=record.generated_log_probs,
        finish_reason=record.finish_reason.value,
    )
