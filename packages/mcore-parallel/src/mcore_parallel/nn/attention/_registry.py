# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The attention cores there are, what each can do, and the choice among them."""

import dataclasses
import importlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_parallel._stability import internal_api
from mcore_parallel.context_parallel import HeadSplitError, context_parallel_attention, exchange_size
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn.attention._cores import AttentionCore, AttentionSpec

_log = logging.getLogger(__name__)
_SHORT_WINDOW = 512
"""Below it the flash kernels on tiles beat FlexAttention, forward and backward together (docs/benchmarks/attention.json)."""
_HALF, _FLOAT, _DOUBLE = ("bfloat16", "float16"), ("float32",), ("float64",)


@dataclass(frozen=True, kw_only=True)
class AttentionCapability:
    """One row of the table of attention cores."""

    backend: str
    summary: str
    window: bool
    sink: bool
    """Off-by-one and learnable softmax."""
    packed: bool
    device_bounds: bool
    """Of packed sequences, over cp=1."""
    cp: bool
    """Sequences split over ranks."""
    grouped: bool
    """Fewer key-value heads than query heads, without repeating them."""
    value_dim: bool
    """Values of another width than queries and keys."""
    bidirectional: bool
    """Attention that is not causal."""
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    training: tuple[str, ...]
    """Devices on which it has a backward."""
    factory: str
    """"module:function" that builds the core from (spec, groups); imported when chosen."""
    needs: str | None = None
    """Library that must be installed."""
    batch_invariant: bool = False
    """A token's result depends, bit by bit, on its own sequence only."""
    softcap: bool = False
    """Scores that are capped by a hyperbolic tangent."""

    @property
    def is_installed(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def missing(self, spec: AttentionSpec, groups: ProcessGroups) -> list[str]:
        """What is asked for and not there, as "field=value"."""
        dtype = str(spec.dtype).removeprefix("torch.")
        conditions = [
            (self.batch_invariant or not spec.batch_invariant, "batch_invariant=True"),
            (self.window or spec.window is None, f"window_size={spec.window}"),
            (self.bidirectional or spec.causal, "causal=False"),
            (self.sink or spec.softmax_type == "vanilla", f"softmax_type={spec.softmax_type!r}"),
            (self.softcap or spec.softcap is None, f"attn_logit_softcapping={spec.softcap}"),
            (self.packed or not spec.packed, "packed=True"),
            ((self.device_bounds and groups.cp.size == 1) or not spec.device_bounds, "device_bounds=True"),
            (self.cp or groups.cp.size == 1, f"cp={groups.cp.size}"),
            (self.grouped or spec.num_kv_heads == spec.num_heads, f"num_kv_heads={spec.num_kv_heads} of num_heads={spec.num_heads}"),
            (self.value_dim or spec.width == spec.head_dim, f"value_dim={spec.width} with head_dim={spec.head_dim}"),
            (dtype in self.dtypes, f"dtype={dtype}"),
            (spec.device in self.devices, f"device={spec.device}"),
            (not spec.training or spec.device not in self.devices or spec.device in self.training, f"training on device={spec.device}"),
        ]
        return [text for able, text in conditions if not able]


_ABLE = {"packed": True, "grouped": True, "value_dim": True, "bidirectional": True, "devices": ("cpu", "cuda"), "training": ("cpu", "cuda")}
ATTENTION_BACKENDS = (
    AttentionCapability(
        backend="sdpa",
        summary="torch's kernels: cuDNN, flash, memory-efficient, or the formula",
        window=False,
        sink=False,
        device_bounds=True,
        cp=False,
        dtypes=_HALF + _FLOAT + _DOUBLE,
        factory="mcore_parallel.nn.attention._cores:sdpa_attention",
        **_ABLE,
    ),
    AttentionCapability(
        backend="context_parallel",
        summary="torch's flash kernels on tiles of the scores, over any cp; the formula in float32 and float64",
        window=True,
        sink=True,
        device_bounds=True,
        cp=True,
        dtypes=_HALF + _FLOAT + _DOUBLE,
        factory="mcore_parallel.nn.attention._registry:build_context_parallel",
        **_ABLE,
    ),
    AttentionCapability(
        backend="flex",
        summary="torch's FlexAttention, compiled; no backward on the CPU",
        window=True,
        sink=True,
        device_bounds=False,
        cp=False,
        dtypes=_HALF + _FLOAT,
        factory="mcore_parallel.nn.attention._flex:FlexAttention",
        softcap=True,
        needs="triton",
        **{**_ABLE, "training": ("cuda",)},
    ),
    AttentionCapability(
        backend="te",
        summary="Transformer Engine's DotProductAttention",
        window=True,
        sink=False,
        device_bounds=False,
        cp=False,
        dtypes=_HALF,
        factory="mcore_parallel.backends._transformer_engine:te_attention",
        needs="transformer_engine",
        **{**_ABLE, "value_dim": False, "devices": ("cuda",), "training": ("cuda",)},
    ),
    AttentionCapability(
        backend="reference",
        summary="the definition, with all scores in memory; to measure the others by",
        window=True,
        sink=True,
        device_bounds=True,
        cp=False,
        dtypes=_HALF + _FLOAT + _DOUBLE,
        factory="mcore_parallel.nn.attention._reference:ReferenceAttention",
        softcap=True,
        **_ABLE,
    ),
    AttentionCapability(
        backend="batch_invariant",
        summary="sums in one order for each token, so that its bits do not depend on the other sequences of a batch",
        window=True,
        sink=True,
        device_bounds=False,
        cp=False,
        dtypes=_HALF + _FLOAT + _DOUBLE,
        factory="mcore_parallel.nn.attention._batch_invariant:BatchInvariantAttention",
        batch_invariant=True,
        **{**_ABLE, "bidirectional": False},
    ),
)


def attention_capabilities() -> tuple[AttentionCapability, ...]:
    """The table of attention cores: one row a backend, with what it can do as data.

    Example:
        >>> [row.backend for row in attention_capabilities() if row.cp]
        ['context_parallel']
    """
    return ATTENTION_BACKENDS


def choose_attention(spec: AttentionSpec, groups: ProcessGroups, backend: str = "auto") -> AttentionCore:
    """The attention core for a layer; the choice and its reason are logged.

    Args:
        spec: what the core must do.
        groups: the layout; cp is used.
        backend: "auto" for the first of the preferred ones that can do it all, or the name of a row of ``attention_capabilities``.

    Returns:
        A core; it takes ``sink=`` if ``spec.softmax_type`` is "learnable".

    Raises:
        ValueError: an unknown name, or something that the backend (with "auto": every backend) cannot do.

    Example:
        >>> spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, window=(8, 0), dtype=torch.float32, device="cpu")
        >>> type(choose_attention(spec, ProcessGroups.single())).__name__
        'ContextParallelAttention'
    """
    row, reason = select_attention(spec, groups, backend)
    _log.info("attention core %r for %s: %s", row.backend, _words(spec, groups), reason)
    module, _, name = row.factory.partition(":")
    return getattr(importlib.import_module(module), name)(spec, groups)


@internal_api
def select_attention(spec: AttentionSpec, groups: ProcessGroups, backend: str = "auto") -> tuple[AttentionCapability, str]:
    """The row that ``choose_attention`` builds, and why; arguments and errors as there."""
    table = {row.backend: row for row in ATTENTION_BACKENDS}
    lacks = {name: row.missing(spec, groups) + ([] if row.is_installed else [f"{row.needs} installed"]) for name, row in table.items()}
    if backend == "auto":
        order, reason = _preference(spec)
        chosen = next((name for name in order if not lacks[name]), None)
        if chosen is None:
            gaps = "; ".join(f"{name} lacks {', '.join(reasons)}" for name, reasons in lacks.items())
            raise ValueError(f"attention_backend='auto': no backend can do it all: {gaps}")
    else:
        if backend not in table:
            raise ValueError(f"attention_backend={backend!r} must be 'auto' or one of {', '.join(map(repr, table))}")
        chosen, reason = backend, "asked for"
        if lacks[backend]:
            able = [name for name, reasons in lacks.items() if not reasons]
            remedy = f"use {' or '.join(able)}" if able else "no other backend can do it all either"
            raise ValueError(f"attention_backend={backend!r} cannot do {', '.join(lacks[backend])}; {remedy}")
    return table[chosen], reason


def build_context_parallel(spec: AttentionSpec, groups: ProcessGroups, cp_comm_type: str = "p2p") -> AttentionCore:
    """The core of ``context_parallel_attention`` for a spec."""
    return context_parallel_attention(
        groups,
        cp_comm_type,
        window_size=spec.window,
        causal=spec.causal,
        softmax_type="off-by-one" if spec.softmax_type == "off-by-one" else "vanilla",
        softmax_scale=spec.softmax_scale,
    )


class ContextParallelBuilder:
    """Builds cores of one way to communicate: ``GPTModel(attention_core=ContextParallelBuilder("a2a"))`` follows the config's windows.

    Args:
        cp_comm_type: as of ``context_parallel_attention``; one name, or one for each layer of the stage.
    """

    def __init__(self, cp_comm_type: str | Sequence[str] = "p2p") -> None:
        self.cp_comm_type = cp_comm_type
        self._made: dict[tuple[AttentionSpec, str], AttentionCore] = {}

    def build_core(self, spec: AttentionSpec, groups: ProcessGroups, layer: int) -> AttentionCore:
        if spec.softcap is not None:
            cap = spec.softcap
            raise ValueError(f"attn_logit_softcapping={cap} is nothing that these cores compute; leave attention_core out, or the field")
        name = self.cp_comm_type if isinstance(self.cp_comm_type, str) else self.cp_comm_type[layer]
        if spec.num_heads % (size := exchange_size(name, groups.plan)):
            raise HeadSplitError(
                f"cp_comm_type={name!r} exchanges tokens for heads among {size} ranks, which must divide num_heads={spec.num_heads} of a "
                "tp rank; use 'p2p' or 'all_gather'"
            )
        # Layers alike share the plans of a core.
        if (spec, name) not in self._made:
            self._made[spec, name] = build_context_parallel(spec, groups, name)
        return self._made[spec, name]


def _preference(spec: AttentionSpec) -> tuple[tuple[str, ...], str]:
    """Backends in the order in which "auto" tries them, and why."""
    if spec.batch_invariant:
        return ("batch_invariant",), "the others choose their way by the shapes of a batch"
    if spec.softcap is not None:
        return ("flex", "reference"), "the others' kernels cap no scores"
    if spec.window is None and spec.softmax_type == "vanilla":
        return ("sdpa", "context_parallel", "te", "flex", "reference"), "neither window nor sink, so torch's fused kernels are the fastest"
    if spec.device == "cuda" and (spec.dtype == torch.float32 or spec.width != spec.head_dim):
        return ("flex", "context_parallel", "reference"), "no flash kernel takes this dtype, or these widths without padding"
    if spec.device == "cuda" and (spec.window is None or not 0 <= spec.window[0] < _SHORT_WINDOW):
        return ("flex", "context_parallel", "reference"), "FlexAttention skips hidden blocks, and is the fastest where windows are long"
    return ("context_parallel", "flex", "reference"), "windows and sinks on tiles of the scores, which cost what the window leaves"


def _words(spec: AttentionSpec, groups: ProcessGroups) -> str:
    required = {item.name: getattr(spec, item.name) for item in dataclasses.fields(spec) if getattr(spec, item.name) != item.default}
    return ", ".join(f"{name}={value}" for name, value in {**required, "cp": groups.cp.size}.items())
