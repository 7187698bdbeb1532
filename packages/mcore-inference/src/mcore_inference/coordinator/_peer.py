# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The sockets of those that connect to a coordinator, and how long it was silent."""

import contextlib

import zmq
import zmq.asyncio

from mcore_inference._fields import is_loopback
from mcore_inference.coordinator._config import CoordinatorSecurity
from mcore_inference.coordinator._messages import NUMBER_BYTES

_SILENT_S = 5.0
_MOST_S = 60.0
"""Between two warnings of one silence."""


def connect(context: zmq.asyncio.Context, address: str, security: CoordinatorSecurity, max_message_bytes: int) -> zmq.asyncio.Socket:
    """A socket that connects, and connects again when the coordinator comes back; a longer message ends it until ``reconnect``.

    Raises:
        ValueError: the address is none, or beyond this machine without the coordinator's public key.
    """
    if not isinstance(address, str):
        raise ValueError(f"address={address!r} is a {type(address).__name__}; give a string such as tcp://127.0.0.1:5000")
    if security.public_key is None and not _is_local(address):
        raise ValueError(
            f"address={address!r} is reached over a network, where secrets would go in the clear; give security with the coordinator's "
            "public_key, or an address of loopback"
        )
    socket = context.socket(zmq.DEALER)
    try:
        socket.linger = 200
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        socket.maxmsgsize = max_message_bytes + NUMBER_BYTES
        socket.ipv6 = "[" in address
        if security.public_key is not None:
            public, secret = zmq.curve_keypair()
            socket.curve_publickey, socket.curve_secretkey = public, secret
            socket.curve_serverkey = security.public_key.encode()
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ValueError(f"address={address!r} is none; it looks like tcp://127.0.0.1:5000") from error
    except BaseException:
        # The end of the context waits for each that is open.
        socket.close()
        raise
    return socket


def _is_local(address: str) -> bool:
    """Whether nothing leaves this machine; what is no address leaves nowhere."""
    transport, _, place = address.partition("://")
    host, colon, _ = place.rpartition(":")
    has_no_port = transport == "tcp" and not colon
    return not place or has_no_port or transport in ("ipc", "inproc") or is_loopback(host.strip("[]"))


def reconnect(socket: zmq.asyncio.Socket, address: str) -> None:
    """Connect anew where nothing is heard; what was to be sent by the connection before is lost."""
    with contextlib.suppress(zmq.ZMQError):
        # There is none after a message that was too long.
        socket.disconnect(address)
    socket.connect(address)


class Silence:
    """How long signs of life are without an answer, and when that is worth a warning: after 5 s, then when it has doubled, or lasted
    another minute."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._next_s = _SILENT_S

    def sent(self, now: float) -> float | None:
        """A sign of life was sent.

        Args:
            now: seconds of a clock.

        Returns:
            Seconds of silence where a warning is due; None where none is.
        """
        self._since = now if self._since is None else self._since
        silent = now - self._since
        if silent < self._next_s:
            return None
        self._next_s = silent + min(silent, _MOST_S)
        return silent

    def heard(self) -> None:
        """Anything came."""
        self._since, self._next_s = None, _SILENT_S
