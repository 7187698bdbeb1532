# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How masters and moments are stored: as they are, or narrow.

A holder has ``read()``, the values as a tensor to compute with, and ``write(values)``. ``read`` gives the live tensor where
the stored dtype is the one of the mathematics; then a change in place is enough and ``write`` costs nothing.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1024
"""Elements that share a scale; also what one program of the fused kernel updates."""


class StateStorage(Protocol):
    """Values of one piece."""

    @property
    def data(self) -> Tensor: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self) -> Tensor: ...
    def read_image(self, data: Tensor) -> Tensor:
        """``read`` of a copy of ``data`` that lies in host memory."""
        ...

    def write(self, values: Tensor) -> None: ...


class Plain:
    """Values in a dtype that can hold them; bfloat16 ones are widened to compute."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def read(self) -> Tensor:
        return self.read_image(self.data)

    def read_image(self, data: Tensor) -> Tensor:
        return data if data.element_size() >= 4 else data.float()

    def write(self, values: Tensor) -> None:
        if values is not self.data:
            self.data.copy_(values)


class ScaledStorage:
    """float16 or float8_e4m3fn values with one scale for each ``BLOCK`` elements, a power of two: written again, what was read keeps
    its bits.

    Args:
        data: [n], zeros.
        rooted: store square roots, which halves the exponent's range. For second moments: they may then become no smaller than
            the smallest stored step, because a second moment that vanishes makes an update explode.
    """

    def __init__(self, data: Tensor, *, rooted: bool) -> None:
        self.data, self.rooted = data, rooted
        self.scales = torch.zeros(-(-len(data) // BLOCK), dtype=torch.float32, device=data.device)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size() + 4 * len(self.scales)

    def read(self) -> Tensor:
        return self.read_image(self.data)

    def read_image(self, data: Tensor) -> Tensor:
        values = _blocks(data.float()) * self.scales.to(data.device)[:, None]
        return (values.square_() if self.rooted else values).view(-1)[: len(data)]

    def write(self, values: Tensor) -> None:
        rows = _blocks(values.sqrt() if self.rooted else values)
        limit = torch.finfo(self.data.dtype).max
        scales = power_of_two(rows.abs().amax(1) / limit)
        self.scales.copy_(scales)
        ratio = rows / torch.where(scales > 0, scales, 1.0)[:, None]
        if self.rooted:
            ratio = torch.where(rows > 0, ratio.clamp(min=smallest_step(self.data.dtype)), ratio)
        self.data.copy_(ratio.clamp(-limit, limit).view(-1)[: len(self.data)])


class _Beside(Plain):
    """What is kept of a master beside its 16-bit parameter."""

    def __init__(self, data: Tensor, parameter: Tensor) -> None:
        super().__init__(data)
        self._parameter = parameter


class Master(_Beside):
    """float32 master beside a 16-bit parameter."""

    def write(self, values: Tensor) -> None:
        super().write(values)
        self._parameter.copy_(self.data)


class Remainder(_Beside):
    """The float32 master of a bfloat16 parameter as the parameter and the 16 bits that it lacks.

    The parameter is the master rounded to the nearest value, ties away from zero. master bits = parameter bits * 2^16 + remainder,
    a signed number: negative where the parameter was rounded up.
    """

    def read_image(self, data: Tensor) -> Tensor:
        return join_bits(self._parameter.to(data.device), data)

    def write(self, values: Tensor) -> None:
        parameter, low = split_bits(values)
        self._parameter.copy_(parameter)
        self.data.copy_(low)


def split_bits(master: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (bfloat16 nearest to it, ties away from zero; int16 remainder).

    Example:
        >>> parameter, low = split_bits(torch.tensor([1.0 + 2**-20]))
        >>> parameter.item(), low.item(), join_bits(parameter, low).item() == 1.0 + 2**-20
        (1.0, 8, True)
    """
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join_bits(parameter: Tensor, low: Tensor) -> Tensor:
    """Inverse of ``split_bits``, bit for bit."""
    return ((parameter.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def moment(numel: int, dtype: torch.dtype, device: torch.device, *, rooted: bool) -> Plain | ScaledStorage:
    """Zeros in the storage that fits ``dtype``."""
    data = torch.zeros(numel, dtype=dtype, device=device)
    return ScaledStorage(data, rooted=rooted) if dtype in (torch.float16, torch.float8_e4m3fn) else Plain(data)


def power_of_two(values: Tensor) -> Tensor:
    """The next power of two of float32 numbers that are not negative; 0 stays.

    Example:
        >>> power_of_two(torch.tensor([0.0, 0.25, 0.3, 5.0])).tolist()
        [0.0, 0.25, 0.5, 8.0]
    """
    return ((values.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def smallest_step(dtype: torch.dtype) -> float:
    """Smallest positive number of a narrow dtype."""
    return 2.0**-9 if dtype == torch.float8_e4m3fn else 2.0**-24


def _blocks(values: Tensor) -> Tensor:
    return F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
