# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Settings of a coordinator, and how its sockets are protected."""

import string
from dataclasses import dataclass, field

from mcore_inference._fields import as_integer, as_number, is_loopback, is_unspecified
from mcore_inference._stability import experimental_api
from mcore_inference.coordinator._messages import MAX_MESSAGE_BYTES

_MAX_SECRET = 4096
"""Characters; a longer greeting is not read."""
SECONDS = (1e-3, 1e6)
"""Least and most of a time."""
_Z85 = string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#"
"""ZeroMQ RFC 32: five of these, by their places, are a number of 32 bits, the highest digit first."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class CoordinatorSecurity:
    """Who may join.

    Raises:
        ValueError: a secret that is no string, too long, or (of control) empty; a key that is no 40 characters of Z85; keys of a curve
            are made by ``zmq.curve_keypair()``.
    """

    secret: str = field(default="", repr=False)
    """That engines and clients of the job bring; empty for none, on loopback only."""
    public_key: str | None = None
    """Of the coordinator, 40 characters of Z85. With it everything is encrypted and the coordinator proves itself (CurveZMQ)."""
    secret_key: str | None = field(default=None, repr=False)
    """Of the coordinator; engines and clients have None."""
    control_secret: str | None = field(default=None, repr=False)
    """That clients bring besides, to pause, suspend, resume and stop engines and to load weights; others may only send requests and ask
    for the status. Engines need none. With None on the coordinator the job's secret is enough."""

    def __post_init__(self) -> None:
        for name, value in (("secret", self.secret), ("control_secret", "" if self.control_secret is None else self.control_secret)):
            if not isinstance(value, str):
                raise ValueError(f"{name} is a {type(value).__name__}; give a string")
            if len(value) > _MAX_SECRET:
                raise ValueError(f"{name} has {len(value)} characters; {_MAX_SECRET} are allowed")
        if self.control_secret == "":
            raise ValueError("control_secret='' is empty; give a secret, or None where the job's is enough")
        for name in ("public_key", "secret_key"):
            key = getattr(self, name)
            if key is not None and not (isinstance(key, str) and _is_key(key)):
                raise ValueError(f"{name} must be 40 characters of Z85; zmq.curve_keypair() makes a pair")
        if self.secret_key is not None and self.public_key is None:
            raise ValueError("secret_key without public_key; a coordinator has both")


def _is_key(text: str) -> bool:
    """Whether it is 32 bytes in Z85."""
    if len(text) != 40 or not set(text) <= set(_Z85):
        return False
    numbers = (text[place : place + 5] for place in range(0, 40, 5))
    return all(sum(_Z85.index(digit) * 85**power for power, digit in enumerate(reversed(number))) < 2**32 for number in numbers)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Settings of a coordinator.

    Raises:
        ValueError: a field out of its range; an address that stands for all of this machine, such as 0.0.0.0; one beyond loopback without
            a secret and the keys that encrypt it.
    """

    host: str = "127.0.0.1"
    """Address that it listens on, and that engines and clients connect to."""
    port: int = 0
    """0 for a free one."""
    security: CoordinatorSecurity = CoordinatorSecurity()
    heartbeat_s: float = 1.0
    """Seconds between two signs of life of an engine and of a client."""
    engine_timeout_s: float = 4.0
    """Seconds of silence after which an engine is lost."""
    client_timeout_s: float = 30.0
    """Seconds of silence after which a client is gone and its requests are aborted."""
    signal_timeout_s: float = 60.0
    """Seconds that engines get for a signal."""
    load_timeout_s: float = 600.0
    """Seconds that engines get for a bucket of new weights, with the requests that end before it (``drain``), and a client to send one."""
    max_retries: int = 1
    """How often a request goes to another engine when its own is lost, while none of its tokens was sent."""
    no_engine_timeout_s: float = 60.0
    """Seconds that a request waits while there is no engine."""
    max_open_requests: int = 65_536
    """Requests of all clients; more are refused."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Longest message, of records, tokens and weights; the connection of a longer one is cut. Requests have 8 MiB of it, others 1 MiB."""

    def __post_init__(self) -> None:
        as_integer("port", self.port, 0, 2**16 - 1)
        as_integer("max_retries", self.max_retries, 0, 100)
        as_integer("max_open_requests", self.max_open_requests, 1, 2**31)
        as_integer("max_message_bytes", self.max_message_bytes, 1024, 2**40)
        for name in ("heartbeat_s", "engine_timeout_s", "client_timeout_s", "signal_timeout_s", "load_timeout_s", "no_engine_timeout_s"):
            as_number(name, getattr(self, name), *SECONDS)
        for name in ("engine_timeout_s", "client_timeout_s"):
            if getattr(self, name) < 2 * self.heartbeat_s:
                raise ValueError(f"{name}={getattr(self, name)} must be at least twice heartbeat_s={self.heartbeat_s}")
        if self.host == "*" or is_unspecified(self.host):
            raise ValueError(
                f"host={self.host!r} stands for all addresses of this machine, and others that connect to it reach themselves; give the "
                "one by which they reach this machine"
            )
        if not is_loopback(self.host) and not (self.security.secret and self.security.secret_key):
            raise ValueError(
                f"host={self.host!r} is reachable from other machines; give security with a secret and both keys, or bind to 127.0.0.1"
            )
