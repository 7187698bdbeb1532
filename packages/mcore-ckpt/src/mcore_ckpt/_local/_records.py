# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What nodes tell of the files that they keep, and which step is whole."""

import re
from dataclasses import dataclass
from typing import Any

from mcore_ckpt._core import Control

__all__ = ["NodeRecord", "choose_attempt", "explain_none"]

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class NodeRecord:
    """What a node says of the file of one rank that it keeps."""

    step: int
    rank: int
    token: str
    """Of the attempt: files of two attempts at one step never mix."""
    layout: str
    """Digest of what the rank held."""
    bytes: int
    sha256: str
    extra: dict[str, Any]

    @property
    def attempt(self) -> tuple[int, str]:
        return self.step, self.token

    @property
    def name(self) -> str:
        """Of the record, without its end."""
        return f"step_{self.step:08d}-r{self.rank:05d}"

    @property
    def file(self) -> str:
        """That it speaks of."""
        return f"{self.name}-{self.token}.safetensors"

    def is_sound(self) -> bool:
        """Whether its fields are what they must be."""
        numbers = (self.step, self.rank, self.bytes)
        texts = _DIGEST.fullmatch(self.sha256) and _DIGEST.fullmatch(self.layout) and re.fullmatch(r"[0-9a-f]{8}", self.token)
        return all(type(number) is int and number >= 0 for number in numbers) and bool(texts) and isinstance(self.extra, dict)


def choose_attempt(answers: list[Any], bad: set[tuple[int, int, str, int]], size: int) -> tuple[tuple[int, str] | None, list[int]]:
    """The newest attempt of which every rank's file is somewhere, and who gives the file of each: itself where it can."""
    holders: dict[tuple[int, str], dict[int, list[int]]] = {}
    for place, answer in enumerate(answers):
        for step, token, rank, layout, _ in answer["held"]:
            if rank < size and layout == answers[rank]["layout"] and (place, step, token, rank) not in bad:
                holders.setdefault((step, token), {}).setdefault(rank, []).append(place)
    for attempt in sorted(holders, reverse=True):
        found = holders[attempt]
        if len(found) == size:
            return attempt, [rank if rank in found[rank] else min(found[rank]) for rank in range(size)]
    return None, []


def explain_none(answers: list[Any], control: Control) -> str:
    """Which ranks' files of the newest step are nowhere."""
    held = {(step, rank) for answer in answers for step, _, rank, *_ in answer["held"]}
    if not held:
        return "they keep none"
    newest = max(step for step, _ in held)
    missing = [control.ranks[rank] for rank in range(control.size) if (newest, rank) not in held]
    if missing:
        return f"of step {newest} the files of ranks {missing} are gone"
    return f"of step {newest} files are damaged, of different attempts, or of another layout than the state"
