# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Very many messages, very long ones and late ranks of a split engine: leader and follower of one process, and a wire in memory."""

import contextlib
import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import LockstepConfig, RankFailedError, SamplingParams
from mcore_inference.engine import _follower, _lockstep, _rank_link
from mcore_inference.engine._follower import _Follower
from mcore_inference.engine._lockstep import LockstepLeader
from mcore_inference.engine._rank_link import RankLink


class End:
    """One end of a wire, in place of a group."""

    def __init__(self, incoming: "queue.SimpleQueue[bytes]", outgoing: "queue.SimpleQueue[bytes]") -> None:
        self.incoming, self.outgoing = incoming, outgoing


def wire() -> tuple[End, End]:
    there, back = queue.SimpleQueue[bytes](), queue.SimpleQueue[bytes]()
    return End(back, there), End(there, back)


class Received:
    """What ``irecv`` gives."""

    def __init__(self, end: End, tensor: Tensor) -> None:
        self._end, self._tensor = end, tensor

    def wait(self, timeout: timedelta) -> None:
        try:
            data = self._end.incoming.get(timeout=timeout.total_seconds())
        except queue.Empty:
            raise RuntimeError("timed out") from None
        assert len(data) == self._tensor.numel(), "both sides know how long each part is"
        self._tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's calls over ends of a wire."""

    def isend(tensor: Tensor, *, group: End, group_dst: int) -> Any:
        group.outgoing.put(tensor.numpy().tobytes())
        return SimpleNamespace(wait=lambda timeout: None)

    fakes = SimpleNamespace(
        isend=isend,
        irecv=lambda tensor, *, group, group_src: Received(group, tensor),
        destroy_process_group=lambda group: None,
    )
    for module in (_rank_link, _lockstep, _follower):
        monkeypatch.setattr(module, "dist", fakes)
    for module in (_lockstep, _follower):
        monkeypatch.setattr(module, "open_group", lambda engine, config: engine.end)


class Engine:
    """Counts steps, and keeps the prompts that it was given."""

    def __init__(self, end: End, rank: int) -> None:
        tp_pp = SimpleNamespace(size=2, rank=rank, ranks=[0, 1], is_first=rank == 0)
        one = SimpleNamespace(size=1)
        self.model = SimpleNamespace(groups=SimpleNamespace(tp_pp=tp_pp, pp=one, dp=one, tp=tp_pp))
        self.context = SimpleNamespace(device=torch.device("cpu"))
        self.weights = SimpleNamespace(are_complete=True)
        self.end, self.peers, self.num_forwards, self.has_broken_pass = end, None, 0, False
        self.prompts: dict[int, list[int]] = {}
        self.calls: list[tuple[int, int]] = []
        """Each prompt's number, and the steps before it."""
        self.num_steps = 0
        self.before_step: Callable[[int], None] = lambda number: None

    def add_request(
        self,
        prompt: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> int:
        number = len(self.prompts) if request_id is None else request_id
        assert number not in self.prompts, "no call is repeated"
        self.prompts[number] = prompt
        self.calls.append((number, self.num_steps))
        return number

    def get_request(self, number: int) -> Any:
        return SimpleNamespace(prompt_tokens=self.prompts[number])

    def step(self) -> list[Any]:
        self.num_steps += 1
        self.before_step(self.num_steps)
        return []

    def take_finished(self) -> list[Any]:
        return []


@contextlib.contextmanager
def ranks(config: LockstepConfig | None = None) -> Iterator[tuple[LockstepLeader, Any, Any, list[RankFailedError]]]:
    """A leader, both engines, and what the leader was told; the follower ends with it."""
    config = config or LockstepConfig(silence_timeout_s=20.0)
    ends = wire()
    first, second = (Engine(end, rank) for rank, end in enumerate(ends))
    failures: list[RankFailedError] = []
    leader = LockstepLeader(first, config, failures.append)  # type: ignore[arg-type]
    follower = _Follower(second, config)  # type: ignore[arg-type]

    def follow() -> None:
        with contextlib.suppress(Exception):
            follower.run()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield leader, first, second, failures
    finally:
        leader.close()
        thread.join(20.0)
    assert not thread.is_alive()


class Direct:
    """A link without threads: the other end has a message, through JSON, when it was sent."""

    def __init__(self, end: End, peer: int, *, on_message: Callable[[int, dict[str, Any]], None], **_: Any) -> None:
        self.peer, self.take = peer, on_message
        self.others: list[Callable[[dict[str, Any]], None]] = []

    def send(self, message: dict[str, Any]) -> None:
        for other in self.others:
            other(json.loads(json.dumps(message)))

    def end(self, reason: str | None = None) -> None:
        pass

    def join(self, timeout_s: float) -> None:
        pass


@pytest.mark.journey
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_steps", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=str)
def test_very_many_empty_steps_are_made_by_both_ranks_and_leave_nothing(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_lockstep, _follower):
        monkeypatch.setattr(module, "RankLink", Direct)
    first, second = (Engine(end, rank) for rank, end in enumerate(wire()))
    failures: list[RankFailedError] = []
    leader: Any = LockstepLeader(first, LockstepConfig(), failures.append)  # type: ignore[arg-type]
    follower: Any = _Follower(second, LockstepConfig())  # type: ignore[arg-type]

    def obey(message: dict[str, Any]) -> None:
        follower._link.send({"number": message["number"], "outcome": dataclasses.asdict(follower._obey(message))})

    leader._links[0].others.append(obey)
    follower._link.others.append(lambda message: leader._receive(1, message))
    for _ in range(num_steps):
        leader.step()
    assert first.num_steps == second.num_steps == num_steps == leader._number
    assert not leader._pending and not leader._calls and not failures


def test_steps_of_both_ranks_go_through_their_threads_in_order() -> None:
    ahead = 0
    with ranks() as (leader, first, second, failures):
        for _ in range(1000):
            leader.step()
            ahead = max(ahead, first.num_steps - second.num_steps)
        leader._wait(lambda: not leader._pending)
        assert first.num_steps == second.num_steps == 1000 == leader._number
        assert not leader._calls and not failures and first.end.incoming.empty()
    # Those that are not acknowledged, the one in progress, and the one that the follower makes.
    assert ahead <= 6


def test_prompts_of_megabytes_come_whole_and_in_order_between_short_messages() -> None:
    lengths = [1, 300_000, 2, 700_000, 3, 300_000, 5]
    with ranks() as (leader, first, second, failures):
        for at, length in enumerate(lengths):
            leader.add_request([at + 1_000_000] * length, SamplingParams(num_tokens_to_generate=1))
            for _ in range(at):
                leader.step()
        leader.step()
        leader._wait(lambda: not leader._pending)
        assert second.prompts == first.prompts and second.calls == first.calls and len(first.calls) == len(lengths)
        assert not failures


def test_messages_around_the_size_of_a_slot_come_whole() -> None:
    ends, got, over = wire(), list[Any](), threading.Event()

    def take(_: int, message: dict[str, Any]) -> None:
        got.append(message)
        if "end" in message:
            over.set()

    lost: list[Any] = []
    settings: dict[str, Any] = {"silence_s": 20.0, "on_lost": lambda *what: lost.append(what)}
    sender = RankLink(ends[0], 1, on_message=lambda *_: None, **settings)  # type: ignore[arg-type]
    receiver = RankLink(ends[1], 0, on_message=take, **settings)  # type: ignore[arg-type]
    sizes = [*range(2000, 2060), 4096, 2**20]
    for size in sizes:
        sender.send({"x": "y" * size})
    sender.end("done")
    assert over.wait(20.0)
    receiver.end()
    for link in (sender, receiver):
        link.join(20.0)
    assert [len(message["x"]) for message in got[:-1]] == sizes and got[-1] == {"end": "done"} and not lost


def test_a_late_rank_holds_the_leader_back_and_loses_nothing() -> None:
    with ranks() as (leader, first, second, failures):
        is_late, go_on = threading.Event(), threading.Event()
        second.before_step = lambda number: None if number != 10 else (is_late.set(), go_on.wait(20.0), None)[2]
        leading = threading.Thread(target=lambda: [leader.step() for _ in range(30)])
        leading.start()
        assert is_late.wait(20.0)
        # The leader would make the others in a moment.
        leading.join(0.5)
        assert leading.is_alive() and first.num_steps - second.num_steps <= 6
        go_on.set()
        leading.join(20.0)
        leader._wait(lambda: not leader._pending)
        assert first.num_steps == second.num_steps == 30 and not failures


@pytest.mark.journey
def test_a_rank_that_is_too_late_is_named_with_its_step() -> None:
    config = LockstepConfig(silence_timeout_s=20.0, step_timeout_s=2.0)
    with ranks(config) as (leader, _, second, failures):
        go_on = threading.Event()
        second.before_step = lambda number: None if number != 7 else (go_on.wait(20.0), None)[1]
        with pytest.raises(RankFailedError, match="tp rank 1 .*did not end step 7 within 2 s"):
            for _ in range(100):
                leader.step()
        go_on.set()
    assert [failure.rank for failure in failures] == [1]
