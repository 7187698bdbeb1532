# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two narrow matrices an expert, beside a frozen stack of weights (LoRA)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups, ShardSpec
from mcore_parallel.backends import check_grouped_width
from mcore_parallel.tensor_parallel import LoraConfig, normal_shard_

# N experts of this rank, E of all, I and O input and output features of an expert, r rank


class ExpertLora(nn.Module):
    """``alpha / rank * B A`` of every expert: A [N, r, I] and B [N, *out, r], divided over ep and expert tensor parallelism as the base is.

    Args:
        config: rank and scale.
        base: spec of the base weights [E, *out, I].
        groups: of the experts.
        seed: of A, which is drawn from N(0, 1 / (3 I)), the same global values in every layout; B is zero.
        dtype: of A and B.
        device: of A and B.

    Raises:
        ValueError: a rank that the grouped products of the device do not take.
    """

    def __init__(
        self, config: LoraConfig, base: ShardSpec, groups: ProcessGroups, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        check_grouped_width("rank", config.rank, dtype, device)
        self.config = config
        num_experts, *out, in_features = base.shape
        self._std = (3 * in_features) ** -0.5
        cuts_input = base.shards["tp"] == len(base.shape) - 1
        # Of two factors one is cut with the weights; the other meets a part of what it is multiplied with.
        whole, cut = {"ep": 0}, dict(base.shards)
        self._specs = {
            "A": ShardSpec(
                shape=(num_experts, config.rank, in_features),
                view="expert",
                shards={**whole, "tp": 2} if cuts_input else whole,
                partial=() if cuts_input else ("tp",),
            ),
            "B": ShardSpec(
                shape=(num_experts, *out, config.rank),
                view="expert",
                shards=whole if cuts_input else cut,
                partial=("tp",) if cuts_input else (),
            ),
        }
        self.A = nn.Parameter(torch.empty(self._specs["A"].local_shape(groups), dtype=dtype, device=device))
        self.B = nn.Parameter(torch.zeros(self._specs["B"].local_shape(groups), dtype=dtype, device=device))
        normal_shard_(self.A, self._specs["A"], groups, std=self._std, seed=seed)

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: object) -> Tensor:
        """Of ``init_parameters``; see its ``SelfInitialised``."""
        return torch.zeros(shape) if name == "B" else torch.empty(shape).normal_(0.0, self._std, generator=generator)

    def delta(self) -> Tensor:
        """What the adapters add to this rank's part of the base weights, in float32 or wider."""
        dtype = torch.promote_types(self.A.dtype, torch.float32)
        product = self.B.detach().flatten(1, -2).to(dtype) @ self.A.detach().to(dtype)
        return (product * self.config.scaling).unflatten(1, self.B.shape[1:-1])
