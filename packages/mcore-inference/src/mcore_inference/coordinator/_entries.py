# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a coordinator keeps of engines, clients, requests and the signal in progress."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mcore_inference.coordinator._messages import EngineStatus, LoadLora, LoadWeights, Signal, SubmitRequest, WireChunk
from mcore_inference.coordinator._routing import EngineLoad
from mcore_inference.coordinator._states import GroupState, MemberState


@dataclass(kw_only=True)
class Engine:
    name: str
    max_sequence_length: int
    heard: float
    state: MemberState = MemberState.SERVING
    requests: dict[int, int] = field(default_factory=dict)
    """Number of the attempt -> its tokens."""
    open_tokens: int = 0
    max_requests: int
    cache_tokens: int
    finished: int = 0
    weight_version: int = 0
    worker: str = ""
    """What it drew to be known by when it comes back."""
    registration: int = 0
    stats: dict[str, float] = field(default_factory=dict)
    """Of its last report."""
    last_step_age_s: float | None = None
    loras: dict[str, str] = field(default_factory=dict)
    """Adapters that it has, and the names of their loads."""
    change: "LoraChange | None" = None
    """Of its adapters, in progress."""

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(share=max(len(self.requests) / self.max_requests, self.open_tokens / self.cache_tokens), tokens=self.open_tokens)

    def status(self, now: float) -> EngineStatus:
        """What clients may know."""
        return EngineStatus(
            name=self.name,
            open_requests=len(self.requests),
            open_tokens=self.open_tokens,
            finished_requests=self.finished,
            silent_s=now - self.heard,
            state=self.state,
            weight_version=self.weight_version,
            last_step_age_s=self.last_step_age_s,
            stats=self.stats,
        )


@dataclass(kw_only=True)
class Client:
    heard: float
    may_control: bool
    """Send signals and weights."""
    requests: dict[int, "Request"] = field(default_factory=dict)
    """By the client's own number."""


@dataclass(kw_only=True)
class Request:
    client: bytes
    message: SubmitRequest
    """With the client's number."""
    tokens: int
    arrived: float
    engine: bytes | None = None
    attempt: int = -1
    """Number that the engine knows it by; each attempt has its own, so that an answer of a lost engine fits none."""
    retries: int = 0
    full_engines: set[bytes] = field(default_factory=set)
    """That refused it for their queues, since it began to look for one."""
    started: bool = False
    """Whether the client has tokens of it."""


@dataclass(kw_only=True)
class Load:
    """Weights on their way: each bucket goes to all engines, and the next when they have it."""

    version: int
    engines: dict[bytes, str]
    """Who takes part, by name."""
    index: int = 0
    end: str = ""
    """Of the last bucket that was sent."""
    errors: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Lora:
    """An adapter, which engines that come later get too."""

    name: str
    load: str
    """Tells it from others that had its name."""
    rank: int
    alpha: float
    buckets: list[list[WireChunk]] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(kw_only=True)
class LoraChange:
    """What one engine is to do."""

    name: str
    load: str
    lora: Lora | None
    """To load; None to forget what has the name and the load."""
    number: int
    """Of the messages to it."""
    deadline: float
    index: int = 0
    """Of the bucket that was sent last."""

    @property
    def call(self) -> str:
        """Its name in messages to humans."""
        return "unload_lora" if self.lora is None else "load_lora"


@dataclass(kw_only=True)
class Operation:
    """A signal that engines are to acknowledge."""

    signal: Signal
    client: bytes
    number: int
    """Of the signal that engines got."""
    target: GroupState
    waiting: set[bytes]
    deadline: float
    lost: list[str] = field(default_factory=list)
    """Engines that were lost meanwhile."""
    failed: dict[bytes, str] = field(default_factory=dict)
    """Engines on which it did not take effect, with their names and reasons."""
    load: Load | None = None
    """Of a signal that brings weights."""


def drop_load(waiting: deque[tuple[bytes, Any]], kind: type[LoadLora] | type[LoadWeights], client: bytes, number: int) -> bool:
    """Whether a load whose client has given it up waited, and waits no more."""
    for entry in waiting:
        if isinstance(entry[1], kind) and (entry[0], entry[1].call) == (client, number):
            waiting.remove(entry)
            return True
    return False
