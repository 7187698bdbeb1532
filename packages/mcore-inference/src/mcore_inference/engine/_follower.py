# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine of another rank than the first: it repeats what the runner does there."""

import dataclasses
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.adapters import LoraWeights
from mcore_inference.engine._engine import DynamicInferenceEngine
from mcore_inference.engine._lockstep import Outcome, apply_calls, digest_of, open_group, rank_name, ranks_of
from mcore_inference.engine._lockstep_config import LockstepConfig
from mcore_inference.engine._rank_link import RankLink
from mcore_inference.engine._weight_broadcast import received_chunks
from mcore_inference.engine._weights import WeightChunk
from mcore_inference.requests import EngineDeadError, RankFailedError

__all__ = ["follow_runner"]


@experimental_api
def follow_runner(engine: DynamicInferenceEngine, config: LockstepConfig | None = None) -> None:
    """Repeat on another rank of a split model what the ``EngineRunner`` of the first does, until that is closed.

    Args:
        engine: with the sizes, seed and tokenizer of the first rank's; nothing else may use it meanwhile.
        config: as of the runner; None for the defaults.

    Raises:
        ValueError: this is the first rank, which makes the runner.
        TimeoutError: not all ranks came.
        RankFailedError: the first rank is gone or silent. A step may hang then: end the process.
        EngineDeadError: the runner gave its engine up, and why.
    """
    ranks = ranks_of(engine)
    if ranks.rank == 0:
        raise ValueError(f"this is {rank_name(engine, 0)} of {ranks.size}, which makes the EngineRunner; the other ranks follow")
    _Follower(engine, LockstepConfig() if config is None else config).run()


class _Follower:
    """Messages come in a thread of the link, and are obeyed in one that may hang in a step; the caller waits for either to end."""

    def __init__(self, engine: DynamicInferenceEngine, config: LockstepConfig) -> None:
        self._engine, self._config = engine, config
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._digest = 0
        self._pg = open_group(engine, config)
        self._link = RankLink(
            self._pg, 0, silence_s=config.silence_timeout_s, on_message=self._receive, on_lost=self._lose,
            sign=lambda: {"forwards": engine.num_forwards},
        )  # fmt: skip
        if engine.peers is not None:
            engine.peers.open(config, self._give_up)
            engine.peers.spans_steps = True

    def run(self) -> None:
        threading.Thread(target=self._obey_all, name="mcore-engine", daemon=True).start()
        try:
            self._is_over.wait()
        except BaseException as error:
            # The caller goes, as with Ctrl-C: the first rank hears it, and no further step begins here.
            self._failure = self._failure or error
            self._messages.put(None)
            self._link.end(f"{type(error).__name__} in its process")
            raise
        self._link.join(self._config.silence_timeout_s)
        dist.destroy_process_group(self._pg)
        if self._engine.peers is not None:
            self._engine.peers.close()
        if self._failure is not None:
            raise self._failure

    def _receive(self, _: int, message: dict[str, Any]) -> None:
        if message:
            self._messages.put(message)
        if message.get("end") is not None:
            # A step may hang that no other rank ends.
            self._failure = self._failure or EngineDeadError(message["end"])
            self._link.end()
            self._is_over.set()

    def _lose(self, rank: int, what: str) -> None:
        self._give_up(RankFailedError(rank, what, rank_name(self._engine, rank)))

    def _give_up(self, failure: RankFailedError) -> None:
        """From another thread: the one that steps may hang."""
        self._failure = self._failure or failure
        self._messages.put(None)
        self._is_over.set()

    def _next_message(self) -> dict[str, Any]:
        message = self._messages.get()
        if message is None:
            assert self._failure is not None, "a link ends by a message or a failure"
            self._messages.put(None)
            raise self._failure
        return message

    def _obey_all(self) -> None:
        try:
            device = self._engine.context.device
            if device.type == "cuda" and device.index is not None:
                # Which GPU is current, each thread says for itself.
                torch.cuda.set_device(device)
            while "end" not in (message := self._next_message()):
                if self._engine.has_broken_pass:
                    # The first rank knows, and what comes meanwhile is of no step that this rank could make.
                    continue
                outcome = self._obey(message)
                self._link.send({"number": message["number"], "outcome": dataclasses.asdict(outcome)})
            self._link.end()
        except BaseException as error:
            self._failure = self._failure or error
            self._link.end(f"{type(error).__name__}: {error}")
        finally:
            self._is_over.set()

    def _obey(self, message: dict[str, Any]) -> Outcome:
        error: Exception | None = None
        try:
            apply_calls(self._engine, message["calls"])
            if "load" in message:
                self._load(message["number"], message["load"], message["in_flight"])
            if "lora" in message:
                self._load_lora(message)
            if "step" in message:
                self._digest = digest_of(self._engine.step(), self._digest)
        except Exception as raised:
            error = raised
            # Those of a failed step.
            self._engine.take_finished()
        return Outcome.of(error, self._digest, self._engine)

    def _chunks(self, number: int) -> Iterator[WeightChunk]:
        """Of the load with this number."""
        buckets = itertools.count(1)

        def reach(failure: Exception | None) -> None:
            refusal = None if failure is None else f"{type(failure).__name__}: {failure}"[:1000]
            self._link.send({"load": number, "bucket": next(buckets), "refusal": refusal})

        return received_chunks(self._next_message, ranks_of(self._engine), self._engine.context.device, reach)

    def _load_lora(self, message: dict[str, Any]) -> None:
        chunks, tensors = self._chunks(message["number"]), {}
        try:
            for name, part in chunks:
                if isinstance(part, Tensor):
                    # The device has one bucket at a time.
                    tensors[name] = part.cpu()
        finally:
            for _ in chunks:
                pass
        self._engine.load_lora(message["lora"], LoraWeights.of(tensors, rank=message["rank"], alpha=message["alpha"]))

    def _load(self, number: int, version: int, in_flight: Any) -> None:
        chunks = self._chunks(number)
        try:
            self._engine.load_weights(chunks, version, in_flight=in_flight)
        finally:
            # Whatever was refused, the first rank sends the rest.
            for _ in chunks:
                pass
