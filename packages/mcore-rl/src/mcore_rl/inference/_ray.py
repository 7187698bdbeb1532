# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines in workers of a Ray cluster, which take the trainer's weights."""

import asyncio
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mcore_rl._lost import LostError
from mcore_rl._ray_workers import RayOptions, RayWorkerError, RayWorkerLostError, RayWorkers, fetch, put
from mcore_rl._refit._refit import WeightSink
from mcore_rl._stability import experimental_api
from mcore_rl._types import InferenceRequest, InferenceResponse
from mcore_rl.inference._affinity import PromptAffinity
from mcore_rl.inference._interface import InferenceInterface

if TYPE_CHECKING:
    from mcore_parallel.data import Tokenizer


_log = logging.getLogger(__name__)


class LostAnswerError(RayWorkerError, LostError):
    """An answer is lost with its engine; others go on."""


class OtherWeightsError(RuntimeError):
    """A worker has not the weights that it is to answer with: it was started again."""


class EngineWorker:
    """An engine in its worker; ``make`` gives an interface and what takes weights behind it."""

    def __init__(self, make: Callable[[], tuple[InferenceInterface, WeightSink]]) -> None:
        self._interface, self._engine = make()
        self._version = 0
        self._turn = asyncio.Lock()

    def pid(self) -> int:
        """Of the process."""
        return os.getpid()

    async def answer(self, request: InferenceRequest, version: int) -> list[list[InferenceResponse]]:
        """Continuations, if the weights are at least those."""
        if self._version < version:
            raise OtherWeightsError(f"has version {self._version}, and is asked for {version}")
        return await self._interface.agenerate(request)

    async def load(self, references: Sequence[Any], version: int) -> None:
        """Take weights out of the object store, bucket by bucket; nothing where they, or newer ones, are there."""
        async with self._turn:
            if self._version >= version:
                return
            weights = (item for item in fetch(references))
            load: Any = getattr(self._interface, "load_weights", None)
            if load is not None:
                await load(weights, version)
            else:
                await asyncio.to_thread(self._engine.load_weights, weights)
            self._version = version


@experimental_api
class RayInference(InferenceInterface):
    """Engines in workers of a Ray cluster as one interface, and as the `WeightSink` behind it.

    Each prompt goes to the worker with the fewest open ones, and further requests for it to the same one, as of `BalancedInference`. One
    that was lost, or does not answer, gets none until it has answered again, as long as others do. One that Ray started again is given the
    newest weights before it answers: they stay in the object store until others come. One that has died more often than it is restarted
    costs the answers that it had to draw; the others go on, and the log says how many are left.

    Args:
        make: makes an interface and its engine in a worker.
        tokenizer: theirs.
        options: workers and limits.
        bucket_bytes: weights of one object of the store.

    Raises:
        ModuleNotFoundError: Ray is not installed; names the extra.
        ValueError: there is no connection to a cluster, or a bucket of nothing.
        RayWorkerError: the workers did not start.
    """

    def __init__(
        self,
        make: Callable[[], tuple[InferenceInterface, WeightSink]],
        *,
        tokenizer: "Tokenizer",
        options: RayOptions | None = None,
        bucket_bytes: int = 1 << 28,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be positive")
        self.tokenizer, self._bucket_bytes = tokenizer, bucket_bytes
        self._references: list[Any] = []
        self.version = 0
        """Of the weights that answers are drawn with; 0 for those that the workers began with."""
        self.workers = RayWorkers(functools.partial(EngineWorker, make), options, name="engines")
        self._affinity = PromptAffinity()

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.tokenize(text)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """As of the engines; where one fails, the others' answers are cancelled.

        Raises:
            RayWorkerError: a worker was lost, which is a `LostError`, too, or did not answer in time; named. Or none is left.
        """
        prompts = [dataclasses.replace(request, prompts=[prompt]) for prompt in request.prompts]
        tasks = [asyncio.ensure_future(self._answer(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], /) -> None:
        """Give all workers new weights, through the object store; blocks. One that is lost meanwhile takes them before it answers again, if
        it does.

        Raises:
            RayWorkerError: workers did not take them, of which one refused them or did not in time, or all were lost; names each. One that
                is asked later takes them then. Or none is left.
        """
        references: list[Any] = []
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights:
            bucket.append((name, tensor.detach().to("cpu", copy=True)))
            size += tensor.nbytes
            if size >= self._bucket_bytes:
                references.append(put(bucket))
                bucket, size = [], 0
        if bucket:
            references.append(put(bucket))
        # Those before are kept until here.
        self._references, self.version = references, self.version + 1
        asked = self.workers._alive()
        failed = self.workers._call_these(asked, "load", references, self.version)
        lost = [number for number, error in failed.items() if isinstance(error, RayWorkerLostError)]
        if len(lost) < len(failed) or len(failed) == len(asked):
            reasons = "; ".join(f"{self.workers.describe(number)}: {error}" for number, error in failed.items())
            raise RayWorkerError(f"version {self.version} of the weights was not taken by {len(failed)} of the workers: {reasons}")
        for number in lost:
            _log.warning("version %d of the weights was taken by the others: %s", self.version, failed[number])

    async def _answer(self, request: InferenceRequest) -> list[InferenceResponse]:
        with self._affinity.engine(request.prompts[0], self.workers.loads) as number:
            try:
                return await self._answer_of(number, request)
            except RayWorkerLostError as error:
                raise LostAnswerError(str(error)) from error

    async def _answer_of(self, number: int, request: InferenceRequest) -> list[InferenceResponse]:
        while True:
            version, references = self.version, self._references
            try:
                [answers] = await self.workers.call("answer", request, version, worker=number)
                return answers
            except OtherWeightsError:
                await self.workers.call("load", references, version, worker=number)

    def close(self, drain_s: float = 0.0) -> None:
        """End the workers; may be called again.

        Args:
            drain_s: as of `RayWorkers`.
        """
        self.workers.close(drain_s)
