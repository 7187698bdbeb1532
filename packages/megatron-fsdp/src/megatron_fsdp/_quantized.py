# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters that a library holds as scaled bytes already: what sharding them needs to know."""

from typing import Protocol

import torch
from torch import nn

from megatron_fsdp._eight_bit import EightBitFormat

ALIGNMENT = 16  # bytes, where products of 8-bit matrices want them to begin


class QuantizedForm(EightBitFormat, Protocol):
    """One such parameter around gathered bytes: ``restore`` finds them in place, and lets ``full`` stand for them."""

    full: nn.Parameter
    """What the module computes with."""

    def release(self) -> None:
        """Forget what was made from the bytes."""
        ...


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether its values are scaled bytes, told without importing the library that makes them."""
    return type(parameter).__module__.partition(".")[0] == "transformer_engine"


def whole_values(parameter: torch.Tensor) -> torch.Tensor:
    """What a parameter was quantised from, if it still knows, or stands for; float32 or wider."""
    from megatron_fsdp._te import whole_values

    return whole_values(parameter)


def quantized_form(name: str, like: nn.Parameter, data: torch.Tensor) -> QuantizedForm:
    """A parameter like another one around the bytes ``data`` (uint8, of its shape).

    Raises:
        ValueError: it is scaled in another way than by one number.
    """
    from megatron_fsdp._te import Float8Form

    return Float8Form(name, like, data)
