# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fields that callers set, checked and made plain: integers and numbers of any library become Python's own."""

import ipaddress
import socket
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

from mcore_inference._stability import experimental_api


def as_integer(name: str, value: object, least: int, most: int) -> int:
    """An integer of a range; numpy's integers are integers, booleans and floats are not.

    Raises:
        ValueError: names the field, the value and the range.
    """
    # Most are, and a request has many: to ask for an abstract class takes longer.
    if type(value) is int and least <= value <= most:
        return value
    # A numpy boolean is no Integral, Python's is.
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name}={_shown(value)} must be an integer from {least} to {most}")
    return int(value)


def as_number(name: str, value: object, least: float, most: float) -> float:
    """A finite number of a range, as a float; booleans are not numbers.

    Raises:
        ValueError: names the field, the value and the range.
    """
    if type(value) is float and least <= value <= most:
        return value
    # NaN is in no range.
    if isinstance(value, bool) or not isinstance(value, Real) or not _lies(value, least, most):
        raise ValueError(f"{name}={_shown(value)} must be a number from {least} to {most}")
    return float(value)


def _lies(value: Any, least: float, most: float) -> bool:
    return bool(least <= value <= most)


def as_flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        ValueError: anything else, 0 and 1 as well.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={_shown(value)} must be True or False")
    return value


def check_fields(kind: str, data: object, known: Collection[str], optional: Collection[str] = ()) -> None:
    """See that data of ``serialize`` have the fields of this version.

    Args:
        kind: what they are data of.
        data: anything.
        known: names that they have.
        optional: names that they may have.

    Raises:
        ValueError: they are no mapping, or a field is unknown or missing; names it.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a {kind} is made of a mapping of its fields, found a {type(data).__name__}; give what its own serialize() made")
    unknown, missing = sorted(map(str, set(data) - {*known, *optional})), sorted(set(known) - set(data))
    if unknown or missing:
        what = f"has no field {unknown[0]!r}" if unknown else f"needs a field {missing[0]!r}"
        raise ValueError(f"a {kind} of this version {what}; give what its own serialize() made")


@experimental_api
def is_loopback(host: str) -> bool:
    """Whether an address, without port and brackets, is reached from this machine alone; servers and coordinators need a secret elsewhere.

    Example:
        >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
        [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether an address stands for all of a machine, such as 0.0.0.0, also in the short forms of sockets and inside IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return not any(socket.inet_aton(host))
        except OSError:
            return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def _shown(value: object) -> str:
    """A value for a message of bounded length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
