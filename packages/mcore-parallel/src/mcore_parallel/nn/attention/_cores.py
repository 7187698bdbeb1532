# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention without parameters: what a layer requires of its core, the core slot, and the plain torch cores."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_parallel._stability import experimental_api, internal_api
from mcore_parallel.context_parallel import ContextParallelAttention, context_parallel_attention
from mcore_parallel.groups import Group, ProcessGroups
from mcore_parallel.nn._step import Step

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention without its parameters, as ``choose_attention`` needs to know it.

    Raises:
        ValueError: heads that do not divide, a scale or a soft cap that is not positive, a window below -1 or one that sees ahead in
            causal attention, an unknown softmax type.

    Example:
        >>> AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, window=(128, 0)).bounds
        (128, 0)
    """

    num_heads: int
    """Query heads of a tp rank."""
    num_kv_heads: int
    """Key-value heads of a tp rank."""
    head_dim: int
    """Width of queries and keys."""
    value_dim: int | None = None
    """Width of values; None for ``head_dim``."""
    causal: bool = True
    window: tuple[int, int] | None = None
    """(left, right) tokens that a query sees before and behind it, -1 for no limit."""
    softmax_type: str = "vanilla"
    """"vanilla", "off-by-one", or "learnable": the core takes ``sink=``, a logit a head."""
    softmax_scale: float | None = None
    """Factor of the scores, above 0; None for 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Scores become ``soft_cap(scores, softcap)`` before keys are hidden, above 0; None for none."""
    packed: bool = False
    """Whether steps with ``cu_seqlens`` will come."""
    device_bounds: bool = False
    """Whether these lie on the device (``Step.max_seqlen``)."""
    training: bool = True
    """Whether there will be a backward."""
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    """Type of the device."""
    batch_invariant: bool = False
    """The result of a token depends, bit by bit, on its own sequence only."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.softmax_scale is not None and not self.softmax_scale > 0:
            raise ValueError(f"softmax_scale={self.softmax_scale} must be above 0")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be above 0, or None")
        if self.softmax_type not in SOFTMAX_TYPES:
            raise ValueError(f"softmax_type={self.softmax_type!r} must be one of {', '.join(map(repr, SOFTMAX_TYPES))}")
        if self.window is None:
            return
        left, right = self.window
        if min(left, right) < -1:
            raise ValueError(f"window_size={self.window} must be two numbers of tokens, or -1 for no limit")
        if self.causal and right > 0:
            raise ValueError(
                f"window_size={self.window} sees {right} tokens ahead, but attention is causal; give ({left}, 0), or causal=False"
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right) of what a query sees, the causal mask included; -1 for no limit."""
        left, right = (-1, -1) if self.window is None else self.window
        return left, 0 if self.causal else right

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def width(self) -> int:
        """Of values."""
        return self.head_dim if self.value_dim is None else self.value_dim


class AttentionCore(Protocol):
    """The part of attention without parameters of its own.

    q is [T, A, d], k and v are [T, K, d] (A heads and K key-value heads of this tp rank), the result is [T, A, d].
    Query head a reads key-value head a // (A / K). ``layer`` is the number of the layer among those of this stage.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor: ...


class SinkAttentionCore(Protocol):
    """An attention core that can leave a part of each softmax to a sink: a key without a value, whose logit [A] is learnt."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor: ...


@runtime_checkable
class AttentionCoreBuilder(Protocol):
    """Makes the core of a layer when it is told what the layer asks for: window, sink, scale, widths.

    Where a core can be given, this can be given in its place.
    """

    def build_core(self, spec: AttentionSpec, groups: ProcessGroups, layer: int) -> AttentionCore | SinkAttentionCore:
        """Args: what is asked for, the layout, the number of the layer among those of the stage."""
        ...


@experimental_api
@runtime_checkable
class PrefixAttentionCore(Protocol):
    """An attention core that can say whether it follows ``Step.prefixes``."""

    @property
    def follows_prefixes(self) -> bool: ...


@internal_api
def follows_prefixes(core: object) -> bool:
    """Whether an attention core follows ``Step.prefixes``; one that does not say so does not."""
    return core is causal_attention or (isinstance(core, PrefixAttentionCore) and core.follows_prefixes)


@internal_api
def check_prefixes(core: object) -> None:
    """Whether a step of a core may have prefixes.

    Raises:
        ValueError: the core does not follow them.
    """
    if not follows_prefixes(core):
        name = getattr(core, "__name__", type(core).__name__)
        raise ValueError(
            f"attention core {name} does not follow prefixes of packed sequences; set attention_backend='sdpa', or 'context_parallel' "
            "for windows and sinks, with cp=1, or pack without prefixes"
        )


@experimental_api
@runtime_checkable
class DeviceBoundsCore(Protocol):
    """An attention core that can say whether it takes bounds of packed sequences on the device."""

    @property
    def takes_device_bounds(self) -> bool: ...


@internal_api
def takes_device_bounds(core: object) -> bool:
    """Whether an attention core takes ``Step.max_seqlen``; one that does not say so does not."""
    return core is causal_attention or (isinstance(core, DeviceBoundsCore) and core.takes_device_bounds)


@internal_api
def check_device_bounds(core: object) -> None:
    """Whether a step of a core may have bounds on the device.

    Raises:
        ValueError: the core reads them on the host.
    """
    if not takes_device_bounds(core):
        name = getattr(core, "__name__", type(core).__name__)
        raise ValueError(
            f"attention core {name} reads the bounds of packed sequences on the host and takes none on the device (max_seqlen); set "
            "attention_backend='sdpa', or 'context_parallel' for windows and sinks, with cp=1, or give host bounds"
        )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
    """Causal softmax attention inside each of the step's B sequences, by torch's fused kernel, or of its packed sequences.

    Scores are scaled by 1 / sqrt(d). It needs nothing of ``step.attention``, and the order of a sequence is the order of
    its tokens: ``step.positions`` are not read.
    """
    if step.cu_seqlens is not None:
        return _packed_attention()(q, k, v, layer, step)
    B, S = step.batch_size, step.seq_len
    q, k, v = (x.view(B, S, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


# Kept, because it keeps its plans: all layers, and their recomputation, ask for the same one.
@functools.cache
def _packed_attention() -> ContextParallelAttention:
    alone = Group.single()
    return ContextParallelAttention(gathered=alone, heads=alone, ring=alone)


def default_attention(groups: ProcessGroups) -> AttentionCore:
    """Causal attention of a layout: torch's kernel, or a ring when sequences are split over cp."""
    return causal_attention if groups.cp.size == 1 else context_parallel_attention(groups)


# In the order of their speed on the GPUs that have the first one's kernels for training; torch goes on to the next where one cannot.
KERNELS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


# A heads, K key-value heads, d width of a head, B sequences, S tokens a sequence.
class SDPAttention:
    """Attention to everything before a token (or to all tokens) of its sequence, by the fastest kernel torch has.

    Packed sequences go to the flash kernels that take bounds, or to the plain formula where there are none.

    Args:
        spec: what is asked for: neither window nor sink.
        groups: not read.
        kernels: of torch, in this order; None for torch's own choice.
    """

    def __init__(self, spec: AttentionSpec, groups: ProcessGroups, *, kernels: tuple[SDPBackend, ...] | None = None) -> None:
        self.causal, self.scale = spec.causal, spec.softmax_scale
        self.kernels = kernels
        self.follows_prefixes = self.takes_device_bounds = True
        alone = Group.single()
        self._packed = ContextParallelAttention(gathered=alone, heads=alone, ring=alone, window=spec.bounds, softmax_scale=self.scale)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
        """q [T, A, d], k and v [T, K, d] -> [T, A, width of v]."""
        if step.cu_seqlens is not None:
            return self._packed(q, k, v, layer, step)
        B, S = step.batch_size, step.seq_len
        q, k, v = (x.view(B, S, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        chosen = contextlib.nullcontext() if self.kernels is None or not q.is_cuda else sdpa_kernel(list(self.kernels), set_priority=True)
        with chosen:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)


def sdpa_attention(spec: AttentionSpec, groups: ProcessGroups) -> SDPAttention:
    """The variant that training takes."""
    return SDPAttention(spec, groups, kernels=_preferred(spec))


def _preferred(spec: AttentionSpec) -> tuple[SDPBackend, ...] | None:
    # cuDNN's kernels for training are the faster ones from Hopper on; below that torch's own order is right.
    if spec.device != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return None
    return KERNELS
