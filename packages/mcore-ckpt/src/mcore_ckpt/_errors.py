# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The error of this wheel, and the nearest-name hint its messages carry."""

import difflib
from collections.abc import Iterable
from itertools import islice

__all__ = ["CheckpointingException", "list_names"]

_MAX_HINT_LENGTH = 200
_MAX_CANDIDATES = 10_000


class CheckpointingException(RuntimeError):
    """A checkpoint could not be written, read or believed; raised on every rank of the group, with the rank and the cause."""


def list_names(names: Iterable[str], candidates: Iterable[str] = (), *, limit: int = 8) -> str:
    """``names`` as text, at most ``limit`` of them, each with the candidate it most resembles."""
    # A resemblance costs the product of two lengths.
    names, candidates = sorted(names), sorted(islice((one for one in candidates if len(one) <= _MAX_HINT_LENGTH), _MAX_CANDIDATES))
    shown = []
    for name in names[:limit]:
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6) if len(name) <= _MAX_HINT_LENGTH else []
        shown.append(f"{name} (did you mean {near[0]}?)" if near else name)
    if len(names) > limit:
        shown.append(f"and {len(names) - limit} more")
    return ", ".join(shown)
