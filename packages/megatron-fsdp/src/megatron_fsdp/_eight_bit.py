# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters that cross ranks in 8 bits: scaled copies, made from the main shards once a step."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from megatron_fsdp._buffer import local_view
from megatron_fsdp._collectives import start_gather, wait
from megatron_fsdp._layout import FlatLayout
from megatron_fsdp._topology import Topology

if TYPE_CHECKING:
    from megatron_fsdp._lane import Work


class EightBitFormat(Protocol):
    """What turns rows of a parameter into one byte an element, and back."""

    def quantize(self, values: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of ``values`` [n] and the scale, which follows from ``largest`` (the largest magnitude of the parameter) alone."""
        ...

    def restore(self, payload: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` [n] with the values that ``payload`` [n] stands for."""
        ...


class Float8Format:
    """Torch's 8-bit floating-point numbers with one scale a parameter, a power of two, so that scaling rounds nothing.

    Example:
        >>> payload, scale = Float8Format().quantize(torch.tensor([1.0, -3.0]), torch.tensor(3.0))
        >>> payload.dtype, scale.item()
        (torch.float8_e4m3fn, 128.0)
    """

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        if not (dtype.is_floating_point and dtype.itemsize == 1):
            raise ValueError(f"dtype={dtype} must be a floating-point dtype of 8 bits, for instance torch.float8_e4m3fn")
        self._dtype = dtype

    def quantize(self, values: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reach = torch.finfo(self._dtype).max / largest.float().clamp(min=2.0**-100)
        scale = torch.exp2(torch.floor(torch.log2(reach)))
        return (values.float() * scale).to(self._dtype), scale

    def restore(self, payload: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(payload.float() / scale)


class EightBitGather:
    """Fills a gathered buffer by way of 8-bit copies of all ranks' main shards, or with them where it holds bytes.

    Args:
        forms: how each parameter is copied.
        layout: of the buffer.
        topology: of the ranks.
    """

    def __init__(self, forms: Sequence[EightBitFormat], layout: FlatLayout, topology: Topology) -> None:
        self._forms, self._layout, self._topology = forms, layout, topology
        self._payload: torch.Tensor | None = None
        """[numel / size of the shard ranks] bytes that this rank gives to gathers, until its main parameters change."""
        self._whole: torch.Tensor | None = None
        self._scales: list[tuple[torch.Tensor, torch.dtype]] = []

    def main_changed(self) -> None:
        """The next gather makes new copies."""
        self._payload = None

    @torch.no_grad()
    def begin(self, main: Callable[[], torch.Tensor], full: torch.Tensor) -> "Work | None":
        """Start gathering the copies of ``main()`` [shard_numel], which is called when there are none, for ``full`` [numel]."""
        if self._payload is None:
            self._payload = self._copies(main())
        self._whole = full if full.dtype == torch.uint8 else self._payload.new_empty(self._layout.numel)
        return start_gather(self._whole, self._payload, self._topology.shards)

    @torch.no_grad()
    def end(self, full: torch.Tensor) -> None:
        """Restore what was gathered into ``full`` [numel]."""
        assert self._whole is not None, "begin was called"
        for form, segment, (scale, dtype) in zip(self._forms, self._layout.segments, self._scales, strict=True):
            here = slice(segment.offset, segment.offset + segment.numel)
            form.restore(self._whole[here].view(dtype), scale, full[here])
        self._whole = None

    def _copies(self, main: torch.Tensor) -> torch.Tensor:
        layout, topology = self._layout, self._topology
        rows = [local_view(main, segment, topology.shard, layout.shard_numel).reshape(-1) for segment in layout.segments]
        largest = torch.stack([each.abs().amax() if each.numel() else main.new_zeros(()) for each in rows])
        for ranks in (topology.shards, topology.outer):
            largest = ranks.all_reduce(largest, "max")
        payload = torch.zeros(layout.shard_numel, dtype=torch.uint8, device=main.device)
        self._scales = []
        for form, segment, values, most in zip(self._forms, layout.segments, rows, largest, strict=True):
            copy, scale = form.quantize(values, most)
            local_view(payload, segment, topology.shard, layout.shard_numel).view(-1).copy_(copy.view(torch.uint8))
            self._scales.append((scale, copy.dtype))
        if topology.outer.size == 1:
            return payload
        inner = payload.new_empty(payload.numel() * topology.outer.size)
        wait(start_gather(inner, payload, topology.outer))
        return inner
