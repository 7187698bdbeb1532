# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engines and clients of a coordinator, what the engines are doing, and the messages to send."""

from mcore_inference.coordinator._entries import Client, Engine, Lora, Operation
from mcore_inference.coordinator._messages import Message
from mcore_inference.coordinator._past import PastCounters
from mcore_inference.coordinator._states import GroupState, MemberState

Outbox = list[tuple[bytes, Message]]


class Group:
    """What the parts of a coordinator share."""

    def __init__(self) -> None:
        self.state = GroupState.RUNNING
        self.engines: dict[bytes, Engine] = {}
        self.clients: dict[bytes, Client] = {}
        self.operation: Operation | None = None
        """In progress."""
        self.version: int | None = None
        """Of the weights of the last load, in progress or over."""
        self.newest = 0
        """Version above which no load was given one, and no engine came with one."""
        self.loaded: int | None = None
        """Of the weights of the last load that ended well; None for those that engines start with."""
        self.loras: dict[str, Lora] = {}
        """Adapters by name, which engines that get requests have."""
        self.past = PastCounters()
        self.num_lost = 0
        """Engines that were lost, or left without having drained."""
        self.num_drained = 0
        """Engines that left when their requests were over."""
        self._number = 0
        self._outbox: Outbox = []

    @property
    def is_loading(self) -> bool:
        return self.operation is not None and self.operation.load is not None

    @property
    def is_stopping(self) -> bool:
        return self.operation is not None and self.operation.target is GroupState.STOPPED

    @property
    def serving(self) -> dict[bytes, Engine]:
        """Engines that are not about to leave."""
        return {peer: engine for peer, engine in list(self.engines.items()) if engine.state is MemberState.SERVING}

    def current(self) -> list[bytes]:
        """Engines that serve and have the weights of the last load, or of the last one that ended well."""
        serving = self.serving
        for version in (self.version, self.loaded):
            peers = [peer for peer, engine in serving.items() if version is None or engine.weight_version == version]
            if peers:
                return peers
        return []

    def eligible(self) -> list[bytes]:
        """Engines that get requests: those that are current and have all adapters."""
        wanted = [(name, lora.load) for name, lora in self.loras.items()]
        return [peer for peer in self.current() if all(self.engines[peer].loras.get(name) == load for name, load in wanted)]

    @property
    def loaded_loras(self) -> str:
        """Which adapters there are, for messages."""
        return f"loaded are {', '.join(map(repr, self.loras))}" if self.loras else "no adapter is loaded"

    def remove_engine(self, peer: bytes, *, is_drained: bool = False) -> Engine | None:
        """One that is gone; its counters stay. None where it went before."""
        engine = self.engines.pop(peer, None)
        if engine is not None:
            self.past.add(engine.worker, engine.stats)
            self.num_drained += is_drained
            self.num_lost += not is_drained
        return engine

    def next_number(self) -> int:
        """Of an attempt or a signal; each is given once."""
        self._number += 1
        return self._number

    def send(self, peer: bytes, message: Message) -> None:
        self._outbox.append((peer, message))

    def flush(self) -> Outbox:
        """What is to be sent since the last time."""
        outbox, self._outbox = self._outbox, []
        return outbox
