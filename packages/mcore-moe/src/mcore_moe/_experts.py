# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The feed-forwards of the experts that a rank holds, as stacked weights."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel import ProcessGroups, ShardSpec


class _StackedExperts(nn.Module):
    """SwiGLU experts: up [N, 2, F, D] holds gate and value, down [N, D, F]; N of the E experts live here.

    With expert tensor parallelism each rank holds a slice of F, and its result is a partial sum.

    Raises:
        ValueError: etp does not divide ``ffn_size``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if ffn_size % groups.expt_tp.size:
            raise ValueError(f"etp={groups.expt_tp.size} must divide the expert width {ffn_size}; lower etp or change moe_ffn_hidden_size")
        up, down = (num_experts, 2, ffn_size, hidden_size), (num_experts, hidden_size, ffn_size)
        shards = {"ep": 0, "tp": 2}
        self._specs = {name: ShardSpec(shape=shape, view="expert", shards=shards) for name, shape in (("up", up), ("down", down))}
        local = {name: spec.local_shape(groups) for name, spec in self._specs.items()}
        self.up = nn.Parameter(torch.empty(local["up"], dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(local["down"], dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs


class SequentialMLP(_StackedExperts):
    """One matrix product an expert; the reference."""

    def forward(self, rows_RD: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """[R, D] rows in expert order -> [R, D]."""
        return _expert_by_expert(rows_RD, tokens_per_expert, self.up, self.down)


class GroupedMLP(_StackedExperts):
    """All experts in two grouped matrix products (bfloat16 on a GPU); elsewhere one product an expert."""

    def forward(self, rows_RD: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """[R, D] rows in expert order -> [R, D]."""
        if not (rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16 and rows_RD.shape[0]):
            return _expert_by_expert(rows_RD, tokens_per_expert, self.up, self.down)
        ends = torch.tensor(tokens_per_expert, device=rows_RD.device).cumsum(0).to(torch.int32)
        gate, value = F.grouped_mm(rows_RD, self.up.flatten(1, 2).transpose(1, 2), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * value, self.down.transpose(1, 2), offs=ends)


def _expert_by_expert(rows_RD: Tensor, tokens_per_expert: Sequence[int], up: Tensor, down: Tensor) -> Tensor:
    outputs = []
    for expert, rows in enumerate(rows_RD.split(list(tokens_per_expert))):
        gate, value = F.linear(rows, up[expert].flatten(0, 1)).chunk(2, -1)
        outputs.append(F.linear(F.silu(gate) * value, down[expert]))
    return torch.cat(outputs)
