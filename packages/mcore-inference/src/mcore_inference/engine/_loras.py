# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters of an engine, and the requests that use them."""

from typing import NamedTuple

from mcore_inference._stability import experimental_api
from mcore_inference.adapters import LoraLoadError, LoraTable, LoraWeights
from mcore_inference.engine._live_requests import LiveRequests
from mcore_inference.requests import UnknownLoraError

_NO_SLOTS = "this engine has no slots for adapters; make its context with InferenceConfig(lora=LoraSlots(...))"


@experimental_api
class LoraInUseError(RuntimeError):
    """An adapter was to be unloaded that requests use."""


class Adapter(NamedTuple):
    """That a request computes with."""

    slot: int
    root: bytes
    """Of its cached beginnings."""


_BASE = Adapter(-1, b"")


class EngineLoras:
    """Which adapters the requests of one engine can choose. Steps in flight keep their results when adapters come and go: of the ranks of a
    split model some may refuse what others do, or not hear of it, and all take results between the same two steps.

    Args:
        table: that holds them; None for an engine without slots.
        requests: of the engine.
    """

    def __init__(self, table: LoraTable | None, requests: LiveRequests) -> None:
        self._table, self._requests = table, requests

    @property
    def names(self) -> tuple[str, ...]:
        """Of the loaded ones."""
        return () if self._table is None else self._table.names

    @property
    def num_slots(self) -> int:
        """Adapters that can be loaded at the same time."""
        return 0 if self._table is None else self._table.slots.max_loras

    def choose(self, name: str | None, request_id: int | None) -> Adapter:
        """The adapter of a request; None for the base.

        Raises:
            UnknownLoraError: none of this name is loaded.
            ValueError: the name is no text.
        """
        if name is None:
            return _BASE
        if not isinstance(name, str):
            raise ValueError(f"lora is a {type(name).__name__}; give the name of a loaded adapter, or None")
        self._check_known(name, request_id)
        assert self._table is not None, "others know no name"
        return Adapter(self._table.slot(name), self._table.root(name))

    def load(self, name: str, weights: LoraWeights) -> None:
        """As ``DynamicInferenceEngine.load_lora``."""
        if self._table is None:
            raise LoraLoadError(_NO_SLOTS)
        # Behind the steps in flight.
        self._table.load(name, weights)

    def unload(self, name: str) -> None:
        """As ``DynamicInferenceEngine.unload_lora``."""
        self._check_known(name, None)
        assert self._table is not None, "others know no name"
        if count := sum(entry.record.lora == name for entry in self._requests.entries.values()):
            raise LoraInUseError(f"{count} requests use the adapter {name}; unload it when they have ended, or abort them")
        self._table.unload(name)

    def _check_known(self, name: str, request_id: int | None) -> None:
        if name not in self.names:
            known = f"loaded are {', '.join(self.names)}" if self.names else "none is loaded"
            what = known if self._table is not None else _NO_SLOTS
            raise UnknownLoraError(request_id, f"lora={str(name)[:80]!r} is no loaded adapter; {what}")
