# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""BERT: a bidirectional stack with token types, a masked-token head and a sentence-pair head (Devlin et al., 2018)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.models._bert_heads import BertOutput, MaskedTokenHead, Pooler, ReplicatedAffine
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._cores import rotary_config
from mcore_parallel.models._init import fill_parameters
from mcore_parallel.models._layer import build_norm, dense_feed_forward, self_attention
from mcore_parallel.models._layout import check_layout
from mcore_parallel.models._memory import StageMemory
from mcore_parallel.models._output import OutputLayer
from mcore_parallel.models._slots import Site
from mcore_parallel.models._stack import LayerStack, place_stage, shares_table
from mcore_parallel.nn import LearnedPositions, MaskedAttention, OffloadConfig, RecomputeConfig, Step
from mcore_parallel.pipeline import StageLayout
from mcore_parallel.tensor_parallel import VocabParallelEmbedding


# T tokens, D model, B sequences, S tokens a sequence.
class BertModel(nn.Module):
    """Embeddings, layers, heads; each pipeline stage holds its share, under global names as in ``GPTModel``.

    With ``config.post_norm`` it is the published BERT: a norm behind the embeddings and behind each sum, none before the heads. Without
    it each branch is normalised first, and the whole before the heads.

    Padding comes as packed sequences (``Step.cu_seqlens``: of each row the tokens, then the padding) or as a mask (``Step.attention``,
    see ``MaskedAttention``); token types as ``Step.token_types``, 0 where that is None.

    Args:
        config: the architecture; "learned_absolute" positions or rotary ones.
        groups: the layout; cp must be 1.
        num_token_types: rows of the token type table; 0 for none.
        add_binary_head: pool the first token of each sequence and tell whether the second sentence follows the first one.
        layers: as of ``GPTModel``.
        recompute: as of ``GPTModel``.
        offload: as of ``GPTModel``.
        unpadded_vocab_size: as of ``GPTModel``.
        dtype: of the parameters and the hidden states.
        device: of the parameters.
        seed: of the initial values; None leaves them uninitialised.

    Raises:
        ValueError: cp above 1, a pattern or heads for further tokens, and what ``GPTModel`` raises.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroups,
        *,
        num_token_types: int = 2,
        add_binary_head: bool = True,
        layers: range | StageLayout | None = None,
        recompute: RecomputeConfig | None = None,
        offload: OffloadConfig | None = None,
        unpadded_vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        _check(config, groups, num_token_types)
        self.config, self.groups, self.dtype = config, groups, dtype
        here = place_stage(config, groups.pp, layers)
        check_layout(config, groups.plan, ends=here.embedding or here.loss)
        self.is_first, self.is_last, self.stage_layers = here.embedding, here.loss, here.layers
        tied, shared = config.share_embeddings_and_output_weights, shares_table(config, groups.pp, here)
        self.memory = StageMemory(recompute, offload, len(here.layers), groups, own_core=True, dense=True)
        attention = self_attention(MaskedAttention(config.attention_backend), causal=False, manage=self.memory.core)
        stack = LayerStack(config=config, mixers={"*": attention}, feed_forward=dense_feed_forward, layer_configs={})
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        ends: dict[str, Any] = {**place, "partial": ("embd",) if shared else ()}
        sizes = (config.vocab_size, config.hidden_size, groups)

        def site(layer: int) -> Site:
            return Site(layer=layer, local_layer=layer - here.layers.start, config=config, groups=groups, **place)

        end = site(here.layers.stop)
        self.embedding = VocabParallelEmbedding(*sizes, init=False, **ends) if self.is_first else None
        rows = config.max_position_embeddings if config.position_embedding_type == "learned_absolute" else None
        self.position_embedding = LearnedPositions(rows, config.hidden_size, groups, **place) if self.is_first and rows else None
        self.token_type_embedding = TokenTypes(num_token_types, end) if self.is_first and num_token_types else None
        self.embedding_norm = build_norm(end) if self.is_first and config.post_norm else None
        self.layers = nn.ModuleDict(
            {str(layer): stack.layer(site(layer), self.memory.layer(local)) for local, layer in enumerate(here.layers)}
        )
        self.final_norm = build_norm(end) if self.is_last and not config.post_norm else None
        self.lm_head = MaskedTokenHead(end) if self.is_last else None
        self.pooler = Pooler(end) if self.is_last and add_binary_head else None
        self.binary_head = ReplicatedAffine(config.hidden_size, 2, end, partial=False) if self.pooler is not None else None
        output_ends = {"unpadded_vocab_size": unpadded_vocab_size, **(ends if tied else place)}
        output = OutputLayer(*sizes, tied=tied and not shared, **output_ends) if self.is_last else None
        self._holds_copy = shared and self.is_last
        if self._holds_copy:
            # As in GPTModel the copy bears the name of the table.
            self.embedding, output = output, None
        self.output = output
        if seed is not None and torch.device(device).type != "meta":
            fill_parameters(self, config, groups, seed)

    def check_noise(self, noise_fields: str) -> None:
        """As of ``mcore_parallel.tensor_parallel.RecomputedModel``."""
        self.memory.check_noise(noise_fields)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor | BertOutput, None]:
        """One pass through this stage.

        Args:
            x: tokens [T] int64 on the first stage, else the hidden states [T or T / tp, D] of the stage before.
            step: positions, token types and padding of all T tokens.

        Returns:
            Hidden states [T or T / tp, D], on the last stage a ``BertOutput``; and None.
        """
        turns = rotary_config(self.config)
        if step.rotary is None and turns is not None:
            step = dataclasses.replace(step, rotary=turns.tables(step.positions))
        if self.is_first:
            x = self.embed(x, step)
        x, _ = self.memory.run(list(self.layers.values()), x, step)
        if self.lm_head is None:
            return x, None
        x = x if self.final_norm is None else self.final_norm(x)
        layer = cast(OutputLayer, self.embedding if self._holds_copy else self.output)
        tied = self.config.share_embeddings_and_output_weights and not self._holds_copy
        pooled = None if self.pooler is None else self.pooler(x, step)
        output = BertOutput(
            hidden=self.lm_head(x),
            layer=layer,
            weight=self.embedding.weight if tied and self.embedding is not None else None,
            bias=self.lm_head.bias,
            sequence=x,
            pooled=pooled,
            binary_logits=None if pooled is None or self.binary_head is None else self.binary_head(pooled),
        )
        return output, None

    def embed(self, tokens: Tensor, step: Step) -> Tensor:
        """Token ids [T] -> [T or T / tp, D], on the first stage."""
        x = cast(VocabParallelEmbedding, self.embedding)(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(step.positions)
        if self.token_type_embedding is not None:
            x = x + self.token_type_embedding(torch.zeros_like(tokens) if step.token_types is None else step.token_types)
        return x if self.embedding_norm is None else self.embedding_norm(x)


class TokenTypes(nn.Module):
    """A learned vector for each of a few token types, added to the embeddings: ``weight`` [types, D], whole on every rank.

    Args:
        num_types: rows.
        site: sizes and layout; under sequence parallelism a rank adds the vectors of its tokens.
    """

    def __init__(self, num_types: int, site: Site) -> None:
        super().__init__()
        self.groups = site.groups
        self.weight = nn.Parameter(torch.empty(num_types, site.config.hidden_size, dtype=site.dtype, device=site.device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        partial = ("tp",) if self.groups.sequence_parallel else ()
        return {"weight": ShardSpec(shape=tuple(self.weight.shape), partial=partial)}

    def forward(self, types: Tensor) -> Tensor:
        """[T] int64 -> [T or T / tp, D]."""
        if self.groups.sequence_parallel:
            tp = self.groups.tp
            types = types.chunk(tp.size)[tp.rank]
        return nn.functional.embedding(types, self.weight)


def _check(config: TransformerConfig, groups: ProcessGroups, num_token_types: int) -> None:
    if groups.cp.size > 1:
        raise ValueError(f"cp={groups.cp.size} splits sequences, whose first token BertModel pools; set cp=1")
    for name in ("hybrid_layer_pattern", "latent_attention", "attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}={getattr(config, name)!r} is not for BertModel; leave it out")
    if config.mtp_num_layers:
        raise ValueError(f"mtp_num_layers={config.mtp_num_layers} predicts later tokens, which BertModel sees; set it to 0")
    if num_token_types < 0:
        raise ValueError(f"num_token_types={num_token_types} must not be negative; 0 is for none")
