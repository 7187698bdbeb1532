# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The feed-forwards of the experts that a rank holds, as stacked weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel import ProcessGroups, ShardSpec
from mcore_parallel.backends import grouped_matmul
from mcore_parallel.nn import Activation, LayerMemory

# R rows in expert order, N experts of this rank, D model, F width of an expert, W width of the activation's input (2 F with a gate).


class _StackedExperts(nn.Module):
    """``down(activation(up x))`` for every expert; N of the E experts live here.

    up is [N, 2, F, D] (gate, value), or without a gate [N, F, D]; down is [N, D, F]. With biases there are up_bias [N, 2, F] or
    [N, F], and down_bias [N, D]. With expert tensor parallelism each rank holds a slice of F, and its result is a partial sum;
    the first of these ranks adds down_bias.

    Args:
        num_experts: E.
        hidden_size: D.
        ffn_size: F.
        groups: ep and expert tensor parallelism are used.
        activation: its name, or the whole choice.
        bias: of both projections.
        memory: which saved tensors wait in host memory: "expert_fc1", the rows, and "moe_act", the input of the activation; None for none.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: etp does not divide ``ffn_size``, or an unknown activation.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        groups: ProcessGroups,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        memory: LayerMemory | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if ffn_size % groups.expt_tp.size:
            raise ValueError(f"etp={groups.expt_tp.size} must divide the expert width {ffn_size}; lower etp or change moe_ffn_hidden_size")
        self.activation = Activation(name=activation) if isinstance(activation, str) else activation
        self.memory = LayerMemory() if memory is None else memory
        self._adds_down_bias = groups.expt_tp.is_first
        features = (2, ffn_size) if self.activation.gated else (ffn_size,)
        wide = {"ep": 0, "tp": len(features)}
        self._specs = {
            "up": ShardSpec(shape=(num_experts, *features, hidden_size), view="expert", shards=wide),
            "down": ShardSpec(shape=(num_experts, hidden_size, ffn_size), view="expert", shards={"ep": 0, "tp": 2}),
        }
        if bias:
            whole: dict[str, Any] = {"shards": {"ep": 0}, "partial": ("tp",)}
            self._specs["up_bias"] = ShardSpec(shape=(num_experts, *features), view="expert", shards=wide)
            self._specs["down_bias"] = ShardSpec(shape=(num_experts, hidden_size), view="expert", **whole)
        local = {
            name: nn.Parameter(torch.empty(spec.local_shape(groups), dtype=dtype, device=device)) for name, spec in self._specs.items()
        }
        self.up, self.down = local["up"], local["down"]
        self.up_bias, self.down_bias = local.get("up_bias"), local.get("down_bias")

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs

    def _run(self, rows_RD: Tensor, tokens_per_expert: Sequence[int], *, grouped: bool) -> Tensor:
        matmul = grouped_matmul if grouped else _matmul_each_expert
        counts = tuple(tokens_per_expert)
        with self.memory.offloading("expert_fc1", self):
            x_RW = _biased(matmul(rows_RD, self.up.flatten(1, -2), counts), self.up_bias, counts)
        with self.memory.offloading("moe_act", self):
            y_RF = self.activation(x_RW)
        return _biased(matmul(y_RF, self.down, counts), self._down_bias(), counts)

    def _down_bias(self) -> Tensor | None:
        """Ranks that share an expert all have a gradient, so that their sums have equal terms; only the first one adds the bias."""
        if self.down_bias is None or self._adds_down_bias:
            return self.down_bias
        return self.down_bias * 0


class SequentialMLP(_StackedExperts):
    """One matmul per expert; the reference."""

    def forward(self, rows_RD: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """[R, D] rows in expert order -> [R, D]."""
        return self._run(rows_RD, tokens_per_expert, grouped=False)


class GroupedMLP(_StackedExperts):
    """All experts in two grouped GEMMs (bfloat16 on a GPU); elsewhere one matmul per expert."""

    def forward(self, rows_RD: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """[R, D] rows in expert order -> [R, D]."""
        grouped = rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16 and rows_RD.shape[0] > 0
        return self._run(rows_RD, tokens_per_expert, grouped=grouped)


def _matmul_each_expert(rows_RI: Tensor, weight_NOI: Tensor, counts: tuple[int, ...]) -> Tensor:
    parts = rows_RI.split(list(counts))
    return torch.cat([F.linear(rows, weight_OI) for rows, weight_OI in zip(parts, weight_NOI, strict=True)])


def _biased(rows_RO: Tensor, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
    """Rows plus the bias [N, ...] of their expert."""
    return rows_RO if bias is None else rows_RO + _RowsOfExperts.apply(bias.flatten(1), counts)


class _RowsOfExperts(torch.autograd.Function):
    """[N, O] -> [R, O], each row as often as its expert has rows; the gradient is summed in the order of the rows."""

    @staticmethod
    def forward(ctx: Any, bias_NO: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.counts = counts
        repeats = torch.tensor(counts, device=bias_NO.device)
        return bias_NO.repeat_interleave(repeats, dim=0, output_size=sum(counts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.stack([rows.sum(0) for rows in grads[0].split(list(ctx.counts))]), None
