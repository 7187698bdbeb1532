# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Names of adapters, and what went wrong with one, as messages have them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from mcore_inference.adapters import LoraLoadError
from mcore_inference.coordinator._messages import MAX_LORA_NAME
from mcore_inference.engine import LoraInUseError
from mcore_inference.requests import UnknownLoraError

LoraFault = Literal["LoraLoadError", "LoraInUseError", "UnknownLoraError"]

_ERRORS: Mapping[str, type[LoraLoadError] | type[LoraInUseError]] = MappingProxyType(
    {"LoraLoadError": LoraLoadError, "LoraInUseError": LoraInUseError}
)


def checked_name(name: object) -> str:
    """The name of an adapter.

    Raises:
        ValueError: it is no text, or too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_LORA_NAME:
        raise ValueError(f"lora={str(name)[:80]!r} must be a name of 1 to {MAX_LORA_NAME} characters")
    return name


def fault(kind: LoraFault, text: str) -> str:
    """For the ``error`` of an answer."""
    return f"{kind}: {text}"


def raise_fault(error: str) -> None:
    """The error that ``fault`` wrote; nothing happens where it is empty.

    Raises:
        LoraLoadError, LoraInUseError, UnknownLoraError: as it says.
    """
    kind, _, text = error.partition(": ")
    if kind == UnknownLoraError.__name__:
        raise UnknownLoraError(None, text)
    if kind:
        raise _ERRORS[kind](text)
