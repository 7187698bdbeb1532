# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a micro-batch keeps between its forward and its backward, and what the work needs beside it for a moment.

Every term is a tensor that the code of ``nn``, ``models``, ``tensor_parallel`` and ``mcore_moe`` saves or makes.
"""

import functools
from dataclasses import dataclass

from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.planner._parameters import Part
from mcore_parallel.planner._sharded import UnitBytes
from mcore_parallel.planner._sizes import WIDE, RankSizes, for_symbol, sizes
from mcore_parallel.planner._workload import Layout, Workload
from mcore_parallel.tensor_parallel import early_chunk, token_chunks

# T, t, D, F, V, a, k and e as in ``_sizes``.


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


def tables_bytes(s: RankSizes, head_dim: int) -> int:
    """Of one forward: cosines and sines."""
    return 2 * WIDE * s.T * head_dim


def layer_bytes(s: RankSizes, recompute: RecomputeConfig | None, *, fusion: bool, symbol: str = "L") -> LayerBytes:
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
    attention = {"attention": 0, "core_attention": s.attention - WIDE * s.T * s.heads}.get(
        next(iter(parts & {"attention", "core_attention"}), ""), s.attention
    )
    feed_forward = s.gated + s.routed
    shared = s.gated if "shared_experts" in parts and s.num_experts else 0
    again_mlp = feed_forward if "mlp" in parts else shared + (s.expert_activation if "moe_act" in parts else 0)
    kept_mlp = feed_forward - again_mlp
    brought = s.norm + s.hidden - norm - out if "norm" in parts else 0
    again_attention = s.attention - attention
    # A part that runs again reads its norm first; one that does not, when the gradients of its projections are due.
    at_once = brought if "mlp" in parts else 0
    moments = list(_feed_forward_moments(s, fusion, again=again_mlp + at_once, inner=brought - at_once)) if mlp else []
    gone = norm + out + kept_mlp if mlp else 0
    at_once = brought if "attention" in parts else 0
    if symbol in s.mixers:
        # Backward the gradients of all it kept are there at once, at most; no part of its own runs again.
        moments.append(Moment("scan", brought + s.hidden + s.mixers[symbol]))
        attention = s.mixers[symbol]
    elif mixer:
        moments += _attention_moments(s, fusion, gone=gone, again=again_attention + at_once, inner=brought - at_once)
    saved = (norm + out + attention if mixer else 0) + (norm + out + kept_mlp if mlp else 0)
    return LayerBytes(kept=saved, moments=tuple(moments))


def _feed_forward_moments(s: RankSizes, fusion: bool, *, again: int, inner: int) -> list[Moment]:
    residual, e = s.hidden, s.e
    whole = e * s.T * s.D if s.sequence_parallel else 0
    feed_forward = s.gated + s.routed
    moments = []
    if s.F:
        weight = 0 if fusion else e * s.D * s.F
        up_weight = 2 * weight
        moments.append(Moment("feed-forward activation", again + residual + s.activation_work))
        # With kernels its product comes when the activation's backward has made the input again.
        moments.append(Moment("feed-forward down", again + residual + whole + (s.activation_work if s.kernels else e * s.T * s.F) + weight))
        up = again + inner + residual + whole + e * s.T * s.D + 2 * e * s.T * s.F + up_weight - s.gated
        moments.append(Moment("feed-forward up", up))
    if s.rows:
        # Without fusion autograd gets the gradient of all experts of a weight as one tensor.
        weight = 0 if fusion else e * s.local_experts * s.expert_F * s.D
        picks, rows, through = e * s.picks * s.D, e * s.rows * s.D, e * s.rows * s.expert_F
        returned = picks if s.exchanges_rows else 0
        moments.append(Moment("experts combine", again + residual + rows + 2 * returned))
        moments.append(Moment("experts down", again + residual + rows + through + weight - returned))
        # The activation's backward lets go of its result.
        up = again + inner + residual + s.gates * (through + weight) + rows - through - returned
        moments.append(Moment("experts up", up))
    # The norm's backward comes when the feed-forward has let go of what it kept, and of its own input.
    moments.append(Moment("norm", again + inner + residual + s.norm_work - feed_forward - s.hidden))
    return moments


def _attention_moments(s: RankSizes, fusion: bool, *, gone: int, again: int, inner: int) -> list[Moment]:
    residual, e = s.hidden, s.e
    out_grad, grads = e * s.T * s.a, e * s.T * (s.a + 2 * s.k)
    # The kernel sums the gradient of the queries in float32, and of shared keys and values one copy a query head.
    scratch = WIDE * s.T * s.a + (2 * e * s.T * s.a if s.grouped_queries else 0)
    if s.context_parallel:
        # A ring sums all gradients in float32, of two ranks' keys and values and of those under way, which travel too.
        scratch = WIDE * s.T * (s.a + 6 * s.k) + 4 * e * s.T * s.k
    core = again + residual + out_grad + grads + scratch - gone
    turned = again + residual + grads + (grads if s.kernels else 3 * WIDE * s.T * s.a) - s.attention - gone
    weight = 0 if fusion else e * s.D * (s.a + 2 * s.k)
    whole = e * s.T * s.D * (2 if s.sequence_parallel else 1)
    projection = again + inner + residual + grads + whole + weight - s.attention - gone
    normed = again + inner + residual + s.norm_work - s.attention - gone - s.hidden
    return [Moment("attention", core), Moment("rotary", turned), Moment("projection", projection), Moment("norm", normed)]


def head_bytes(s: RankSizes, *, fusion: bool) -> HeadBytes:
    """Final norm, output projection and ``ModelOutput.loss_sum``.

    Args:
        s: what the rank sees.
        fusion: the weight gradient goes into the main gradient.
    """
    e, vocabulary = s.e, s.V * s.D
    chunk, num_chunks = loss_chunk(s.T, s.V, s.D, e)
    labels = s.T * (8 + 1 + 4)
    whole = e * s.T * s.D if s.sequence_parallel else 0
    base = s.norm + s.hidden + labels
    logits = chunk * s.V * e
    # Without kernels the statistics of the rows are made of float32 copies of a chunk: the logits where they are narrower, and what is left
    # of them below the largest.
    copies = 0 if s.kernels else WIDE * (2 if e < WIDE else 1) * chunk * s.V
    # Without a GEMM of a wider result the factors of the weight gradient are widened.
    widened = WIDE * chunk * (s.V + s.D) if not s.kernels and e < WIDE and num_chunks > 1 else 0
    moments = [Moment("final norm", s.norm + s.norm_work)]
    # The gradients are made in the forward and wait, and the backward scales them into new tensors. Over several chunks the weight's adds
    # up in float32, and is rounded for autograd; of a single one that of the logits waits with the hidden states.
    if num_chunks > 1:
        waiting = (WIDE if fusion else e) * vocabulary
        making = WIDE * vocabulary + max(logits + max(copies, widened), 0 if fusion or e == WIDE else e * vocabulary)
        scaled = s.hidden + (0 if fusion else e * vocabulary)
    else:
        waiting, making = logits + whole, logits + copies
        weight = 0 if fusion and s.kernels else e * vocabulary
        scaled = max(e * s.T * s.D + weight, s.hidden + (0 if fusion else weight))
    saved = base + s.T * 8 + s.hidden + waiting
    moments.append(Moment("loss", base + whole + e * s.T * s.D + making))
    moments.append(Moment("loss backward", saved + scaled))
    return HeadBytes(kept=saved, moments=tuple(moments))


def _turning(config: TransformerConfig) -> int:
    """Channels of a head that turn."""
    if config.position_embedding_type not in ("rope", "yarn", "mrope"):
        return 0
    if config.latent_attention is not None:
        return config.latent_attention.qk_rope_head_dim
    return round(config.head_dim * config.rotary_percent) * (1 if config.rotary_base_window is None else 2)


@functools.lru_cache(maxsize=256)
def loss_chunk(tokens: int, vocabulary: int, depth: int, itemsize: int) -> tuple[int, int]:
    """Tokens of a chunk of ``fused_linear_cross_entropy``, and how many chunks there are."""
    chunks = token_chunks(tokens, vocabulary, None, early_chunk(tokens, vocabulary, depth, itemsize))
    return chunks[0][1], len(chunks)


def embedding_bytes(s: RankSizes, *, masked: bool) -> int:
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


def stage_activations(
    workload: Workload, layout: Layout, parts: tuple[Part, ...], live: int, *, kernels: bool = True, units: UnitBytes | None = None
) -> StageActivations:
    """The worst moment of a stage.

    Args:
        workload: what is trained.
        layout: where.
        parts: chunks of the stage.
        live: forwards (of a chunk each) that are held at once.
        kernels: as in ``sizes``.
        units: what is whole for a moment only; None for nothing.
    """
    s, recompute = sizes(workload, layout, kernels=kernels), layout.recompute
    fusion, units = layout.fuses_weight_gradients, UnitBytes() if units is None else units
    config, tp = workload.model.config, layout.plan.tp

    def of(symbol: str) -> LayerBytes:
        return layer_bytes(for_symbol(s, config, tp, symbol), recompute, fusion=fusion, symbol=symbol)

    kinds = {symbol: of(symbol) for part in parts for symbol in {*part.symbols, *"".join(part.depths)}}
    whole_chunks = [sum(kinds[symbol].kept for symbol in part.symbols) for part in parts]
    saved = max(whole_chunks)
    chunk = parts[whole_chunks.index(saved)].num_layers
    first, last = any(part.first for part in parts), any(part.last for part in parts)
    again = num_inputs = 0
    if recompute is not None and recompute.granularity == "full" and chunk:
        spans = recompute.spans(chunk)
        share = layout.plan.tp if recompute.distribute_saved_activations else 1
        most = max(layer.kept for layer in kinds.values())
        whole = max((end - start for start, end, runs_again in spans if runs_again), default=0)
        rest = sum(end - start for start, end, runs_again in spans if not runs_again)
        num_inputs = sum(runs_again for _, _, runs_again in spans)
        saved = num_inputs * s.hidden // share + rest * saved // chunk
        # The input of the first one is there already where that is what its norm keeps.
        again = 0 if rest else whole * most + (s.hidden if share > 1 else 0) - (s.hidden if s.kernels or s.e == WIDE else 0)
    tables = tables_bytes(s, _turning(config))
    # What came from the stage before is kept too; where a layer runs again, or is wide, it is among what that keeps.
    received = 0 if s.kernels or s.e == WIDE or num_inputs or (recompute and "norm" in recompute.parts) else s.hidden
    depths = [depth for part in parts for depth in part.depths]
    each = saved + tables + (embedding_bytes(s, masked=not fusion and (kernels or s.V * layout.plan.tp != s.V)) if first else received)
    head = head_bytes(s, fusion=fusion) if last else None
    whole_layers = units.layers(saved // max(1, chunk), chunk)
    moments = [Moment(moment.name, again + moment.extra + whole_layers) for layer in kinds.values() for moment in layer.moments]
    if first:
        # Last of all: the embedding's gradient, when its micro-batch has let go of the layers.
        tied = last and config.share_embeddings_and_output_weights
        picked = fusion and s.kernels  # of the rows of its tokens only
        extra = (tied + (not picked)) * s.e * s.V * s.D + (2 - picked) * s.e * s.T * s.D - saved
        moments.append(Moment("embedding", extra + units.embedding_backward))
    if head is not None:
        # A depth keeps three norms, their results side by side and projected, its layers, and its loss until the backward begins.
        further = sum(3 * s.norm + 4 * s.hidden + sum(kinds[symbol].kept for symbol in depth) for depth in depths)
        whole = {"loss": units.loss}
        further += len(depths) * head.kept
        moments += [Moment(moment.name, moment.extra + further + whole.get(moment.name, units.loss_backward)) for moment in head.moments]
    worst = max(moments, key=lambda moment: moment.extra)
    return StageActivations(each * live, worst.extra, worst.name)
