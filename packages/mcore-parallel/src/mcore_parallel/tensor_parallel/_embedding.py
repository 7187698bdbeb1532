# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Token embedding whose rows are split over the tensor-parallel group."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel.comm import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.tensor_parallel._init import normal_shard_
from mcore_parallel.tensor_parallel._picked_rows import pick_rows
from mcore_parallel.tensor_parallel._vocab import check_ids, owned_rows
from mcore_parallel.tensor_parallel._weight_gradient import MainGradient


class VocabParallelEmbedding(nn.Module):
    """Rank r of tp holds rows [r * V / tp, (r + 1) * V / tp).

    An id outside [0, V) is an error on CPU; on an accelerator, where looking would wait for the device, and in a graph under
    compilation it gives the zero vector and no gradient, in every layout.

    Args:
        vocab_size: V, rows of the table; pad it with ``pad_vocab_size``.
        hidden_size: D.
        groups: the process groups; ``tp`` is used.
        dtype: of the table.
        device: of the table.
        init: draw the table from N(0, 0.02^2), the same global values in every layout; False leaves the memory
            uninitialised for a caller that fills it.
        seed: of that draw.
        partial: as in ``ShardSpec``.

    Raises:
        ValueError: tp does not divide ``vocab_size``.
    """

    _main_grad: MainGradient | None = None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
        seed: int = 0,
        partial: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        if vocab_size % groups.tp.size:
            raise ValueError(f"tp={groups.tp.size} must divide vocab_size={vocab_size}; pad it with pad_vocab_size")
        self.vocab_size, self.hidden_size, self.groups, self.partial = vocab_size, hidden_size, groups, partial
        shape = self.shard_specs()["weight"].local_shape(groups)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        if init:
            self.reset_parameters(seed)

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"weight": ShardSpec(shape=(self.vocab_size, self.hidden_size), shards={"tp": 0}, partial=self.partial)}

    def reset_parameters(self, seed: int = 0, std: float = 0.02) -> None:
        """Normal table that is the same in every layout."""
        normal_shard_(self.weight, self.shard_specs()["weight"], self.groups, std=std, seed=seed)

    def accumulate_weight_gradients_into(self, main_grads: Mapping[str, MainGradient]) -> None:
        """As ``WeightGradientSink``; in a graph under compilation autograd gets the gradient."""
        self._main_grad = main_grads.get("weight")

    def forward(self, tokens_T: Tensor) -> Tensor:
        """tokens [T] int64 -> [T, D], or [T/tp, D] under sequence parallelism.

        Raises:
            ValueError: an id outside [0, V) (on CPU), or tp does not divide T under sequence parallelism.
        """
        check_ids(tokens_T, "tokens", self.vocab_size)
        main_grad = None if torch.compiler.is_compiling() else self._main_grad
        if main_grad is None and self.groups.tp.size == 1 and tokens_T.device.type == "cpu" and not torch.compiler.is_compiling():
            return F.embedding(tokens_T, self.weight)
        rows_T, owned_T = owned_rows(tokens_T, self.weight.shape[0], self.groups.tp)
        if main_grad is None:
            part = F.embedding(rows_T, self.weight).masked_fill(~owned_T.unsqueeze(-1), 0.0)
        else:
            part = pick_rows(self.weight, torch.where(owned_T, rows_T, -1), main_grad)
        reduce = reduce_scatter_to_sequence_parallel_region if self.groups.sequence_parallel else reduce_from_tensor_model_parallel_region
        return reduce(part, self.groups.tp)

    def extra_repr(self) -> str:
        return f"vocab_size={self.vocab_size} over tp={self.groups.tp.size}, hidden_size={self.hidden_size}"
