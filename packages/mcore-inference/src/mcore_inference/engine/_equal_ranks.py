# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the ranks of one engine must have alike, since each of them schedules and draws for itself; what one refuses, all refuse."""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping

import torch

from mcore_inference._capability import peers_of, shares_experts
from mcore_inference.adapters import LoraSlots
from mcore_inference.context import DynamicInferenceContext
from mcore_inference.requests import RankFailedError
from mcore_parallel import ProcessGroups
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel


@contextlib.contextmanager
def refused_together(model: GPTModel, call: str) -> Iterator[Callable[[], None]]:
    """For a call that all ranks of an engine make together, those that share its experts among them: the block checks what it can check
    without the others, and calls what it is given before it waits for them.

    Args:
        model: of this rank.
        call: what it is, in errors.

    Raises:
        RankFailedError: on the ranks that refused nothing, another one did; names it. It says why itself.
    """
    met = False

    def meet() -> None:
        nonlocal met
        met = True
        _tell(model, call, refuses=False)

    try:
        yield meet
    except Exception:
        if not met and isinstance(model, GPTModel):
            _tell(model, call, refuses=True)
        raise


def _tell(model: GPTModel, call: str, *, refuses: bool) -> None:
    groups = model.groups
    ranks = peers_of(model) if shares_experts(model) else groups.tp_pp
    if ranks.size == 1:
        return
    number = torch.tensor([ranks.ranks[ranks.rank] + 1 if refuses else 0], dtype=torch.int64, device=next(model.parameters()).device)
    # Together they reach all, and a step uses them anyway: a communicator of its own would take memory.
    for part in (groups.tp_pp, groups.tp_ep) if shares_experts(model) else (groups.tp_pp,):
        number = all_reduce(number, part, op="max")
    refused = int(number.item()) - 1
    if refused >= 0 and not refuses:
        what = f"refused {call}, which the {ranks.size} ranks of this engine make together; it says why"
        raise RankFailedError(ranks.ranks.index(refused), what, f"rank {refused} of the world")


def check_equal_ranks(groups: ProcessGroups, context: DynamicInferenceContext, *, vocab_size: int, seed: int) -> None:
    """See that the tensor-parallel ranks of all stages have equal sizes and seeds; all of them call it together.

    Raises:
        ValueError: on all of them; names the first field that differs.
    """
    if groups.tp_pp.size == 1:
        return
    fields = {
        "num_blocks": context.allocator.usable_count,
        "num_snapshots": context.allocator.snapshots.total_count,
        "max_requests": context.max_requests,
        "max_tokens": context.max_tokens,
        "max_sequence_length": context.max_sequence_length,
        "block_size_tokens": context.block_size,
        "vocab_size": vocab_size,
        "seed": seed,
        **_lora_fields(context.config.lora),
    }
    for name, (least, most) in _ranges(fields, groups, context.device).items():
        if least != most:
            raise ValueError(
                f"{name} is {fields[name]} here and from {least} to {most} over the tp={groups.tp.size} pp={groups.pp.size} ranks of this "
                "engine, which would draw different tokens; give all of them the same"
            )


def _lora_fields(slots: LoraSlots | None) -> dict[str, int]:
    """As integers; those of the targets say whether they are equal."""
    if slots is None:
        return {"max_loras": 0, "max_lora_rank": 0, "targets of lora": 0}
    targets = zlib.crc32(",".join(slots.wanted).encode())
    return {"max_loras": slots.max_loras, "max_lora_rank": slots.max_lora_rank, "targets of lora": targets}


def _ranges(fields: Mapping[str, int], groups: ProcessGroups, device: torch.device) -> dict[str, tuple[int, int]]:
    own = torch.tensor(list(fields.values()), dtype=torch.int64, device=device)
    # All bits turned, the largest is the least one, of a seed of 64 bits too.
    most, turned = all_reduce(torch.stack([own, ~own]), groups.tp_pp, op="max").tolist()
    return {name: (~least, largest) for name, least, largest in zip(fields, turned, most, strict=True)}
