# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What one rank sees of a micro-batch, and what the parts of a layer keep of it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import Activation
from mcore_parallel.planner._parameters import padded_vocab
from mcore_parallel.planner._workload import Layout, Workload

# T tokens of a micro-batch on this rank, t of them between tensor-parallel parts, D model, F feed-forward, R rows of the experts.
# e bytes of an element; norms, rotary tables and statistics are float32. Widths a, k, F, V are those of this rank.

WIDE = 4
_NORM_PROGRAMS = 512


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """Per rank."""

    T: int
    t: int
    D: int
    a: int
    """Width of the query heads."""
    k: int
    """Width of the key heads, also of the values."""
    heads: int
    F: int
    """Width of the dense (or shared) feed-forward; 0 for none."""
    V: int
    e: int
    sequence_parallel: bool
    context_parallel: bool
    kernels: bool
    """Norm, gating and rotation are one kernel each (``nn.kernels``), and the loss works in place: on a GPU with Triton."""
    picks: int = 0
    """(token, expert) pairs of this rank's tokens."""
    rows: int = 0
    """R: of balanced experts."""
    expert_F: int = 0
    local_experts: int = 0
    num_experts: int = 0
    expert_biases: bool = False
    exchanges_rows: bool = False
    """Rows travel to the ranks of their experts and back."""
    grouped_queries: bool = False
    more_attention: int = 0
    """Bytes that attention keeps beside its heads: latents, the norms of heads, the gate."""
    mixers: Mapping[str, int] = field(default_factory=dict)
    """Bytes that linear mixers keep, by symbol."""
    gates: int = 2
    """Widths of the feed-forward's (and of an expert's) input to its activation."""

    @property
    def hidden(self) -> int:
        """Bytes of hidden states between the parts."""
        return self.t * self.D * self.e

    @property
    def norm(self) -> int:
        """Saved in a norm: its input and the scales; without kernels the widened input and that scaled.

        The input is the residual stream, which nothing else keeps.
        """
        return self.hidden + WIDE * self.t if self.kernels else WIDE * self.t * (2 * self.D + 1)

    @property
    def norm_work(self) -> int:
        """What a norm's backward makes beside that: both gradients, partial sums for the weight; without kernels four wide tensors."""
        wide = WIDE * self.D
        return 2 * self.hidden + min(_NORM_PROGRAMS, self.t) * wide if self.kernels else 4 * self.t * wide

    @property
    def attention(self) -> int:
        """Queries, keys and values, the result, its log-sum-exp.

        Without kernels the values are a view of the projections, which also hold the queries and keys before their rotation. A ring
        keeps keys and values as one tensor of its own.
        """
        unturned = 0 if self.kernels or self.context_parallel else self.a + self.k
        return self.e * self.T * (unturned + self.a + 2 * self.k + self.a) + WIDE * self.T * self.heads + self.more_attention

    @property
    def gated(self) -> int:
        """Gate and value (or one of them); without kernels the product too."""
        return (self.gates + (not self.kernels)) * self.e * self.T * self.F

    @property
    def activation_work(self) -> int:
        """What the activation's backward makes: both gradients, and the product in place of its gradient; without kernels in place of the
        product, in float32, and a narrow input and gradient widened."""
        if self.kernels:
            return (self.gates + 1) * self.e * self.T * self.F
        wide = 2 * self.gates if self.gates > 1 else 1
        return (wide + (self.gates + 1 if self.e < WIDE else 0)) * WIDE * self.T * self.F

    @property
    def routed(self) -> int:
        """Of a mixture: the picks, their weights and the scores of all experts, what goes into the experts and through them, and the order
        of the rows; what comes back from other ranks, in the order of the picks."""
        router = self.picks * (8 + WIDE) + WIDE * self.t * self.num_experts
        rows = self.rows * (self.e * (self.D + (self.gates + 1) * self.expert_F) + 8)
        if self.expert_biases:
            rows += self.rows * self.e * (self.D + (self.e < WIDE))
        if self.exchanges_rows:
            return router + rows + self.picks * (self.e * self.D + 2 * 8)
        return router + rows + WIDE * (self.picks + self.rows)

    @property
    def expert_activation(self) -> int:
        """Of that, the results of the experts' activation."""
        return self.e * self.rows * self.expert_F


def sizes(workload: Workload, layout: Layout, *, kernels: bool = True) -> RankSizes:
    """What one rank sees of a micro-batch, on a GPU with Triton or (``kernels=False``) in torch operators."""
    model, plan = workload.model, layout.plan
    config, experts, tp = model.config, model.experts, layout.plan.tp
    T = workload.micro_batch * workload.sequence // plan.cp
    t = T // tp if layout.sequence_parallel else T
    width = config.ffn_size if experts is None else experts.shared_ffn_hidden_size
    # Ranks that hold the same tokens have a row for every pick, of which those for experts of others are not computed.
    replicated = tp > 1 and not layout.sequence_parallel
    picks = t * experts.topk if experts else 0
    e = workload.dtype.itemsize
    rank_sizes = RankSizes(
        T=T, t=t, D=config.hidden_size, e=e, sequence_parallel=layout.sequence_parallel,
        context_parallel=plan.cp > 1,
        kernels=kernels,
        a=config.num_attention_heads * config.head_dim // tp, k=config.kv_heads * config.head_dim // tp,
        heads=config.num_attention_heads // tp, F=width // tp, V=padded_vocab(model, tp) // tp,
        grouped_queries=config.num_attention_heads != config.kv_heads,
        picks=picks,
        rows=picks if replicated else picks * plan.expert_tp,
        expert_F=experts.ffn_hidden_size // plan.expert_tp if experts else 0,
        local_experts=experts.num_experts // plan.ep if experts else 0, num_experts=experts.num_experts if experts else 0,
        expert_biases=experts is not None and config.add_bias_linear,
        exchanges_rows=experts is not None and not replicated and plan.ep * plan.expert_tp > 1,
        mixers=_linear_mixers(config, e * T // tp),
        gates=2 if Activation(name=config.activation).gated else 1,
    )  # fmt: skip
    if config.latent_attention is None:
        gate = 2 * rank_sizes.a * config.attention_output_gate
        return dataclasses.replace(rank_sizes, more_attention=e * T * (gate + (rank_sizes.a + rank_sizes.k) * config.qk_layernorm))
    latent = config.latent_attention
    # Keys and values are of two widths; the latents are kept before and behind their norms.
    heads = config.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim) // (2 * tp)
    narrow = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank) + latent.qk_rope_head_dim
    return dataclasses.replace(rank_sizes, a=heads, k=heads, grouped_queries=False, more_attention=e * T * narrow)


def _linear_mixers(config: TransformerConfig, tokens: int) -> dict[str, int]:
    """Of the mixers with a state: projection, convolution, scan and gated norm keep what they read, in the model's dtype.

    Args:
        config: the architecture.
        tokens: bytes of an element times tokens, over tp.
    """
    widths = {}
    if config.mamba is not None:
        heads = config.mamba.heads(config.hidden_size)
        inner = heads * config.mamba.head_dim
        widths["M"] = tokens * (5 * inner + 4 * config.mamba.num_groups * config.mamba.state_dim + heads)
    if config.delta_net is not None:
        sizes = config.delta_net
        inner, keys = sizes.num_value_heads * sizes.value_head_dim, sizes.num_key_heads * sizes.key_head_dim
        # The scan is torch code in float32: products of a chunk's tokens with each other, and widened queries, keys and values.
        wide = 3 * sizes.num_value_heads * sizes.chunk_size + 4 * inner + 6 * keys
        widths["G"] = tokens * (5 * inner + 4 * keys + 2 * sizes.num_value_heads) + tokens * 2 * wide
    return widths


def for_symbol(s: RankSizes, config: TransformerConfig, tp: int, symbol: str) -> RankSizes:
    """Sizes of a layer of that symbol: a feed-forward "-" beside experts is dense."""
    if symbol != "-" or not s.num_experts:
        return s
    return dataclasses.replace(s, F=config.ffn_size // tp, picks=0, rows=0, expert_F=0, local_experts=0, num_experts=0)
