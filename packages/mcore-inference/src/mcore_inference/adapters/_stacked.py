# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The adapters of one linear layer, stacked into one pair of matrices."""

import threading
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_inference._kernels import has_kernels
from mcore_inference._stability import experimental_api
from mcore_parallel.groups import ProcessGroups, ShardSpec

__all__ = ["Chosen", "StackedAdapters"]

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# Of a tile of the kernels, tokens and ranks of all slots; beyond so many numbers the GEMMs are faster.
_KERNEL_TOKENS, _KERNEL_RANKS, _KERNEL_NUMBERS = 64, 256, 4096


# T tokens, I and O input and output features of this rank, S slots, r greatest rank, P = S r
@dataclass
class Chosen:
    """Which slot each token of the step in progress has."""

    slots_T: Tensor | None = None
    """[T] int32, -1 for the base; None outside of steps."""
    others_TP: Tensor | None = None
    """[T, P] bool, True for the ranks of slots that are not the token's own; None outside of steps."""
    thread: int = 0
    """Whose step it is."""


@experimental_api
class StackedAdapters:
    """Adds to what a linear layer computes of each token what the token's own adapter does: ``B (own * (A x))``, two GEMMs for all slots.

    A [P, I] and B [O, P] hold all slots side by side, with alpha / rank in B and zeros where a slot is free or has a lower rank. What A
    gives for other slots is replaced by zeros, so that a token without an adapter gets what the base layer gives, to the bit, and one with
    an adapter nothing of the others. Beside a column-parallel layer A is whole and B is cut with the output; beside a row-parallel one A is
    cut with the input, and the result is a partial sum, as that of the layer is.

    Args:
        base: spec of the layer's weight [*O, I].
        groups: of the layer.
        chosen: of the table that this belongs to.
        max_loras: S.
        max_lora_rank: r.
        dtype: of activations.
        device: of the layer.
    """

    def __init__(
        self,
        base: ShardSpec,
        groups: ProcessGroups,
        chosen: Chosen,
        *,
        max_loras: int,
        max_lora_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        *out, width = base.local_shape(groups)
        self._slices, self._chosen, self._rank = base.slices(groups), chosen, max_lora_rank
        self.A = torch.zeros(max_loras * max_lora_rank, width, dtype=dtype, device=device)
        """[P, I]."""
        self.B = torch.zeros(*out, max_loras * max_lora_rank, dtype=dtype, device=device)
        """[*O, P]."""
        self._B_OP = self.B.view(-1, self.B.shape[-1])
        ranks = _power_of_2(max_loras) * max(16, _power_of_2(max_lora_rank))
        has_tiles = ranks <= _KERNEL_RANKS and dtype in _KERNEL_DTYPES and has_kernels(device, dtype)
        self._few = min(_KERNEL_TOKENS, _KERNEL_NUMBERS // ranks) if has_tiles else 0

    def write(self, slot: int, A: Tensor, B: Tensor) -> None:
        """Put an adapter into a slot, in place.

        Args:
            slot: its number; whatever it held is gone.
            A: [r' up to r, I], whole.
            B: [*O, r'], whole, with alpha / rank in it.
        """
        self.clear(slot)
        begin, rank = slot * self._rank, len(A)
        *out, columns = self._slices
        self.A[begin : begin + rank].copy_(A[:, columns])
        self.B[..., begin : begin + rank].copy_(B[tuple(out)])

    def clear(self, slot: int) -> None:
        """Put zeros into a slot."""
        ranks = slice(slot * self._rank, (slot + 1) * self._rank)
        self.A[ranks].zero_()
        self.B[..., ranks].zero_()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, O], what is added to the layer's product before any sum over tp."""
        return F.linear(self._own(x), self._B_OP)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """y [T, O] plus that of x [T, I], in place; of few tokens on a GPU by two kernels, which read no slot that nobody has."""
        if len(x) > self._few:
            return y.addmm_(self._own(x), self._B_OP.t())
        from mcore_inference.adapters._triton import add_few

        slots_T, _ = self._of_step(x)
        return add_few(y, x.contiguous(), self.A, self._B_OP, slots_T, self._rank)

    def _own(self, x: Tensor) -> Tensor:
        """[T, P]."""
        # Not by a product: a token's own numbers are right beside any that are not finite.
        return F.linear(x, self.A).masked_fill_(self._of_step(x)[1], 0.0)

    def _of_step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slots_T, others_TP = self._chosen.slots_T, self._chosen.others_TP
        if self._chosen.thread != threading.get_ident():
            raise RuntimeError(
                "another thread computes with the model of an engine with lora=LoraSlots(...) while that is in a step; give each a model "
                "of its own"
            )
        assert slots_T is not None and others_TP is not None, "layers have adapters in steps alone"
        assert x.dim() == 2 and len(x) == len(slots_T), "layers with adapters meet all tokens of a step"
        return slots_T, others_TP


def _power_of_2(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()
