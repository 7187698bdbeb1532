# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a load does about tensors that a state and a checkpoint do not have alike."""

import warnings
from dataclasses import dataclass, fields
from typing import Literal

from mcore_ckpt._errors import list_names

__all__ = ["Mismatches", "Strictness", "as_strictness"]

_MODES = ("raise", "warn", "ignore")


@dataclass(frozen=True, kw_only=True)
class Strictness:
    """What to do about each kind of mismatch: "raise" before anything is written, "warn" on the first rank, or "ignore".

    Where it is not raised, the tensor in the state keeps its values. Another element type is always raised.

    Raises:
        ValueError: another mode.

    Example:
        >>> Strictness(missing="warn", unexpected="ignore").shape
        'raise'
    """

    missing: Literal["raise", "warn", "ignore"] = "raise"
    """The state asks for it, the checkpoint lacks it."""
    unexpected: Literal["raise", "warn", "ignore"] = "raise"
    """The checkpoint holds it, no rank asks for it."""
    shape: Literal["raise", "warn", "ignore"] = "raise"
    """Stored with another global shape than the state's."""

    def __post_init__(self) -> None:
        for field in fields(self):
            mode = getattr(self, field.name)
            if mode not in _MODES:
                raise ValueError(f"{field.name}={mode!r} must be one of {', '.join(_MODES)}")


@dataclass(frozen=True, kw_only=True)
class Mismatches:
    """What a state and a checkpoint do not have alike; names in order, all empty where they fit."""

    missing: tuple[str, ...] = ()
    """Asked for and not stored."""
    unexpected: tuple[str, ...] = ()
    """Stored and not asked for."""
    shapes: tuple[str, ...] = ()
    """Stored with another global shape: ``name (stored [..], asked [..])``."""
    dtypes: tuple[str, ...] = ()
    """Stored with another element type."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return any(getattr(self, field.name) for field in fields(self))

    def told(self, strictness: Strictness, mode: str) -> list[str]:
        """One line for each kind of which ``strictness`` says ``mode``; where it is "raise", with what remedies it."""
        lines = []
        if self.missing and strictness.missing == mode:
            lines.append(f"missing from the checkpoint: {list_names(self.missing, self.unexpected)}")
        if self.shapes and strictness.shape == mode:
            lines.append(f"other global shape: {list_names(self.shapes)}")
        if self.dtypes and mode == "raise":
            lines.append(f"other dtype: {list_names(self.dtypes)}; load into the stored dtype and convert after")
        if self.unexpected and strictness.unexpected == mode:
            remedy = "; pass strict=False to leave them" if mode == "raise" else ""
            lines.append(f"holds tensors nobody asks for: {list_names(self.unexpected, self.missing)}{remedy}")
        return lines

    def warn(self, strictness: Strictness, where: str) -> None:
        """Warn of what ``strictness`` wants to be warned of."""
        lines = self.told(strictness, "warn")
        if lines:
            warnings.warn(f"{where}: {'; '.join(lines)}", RuntimeWarning, stacklevel=3)


def as_strictness(strict: bool | Strictness) -> Strictness:
    """True: everything raises. False: as True, but unexpected tensors are left."""
    if isinstance(strict, Strictness):
        return strict
    return Strictness() if strict else Strictness(unexpected="ignore")
