# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines of the ranks of one split model: the first decides, the others repeat its calls in its order."""

import contextlib
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mcore_inference._fields import as_integer
from mcore_inference.adapters import LoraLoadError, LoraWeights
from mcore_inference.engine._engine import DynamicInferenceEngine
from mcore_inference.engine._lockstep_config import LockstepConfig
from mcore_inference.engine._rank_link import RankLink
from mcore_inference.engine._weight_broadcast import WeightSender
from mcore_inference.engine._weights import WeightChunk, WeightLoadError, WeightPolicy, check_policy
from mcore_inference.requests import DynamicInferenceRequestRecord, Prompt, RankFailedError
from mcore_inference.sampling import SamplingParams
from mcore_parallel.groups import Group, connect

_MAX_UNACKNOWLEDGED = 4
"""Steps that the first rank may be ahead of another of its stage, and one more for each stage behind."""
_BLAME_DELAY_S = 1.0
"""From the error of a pass on one stage to its blame: a rank that is gone breaks the passes of others, and is known by then."""


def ranks_of(engine: DynamicInferenceEngine) -> Group:
    """The ranks that hold one copy of the engine's model and step together; the first leads."""
    return engine.model.groups.tp_pp


def rank_name(engine: DynamicInferenceEngine, rank: int) -> str:
    """What messages call one of ``ranks_of``; with its number in the world where that has other engines, too."""
    groups = engine.model.groups
    stage, place = divmod(rank, groups.tp.size)
    name = f"tp rank {rank}" if groups.pp.size == 1 else f"rank {rank} (tp {place} of stage {stage})"
    return name if groups.dp.size == 1 else f"{name} of engine {groups.dp.rank} (rank {groups.tp_pp.ranks[rank]} of the world)"


def open_group(engine: DynamicInferenceEngine, config: LockstepConfig) -> dist.ProcessGroup:
    """A gloo group of the engine's ranks, for their messages; all of them call this.

    Raises:
        TimeoutError: not all ranks came.
    """
    ranks = ranks_of(engine)
    me, timeout_s = ranks.ranks[ranks.rank], config.join_timeout_s
    try:
        group = connect(ranks.ranks, me, backend="gloo", timeout_s=timeout_s, name="mcore-lockstep", local=True)
    except RuntimeError as error:
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        raise TimeoutError(
            f"ranks {others} of {ranks.size} did not all come within join_timeout_s={timeout_s:g}; rank 0 makes the runner, "
            "each other rank calls follow_runner(engine)"
        ) from error
    assert group.pg is not None, "this rank is one of them"
    return group.pg


@dataclass(frozen=True)
class Outcome:
    """What a message came to on one rank."""

    kind: str = ""
    """Class of the error; empty for none."""
    text: str = ""
    digest: int = 0
    """Of all tokens of finished requests so far."""
    has_weights: bool = True
    """Whether no load failed half-way."""
    has_broken_pass: bool = False
    """Whether the rank left a pass through the stages, in which others wait for it; it makes no further step."""

    @classmethod
    def of(cls, error: Exception | None, digest: int, engine: DynamicInferenceEngine) -> "Outcome":
        kind = "" if error is None else type(error).__name__
        text = f"{kind}: {error}"[:1000] if kind else ""
        return cls(kind, text, digest, engine.weights.are_complete, bool(kind) and engine.has_broken_pass)


@dataclass
class _Pending:
    """A message whose outcome is not known on all ranks."""

    name: str
    """For messages."""
    is_step: bool
    acks: dict[int, Outcome] = field(default_factory=dict)
    due: float | None = None
    """When a rank without an acknowledgement is late; None while this rank works itself on a call that may take long."""
    own: Outcome | None = None
    num_buckets: int = 0
    """Of weights, whose broadcast began here."""
    reached_buckets: dict[int, int] = field(default_factory=dict)
    """By rank, those that it has memory for, and waits for."""
    refusal: str | None = None
    """Of a rank without memory for a bucket."""


def digest_of(records: Iterable[DynamicInferenceRequestRecord], digest: int) -> int:
    """Add the tokens of finished requests to a checksum."""
    for record in records:
        digest = zlib.crc32(array("q", [record.request_id, *record.generated_tokens]).tobytes(), digest)
    return digest


class LockstepLeader:
    """Calls of an engine, sent to the engines of the other ranks of its model as well: those of its stages and of their tp groups.

    What changes no memory of the device waits for the next step and goes with it in one message. A step does not wait for the others:
    their acknowledgements are compared later, by class of error and tokens. Loads, ``suspend`` and ``resume`` wait.

    Args:
        engine: of the first rank.
        config: time-outs.
        on_failure: called once, in another thread, when a rank is lost, late or did something else; no call comes back to life then.

    Raises:
        TimeoutError: not all ranks came.
    """

    def __init__(self, engine: DynamicInferenceEngine, config: LockstepConfig, on_failure: Callable[[RankFailedError], None]) -> None:
        self.engine = engine
        self._config, self._on_failure = config, on_failure
        self._changed = threading.Condition()
        self._failure: RankFailedError | None = None
        self._calls: list[dict[str, Any]] = []
        self._pending: dict[int, _Pending] = {}
        self._signs: dict[int, tuple[float, int]] = {}
        """Of ranks that had nothing else to send: when it came, and the passes through their part of the model that they had launched."""
        self._blame_timer: threading.Timer | None = None
        """Of a rank that left a pass."""
        self._number = 0
        self._digest = 0
        self._num_ranks = ranks_of(engine).size
        self._most_unacknowledged = _MAX_UNACKNOWLEDGED + engine.model.groups.pp.size - 1
        self._pg = open_group(engine, config)
        self._links = [
            RankLink(self._pg, rank, silence_s=config.silence_timeout_s, on_message=self._receive, on_lost=self._blame)
            for rank in range(1, self._num_ranks)
        ]

    # -- calls -------------------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0, lora: str | None = None
    ) -> int:
        """As of the engine; the others get what it accepted, as tokens."""
        self._check()
        number = self.engine.add_request(prompt, sampling_params, priority=priority, lora=lora)
        try:
            record = self.engine.get_request(number)
        except KeyError:
            # It had nothing to compute.
            return number
        settings = None if sampling_params is None else sampling_params.serialize()
        call = {"call": "add", "id": number, "tokens": record.prompt_tokens, "params": settings, "priority": priority, "lora": lora}
        self._calls.append(call)
        return number

    def abort(self, request_id: int, error: Exception | None = None) -> DynamicInferenceRequestRecord | None:
        """As of the engine; the others end it without the error."""
        record = self.engine.abort(request_id, error)
        if record is not None:
            self._calls.append({"call": "abort", "id": request_id})
        return record

    def hold_queue(self, hold: bool) -> None:
        """As of the engine."""
        self.engine.hold_queue(hold)
        self._calls.append({"call": "hold", "hold": hold})

    def hold_steps(self, reason: str | None) -> None:
        """As of the engine."""
        self.engine.hold_steps(reason)
        self._calls.append({"call": "hold_steps", "reason": reason})

    def announce_load(self, version: int | None, in_flight: WeightPolicy = "recompute") -> None:
        """As of the engine."""
        self.engine.announce_load(version, in_flight)
        self._calls.append({"call": "announce", "version": version, "in_flight": in_flight})

    def step(self) -> list[DynamicInferenceRequestRecord]:
        """As of the engine.

        Raises:
            RankFailedError: a rank is lost, late, or did something else.
            Exception: what the step raised on all ranks alike.
        """
        self._wait(lambda: len(self._pending) < self._most_unacknowledged and self._blame_timer is None)
        number = self._send({"step": True}, is_step=True)
        error: Exception | None = None
        finished: list[DynamicInferenceRequestRecord] = []
        try:
            finished = self.engine.step()
        except Exception as raised:
            error = raised
        self._digest = digest_of(finished, self._digest)
        self._finish(number, Outcome.of(error, self._digest, self.engine))
        if error is not None:
            # Only what failed everywhere has left the ranks equal.
            self._wait(lambda: number not in self._pending)
            raise error
        return finished

    def load_weights(self, chunks: Iterable[WeightChunk], version: int | None = None, *, in_flight: WeightPolicy = "recompute") -> None:
        """As of the engine; the chunks are read here and sent by buckets. A load that one rank refuses fails on all."""
        check_policy(in_flight)
        version = self.engine.next_weight_version if version is None else as_integer("version", version, 0, 2**63 - 1)
        sender = WeightSender(ranks_of(self.engine), self.engine.context.device, self._broadcast, self._watch_bucket)

        def load() -> None:
            try:
                self.engine.load_weights(sender.chunks(chunks), version, in_flight=in_flight)
            finally:
                sender.end()

        error, outcomes = self._everywhere({"load": version, "in_flight": in_flight}, load)
        failed = _failed(outcomes)
        if error is None and not failed:
            return
        as_before = self.engine.weights.are_complete and all(outcome.has_weights for outcome in outcomes.values())
        if error is None or len(failed) < len(outcomes) or not as_before:
            self._everywhere({"call": "invalidate"}, lambda: invalidate_weights(self.engine))
        if error is not None:
            raise error
        rank, outcome = next(iter(failed.items()))
        raise WeightLoadError(f"{rank_name(self.engine, rank)} refused the weights: {outcome.text}")

    def load_lora(self, name: str, weights: LoraWeights) -> None:
        """As of the engine; the matrices are sent from here, unless they are refused here. A load that another rank refuses is undone on
        all.
        """
        self._check()
        self.engine.load_lora(name, weights)
        sender = WeightSender(ranks_of(self.engine), self.engine.context.device, self._broadcast, self._watch_bucket)

        def send() -> None:
            try:
                for _ in sender.chunks(weights.tensors().items()):
                    pass
            except WeightLoadError as error:
                raise LoraLoadError(str(error)) from error
            finally:
                sender.end()

        error, outcomes = self._everywhere({"lora": name, "rank": weights.rank, "alpha": weights.alpha}, send)
        failed = _failed(outcomes)
        if error is None and not failed:
            return
        self._everywhere({"call": "drop_lora", "name": name}, lambda: drop_lora(self.engine, name))
        if error is not None:
            raise error
        rank, outcome = next(iter(failed.items()))
        raise LoraLoadError(f"{rank_name(self.engine, rank)} refused the adapter: {outcome.text}")

    def unload_lora(self, name: str) -> None:
        """As of the engine; the others have the same requests and adapters."""
        self._check()
        self.engine.unload_lora(name)
        self._calls.append({"call": "unload_lora", "name": name})

    def suspend(self) -> None:
        """As of the engine; returns when all ranks have freed their caches."""
        error, outcomes = self._everywhere({"call": "suspend"}, self.engine.suspend)
        self._check_all("suspend", error, outcomes)

    def resume(self) -> None:
        """As of the engine. Where a rank has no memory, all stay suspended."""
        error, outcomes = self._everywhere({"call": "resume"}, self.engine.resume)
        if error is not None or _failed(outcomes):
            self.suspend()
        self._check_all("resume", error, outcomes)

    def close(self, reason: str | None = None) -> None:
        """Let the others end, with an error where there is a reason for one, else with the engine as it is here."""
        with self._changed:
            timer = self._blame_timer
        if timer is not None:
            timer.cancel()
        if reason is None and self._calls and self._failure is None:
            self._send({}, is_step=False)
        for link in self._links:
            link.end(reason)
        deadline = time.monotonic() + self._config.silence_timeout_s
        for link in self._links:
            link.join(deadline - time.monotonic())
        dist.destroy_process_group(self._pg)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_all(self, name: str, error: Exception | None, outcomes: dict[int, Outcome]) -> None:
        if error is not None:
            raise error
        for rank, outcome in _failed(outcomes).items():
            raise RuntimeError(f"{name} failed on {rank_name(self.engine, rank)}: {outcome.text}")

    def _everywhere(self, message: dict[str, Any], run: Callable[[], None]) -> tuple[Exception | None, dict[int, Outcome]]:
        """Do something on all ranks, and wait for them: the error here, and the outcomes of the others."""
        self._check()
        number = self._send(message, is_step=False)
        error: Exception | None = None
        try:
            run()
        except Exception as raised:
            error = raised
        with self._changed:
            pending = self._pending.get(number)
        self._finish(number, Outcome.of(error, self._digest, self.engine))
        self._wait(lambda: number not in self._pending)
        return error, {} if pending is None else dict(sorted(pending.acks.items()))

    def _send(self, message: dict[str, Any], *, is_step: bool) -> int:
        """Send what happened since the last message, and what happens now."""
        self._number += 1
        calls, self._calls = self._calls, []
        with self._changed:
            due = time.monotonic() + self._config.step_timeout_s if is_step else None
            name = f"step {self._number}" if is_step else message.get("call", "load_lora" if "lora" in message else "load_weights")
            self._pending[self._number] = _Pending(name, is_step, due=due)
        if "call" in message:
            calls, message = [*calls, message], {}
        self._broadcast({"number": self._number, "calls": calls, **message})
        return self._number

    def _broadcast(self, message: dict[str, Any]) -> None:
        for link in self._links:
            link.send(message)

    @contextlib.contextmanager
    def _watch_bucket(self) -> Iterator[str | None]:
        """While a bucket of the load in progress is broadcast: ranks that do not take it are late. Entered when all others wait for it, or
        one says that it has no memory for it, which is given.
        """
        with self._changed:
            pending = self._pending[self._number]
            pending.num_buckets += 1
            pending.due = time.monotonic() + self._config.step_timeout_s
        try:
            others, bucket = range(1, self._num_ranks), pending.num_buckets
            self._wait(lambda: pending.refusal is not None or all(pending.reached_buckets.get(rank, 0) >= bucket for rank in others))
            yield pending.refusal
        finally:
            with self._changed:
                pending.due = None

    def _finish(self, number: int, outcome: Outcome) -> None:
        with self._changed:
            pending = self._pending.get(number)
            if pending is not None:
                pending.own = outcome
                patience_s = self._config.silence_timeout_s if outcome.kind and pending.is_step else self._config.step_timeout_s
                pending.due = time.monotonic() + patience_s
        self._compare(number)

    def _receive(self, rank: int, message: dict[str, Any]) -> None:
        """In a thread of a link."""
        now = time.monotonic()
        if "number" in message:
            number = message["number"]
            with self._changed:
                pending = self._pending.get(number)
                if pending is None:
                    return
                outcome = pending.acks[rank] = Outcome(**message["outcome"])
                if outcome.kind and pending.own is None and pending.is_step:
                    # This rank may wait in the model for one that has left it.
                    pending.due = min(pending.due or now, now + self._config.silence_timeout_s)
            self._compare(number)
        elif "bucket" in message:
            with self._changed:
                pending = self._pending.get(message["load"])
                if pending is None:
                    return
                pending.reached_buckets[rank] = message["bucket"]
                if message["refusal"] is not None:
                    pending.refusal = f"{rank_name(self.engine, rank)} refused {pending.name}: {message['refusal']}"
                self._changed.notify_all()
        elif "end" in message:
            if self._failure is None and message["end"] is not None:
                self._blame(rank, f"ended: {message['end']}")
        else:
            with self._changed:
                self._signs[rank] = now, message["forwards"]
            self._check_late(now)

    def _compare(self, number: int) -> None:
        """Forget a message that all ranks are done with; where one step had two outcomes, the ranks are no more in step."""
        blamed: tuple[int, str] | None = None
        with self._changed:
            pending = self._pending.get(number)
            if pending is None or self._has_broken_pass(pending) or pending.own is None:
                return
            for rank, outcome in pending.acks.items():
                if not pending.is_step or (outcome.kind, outcome.digest) == (pending.own.kind, pending.own.digest):
                    continue
                if pending.own.kind and not outcome.kind:
                    blamed = 0, f"failed in step {number}, which succeeded on others: {pending.own.text}"
                else:
                    what = outcome.text or "drew other tokens"
                    blamed = rank, f"is not in step {number}: {what}, and rank 0: {pending.own.text or 'it succeeded'}"
            if len(pending.acks) == self._num_ranks - 1:
                del self._pending[number]
            self._changed.notify_all()
        if blamed is not None:
            self._blame(*blamed)

    def _has_broken_pass(self, pending: _Pending) -> bool:
        """Whether a rank left the pass of this step; it is blamed soon then, unless a lost one is the reason. With the lock."""
        outcomes = {**({} if pending.own is None else {0: pending.own}), **pending.acks}
        broken = next(((rank, outcome.text) for rank, outcome in outcomes.items() if outcome.has_broken_pass), None)
        if broken is None:
            return False
        if self._blame_timer is None:
            self._blame_timer = threading.Timer(_BLAME_DELAY_S, self._blame, (broken[0], f"failed in {pending.name}: {broken[1]}"))
            self._blame_timer.daemon = True
            self._blame_timer.start()
        return True

    def _check_late(self, now: float) -> None:
        with self._changed:
            late = [pending for pending in self._pending.values() if pending.due is not None and now > pending.due]
            blamed = [self._culprit(pending) for pending in late if self._is_explained(pending)]
        for rank, what in blamed:
            self._blame(rank, what)

    def _is_explained(self, pending: _Pending) -> bool:
        """Whether all stages that a late step waits for have said how far they are, since it is late."""
        if not pending.is_step or self.engine.model.groups.pp.size == 1 or pending.due is None:
            return True
        missing = [rank for rank in range(1, self._num_ranks) if rank not in pending.acks]
        return all(self._signs.get(rank, (0.0, 0))[0] > pending.due for rank in missing)

    def _culprit(self, pending: _Pending) -> tuple[int, str]:
        """Whom a late message waits for, and what that rank did."""
        within = f"within {self._config.step_timeout_s:g} s"
        missing = [rank for rank in range(1, self._num_ranks) if rank not in pending.acks]
        if pending.is_step and (failed := _failed(pending.acks)):
            rank, outcome = next(iter(failed.items()))
            return rank, f"failed in {pending.name}: {outcome.text}"
        if pending.own is None and pending.num_buckets:
            for rank in missing:
                if pending.reached_buckets.get(rank, 0) < pending.num_buckets:
                    return rank, f"did not take bucket {pending.num_buckets} of {pending.name} {within}"
            return 0, f"did not broadcast bucket {pending.num_buckets} of {pending.name} {within}"
        if pending.is_step and pending.own is not None and pending.own.kind:
            # The others may wait in the model for this rank, which has left it.
            return 0, f"failed in {pending.name}: {pending.own.text}"
        if pending.is_step and self.engine.model.groups.pp.size > 1:
            # Of stages those behind wait for the first one that has launched the fewest passes, and those before are ahead.
            forwards = {0: self.engine.num_forwards, **{rank: self._signs[rank][1] for rank in missing if rank in self._signs}}
            return min(forwards, key=lambda rank: forwards[rank]), f"did not end {pending.name} {within}"
        return missing[0] if missing else 0, f"did not end {pending.name} {within}"

    def _blame(self, rank: int, what: str) -> None:
        """Give the engine up for what a rank did."""
        failure = RankFailedError(rank, what, rank_name(self.engine, rank))
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._changed.notify_all()
        self._on_failure(failure)
        for link in self._links:
            link.end(str(failure))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Until something holds; late ranks end the wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or is_done())
        self._check()


def _failed(outcomes: Mapping[int, Outcome]) -> dict[int, Outcome]:
    return {rank: outcome for rank, outcome in outcomes.items() if outcome.kind}


def invalidate_weights(engine: DynamicInferenceEngine) -> None:
    """Let an engine refuse to step until a load succeeds, and forget what old and new weights may have computed."""
    engine.weights.are_complete = False
    engine.reset_prefix_cache()


def drop_lora(engine: DynamicInferenceEngine, name: str) -> None:
    """Undo a load that another rank refused; no request has come since."""
    if name in engine.loras:
        engine.unload_lora(name)


def apply_calls(engine: DynamicInferenceEngine, calls: Sequence[dict[str, Any]]) -> None:
    """Repeat calls of the first rank."""
    for call in calls:
        name = call["call"]
        if name == "add":
            params = None if call["params"] is None else SamplingParams.deserialize(call["params"])
            engine.add_request(call["tokens"], params, request_id=call["id"], priority=call["priority"], lora=call["lora"])
        elif name == "abort":
            engine.abort(call["id"])
        elif name == "hold":
            engine.hold_queue(call["hold"])
        elif name == "hold_steps":
            engine.hold_steps(call["reason"])
        elif name == "announce":
            engine.announce_load(call["version"], call["in_flight"])
        elif name == "suspend":
            engine.suspend()
        elif name == "resume":
            engine.resume()
        elif name == "unload_lora":
            engine.unload_lora(call["name"])
        elif name == "drop_lora":
            drop_lora(engine, call["name"])
        elif name == "invalidate":
            invalidate_weights(engine)
        else:
            raise AssertionError(f"the ranks of one engine run one version, and {name} is of another")
