# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a step says about the tokens that a mixture holds on this rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.comm import local_slice
from mcore_parallel.context_parallel import sequence_lengths, sequence_of_tokens
from mcore_parallel.nn import Step

# T tokens of this rank, K experts a token, S sequences, L layers.


@dataclass(frozen=True)
class LocalTokens:
    """This rank's tokens: under sequence parallelism a slice of those that the step speaks of."""

    step: Step
    groups: ProcessGroups
    valid_T: Tensor | None
    """bool, False at padding; None where every token is real."""

    @classmethod
    def of(cls, step: Step, groups: ProcessGroups, num_tokens: int) -> "LocalTokens":
        """Of ``num_tokens`` hidden states.

        Raises:
            ValueError: ``step.valid`` speaks of another number of tokens.
        """
        tokens = cls(step, groups, None)
        if step.valid is None:
            return tokens
        valid_T = tokens.local(step.valid)
        if len(valid_T) != num_tokens:
            raise ValueError(f"step.valid speaks of {len(step.valid)} tokens, of which {len(valid_T)} lie here, but {num_tokens} came")
        return cls(step, groups, valid_T)

    def local(self, values: Tensor) -> Tensor:
        """This rank's part of [all tokens, ...]."""
        return local_slice(values, self.groups.tp, 0) if self.groups.sequence_parallel else values

    def masked(self, values: Tensor) -> Tensor:
        """[T, ...] with zeros at padding."""
        if self.valid_T is None:
            return values
        return values.masked_fill(~self.valid_T.view(-1, *[1] * (values.dim() - 1)), 0.0)

    def replayed(self, layer: int, num_tokens: int, num_experts: int, topk: int) -> tuple[Tensor | None, Tensor | None]:
        """[T, K] recorded experts of this rank's tokens, and their weights; None where there are none, or none of this layer.

        Numbers are looked at on the CPU only: on a GPU the host would wait for them.

        Raises:
            ValueError: weights without experts, shapes that are not those of this router, experts that are not its own, or one twice.
        """
        experts, weights = self.step.routed_experts, self.step.routed_weights
        if experts is None:
            if weights is not None:
                raise ValueError("step.routed_weights are those of step.routed_experts, which is None; set it too, or leave both out")
            return None, None
        total = num_tokens * (self.groups.tp.size if self.groups.sequence_parallel else 1)
        if experts.dim() != 3 or (experts.shape[0], experts.shape[2]) != (total, topk):
            raise ValueError(
                f"step.routed_experts has shape {list(experts.shape)}, must be [tokens={total}, layers, moe_router_topk={topk}]; replay "
                "what a model like this one recorded of these tokens"
            )
        if weights is not None and weights.shape != experts.shape:
            raise ValueError(
                f"step.routed_weights has shape {list(weights.shape)}, step.routed_experts {list(experts.shape)}; give each expert a weight"
            )
        if layer >= experts.shape[1]:
            return None, None
        experts_TK = self.local(experts[:, layer])
        if experts.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_experts(experts_TK, layer, num_experts)
        return experts_TK, None if weights is None else self.local(weights[:, layer])

    def sequences(self) -> tuple[Tensor, int]:
        """[T] the sequence of each token, and how many sequences there are."""
        step, cp = self.step, self.groups.cp.size
        device = step.positions.device
        if step.cu_seqlens is None:
            index = torch.arange(step.batch_size * step.seq_len, device=device) // step.seq_len
            return self.local(index), step.batch_size
        if step.max_seqlen is not None:
            return self.local(sequence_of_tokens(step.cu_seqlens, len(step.positions))), len(step.cu_seqlens) - 1
        lengths = torch.tensor([length // cp for length in sequence_lengths(step.cu_seqlens)])
        index = torch.arange(len(lengths)).repeat_interleave(lengths).to(device, non_blocking=True)
        return self.local(index), len(lengths)


def _check_experts(experts_TK: Tensor, layer: int, num_experts: int) -> None:
    sorted_RK = experts_TK[(experts_TK >= 0).all(-1)].sort(-1).values
    if (sorted_RK >= num_experts).any():
        raise ValueError(
            f"step.routed_experts names expert {int(sorted_RK.max())} in layer {layer}, must be below num_moe_experts={num_experts}; "
            "replay what a model like this one recorded"
        )
    if (twice_RK := sorted_RK[:, 1:] == sorted_RK[:, :-1]).any():
        raise ValueError(
            f"step.routed_experts sends a token to expert {int(sorted_RK[:, 1:][twice_RK][0])} of layer {layer} twice; a row holds "
            "distinct experts, or a negative number for a fresh choice"
        )
