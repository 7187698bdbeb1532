# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One kernel that updates all pieces with Adam: scale, clip, decay, moments, master and 16-bit parameter in one pass over memory.

Each program updates up to ``BLOCK`` elements of one piece, which it finds through a table of addresses, so that pieces may lie
anywhere. Whether to skip, the clipping and the corrections are read from the device: the host waits for nothing.
"""

# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportUnreachable=false, reportAttributeAccessIssue=false, reportUnusedExpression=false

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_parallel.optim._config import OptimizerConfig
from mcore_parallel.optim._piece_state import PieceState
from mcore_parallel.optim._rate import Limits
from mcore_parallel.optim._state import BLOCK, Master, Plain, Remainder, ScaledStorage, smallest_step

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
}
_IN_PLACE, _SEPARATE, _REMAINDER = 0, 1, 2


@triton.jit
def _at(address, begin, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE)) + begin
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load_moment(address, begin, scale, at, inside, TYPE: tl.constexpr, SCALED: tl.constexpr, ROOTED: tl.constexpr, ALIGNED: tl.constexpr):
    value = tl.load(_at(address, begin, TYPE, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value = value * tl.load(scale)
        if ROOTED:
            value = value * value
    return value


@triton.jit
def _store_moment(
    value, address, begin, scale, at, inside, TYPE: tl.constexpr, SCALED: tl.constexpr, ROOTED: tl.constexpr, LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if SCALED:
        if ROOTED:
            value = tl.sqrt_rn(value)
        value = tl.where(inside, value, 0.0)
        bits = (tl.max(tl.abs(value), 0) / LIMIT).to(tl.int32, bitcast=True)
        # Up to a power of two, as in power_of_two().
        new = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(scale, new)
        ratio = value / tl.where(new > 0.0, new, 1.0)
        if ROOTED:
            ratio = tl.where(value > 0.0, tl.maximum(ratio, SMALLEST), ratio)
        value = tl.minimum(tl.maximum(ratio, -LIMIT), LIMIT)
    tl.store(_at(address, begin, TYPE, ALIGNED) + at, value.to(TYPE), mask=inside)


@triton.jit
def _adam(
    addresses, numels, constants, owners, places, numbers, num_units, beta1, rest1, beta2, rest2, eps,
    PARAM: tl.constexpr, GRAD: tl.constexpr, M: tl.constexpr, V: tl.constexpr, MASTER: tl.constexpr, M_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, M_LIMIT: tl.constexpr, V_LIMIT: tl.constexpr, V_SMALLEST: tl.constexpr, DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers + 4) != 0:
        return
    chunk = tl.program_id(0)
    unit = tl.load(owners + chunk)
    place = tl.load(places + chunk).to(tl.int64)
    begin = place * BLOCK
    factor = tl.load(numbers).to(tl.float32) * tl.load(constants + 2 * num_units + unit)
    lr = tl.load(numbers + 1).to(tl.float32) * tl.load(constants + unit) + tl.load(constants + 3 * num_units + unit)
    correction1 = tl.load(numbers + 2).to(tl.float32)
    root2 = tl.load(numbers + 3).to(tl.float32)
    decay = tl.load(numbers + 5).to(tl.float32) * tl.load(constants + num_units + unit)
    at = tl.arange(0, BLOCK)
    if FULL:
        # A mask the compiler knows lets it use wide loads.
        inside = at < BLOCK
    else:
        inside = at < tl.load(numels + unit) - begin

    parameter = _at(tl.load(addresses + unit), begin, PARAM, ALIGNED) + at
    gradient = _at(tl.load(addresses + num_units + unit), begin, GRAD, ALIGNED) + at
    master = tl.load(addresses + 2 * num_units + unit)
    m_at, v_at = tl.load(addresses + 3 * num_units + unit), tl.load(addresses + 4 * num_units + unit)
    m_scale = tl.load(addresses + 5 * num_units + unit).to(tl.pointer_type(tl.float32)) + place
    v_scale = tl.load(addresses + 6 * num_units + unit).to(tl.pointer_type(tl.float32)) + place

    g = tl.load(gradient, mask=inside, other=0.0).to(tl.float32) * factor
    if MASTER == 0:
        p = tl.load(parameter, mask=inside, other=0.0).to(tl.float32)
    elif MASTER == 1:
        p = tl.load(_at(master, begin, tl.float32, ALIGNED) + at, mask=inside, other=0.0)
    else:
        high = tl.load(parameter, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        low = tl.load(_at(master, begin, tl.int16, ALIGNED) + at, mask=inside, other=0)
        p = (high + low.to(tl.int32)).to(tl.float32, bitcast=True)
    m = _load_moment(m_at, begin, m_scale, at, inside, M, M_SCALED, False, ALIGNED)
    v = _load_moment(v_at, begin, v_scale, at, inside, V, V_SCALED, True, ALIGNED)

    if DECOUPLED:
        p = p * (1.0 - lr * decay)
    else:
        g = g + p * decay
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    p = p - (lr / correction1) * (m / (tl.sqrt_rn(v) / root2 + eps))

    _store_moment(m, m_at, begin, m_scale, at, inside, M, M_SCALED, False, M_LIMIT, 0.0, ALIGNED)
    _store_moment(v, v_at, begin, v_scale, at, inside, V, V_SCALED, True, V_LIMIT, V_SMALLEST, ALIGNED)
    if MASTER == 0:
        tl.store(parameter, p, mask=inside)
    elif MASTER == 1:
        tl.store(_at(master, begin, tl.float32, ALIGNED) + at, p, mask=inside)
        tl.store(parameter, p.to(PARAM), mask=inside)
    else:
        bits = p.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        tl.store(parameter, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(_at(master, begin, tl.int16, ALIGNED) + at, (bits - (upper << 16)).to(tl.int16), mask=inside)


class FusedAdam:
    """Pieces of equal dtypes, with the table of their addresses.

    Args:
        units: Adam's, on one device, none float64. When tensors have moved, the table is made anew.
        config: the update rule.
    """

    def __init__(self, units: Sequence[PieceState], config: OptimizerConfig) -> None:
        self._config, self._units = config, tuple(units)
        self._tables: list[_Table] = []
        self._places: list[int] = []
        self._rebuild()

    def _rebuild(self) -> None:
        self._places = self._addresses()
        alike: dict[tuple[object, ...], list[PieceState]] = {}
        for unit in self._units:
            assert unit.exp_avg_sq is not None
            dtypes = (unit.piece.parameter.dtype, unit.piece.gradient.dtype, unit.exp_avg.data.dtype, unit.exp_avg_sq.data.dtype)
            alike.setdefault((*dtypes, type(unit.master), _aligned(unit)), []).append(unit)
        tables = [_Table(members, self._config.norm_groups, full=full) for members in alike.values() for full in (True, False)]
        self._tables = [table for table in tables if table.num_chunks]

    def run(self, numbers: Tensor, rates: Mapping[Limits, tuple[float, float]], factors_G: Tensor | None = None) -> None:
        """One step.

        Args:
            numbers: float64 [6] on the device: gradient factor, learning rate, 1 - beta1 ** step, (1 - beta2 ** step) ** 0.5, skip,
                weight decay.
            rates: of ``group_rates``.
            factors_G: further factors of the gradients of each of ``config.norm_groups``, on the device; None for 1.
        """
        if self._places != self._addresses():
            self._rebuild()
        for table in self._tables:
            table.run(numbers, rates, factors_G, self._config)

    def _addresses(self) -> list[int]:
        return [address for unit in self._units for address in _row(unit)]


class _Table:
    """Full blocks of some pieces, or what is left at their ends."""

    def __init__(self, units: Sequence[PieceState], norm_groups: Sequence[str | None], *, full: bool) -> None:
        rows = [_row(unit) for unit in units]
        first, device = units[0], units[0].piece.parameter.device
        numels = torch.tensor([len(unit.piece.parameter) for unit in units])
        blocks = numels // BLOCK
        held = blocks if full else (numels % BLOCK > 0).long()
        owners = torch.repeat_interleave(torch.arange(len(units)), held)
        # Block numbers: counted from each piece's first one, or the one after the full ones.
        places = torch.arange(len(owners)) - (held.cumsum(0) - held)[owners] if full else blocks[owners]
        self.num_chunks = len(owners)
        self.owners, self.places = owners.int().to(device), places.int().to(device)
        self.addresses = torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)
        self.numels = numels.to(device)
        constants = [(unit.rule.lr_mult, unit.rule.wd_mult, unit.piece.factor, 0.0) for unit in units]
        self.constants = torch.tensor(constants, dtype=torch.float32).T.contiguous().to(device)
        """Factors of the step's rate, of its weight decay and of the gradient, and a rate to add."""
        self.factors = self.constants[2].clone()
        self.parts = torch.tensor([norm_groups.index(unit.rule.norm_group) for unit in units]).to(device)
        mults = torch.tensor([unit.rule.lr_mult for unit in units])
        limits = [unit.rule.limits for unit in units]
        self.members = {
            pair: torch.where(torch.tensor([pair == other for other in limits]), mults, 0.0).to(device) for pair in dict.fromkeys(limits)
        }
        self.num_units = len(units)
        assert first.exp_avg_sq is not None
        m, v = first.exp_avg, first.exp_avg_sq
        self.options = {
            "PARAM": _TYPES[first.piece.parameter.dtype],
            "GRAD": _TYPES[first.piece.gradient.dtype],
            "M": _TYPES[m.data.dtype],
            "V": _TYPES[v.data.dtype],
            "MASTER": {Plain: _IN_PLACE, Master: _SEPARATE, Remainder: _REMAINDER}[type(first.master)],
            "M_SCALED": isinstance(m, ScaledStorage),
            "V_SCALED": isinstance(v, ScaledStorage),
            "M_LIMIT": torch.finfo(m.data.dtype).max,
            "V_LIMIT": torch.finfo(v.data.dtype).max,
            "V_SMALLEST": smallest_step(v.data.dtype),
            "ALIGNED": _aligned(first),
            "FULL": full,
        }

    def run(self, numbers: Tensor, rates: Mapping[Limits, tuple[float, float]], factors_G: Tensor | None, config: OptimizerConfig) -> None:
        if any(pair in rates for pair in self.members):
            # Numbers of the host as arguments of kernels: nothing is copied, nothing waits.
            self.constants[::3].zero_()
            for pair, mults in self.members.items():
                share, own = rates.get(pair, (1.0, 0.0))
                self.constants[0].add_(mults, alpha=share)
                self.constants[3].add_(mults, alpha=own)
        if factors_G is not None:
            torch.mul(self.factors, factors_G.float()[self.parts], out=self.constants[2])
        _adam[(self.num_chunks,)](
            self.addresses, self.numels, self.constants, self.owners, self.places, numbers, self.num_units,
            config.adam_beta1, 1.0 - config.adam_beta1, config.adam_beta2, 1.0 - config.adam_beta2, config.adam_eps,
            DECOUPLED=config.decoupled_weight_decay, BLOCK=BLOCK, **self.options,
        )  # fmt: skip


def _row(unit: PieceState) -> tuple[int, ...]:
    """Addresses of parameter, gradient, master, moments and their scales. Each can move alone: freed memory comes back anywhere."""
    m, v = unit.exp_avg, unit.exp_avg_sq
    assert v is not None
    tensors = (unit.piece.parameter, unit.piece.gradient, unit.master.data, m.data, v.data)
    scales = (holder.scales.data_ptr() if isinstance(holder, ScaledStorage) else 0 for holder in (m, v))
    return *(tensor.data_ptr() for tensor in tensors), *scales


def _aligned(unit: PieceState) -> bool:
    """Whether every address is a multiple of 16 bytes, so that loads may be wide (chunks keep it: BLOCK is a multiple of 16)."""
    assert unit.exp_avg_sq is not None
    tensors = (unit.piece.parameter, unit.piece.gradient, unit.master.data, unit.exp_avg.data, unit.exp_avg_sq.data)
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
