# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters that cross ranks as one byte an element: scaled copies of the main shards, or the bytes of Transformer Engine."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from megatron_fsdp._buffers import local_view
from megatron_fsdp._collectives import start_gather, wait
from megatron_fsdp._layout import FlatLayout
from megatron_fsdp._topology import Topology

if TYPE_CHECKING:
    from megatron_fsdp._collectives import Work

FLOAT8_ALIGNMENT = 16
"""Bytes at whose multiples fp8 GEMMs want matrices to begin."""


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether its values are scaled bytes."""
    return type(parameter).__module__.partition(".")[0] == "transformer_engine"


@torch.no_grad()
def whole_values(parameter: Any) -> torch.Tensor:
    """What a parameter was quantised from (``preserve_high_precision_init_val``), or stands for; float32 or wider."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    initial_value = getattr(parameter, "get_high_precision_init_val", None)
    value = None if initial_value is None else initial_value()
    return parameter.dequantize(dtype=wide) if value is None else value.to(parameter.device, wide)


class Float8Form:
    """A parameter like another one, around bytes that are gathered; an ``EightBitFormat`` whose ``restore`` finds them in place.

    Delayed and current scaling both work: the quantizer of the parameter decides.

    Args:
        name: of the parameter, for messages.
        like: what the module was built with.
        data: uint8, of its shape; comes and goes with the unit.

    Raises:
        ValueError: another kind of quantised tensor.
    """

    def __init__(self, name: str, like: Any, data: torch.Tensor) -> None:
        if type(like).__name__ != "Float8Tensor":
            raise ValueError(
                f"{name!r} is a {type(like).__name__}; only tensors with one scale can be cut between rows: "
                "build the module with Float8CurrentScaling() or DelayedScaling()"
            )
        tensor = type(like)(
            shape=data.shape,
            dtype=like.dtype,
            data=data,
            fp8_scale_inv=torch.ones(1, dtype=torch.float32, device=data.device),
            fp8_dtype=like._fp8_dtype,
            quantizer=like._get_quantizer(),
            device=data.device,
        )
        self.full: Any = nn.Parameter(tensor, requires_grad=like.requires_grad)
        # The transpose that the GEMMs of a backward want is made when they run, and not for every forward too.
        self.full._get_quantizer().set_usage(rowwise=True, columnwise=False)

    def quantize(self, values: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``EightBitFormat``; the scale that comes back is the one that undoes the library's."""
        quantizer = self.full._get_quantizer().copy()
        quantizer.set_usage(rowwise=True, columnwise=False)
        quantizer.internal = False
        # With the largest magnitude of the whole tensor behind its own, each shard gets the scale of the whole and notes its magnitude.
        row = torch.empty(1, values.numel() + 1, dtype=self.full.dtype, device=values.device)
        row[0, :-1].copy_(values)
        row[0, -1].copy_(largest)
        quantized = quantizer(row)
        self.full._scale_inv.copy_(quantized._scale_inv)
        return quantized._data.view(-1)[:-1], self.full._scale_inv

    def restore(self, payload: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """Nothing is to be filled: the parameter lies where the bytes are, and has the scale."""
        self.release()

    def release(self) -> None:
        """Forget the transpose."""
        self.full.remove_caches()


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
