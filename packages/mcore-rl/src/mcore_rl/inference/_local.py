# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rollouts from an engine in this process."""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal, Self

from mcore_rl._lost import LostError
from mcore_rl._ranks._rendezvous import rendezvous
from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, InferenceRequest, InferenceResponse
from mcore_rl.inference._interface import InferenceInterface, answer_all
from mcore_rl.inference._request_seeds import RequestSeeds

if TYPE_CHECKING:
    from torch import Tensor

    from mcore_inference import (
        DynamicInferenceEngine,
        DynamicInferenceRequestRecord,
        EngineRunner,
        LockstepConfig,
        RequestStream,
        SamplingParams,
        WeightSlice,
    )


@experimental_api
class MegatronLocal(InferenceInterface):
    """Submits to a `DynamicInferenceEngine`, which steps in a thread of its own while anybody waits.

    The event loop stays free for judges. All requests are batched together; every answer carries the log-probabilities of its tokens, of
    the distribution that each was drawn from. While nobody waits the engine is the caller's: weights may be loaded.

    With ``load_weights`` a refit may come while answers are generated: each keeps its tokens and goes on with the new weights, and says
    which weights drew which of them.

    An engine of several ranks is asked by the first of them, inside of ``drawing``, which all of them enter.

    Args:
        engine: with a tokenizer; of this rank.
        max_lag: versions between the weights that an answer began with and the newest ones, at most: at a load that exceeds it the answer
            is given up and drawn again from the newest weights. None for no limit.
        seed: request n that comes here is drawn with a seed of ``seed`` and n alone, or of its name (as of `RequestSeeds`), whatever else
            the engine is asked; None for one of the engine's own seed and the number of the request among all.
        lockstep: patience with the other ranks of the engine; None for the defaults.

    Raises:
        ValueError: the engine has no tokenizer, or shares experts with other ranks; a limit below 0.
    """

    def __init__(
        self,
        engine: "DynamicInferenceEngine",
        *,
        max_lag: int | None = None,
        seed: int | None = None,
        lockstep: "LockstepConfig | None" = None,
    ) -> None:
        if engine.tokenizer is None:
            raise ValueError("engine.tokenizer is None; build the engine with one, prompts and answers are texts here")
        if engine.peers is not None:
            groups = engine.model.groups
            raise ValueError(
                f"the engine has its experts over ep={groups.ep.size} etp={groups.expt_tp.size}, which every rank has to step with; build "
                "the served model with ep and etp up to tp"
            )
        if max_lag is not None and max_lag < 0:
            raise ValueError(f"max_lag={max_lag} must not be negative; None for no limit")
        self.max_lag = max_lag
        self.num_redrawn = 0
        """Answers that were given up for their age and drawn again."""
        self._open: dict[asyncio.Future[None], int] = {}
        """Of each request in flight, what ends it for its age, and the version that it began with."""
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self._thread = _EngineThread(engine, lockstep)
        self._seeds = None if seed is None else RequestSeeds(seed)

    def with_seed(self, seed: int) -> Self:
        """Another one on the same engine, which may be asked at the same time: its requests have seeds of their own and count for
        themselves, as those of an evaluation beside a training."""
        other = copy.copy(self)
        other._seeds, other.num_redrawn = RequestSeeds(seed), 0
        return other

    @contextlib.contextmanager
    def drawing(self) -> Iterator[bool]:
        """A block in which requests may come. Every rank of the engine enters it together, and on each rank nothing else uses the engine
        meanwhile.

        Yields:
            Whether this rank asks. Another one of an engine over several ranks has followed the first by then, to the end of its block.

        Raises:
            RankTimeoutError: ranks of the engine did not come within ``lockstep.join_timeout_s``, or died; names them.
            mcore_inference.RankFailedError: the first rank is gone or silent.
            mcore_inference.EngineDeadError: the first rank gave its engine up; says why.
        """
        with self._thread.drawing() as asks:
            yield asks

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.tokenize(text)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """Continuations from the engine.

        Raises:
            LostError: the engine refused the request, or it failed there; carries the engine's reason.
            mcore_inference.EngineDeadError: the engine's steps failed one after the other, or it lost a rank.
            RuntimeError: the engine has several ranks, and this is outside of ``drawing``.
        """
        params = _sampling_params(request.generation_args)
        with self._thread.running() as runner:
            return await answer_all(request, lambda prompt: self._answer(runner, prompt, params, request.draw))

    async def load_weights(
        self,
        weights: "Iterable[tuple[str, Tensor | WeightSlice]]",
        version: int | None = None,
        *,
        in_flight: Literal["recompute", "keep", "drain"] = "recompute",
    ) -> None:
        """New weights between two steps, also while answers are generated; in the event loop in which these are asked for.

        Args:
            weights: tensors or `mcore_inference.WeightSlice`s by name, read in the engine's thread.
            version: of them; None for the next number.
            in_flight: what answers in flight do: recompute their keys and values with the new weights, keep the old ones, or drain.

        Raises:
            mcore_inference.WeightLoadError, ValueError, RuntimeError: as of ``EngineRunner.load_weights``.
        """
        with self._thread.running() as runner:
            await runner.load_weights(weights, version, in_flight=in_flight)
        if self.max_lag is not None:
            oldest = self.engine.weight_version - self.max_lag
            # Those of `with_seed` are asked in event loops of other threads, too.
            for stale, begun in list(self._open.items()):
                if begun < oldest:
                    with contextlib.suppress(RuntimeError):  # its event loop has ended
                        stale.get_loop().call_soon_threadsafe(_end, stale)

    async def _answer(self, runner: "EngineRunner", prompt: Sequence[int], params: "SamplingParams", draw: str | None) -> InferenceResponse:
        from mcore_inference import RequestError

        while True:
            stale: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._open[stale] = self.engine.weight_version
            try:
                try:
                    stream = await runner.submit(prompt, self._seeded(params, draw), stream=False)
                except RequestError as error:
                    raise LostError(str(error), is_transient=error.is_transient) from error
                try:
                    if (record := await self._record(stream, stale)) is not None:
                        return _response(record)
                    self.num_redrawn += 1
                finally:
                    stream.abort()
            finally:
                del self._open[stale]

    async def _record(self, stream: "RequestStream", stale: "asyncio.Future[None]") -> "DynamicInferenceRequestRecord | None":
        """The end of an answer; None where it is given up for its age."""
        if self.max_lag is None:
            return await stream.record()
        record = asyncio.ensure_future(stream.record())
        try:
            await asyncio.wait((record, stale), return_when=asyncio.FIRST_COMPLETED)
            return None if stale.done() else record.result()
        finally:
            record.cancel()

    def _seeded(self, params: "SamplingParams", draw: str | None) -> "SamplingParams":
        """With the seed of the named request, or the next one, where it brings none."""
        if self._seeds is None or params.seed is not None:
            return params
        return dataclasses.replace(params, seed=self._seeds.of(draw))


class _EngineThread:
    """An engine that steps in a thread of its own while anybody waits."""

    def __init__(self, engine: "DynamicInferenceEngine", lockstep: "LockstepConfig | None") -> None:
        self._engine, self._lockstep = engine, lockstep
        self._ranks = engine.model.groups.tp_pp
        self._lock = threading.Lock()
        self._runner: EngineRunner | None = None
        self._num_waiting = 0

    @contextlib.contextmanager
    def drawing(self) -> Iterator[bool]:
        """As of `MegatronLocal`."""
        from mcore_inference import LockstepConfig, follow_runner

        if self._ranks.size == 1:
            yield True
            return
        lockstep = self._lockstep or LockstepConfig()
        # One that died is named at once.
        rendezvous(self._ranks, lockstep.join_timeout_s, "draws of their engine")
        if self._ranks.rank > 0:
            follow_runner(self._engine, lockstep)
            yield False
            return
        with self.running(is_block=True):
            yield True

    @contextlib.contextmanager
    def running(self, *, is_block: bool = False) -> "Iterator[EngineRunner]":
        """The engine in its thread, which the last one who waits ends; with several ranks that is a block, and the others are there."""
        from mcore_inference import EngineRunner

        with self._lock:
            if self._runner is None:
                if self._ranks.size > 1 and not is_block:
                    raise RuntimeError(
                        f"the engine has {self._ranks.size} ranks, which step together inside of drawing(); ask it there, on its first rank"
                    )
                self._runner = EngineRunner(self._engine, lockstep=self._lockstep)
            runner = self._runner
            self._num_waiting += 1
        try:
            yield runner
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._runner = None
                    runner.close()


def _end(stale: "asyncio.Future[None]") -> None:
    if not stale.done():
        stale.set_result(None)


@functools.lru_cache(maxsize=4)
def _sampling_params(args: GenericGenerationArgs) -> "SamplingParams":
    # Whoever has an engine has imported it already; agents without one need not.
    from mcore_inference import SamplingParams

    return SamplingParams(
        temperature=1.0 if args.temperature is None else args.temperature,
        top_k=args.top_k or 0,
        top_p=0.0 if args.top_p is None or args.top_p == 1 else args.top_p,
        num_tokens_to_generate=args.max_tokens,
        return_log_probs=True,
        processed_log_probs=True,
    )


def _response(record: "DynamicInferenceRequestRecord") -> InferenceResponse:
    from mcore_inference import RequestError

    if (error := record.error) is not None:
        is_transient = isinstance(error, RequestError) and error.is_transient
        raise LostError(f"request {record.request_id} failed: {error}", is_transient=is_transient) from error
    assert record.finish_reason is not None
    return InferenceResponse(
        response=record.generated_text,
        token_ids=[*record.prompt_tokens, *record.generated_tokens],
        prompt_length=len(record.prompt_tokens),
        logprobs=record.generated_log_probs,
        finish_reason=record.finish_reason.value,
        routed_experts=record.routed_experts,
        weight_versions=tuple(chain.from_iterable((version,) * count for version, count in record.weight_versions)),
    )
