# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Heads that predict further tokens than the next one (multi-token prediction, DeepSeek-V3, 2024)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.context_parallel import sequence_lengths, tokens_ahead
from mcore_parallel.groups import Group
from mcore_parallel.models._aux import Aux
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._layer import build_norm
from mcore_parallel.models._memory import StageMemory
from mcore_parallel.models._slots import Site
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import BatchInvariantProducts, ReplicatedLinear


# T tokens, D model.
class TokenDepth(nn.Module):
    """One depth: its layers read the states of the depth before beside the embedding of the token that one predicted.

    ``final_norm(layers(projection([embedding_norm(e), hidden_norm(h)])))``; embedding and output layer are the model's.

    Args:
        site: of its first layer.
        layers: the layers, in order.
    """

    def __init__(self, site: Site, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = build_norm(site), build_norm(site)
        size = site.config.hidden_size
        products = BatchInvariantProducts() if site.batch_invariant else None
        place: dict[str, Any] = {"dtype": site.dtype, "device": site.device}
        self.projection = ReplicatedLinear(2 * size, size, site.groups, init=False, products=products, **place)
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
        self.final_norm = build_norm(site)

    def forward(self, hidden: Tensor, embedded: Tensor, step: Step, memory: StageMemory) -> tuple[Tensor, Aux | None]:
        """Two [T or T / tp, D] -> (the same, what the layers return beside or None)."""
        x = self.projection(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        x, aux = memory.run(list(self.layers.values()), x, step)
        return self.final_norm(x), aux


def predict_further(
    depths: nn.ModuleDict,
    hidden: Tensor,
    tokens: Tensor,
    step: Step,
    *,
    embed: Callable[[Tensor], Tensor],
    memory: StageMemory,
    config: TransformerConfig,
    cp: Group,
) -> tuple[list[Tensor], Aux | None]:
    """Hidden states of every depth, behind their final norms, and what the layers return beside.

    Depth k (from 1) of token t reads the embedding of token t + k and predicts token t + k + 1; behind the end of a sequence it
    reads token 0, whose prediction no label weighs.

    Args:
        depths: the heads.
        hidden: [T or T / tp, D] of the trunk, behind the final norm.
        tokens: [T].
        step: of these tokens.
        embed: from token ids to [T or T / tp, D].
        memory: of the stage.
        config: of the model.
        cp: ranks that share each sequence.
    """
    if step.prefixes is not None:
        raise ValueError(f"mtp_num_layers={config.mtp_num_layers}: behind a prefix there are several next tokens; pack without prefixes")
    whole = (step.seq_len * cp.size,) * step.batch_size if step.cu_seqlens is None else sequence_lengths(step.cu_seqlens)
    if config.mtp_detach:
        hidden = hidden.detach()
    hiddens: list[Tensor] = []
    parts: list[Aux | None] = []
    for number, depth in enumerate(depths.values(), 1):
        embedded = embed(tokens_ahead(tokens, whole, cp, by=number))
        hidden, aux = depth(hidden, embedded.detach() if config.mtp_detach else embedded, step, memory)
        hiddens.append(hidden)
        parts.append(aux)
    return hiddens, Aux.merged(parts)
