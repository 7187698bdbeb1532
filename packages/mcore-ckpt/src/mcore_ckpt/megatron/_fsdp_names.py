# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Names in checkpoints of Megatron-FSDP: behind those of the modules around the model, a gate apart from its values, experts one by one."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_ckpt.chunks import Box
from mcore_ckpt.megatron._names import Cut, rule_of

__all__ = ["META", "STATE", "WEIGHT", "Piece", "is_fsdp", "piece_box", "piece_name", "piece_of", "pieces_of"]

WEIGHT = "model.module."
"""Before a weight: its modules are the module that shards, and what is inside of the one that rounds to 16 bits."""
STATE = "optimizer.state.module.module.module."
"""Before a weight whose optimizer state it is; here all modules around the model count."""
META = "optimizer.param_to_group_meta.module.module.module."
"""Before a whole weight (of experts: of one) whose parameter group it is."""
_EXPERT = re.compile(
    r"(?P<layer>decoder\.layers\.\d+\.mlp\.)experts\."
    r"(?:(?P<grouped>linear_fc[12])\.weight(?P<at>\d+)|local_experts\.(?P<number>\d+)\.(?P<alone>linear_fc[12])\.weight)(?:_(?P<half>[wv]))?"
)
_HALF = re.compile(r"(?P<key>.+\.linear_fc1\.(?:weight|bias))_(?P<half>[wv])")
_EXPERTS = ".mlp.experts.experts."
_HALVES = "wv"


@dataclass(frozen=True)
class Piece:
    """Which part of a whole tensor of a layer one stored tensor is; None where it is not cut that way."""

    expert: int | None = None
    half: int | None = None
    """0 for the rows of the gate, 1 for those of the values."""


def is_fsdp(names: Iterable[str]) -> bool:
    """Whether tensors of these names are of such a checkpoint."""
    return any(name.startswith((WEIGHT, "optimizer.state.module.")) for name in names)


def piece_of(name: str) -> tuple[str, Piece]:
    """The whole, per-layer key of a stored name without what precedes it, and which part of that it is.

    Example:
        >>> piece_of("decoder.layers.3.mlp.experts.linear_fc1.weight5_v")
        ('decoder.layers.3.mlp.experts.experts.linear_fc1.weight', Piece(expert=5, half=1))
    """
    found = _EXPERT.fullmatch(name)
    if found is not None:
        half = None if found["half"] is None else _HALVES.index(found["half"])
        product = found["grouped"] or found["alone"]
        return f"{found['layer']}experts.experts.{product}.weight", Piece(int(found["at"] or found["number"] or 0), half)
    found = _HALF.fullmatch(name)
    return (name, Piece()) if found is None else (found["key"], Piece(half=_HALVES.index(found["half"])))


def piece_name(key: str, piece: Piece) -> str:
    """Inverse of `piece_of`; experts get the names of the grouped product."""
    if piece.expert is not None:
        key = f"{key.replace(_EXPERTS, '.mlp.experts.')}{piece.expert}"
    return key if piece.half is None else f"{key}_{_HALVES[piece.half]}"


def pieces_of(key: str, shape: Sequence[int], *, gated: bool) -> list[Piece]:
    """The parts in which the tensor of a whole, per-layer key is stored.

    Args:
        shape: ours: experts first, then a gate and its values where there are some.
        gated: the tensor has a dim of gate and values.
    """
    halves = (0, 1) if gated and (rule := rule_of(key, gated=True)) is not None and rule.cut is Cut.GATED else (None,)
    experts = range(shape[0]) if _EXPERTS in key else (None,)
    return [Piece(expert, half) for expert in experts for half in halves]


def piece_box(shape: Sequence[int], piece: Piece) -> Box:
    """Where a part lies in the tensor of our shape, [experts, 2, rows, ...] without the dims that it does not have."""
    chosen = [place for place in (piece.expert, piece.half) if place is not None]
    rest = tuple(shape[len(chosen) :])
    return Box((*chosen, *(0 for _ in rest)), (*(1 for _ in chosen), *rest))
