# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The error of this wheel, and the nearest-name hint its messages carry."""

import difflib
from collections.abc import Iterable

__all__ = ["CheckpointingException", "list_names"]


class CheckpointingException(RuntimeError):
    """A checkpoint could not be written, read or believed; raised on every rank of the group, with the rank and the cause."""


def list_names(names: Iterable[str], candidates: Iterable[str] = (), *, limit: int = 8) -> str:
    """``names`` as text, at most ``limit`` of them, each with the candidate it most resembles."""
    names, candidates = sorted(names), sorted(candidates)
    shown = []
    for name in names[:limit]:
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
        shown.append(f"{name} (did you mean {near[0]}?)" if near else name)
    if len(names) > limit:
        shown.append(f"and {len(names) - limit} more")
    return ", ".join(shown)
