# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a micro-batch keeps between its forward and its backward, and what the work needs beside it for a moment.

Every term is a tensor that the code of ``nn``, ``models``, ``tensor_parallel`` and ``mcore_moe`` saves or makes.
"""

import functools
from dataclasses import dataclass

from mcore_parallel.nn import RecomputeConfig
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
        return self.e * self.T * (unturned + self.a + 2 * self.k + self.a) + _WIDE * self.T * self.heads

    @property
    def gated(self) -> int:
        """Gate and value, the product; without kernels the activated gate too."""
        return (3 if self.kernels else 4) * self.e * self.T * self.F

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
    found = _Sizes(
        T=T, t=t, D=config.hidden_size, e=workload.dtype.itemsize, sequence_parallel=layout.sequence_parallel,
        context_parallel=plan.cp > 1,
        kernels=kernels,
        a=config.num_attention_heads * config.head_dim // tp, k=config.kv_heads * config.head_dim // tp,
        heads=config.num_attention_heads // tp, F=width // tp, V=padded_vocab(model, tp) // tp,
        grouped_queries=config.num_attention_heads != config.kv_heads,
        picks=t * experts.topk if experts else 0,
        rows=t * experts.topk * plan.expert_tp if experts else 0,
        expert_F=experts.ffn_hidden_size // plan.expert_tp if experts else 0,
        local_experts=experts.num_experts // plan.ep if experts else 0, num_experts=experts.num_experts if experts else 0,
    )  # fmt: skip
    return found


def tables_bytes(s: _Sizes, head_dim: int) -> int:
    """Of one forward: cosines and sines."""
    return 2 * _WIDE * s.T * head_dim


def layer_bytes(s: _Sizes, recompute: RecomputeConfig | None, *, fusion: bool) -> LayerBytes:
    """One layer of a stage that recomputes as said ("full" is the matter of ``stage_activations``).

    Args:
        s: what the rank sees.
        recompute: parts that run again.
        fusion: weight gradients go into the main gradients and are never tensors of their own.
    """
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
    moments = list(_feed_forward_moments(s, fusion, again=again_mlp + at_once, inner=brought - at_once))
    # Routers widen their input and nothing else of a mixture keeps it, unless it runs again.
    ffn_out = 0 if s.rows and not s.F and s.e < _WIDE and "mlp" not in parts else out
    gone = norm + ffn_out + kept_mlp
    at_once = brought if "attention" in parts else 0
    moments += _attention_moments(s, fusion, gone=gone, again=again_attention + at_once, inner=brought - at_once)
    return LayerBytes(kept=2 * norm + out + ffn_out + attention + kept_mlp, moments=tuple(moments))


def _feed_forward_moments(s: _Sizes, fusion: bool, *, again: int, inner: int) -> list[Moment]:
    residual, e = s.hidden, s.e
    whole = e * s.T * s.D if s.sequence_parallel else 0
    feed_forward = s.gated + s.routed
    found = []
    if s.F:
        weight = 0 if fusion else e * s.D * s.F
        up_weight = 2 * weight
        found.append(Moment("feed-forward activation", again + residual + 2 * e * s.T * s.F))
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
    # Without kernels the statistics of the rows are made of float32 copies of a chunk.
    copies = 0 if s.kernels else 12 * chunk * s.V
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


@functools.lru_cache(maxsize=256)
def loss_chunk(tokens: int, vocabulary: int) -> tuple[int, int]:
    """Tokens of a chunk of ``fused_linear_cross_entropy``, and how many chunks there are."""
    most = max(128, _CHUNK_LOGITS // vocabulary)
    size = min(-(-tokens // (128 * -(-tokens // most))) * 128, tokens)
    return size, -(-tokens // size)


def embedding_bytes(s: _Sizes, *, masked: bool) -> int:
    """Token ids, and off the CPU which of them this rank holds."""
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
    chunk = max(part.num_layers for part in parts)
    layer = layer_bytes(s, recompute, fusion=fusion)
    first, last = any(part.first for part in parts), any(part.last for part in parts)
    again, kept = 0, chunk * layer.kept
    num_inputs = 0
    if recompute is not None and recompute.granularity == "full":
        spans = recompute.spans(chunk)
        share = layout.plan.tp if recompute.distribute_saved_activations else 1
        whole = max((end - start for start, end, runs_again in spans if runs_again), default=0)
        rest = sum(end - start for start, end, runs_again in spans if not runs_again)
        num_inputs = sum(runs_again for _, _, runs_again in spans)
        kept = num_inputs * s.hidden // share + rest * layer.kept
        # The input of the first one is there already where that is what its norm keeps.
        again = 0 if rest else whole * layer.kept + (s.hidden if share > 1 else 0) - (s.hidden if s.kernels or s.e == _WIDE else 0)
    tables = tables_bytes(s, workload.model.config.head_dim)
    # What came from the stage before is kept too; where a layer runs again, or is wide, it is among what that keeps.
    received = 0 if s.kernels or s.e == _WIDE or num_inputs or (recompute and "norm" in recompute.parts) else s.hidden
    each = kept + tables + (embedding_bytes(s, masked=kernels or s.V * layout.plan.tp != s.V) if first else received)
    head = head_bytes(s, fusion=fusion) if last else None
    moments = [Moment(moment.name, again + moment.extra) for moment in layer.moments] if chunk else []
    if first:
        # Last of all: the embedding's gradient, when its micro-batch has let go of the layers.
        tied = last and workload.model.config.share_embeddings_and_output_weights
        moments.append(Moment("embedding", (1 + tied) * s.e * s.V * s.D + 2 * s.e * s.T * s.D - kept))
    if head is not None:
        moments += head.moments
    worst = max(moments, key=lambda moment: moment.extra)
    return StageActivations(each * live, worst.extra, worst.name)
