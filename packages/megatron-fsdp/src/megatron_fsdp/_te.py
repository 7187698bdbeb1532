# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Transformer Engine's ``Float8Tensor``: bytes with one scale a tensor, made by the library's own quantizers.

Everything is asked of the tensors themselves, so that the library is imported by those who have made one, and never from here.
"""

from typing import Any

import torch
from torch import nn

ALIGNMENT = 16
"""Bytes at whose multiples products of 8-bit matrices want them to begin."""


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether its values are scaled bytes."""
    return type(parameter).__module__.partition(".")[0] == "transformer_engine"


@torch.no_grad()
def whole_values(parameter: Any) -> torch.Tensor:
    """What a parameter was quantised from (``preserve_high_precision_init_val``), or stands for; float32 or wider."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    kept = getattr(parameter, "get_high_precision_init_val", None)
    value = None if kept is None else kept()
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
        # What the products of a backward want is made when they run, and not for every forward too.
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
        made = quantizer(row)
        self.full._scale_inv.copy_(made._scale_inv)
        return made._data.view(-1)[:-1], self.full._scale_inv

    def restore(self, payload: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """Nothing is to be filled: the parameter lies where the bytes are, and has the scale."""
        self.release()

    def release(self) -> None:
        """Forget the transpose."""
        self.full.remove_caches()
