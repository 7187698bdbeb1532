# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Limits of a server, beyond which it refuses."""

from dataclasses import dataclass, field

from mcore_inference._fields import as_integer, as_number
from mcore_inference._stability import experimental_api
from mcore_inference.server._connection import ConnectionLimits


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits on bodies, the queue, the engine and connections.

    Raises:
        ValueError: a field of another type or out of its range.
    """

    max_body_bytes: int = 4 * 2**20
    """Longer bodies are answered 413."""
    max_characters_per_token: int = 32
    """A prompt or conversation of more characters than this times the longest sequence is answered 400 before it is tokenized."""
    max_waiting_requests: int | None = 512
    """Length of the queue at which requests are answered 429; None for the engine's own limit only."""
    max_failed_steps: int = 3
    """As of ``EngineRunner``."""
    stall_timeout_s: float | None = None
    """Age of the last step at which ``/health`` reports the engine dead; None as of ``EngineRunner``."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    def __post_init__(self) -> None:
        as_integer("max_body_bytes", self.max_body_bytes, 1, 2**31)
        as_integer("max_characters_per_token", self.max_characters_per_token, 1, 2**20)
        if self.max_waiting_requests is not None:
            as_integer("max_waiting_requests", self.max_waiting_requests, 1, 2**31)
        as_integer("max_failed_steps", self.max_failed_steps, 1, 2**31)
        if self.stall_timeout_s is not None:
            as_number("stall_timeout_s", self.stall_timeout_s, 0, 1e9)
