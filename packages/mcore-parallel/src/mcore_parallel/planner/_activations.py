# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a micro-batch keeps between its forward and its backward, and what the work needs beside it for a moment.

Every term is a tensor that the code of ``nn``, ``models``, ``tensor_parallel`` and ``mcore_moe`` saves or makes.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import Activation, RecomputeConfig
from mcore_parallel.planner._parameters import Part, padded_vocab
from mcore_parallel.planner._workload import Layout, Workload

# T tokens of a micro-batch on this rank, t of them between tensor-parallel parts, D model, F feed-forward, R rows of the experts.
# e bytes of an element; norms, rotary tables and statistics are float32. Widths a, k, F, V are those of this rank.

_CHUNK_LOGITS = 1 << 28
_WIDE = 4
_NORM_PROGRAMS = 512


@dataclass(frozen=True)
class Moment:
    """A point of the step at which much is alive."""

    name: str
    extra: int
    """Bytes on top of what the live micro-batches keep; negative when part of that is gone already."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Of one layer and one micro-batch."""

    kept: int
    """From forward to backward."""
    moments: tuple[Moment, ...]
    """Of its backward, on top of what all layers keep; with what the layer's own recomputed parts bring back."""


@dataclass(frozen=True, kw_only=True)
class HeadBytes:
    """Of the final norm and the loss of one micro-batch."""

    kept: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, kw_only=True)
class _Sizes:
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
    """Norm, gating and rotation are one kernel each (``nn._fused``), and the loss works in place: on a GPU with Triton."""
    picks: int = 0
    """(token, expert) pairs of this rank's tokens."""
    rows: int = 0
    """R: of balanced experts."""
    expert_F: int = 0
    local_experts: int = 0
    num_experts: int = 0
    grouped_queries: bool = False
    more_attention: int = 0
    """Bytes that attention keeps beside its heads: latents, the norms of heads, the gate."""
    mixers: Mapping[str, int] = field(default_factory=dict)
    """Bytes that linear mixers keep, by symbol."""
    gates: int = 2
    """Widths of the feed-forward's input to its activation."""

    @property
    def hidden(self) -> int:
        """Bytes of hidden states between the parts."""
        return self.t * self.D * self.e

    @property
    def norm(self) -> int:
        """Saved in a norm: its input and the scales; without kernels the widened input and that scaled.

        The input is the residual stream, which nothing else keeps.
        """
        return self.hidden + _WIDE * self.t if self.kernels else _WIDE * self.t * (2 * self.D + 1)

    @property
    def norm_work(self) -> int:
        """What a norm's backward makes beside that: both gradients, partial sums for the weight; without kernels four wide tensors."""
        wide = _WIDE * self.D
        return 2 * self.hidden + min(_NORM_PROGRAMS, self.t) * wide if self.kernels else 4 * self.t * wide

    @property
    def attention(self) -> int:
        """Queries, keys and values, the result, its log-sum-exp.

        Without kernels the values are a view of the projections, which also hold the queries and keys before their rotation. A ring
        keeps keys and values as one tensor of its own.
        """
        unturned = 0 if self.kernels or self.context_parallel else self.a + self.k
        return self.e * self.T * (unturned + self.a + 2 * self.k + self.a) + _WIDE * self.T * self.heads + self.more_attention

    @property
    def gated(self) -> int:
        """Gate and value (or one of them), the product."""
        return (self.gates + 1) * self.e * self.T * self.F

    @property
    def activation_work(self) -> int:
        """What the activation's backward makes, in place of the product: both gradients; without kernels in float32, and a narrow
        input and gradient widened."""
        if self.kernels:
            return self.gates * self.e * self.T * self.F
        wide = 2 * self.gates if self.gates > 1 else 1
        return (wide + (self.gates + 1 if self.e < _WIDE else 0)) * _WIDE * self.T * self.F

    @property
    def routed(self) -> int:
        """Of a mixture: the wide input and weight of the router, its scores, what goes into the experts, through them and out of them,
        and what comes back, as it comes and in the order of the picks."""
        wide = self.t * self.D if self.e < _WIDE else 0
        router = _WIDE * (wide + self.num_experts * self.D + 2 * self.t * self.num_experts)
        rows = self.rows * (self.e * (2 * self.D + 4 * self.expert_F) + 2 * 8) + self.picks * (self.e * 2 * self.D + 3 * 8)
        return router + rows if self.num_experts else 0


def sizes(workload: Workload, layout: Layout, *, kernels: bool = True) -> _Sizes:
    """What one rank sees of a micro-batch, on a GPU with Triton or (``kernels=False``) in torch operators."""
    model, plan = workload.model, layout.plan
    config, experts, tp = model.config, model.experts, layout.plan.tp
    T = workload.micro_batch * workload.sequence // plan.cp
    t = T // tp if layout.sequence_parallel else T
    width = config.ffn_size if experts is None else experts.shared_ffn_hidden_size
    e = workload.dtype.itemsize
    found = _Sizes(
        T=T, t=t, D=config.hidden_size, e=e, sequence_parallel=layout.sequence_parallel,
        context_parallel=plan.cp > 1,
        kernels=kernels,
        a=config.num_attention_heads * config.head_dim // tp, k=config.kv_heads * config.head_dim // tp,
        heads=config.num_attention_heads // tp, F=width // tp, V=padded_vocab(model, tp) // tp,
        grouped_queries=config.num_attention_heads != config.kv_heads,
        picks=t * experts.topk if experts else 0,
        rows=t * experts.topk * plan.expert_tp if experts else 0,
        expert_F=experts.ffn_hidden_size // plan.expert_tp if experts else 0,
        local_experts=experts.num_experts // plan.ep if experts else 0, num_experts=experts.num_experts if experts else 0,
        mixers=_linear_mixers(config, e * T // tp),
        gates=2 if experts or Activation(name=config.activation).gated else 1,
    )  # fmt: skip
    if config.latent_attention is None:
        gate = 2 * found.a * config.attention_output_gate
        return dataclasses.replace(found, more_attention=e * T * (gate + (found.a + found.k) * config.qk_layernorm))
    latent = config.latent_attention
    # Keys and values are of two widths; the latents are kept before and behind their norms.
    heads = config.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim) // (2 * tp)
    narrow = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank) + latent.qk_rope_head_dim
    return dataclasses.replace(found, a=heads, k=heads, grouped_queries=False, more_attention=e * T * narrow)


def _linear_mixers(config: TransformerConfig, tokens: int) -> dict[str, int]:
    """Of the mixers with a state: projection, convolution, scan and gated norm keep what they read, in the model's dtype.

    Args:
        config: the architecture.
        tokens: bytes of an element times tokens, over tp.
    """
    found = {}
    if config.mamba is not None:
        heads = config.mamba.heads(config.hidden_size)
        inner = heads * config.mamba.head_dim
        found["M"] = tokens * (5 * inner + 4 * config.mamba.num_groups * config.mamba.state_dim + heads)
    if config.delta_net is not None:
        sizes = config.delta_net
        inner, keys = sizes.num_value_heads * sizes.value_head_dim, sizes.num_key_heads * sizes.key_head_dim
        # The scan is torch code in float32: products of a chunk's tokens with each other, and widened queries, keys and values.
        wide = 3 * sizes.num_value_heads * sizes.chunk_size + 4 * inner + 6 * keys
        found["G"] = tokens * (5 * inner + 4 * keys + 2 * sizes.num_value_heads) + tokens * 2 * wide
    return found


def tables_bytes(s: _Sizes, head_dim: int) -> int:
    """Of one forward: cosines and sines."""
    return 2 * _WIDE * s.T * head_dim


def layer_bytes(s: _Sizes, recompute: RecomputeConfig | None, *, fusion: bool, symbol: str = "L") -> LayerBytes:
    """One layer of a stage that recomputes as said ("full" is the matter of ``stage_activations``).

    Args:
        s: what the rank sees, of a layer of that symbol (``for_symbol``).
        symbol: as of ``Part``.
        recompute: parts that run again.
        fusion: weight gradients go into the main gradients and are never tensors of their own.
    """
    mlp, mixer = symbol in "LE-", symbol not in "E-"
    parts = frozenset() if recompute is None else recompute.parts
    norm = s.hidden if "norm" in parts else s.norm
    out = 0 if "norm" in parts else s.hidden
    attention = {"attention": 0, "core_attention": s.attention - _WIDE * s.T * s.heads}.get(
        next(iter(parts & {"attention", "core_attention"}), ""), s.attention
    )
    feed_forward = s.gated + s.routed
    kept_mlp = 0 if "mlp" in parts else feed_forward
    brought = s.norm + s.hidden - norm - out if "norm" in parts else 0
    again_mlp, again_attention = feed_forward - kept_mlp, s.attention - attention
    # A part that runs again reads its norm first; one that does not, when the gradients of its projections are due.
    at_once = brought if "mlp" in parts else 0
    moments = list(_feed_forward_moments(s, fusion, again=again_mlp + at_once, inner=brought - at_once)) if mlp else []
    # Routers widen their input and nothing else of a mixture keeps it, unless it runs again.
    ffn_out = 0 if s.rows and not s.F and s.e < _WIDE and "mlp" not in parts else out
    gone = norm + ffn_out + kept_mlp if mlp else 0
    at_once = brought if "attention" in parts else 0
    if symbol in s.mixers:
        # Backward the gradients of all it kept are there at once, at most; no part of its own runs again.
        moments.append(Moment("scan", brought + s.hidden + s.mixers[symbol]))
        attention = s.mixers[symbol]
    elif mixer:
        moments += _attention_moments(s, fusion, gone=gone, again=again_attention + at_once, inner=brought - at_once)
    kept = (norm + out + attention if mixer else 0) + (norm + ffn_out + kept_mlp if mlp else 0)
    return LayerBytes(kept=kept, moments=tuple(moments))


def for_symbol(s: _Sizes, config: TransformerConfig, tp: int, symbol: str) -> _Sizes:
    """Sizes of a layer of that symbol: a feed-forward "-" beside experts is dense."""
    if symbol != "-" or not s.num_experts:
        return s
    gates = 2 if Activation(name=config.activation).gated else 1
    return dataclasses.replace(s, F=config.ffn_size // tp, gates=gates, picks=0, rows=0, expert_F=0, local_experts=0, num_experts=0)


def _feed_forward_moments(s: _Sizes, fusion: bool, *, again: int, inner: int) -> list[Moment]:
    residual, e = s.hidden, s.e
    whole = e * s.T * s.D if s.sequence_parallel else 0
    feed_forward = s.gated + s.routed
    found = []
    if s.F:
        weight = 0 if fusion else e * s.D * s.F
        up_weight = 2 * weight
        found.append(Moment("feed-forward activation", again + residual + s.activation_work))
        found.append(Moment("feed-forward down", again + residual + whole + e * s.T * s.F + weight))
        up = again + inner + residual + whole + e * s.T * s.D + 2 * e * s.T * s.F + up_weight - s.gated
        found.append(Moment("feed-forward up", up))
    if s.rows:
        # Autograd gets the gradient of all experts of a weight as one tensor.
        weight = e * s.local_experts * s.expert_F * s.D
        picks = e * s.picks * s.D
        returned = 2 * picks + e * s.rows * s.D
        found.append(Moment("experts combine", again + residual + 3 * picks))
        through = e * s.rows * s.expert_F
        found.append(Moment("experts down", again + residual + e * s.rows * s.D + 2 * through + weight - returned))
        found.append(Moment("experts up", again + inner + residual + picks + 2 * weight - 2 * through - returned))
    # The norm's backward comes when the feed-forward has let go of what it kept, and of its own input.
    found.append(Moment("norm", again + inner + residual + s.norm_work - feed_forward - s.hidden))
    return found


def _attention_moments(s: _Sizes, fusion: bool, *, gone: int, again: int, inner: int) -> list[Moment]:
    residual, e = s.hidden, s.e
    out_grad, grads = e * s.T * s.a, e * s.T * (s.a + 2 * s.k)
    # The kernel sums the gradient of the queries in float32, and of shared keys and values one copy a query head.
    scratch = _WIDE * s.T * s.a + (2 * e * s.T * s.a if s.grouped_queries else 0)
    if s.context_parallel:
        # A ring sums all gradients in float32, of two ranks' keys and values and of those under way, which travel too.
        scratch = _WIDE * s.T * (s.a + 6 * s.k) + 4 * e * s.T * s.k
    core = again + residual + out_grad + grads + scratch - gone
    turned = again + residual + grads + (grads if s.kernels else 3 * _WIDE * s.T * s.a) - s.attention - gone
    weight = 0 if fusion else e * s.D * (s.a + 2 * s.k)
    whole = e * s.T * s.D * (2 if s.sequence_parallel else 1)
    projection = again + inner + residual + grads + whole + weight - s.attention - gone
    normed = again + inner + residual + s.norm_work - s.attention - gone - s.hidden
    return [Moment("attention", core), Moment("rotary", turned), Moment("projection", projection), Moment("norm", normed)]


def head_bytes(s: _Sizes, *, fusion: bool) -> HeadBytes:
    """Final norm, output projection and ``ModelOutput.loss_sum``.

    Args:
        s: what the rank sees.
        fusion: the weight gradient goes into the main gradient.
    """
    e, vocabulary = s.e, s.V * s.D
    chunk, num_chunks = loss_chunk(s.T, s.V)
    labels = s.T * (8 + 1 + 4)
    whole = e * s.T * s.D if s.sequence_parallel else 0
    base = s.norm + s.hidden + labels
    logits = chunk * s.V * e
    # Without kernels the statistics of the rows are made of float32 copies of a chunk: the logits where they are narrower, and what is left
    # of them below the largest.
    copies = 0 if s.kernels else _WIDE * (2 if e < _WIDE else 1) * chunk * s.V
    # Without a product of a wider result the factors of the weight gradient are widened.
    widened = _WIDE * chunk * (s.V + s.D) if not s.kernels and e < _WIDE and num_chunks > 1 else 0
    moments = [Moment("final norm", s.norm + s.norm_work)]
    # The gradients are made in the forward and wait; over several chunks the weight's adds up in float32, and is rounded for autograd.
    wide = num_chunks > 1
    waiting = _WIDE if wide and fusion else e
    kept = base + s.T * 8 + s.hidden + waiting * vocabulary
    if wide:
        making = _WIDE * vocabulary + max(logits + max(copies, widened), 0 if fusion or e == _WIDE else e * vocabulary)
    else:
        making = logits + max(copies, e * vocabulary)
    moments.append(Moment("loss", base + whole + e * s.T * s.D + making))
    # The backward scales them: into new tensors, or a narrow one of the weight widened into the main gradient.
    scaled = e if not fusion else _WIDE if waiting < _WIDE else 0
    moments.append(Moment("loss backward", kept + s.hidden + scaled * vocabulary))
    return HeadBytes(kept=kept, moments=tuple(moments))


def _turning(config: TransformerConfig) -> int:
    """Channels of a head that turn."""
    if config.position_embedding_type not in ("rope", "yarn", "mrope"):
        return 0
    if config.latent_attention is not None:
        return config.latent_attention.qk_rope_head_dim
    return round(config.head_dim * config.rotary_percent) * (1 if config.rotary_base_window is None else 2)


@functools.lru_cache(maxsize=256)
def loss_chunk(tokens: int, vocabulary: int) -> tuple[int, int]:
    """Tokens of a chunk of ``fused_linear_cross_entropy``, and how many chunks there are."""
    most = max(128, _CHUNK_LOGITS // vocabulary)
    size = min(-(-tokens // (128 * -(-tokens // most))) * 128, tokens)
    return size, -(-tokens // size)


def embedding_bytes(s: _Sizes, *, masked: bool) -> int:
    """Token ids, and off the CPU which of them this rank holds, where that is not marked in them."""
    return s.T * (8 + (1 if masked else 0))


@dataclass(frozen=True)
class StageActivations:
    """Of one stage at its worst moment."""

    kept: int
    """By all live micro-batches."""
    work: int
    """What that moment needs beside."""
    moment: str


def stage_activations(workload: Workload, layout: Layout, parts: tuple[Part, ...], live: int, *, kernels: bool = True) -> StageActivations:
    """The worst moment of a stage.

    Args:
        workload: what is trained.
        layout: where.
        parts: chunks of the stage.
        live: forwards (of a chunk each) that are held at once.
        kernels: as in ``sizes``.
    """
    s, recompute = sizes(workload, layout, kernels=kernels), layout.recompute
    fusion = layout.sync.gradient_accumulation_fusion
    config, tp = workload.model.config, layout.plan.tp

    def of(symbol: str) -> LayerBytes:
        return layer_bytes(for_symbol(s, config, tp, symbol), recompute, fusion=fusion, symbol=symbol)

    kinds = {symbol: of(symbol) for part in parts for symbol in {*part.symbols, *"".join(part.depths)}}
    whole_chunks = [sum(kinds[symbol].kept for symbol in part.symbols) for part in parts]
    kept = max(whole_chunks)
    chunk = parts[whole_chunks.index(kept)].num_layers
    first, last = any(part.first for part in parts), any(part.last for part in parts)
    again = num_inputs = 0
    if recompute is not None and recompute.granularity == "full" and chunk:
        spans = recompute.spans(chunk)
        share = layout.plan.tp if recompute.distribute_saved_activations else 1
        most = max(layer.kept for layer in kinds.values())
        whole = max((end - start for start, end, runs_again in spans if runs_again), default=0)
        rest = sum(end - start for start, end, runs_again in spans if not runs_again)
        num_inputs = sum(runs_again for _, _, runs_again in spans)
        kept = num_inputs * s.hidden // share + rest * kept // chunk
        # The input of the first one is there already where that is what its norm keeps.
        again = 0 if rest else whole * most + (s.hidden if share > 1 else 0) - (s.hidden if s.kernels or s.e == _WIDE else 0)
    tables = tables_bytes(s, _turning(config))
    # What came from the stage before is kept too; where a layer runs again, or is wide, it is among what that keeps.
    received = 0 if s.kernels or s.e == _WIDE or num_inputs or (recompute and "norm" in recompute.parts) else s.hidden
    depths = [depth for part in parts for depth in part.depths]
    each = kept + tables + (embedding_bytes(s, masked=not fusion and (kernels or s.V * layout.plan.tp != s.V)) if first else received)
    head = head_bytes(s, fusion=fusion) if last else None
    moments = [Moment(moment.name, again + moment.extra) for layer in kinds.values() for moment in layer.moments]
    if first:
        # Last of all: the embedding's gradient, when its micro-batch has let go of the layers.
        tied = last and config.share_embeddings_and_output_weights
        picked = fusion and s.kernels  # of the rows of its tokens only
        moments.append(Moment("embedding", (tied + (not picked)) * s.e * s.V * s.D + (2 - picked) * s.e * s.T * s.D - kept))
    if head is not None:
        # A depth keeps three norms, their results side by side and projected, its layers, and its loss until the backward begins.
        further = sum(3 * s.norm + 4 * s.hidden + sum(kinds[symbol].kept for symbol in depth) for depth in depths)
        moments += [Moment(moment.name, moment.extra + further + len(depths) * head.kept) for moment in head.moments]
    worst = max(moments, key=lambda moment: moment.extra)
    return StageActivations(each * live, worst.extra, worst.name)
