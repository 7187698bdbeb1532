# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel of linear layers of few tokens, bound by reading their weights; imported only when it runs.

The RMS norm in front of a layer costs no kernel and no pass: the layer that writes the residual stream also writes it times the next norm's
weight, and sums of its squares; the next layer multiplies its result by the root that these sums give.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_inference._triton_parts import best_and_weight, plain_temperature, raw_log_sum
from mcore_inference.decoder._partial_sums import PeerRows
from mcore_inference.sampling import PlainSums
from mcore_parallel.backends import Scaled
from mcore_parallel.backends.kernels import arrive, peer_memories, sum_of_peers, wait_for_all, widened, widens_by_bits
from mcore_parallel.nn import NormedStream, StreamNorm

# T tokens (one a request), D input and N output width of a linear layer, R lines of a tile (T and padding), P parts of a sum.

MAX_ROWS = 64
"""Tokens up to which a linear layer is bound by reading its weight, and this kernel reads it as fast as any."""
MAX_FP8_ROWS = 32
"""The same of a weight in e4m3; with more tokens it is faster to multiply in fp8."""


def streamed_linear(
    x: Tensor | NormedStream,
    weight_ND: Tensor | Scaled,
    *,
    out: Tensor | None = None,
    finished: Tensor | None = None,
    sums: PlainSums | None = None,
) -> Tensor:
    """``norm(x) @ weight.T`` of at most ``MAX_ROWS`` tokens, at the speed at which the weight can be read.

    Args:
        x: [T, D], last stride 1; or what stands in front of a norm.
        weight_ND: [N, D], contiguous; or in e4m3 with a scale for each row.
        out: contiguous [T, N] in the dtype of x, which is written; None for a new one.
        finished: int32 zeros, N or more, which the launch counts in and leaves zero: with them parts of the sums over D
            have programs of their own where there are few columns. The parts are added up in one order.
        sums: of the result as logits, which are filled in; only where it ``sums_parts``.

    Returns:
        [T, N] in the dtype of x.
    """
    return _launch(x, weight_ND, out=out, finished=finished, sums=sums)[0]


def sums_parts(width: int, depth: int, tokens: int) -> bool:
    """Whether a program of ``streamed_linear`` by a weight [N, D] that is not in fp8 has one part of the logits of T tokens."""
    return _tile(width, depth, _lines(tokens), gated=False, fp8=False)[0] == PlainSums.part


def streamed_swiglu(x: NormedStream, weight_2FD: Tensor | Scaled) -> Tensor:
    """``silu(gate) * value`` of the linear layer [2 F, D] (gates first) on ``norm(x)``: [T, F]."""
    return _launch(x, weight_2FD, gated=True)[0]


def streamed_residual(
    x: Tensor, weight_ND: Tensor | Scaled, residual_TN: Tensor, norm: StreamNorm, *, finished: Tensor | None = None
) -> NormedStream:
    """``residual + x @ weight.T``, ready for the norm behind it.

    Args:
        x: [T, D], last stride 1.
        weight_ND: as of ``streamed_linear``.
        residual_TN: contiguous.
        norm: the next one.
        finished: as of ``streamed_linear``.
    """
    y_TN, scaled_TN, squares = _launch(x, weight_ND, residual_TN=residual_TN, norm=norm, finished=finished)
    assert scaled_TN is not None and squares is not None
    return NormedStream(x=y_TN, scaled=scaled_TN, squares=squares, epsilon=norm.epsilon)


def embed(tokens_T: Tensor, table_VD: Tensor, norm: StreamNorm) -> NormedStream:
    """Rows of an embedding, ready for the norm behind it."""
    return _enter(table_VD, norm, tokens_T=tokens_T)


def enter_stream(x_TD: Tensor, norm: StreamNorm, *, residual_TD: Tensor | None = None, peers: PeerRows | None = None) -> NormedStream:
    """``residual + x``, ready for the norm behind it.

    Args:
        x_TD: contiguous.
        norm: the next one.
        residual_TD: contiguous; None for zero.
        peers: of all ranks, whose sum takes the place of x, with the bits of ``PartialSums.sum``; None where x is whole.
    """
    return _enter(x_TD, norm, residual_TD=residual_TD, peers=peers)


def _enter(
    rows_VD: Tensor,
    norm: StreamNorm,
    *,
    tokens_T: Tensor | None = None,
    residual_TD: Tensor | None = None,
    peers: PeerRows | None = None,
) -> NormedStream:
    tokens, depth = len(rows_VD if tokens_T is None else tokens_T), rows_VD.shape[1]
    x_TD = torch.empty((tokens, depth), dtype=rows_VD.dtype, device=rows_VD.device)
    scaled_TD = torch.empty_like(x_TD)
    squares = torch.empty((1, _lines(tokens)), dtype=torch.float32, device=rows_VD.device)
    meeting = (None, None, 0, 0) if peers is None else (peers.addresses, peers.counters, peers.counters_at, peers.counters.shape[1])
    _enter_kernel[(squares.shape[1],)](
        tokens_T, rows_VD, residual_TD, norm.weight, x_TD, scaled_TD, squares, *meeting, tokens, depth, norm.shift,
        WIDTH=triton.next_power_of_2(depth), RANKS=1 if peers is None else len(peers.addresses), num_warps=4,
    )  # fmt: skip
    return NormedStream(x=x_TD, scaled=scaled_TD, squares=squares, epsilon=norm.epsilon)


def _launch(
    source: Tensor | NormedStream,
    weight: Tensor | Scaled,
    *,
    gated: bool = False,
    residual_TN: Tensor | None = None,
    norm: StreamNorm | None = None,
    out: Tensor | None = None,
    finished: Tensor | None = None,
    sums: PlainSums | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x_TD, squares, epsilon = (source, None, 0.0) if isinstance(source, Tensor) else (source.scaled, source.squares, source.epsilon)
    weight_ND, inverse_N = (weight, None) if isinstance(weight, Tensor) else (weight.data, weight.inverse)
    (tokens, depth), device = x_TD.shape, x_TD.device
    width, lines = weight_ND.shape[0] // (2 if gated else 1), _lines(tokens)
    columns, block, stages, splits = _tile(width, depth, lines, gated=gated, fp8=inverse_N is not None)
    block = max(16, min(block, 1 << (depth - 1).bit_length()))
    if finished is None or depth % (splits * block):
        splits = 1
    programs = triton.cdiv(width, columns)
    y_TN = torch.empty((tokens, width), dtype=x_TD.dtype, device=device) if out is None else out
    scaled_TN = None if norm is None else torch.empty_like(y_TN)
    new_squares = None if norm is None else torch.empty((programs, lines), dtype=torch.float32, device=device)
    partial = None if splits == 1 else torch.empty((splits, lines, width), dtype=torch.float32, device=device)
    parts = 0 if squares is None else squares.shape[0]
    even = depth % block == 0 and width % columns == 0
    filled = (None,) * 4 if sums is None else (sums.words, sums.best_RN, sums.weight_RN, sums.raw_RN)
    assert sums is None or (columns == sums.part and splits == 1), "asked before"
    _linear_kernel[(programs, splits)](
        x_TD, squares, weight_ND, inverse_N, residual_TN, None if norm is None else norm.weight, y_TN, scaled_TN, new_squares,
        partial, finished if splits > 1 else None, *filled, 0 if sums is None else sums.vocab_size,
        tokens, width, depth, depth // splits, x_TD.stride(0), parts, epsilon, 0.0 if norm is None else norm.shift,
        LINES=lines, COLUMNS=columns, DEPTH=block, PARTS=triton.next_power_of_2(max(parts, 128)), EVEN=even, GATED=gated,
        SPLITS=splits, BY_BITS=widens_by_bits(x_TD), num_warps=4, num_stages=stages,
    )  # fmt: skip
    return y_TN, scaled_TN, new_squares


def _lines(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def _tile(width: int, depth: int, lines: int, *, gated: bool, fp8: bool) -> tuple[int, int, int, int]:
    """Columns, depth and stages of a program and parts of the sum, those that were fastest on an H200, or (fp8, more lines) on an H100."""
    if fp8:
        if gated:
            return (64, 128, 3, 1) if lines > 16 else (64, 256, 5, 1) if width <= 64 * 132 else (32, 256, 3, 1)
        return (64, 128, 3, 4) if lines > 16 else (32, 256, 3, 4 if depth > 4096 else 2)
    if lines == 16:
        if gated:
            return (64, 64, 5, 1) if width <= 64 * 132 else (32, 128, 4, 1)
        return (16, 512, 4, 1) if width <= 2048 else (32, 256, 4, 1) if width <= 65536 else (64, 128, 4, 1)
    if gated:
        return (64, 128, 3, 1) if lines == 32 else (32, 128, 3, 1)
    if width > 65536:
        return 64, 128, 4, 1
    return 32, 128, 5, 1 if width > 2048 else 4 if depth > 4096 and lines == 32 else 2


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x_ptr, squares_ptr, weight_ptr, inverse_ptr, residual_ptr, norm_ptr, y_ptr, scaled_ptr, new_squares_ptr,
    partial_ptr, finished_ptr, words_ptr, best_ptr, weight_sum_ptr, raw_ptr, vocab_size,
    tokens, width, depth, depth_each, x_stride, parts, epsilon, shift,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    SPLITS: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    row, lane = tl.arange(0, LINES), tl.arange(0, DEPTH)
    begin = tl.program_id(1) * depth_each
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_rows = weight_ptr + column[None, :].to(tl.int64) * depth
    value_rows = weight_rows + tl.cast(width, tl.int64) * depth
    if squares_ptr is not None:
        part = tl.arange(0, PARTS)
        # Here, so that they arrive while the weights stream.
        squares = tl.load(squares_ptr + part[:, None] * LINES + row[None, :], mask=part[:, None] < parts, other=0.0)
    total = tl.zeros((LINES, COLUMNS), dtype=tl.float32)
    value = tl.zeros((LINES, COLUMNS), dtype=tl.float32)
    for first in range(0, depth_each, DEPTH):
        at = begin + first + lane
        if EVEN:
            weight = tl.load(weight_rows + at[:, None])
            x = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=row[:, None] < tokens, other=0.0)
        else:
            inside = (at[:, None] < depth) & (column[None, :] < width)
            weight = tl.load(weight_rows + at[:, None], mask=inside, other=0.0)
            x = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=(row[:, None] < tokens) & (at[None, :] < depth), other=0.0)
        # Of one in fp8: its scales are common factors of the sums.
        total = tl.dot(x, widened(weight, x.dtype, BY_BITS), total)
        if GATED:
            if EVEN:
                second = tl.load(value_rows + at[:, None])
            else:
                second = tl.load(value_rows + at[:, None], mask=(at[:, None] < depth) & (column[None, :] < width), other=0.0)
            value = tl.dot(x, widened(second, x.dtype, BY_BITS), value)
    if SPLITS > 1:
        spot = row[:, None] * width + column[None, :]
        exists = column[None, :] < width
        tl.store(partial_ptr + tl.program_id(1) * LINES * width + spot, total, mask=exists)
        tl.debug_barrier()
        last = tl.atomic_add(finished_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
        if last:
            total = tl.zeros((LINES, COLUMNS), dtype=tl.float32)
            for number in tl.static_range(SPLITS):
                # Past the first-level cache, which may hold what stood there before.
                total += tl.load(partial_ptr + number * LINES * width + spot, mask=exists, other=0.0, cache_modifier=".cg")
            tl.store(finished_ptr + tl.program_id(0), 0)
    else:
        last = True
    if last:
        if inverse_ptr is not None:
            total = total * tl.load(inverse_ptr + column, mask=column < width, other=0.0)[None, :]
            if GATED:
                value = value * tl.load(inverse_ptr + width + column, mask=column < width, other=0.0)[None, :]
        if squares_ptr is not None:
            scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / depth + epsilon)
            total = total * scale[:, None]
            value = value * scale[:, None]
        if GATED:
            total = total / (1.0 + tl.exp(-total)) * value
        places = row[:, None] * width + column[None, :]
        real = (row[:, None] < tokens) & (column[None, :] < width)
        if residual_ptr is not None:
            total += tl.load(residual_ptr + places, mask=real, other=0.0).to(tl.float32)
        result = total.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + places, result, mask=real)
        if norm_ptr is not None:
            seen = tl.where(real, result.to(tl.float32), 0.0)
            factor = tl.load(norm_ptr + column, mask=column < width, other=0.0).to(tl.float32) + shift
            tl.store(scaled_ptr + places, (seen * factor[None, :]).to(scaled_ptr.dtype.element_ty), mask=real)
            tl.store(new_squares_ptr + tl.program_id(0) * LINES + row, tl.sum(seen * seen, 1))
        if words_ptr is not None:
            # As rounded, which is what others read.
            logits = tl.where(column[None, :] < width, result.to(tl.float32), -float("inf"))
            temperature = plain_temperature(words_ptr, tl.minimum(row, tokens - 1))
            scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
            best, weight_sum = best_and_weight(logits, column[None, :], vocab_size, scale[:, None])
            at = row * tl.num_programs(0) + tl.program_id(0)
            tl.store(best_ptr + at, best, mask=row < tokens)
            tl.store(weight_sum_ptr + at, weight_sum, mask=row < tokens)
            tl.store(raw_ptr + at, raw_log_sum(logits), mask=row < tokens)


@triton.jit(do_not_specialize=["tokens"])
def _enter_kernel(
    tokens_ptr, rows_ptr, residual_ptr, norm_ptr, x_ptr, scaled_ptr, squares_ptr, addresses_ptr, counters_ptr, counters_at, num_counters,
    tokens, depth, shift, WIDTH: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0), tl.arange(0, WIDTH)
    # Not lane < depth and row < tokens, which is no mask of booleans in every Triton.
    inside = lane < tl.where(row < tokens, depth, 0)
    source = row.to(tl.int64)
    if tokens_ptr is not None:
        source = tl.load(tokens_ptr + row, mask=row < tokens, other=0).to(tl.int64)
    factor = tl.load(norm_ptr + lane, mask=inside, other=0.0).to(tl.float32) + shift
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * depth + lane, mask=inside, other=0.0)
    if addresses_ptr is not None:
        addresses = tl.load(addresses_ptr + tl.arange(0, RANKS))
        memories = peer_memories(addresses_ptr, rows_ptr.dtype.element_ty, RANKS)
        if row < tokens:
            arrive(addresses, counters_at + row * 4)
            wait_for_all(counters_ptr + row, RANKS)
        x = sum_of_peers(memories, source * depth + lane, inside, RANKS)
    else:
        x = tl.load(rows_ptr + source * depth + lane, mask=inside, other=0.0)
    if residual_ptr is not None:
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, 0)
    if addresses_ptr is not None:  # noqa: SIM102, a constant of the kernel and a number of the device
        if row < tokens:
            # Behind a sum that needs all that was read, so that no load is under way; before the stores, which it need not wait for.
            arrive(addresses, counters_at + (num_counters + row) * 4)
    tl.store(x_ptr + row * depth + lane, x, mask=inside)
    tl.store(scaled_ptr + row * depth + lane, (wide * factor).to(scaled_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + row, squares)
    if addresses_ptr is not None:  # noqa: SIM102, as above
        if row < tokens:
            # Behind this launch the rows of this rank may be written again.
            wait_for_all(counters_ptr + num_counters + row, RANKS)
