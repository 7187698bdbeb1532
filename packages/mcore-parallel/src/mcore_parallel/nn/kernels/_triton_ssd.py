# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of the state-space scan; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from mcore_parallel.nn.kernels._chunks import BoundedSequences, ChunkPlan

# T tokens, B sequences, C chunks, Q places of a chunk, G groups, h heads of each, H = G h heads, P channels of a head, N channels of a
# state. Chunks of all sequences are computed side by side but for two sweeps, one along and one against the sequence, that hand states
# from chunk to chunk; what a sweep stores is in the dtype of the values, what it carries in float32.

_TILE_N = 64
"""Channels of b and c whose gradients one program sums; more would not fit the registers."""
_NARROW = 64
"""Channels below which programs of four warps were seen to give wrong 16-bit sums on Hopper, by the true sizes, not by the blocks."""
_WIDEST_WARPS = 8
_PROGRAMS = 528
"""Work is spread over as many programs at least, where it can be: four for each multiprocessor of the largest devices."""


def ssd_forward(
    mixed_TGW: Tensor, raw_TGh: Tensor, bias_H: Tensor, rates_H: Tensor, skip_H: Tensor,
    plan: ChunkPlan, sizes: tuple[int, int], limits: tuple[float, float], initial: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [T, H, P] and the states behind the sequences [B, H, P, N] float32.

    Args:
        mixed_TGW: of each group values [h P], b [N] and c [N].
        raw_TGh: step sizes before bias and softplus; the last dim has stride 1.
        bias_H: of them, float32.
        rates_H: negative rates of decay, float32.
        skip_H: D, float32.
        plan: the sequences.
        sizes: P and N.
        limits: of the step sizes.
        initial: states before the sequences, float32; None for zeros.
    """
    call = _Call(mixed_TGW, raw_TGh, plan, sizes, limits)
    before, behind = call.sweep(mixed_TGW, bias_H, rates_H, initial, reverse=False)
    y_THP = torch.empty((plan.num_tokens, call.heads, sizes[0]), dtype=mixed_TGW.dtype, device=mixed_TGW.device)
    if plan.num_chunks:
        _output_kernel[call.head_grid](
            mixed_TGW, raw_TGh, bias_H, rates_H, skip_H, before, y_THP, plan.bounds, *call.strides, *limits, BOUNDED=call.bounded,
            **call.constants,
        )  # fmt: skip
    return y_THP, behind


def ssd_backward(
    grad_THP: Tensor, mixed_TGW: Tensor, raw_TGh: Tensor, bias_H: Tensor, rates_H: Tensor, skip_H: Tensor,
    plan: ChunkPlan, sizes: tuple[int, int], limits: tuple[float, float], initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of mixed, raw, bias, rates and skip; the states are computed once more. Sums go in a fixed order."""
    call = _Call(mixed_TGW, raw_TGh, plan, sizes, limits)
    grad_mixed, grad_raw = torch.empty_like(mixed_TGW), torch.empty(raw_TGh.shape, dtype=raw_TGh.dtype, device=raw_TGh.device)
    if not plan.num_chunks:
        return grad_mixed, grad_raw, torch.zeros_like(bias_H), torch.zeros_like(rates_H), torch.zeros_like(skip_H)
    before, _ = call.sweep(mixed_TGW, bias_H, rates_H, initial, reverse=False)
    behind, _ = call.sweep(grad_THP, bias_H, rates_H, None, reverse=True, mixed=mixed_TGW)
    sums = torch.empty((3, plan.num_chunks, call.heads), dtype=torch.float32, device=mixed_TGW.device)
    per_program = call.heads_per_sum()
    parts = call.group_heads // per_program
    shared = grad_mixed[None, ..., -2 * sizes[1] :]
    if parts > 1:
        shared = torch.empty((parts, plan.num_tokens, call.groups, 2 * sizes[1]), dtype=torch.float32, device=mixed_TGW.device)
    constants = {**call.constants, "BLOCK_N": min(call.constants["BLOCK_N"], _TILE_N)}
    tiles = triton.cdiv(sizes[1], constants["BLOCK_N"])
    ties = torch.empty((tiles, plan.num_chunks, call.heads), dtype=torch.float32, device=mixed_TGW.device)
    _group_gradient_kernel[(plan.num_chunks * parts * tiles, call.groups)](
        grad_THP, mixed_TGW, raw_TGh, bias_H, rates_H, before, behind, shared, ties, plan.bounds, *call.strides, *limits,
        *shared.stride()[1:3], plan.num_tokens, plan.num_chunks, HEADS=per_program, PARTS=parts, **constants,
    )  # fmt: skip
    if parts > 1:
        grad_mixed[..., -2 * sizes[1] :] = shared.sum(0)
    sums = torch.empty((3, plan.num_chunks, call.heads), dtype=torch.float32, device=mixed_TGW.device)
    _head_gradient_kernel[call.head_grid](
        grad_THP, mixed_TGW, raw_TGh, bias_H, rates_H, skip_H, before, behind, grad_mixed, grad_raw, ties, sums, plan.bounds,
        *call.strides, *limits, plan.num_chunks, TILES=tiles, **call.constants,
    )  # fmt: skip
    grad_bias, grad_rates, grad_skip = sums.sum(1)
    return grad_mixed, grad_raw, grad_bias, grad_rates, grad_skip


class _Call:
    """Sizes and strides that the kernels of one scan share."""

    def __init__(self, mixed_TGW: Tensor, raw_TGh: Tensor, plan: ChunkPlan, sizes: tuple[int, int], limits: tuple[float, float]) -> None:
        self.raw, self.plan, self.sizes, self.limits = raw_TGh, plan, sizes, limits
        self.bounded = isinstance(plan.lengths, BoundedSequences)
        self.groups, self.group_heads = raw_TGh.shape[1:]
        self.heads = self.groups * self.group_heads
        self.strides = (*mixed_TGW.stride()[:2], *raw_TGh.stride()[:2])
        self.constants: dict[str, Any] = {
            "GROUPS": self.groups, "GROUP_HEADS": self.group_heads, "P": sizes[0], "N": sizes[1], "Q": plan.chunk_size,
            "BLOCK_P": max(16, triton.next_power_of_2(sizes[0])), "BLOCK_N": max(16, triton.next_power_of_2(sizes[1])),
            "PRECISION": "ieee" if mixed_TGW.dtype == torch.float32 else "tf32",
        }  # fmt: skip

    def head_grid(self, constants: dict[str, Any]) -> tuple[int, int]:
        """Programs of the kernels that go through some heads of a group, chunk by chunk."""
        return self.plan.num_chunks * (self.group_heads // constants["HEADS"]), self.groups

    def heads_per_sum(self) -> int:
        """Heads of a group that one program adds up: all of them, or fewer where there would be too few programs."""
        count = self.group_heads
        while count % 2 == 0 and self.plan.num_chunks * self.heads // count < _PROGRAMS:
            count //= 2
        return count

    def sweep(
        self, values: Tensor, bias_H: Tensor, rates_H: Tensor, initial: Tensor | None, *, reverse: bool, mixed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """States before each chunk [C, H, P, N] and behind each sequence; ``reverse``: gradients behind each chunk, and before."""
        plan, (p, n) = self.plan, self.sizes
        mixed = values if mixed is None else mixed
        batch, device = plan.num_sequences, values.device
        stored = torch.empty((plan.num_chunks, self.heads, p, n), dtype=values.dtype, device=device)
        last = torch.empty((batch, self.heads, p, n), dtype=torch.float32, device=device)
        # Where heads and sequences are few, a state's channels are cut, too.
        block = self.constants["BLOCK_N"]
        while block > 32 and batch * self.heads * triton.cdiv(n, block) < _PROGRAMS // 2:
            block //= 2
        constants = {**self.constants, "BLOCK_N": block}
        if batch:
            strides = (self.heads * p, self.group_heads * p) if reverse else self.strides[:2]
            _sweep_kernel[(batch, self.heads, triton.cdiv(n, block))](
                values, mixed, self.raw, bias_H, rates_H, stored if initial is None else initial, stored, last, plan.tokens,
                plan.first_chunk, *strides, *self.strides, *self.limits, HAS_INITIAL=initial is not None, REVERSE=reverse,
                BOUNDED=self.bounded, **constants,
            )  # fmt: skip
        return stored, last


def _configs(*choices: tuple[int, int], heads: tuple[int, ...] = ()) -> list[triton.Config]:
    """Warps and stages to try, each with so many heads a program; the interpreter has nothing to measure."""
    configs = [triton.Config({"HEADS": heads[i]} if heads else {}, num_warps=w, num_stages=n) for i, (w, n) in enumerate(choices)]
    return configs[:1] if knobs.runtime.interpret else configs


def _search(configs: list[triton.Config], named: dict[str, Any], **constants: Any) -> list[triton.Config]:
    """16-bit values are worth a search, unless every run must give the same bits; float32 ones are not and take the widest. Where the
    device alone knows the lengths there may be nothing to measure: steps are recorded without a token."""
    if constants["PRECISION"] != "tf32":
        return configs[-1:]
    fitting = [config for config in configs if constants["GROUP_HEADS"] % config.kwargs.get("HEADS", 1) == 0]
    if min(constants["P"], constants["N"]) < _NARROW:
        fitting = [config for config in fitting if config.num_warps == _WIDEST_WARPS]
    return fitting[:1] if constants.get("BOUNDED") or torch.are_deterministic_algorithms_enabled() else fitting


_KEY = ["GROUPS", "GROUP_HEADS", "P", "N", "Q", "BLOCK_N", "PRECISION"]
_TUNING: dict[str, Any] = {"prune_configs_by": {"early_config_prune": _search}}


@triton.jit
def _step_sizes(raw_ptr, rows, inside, stride, at, bias, low, high):
    """Step sizes [Q] of a chunk, 0 where there is no token, and their values before the softplus."""
    raw = tl.load(raw_ptr + rows * stride + at, mask=inside, other=0.0).to(tl.float32) + bias
    # log(1 + e), precise for small e, too.
    e = tl.exp(-tl.abs(raw))
    u = 1.0 + e
    sizes = tl.maximum(raw, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    # What is no number stays none.
    limited = tl.minimum(tl.maximum(sizes, low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)
    return tl.where(inside, limited, 0.0), raw, sizes


@triton.jit
def _inside(rows_inside, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of a tile of some rows and columns."""
    mask = rows_inside[:, None]
    if WIDTH % BLOCK:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def _load_state(pointers, p, n, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    if P == BLOCK_P and N % BLOCK_N == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)


@triton.autotune(_configs((4, 2), (4, 3), (8, 2)), key=[*_KEY, "REVERSE", "BOUNDED"], **_TUNING)
@triton.jit
def _sweep_kernel(
    values_ptr, mixed_ptr, raw_ptr, bias_ptr, rates_ptr, initial_ptr, stored_ptr, last_ptr, tokens_ptr, first_chunk_ptr,
    value_stride, value_group_stride, mixed_stride, mixed_group_stride, raw_stride, raw_group_stride, low, high,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, HAS_INITIAL: tl.constexpr, REVERSE: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, member = head // GROUP_HEADS, head % GROUP_HEADS
    places = tl.arange(0, Q)
    p, n = tl.arange(0, BLOCK_P), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    state_at = p[:, None] * N + n[None, :]
    in_state = in_p[:, None] & in_n[None, :]
    bias = tl.load(bias_ptr + head)
    rate = tl.load(rates_ptr + head)
    # Along the sequence values are written by b, against it gradients by c.
    key_at = group.to(tl.int64) * mixed_group_stride + GROUP_HEADS * P + n
    if REVERSE:
        key_at += N
    value_at = group.to(tl.int64) * value_group_stride + member * P + p
    raw_at = group.to(tl.int64) * raw_group_stride + member
    state = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + (sequence * heads + head).to(tl.int64) * P * N + state_at, mask=in_state, other=0.0)
    begin = tl.load(tokens_ptr + sequence).to(tl.int64)
    end = tl.load(tokens_ptr + sequence + 1).to(tl.int64)
    first = tl.load(first_chunk_ptr + sequence)
    count = tl.load(first_chunk_ptr + sequence + 1) - first
    for step in range(count):
        number = step
        if REVERSE:
            number = count - 1 - step
        rows = begin + number * Q + places
        inside = rows < end
        stored_at = ((first + number).to(tl.int64) * heads + head) * P * N + state_at
        tl.store(stored_ptr + stored_at, state.to(stored_ptr.dtype.element_ty), mask=in_state)
        sizes, _raw, _soft = _step_sizes(raw_ptr, rows, inside, raw_stride, raw_at, bias, low, high)
        decay = sizes * rate
        fade = tl.cumsum(decay, 0)
        total = tl.sum(decay, 0)
        if REVERSE:
            weight = tl.exp(fade)
        else:
            weight = tl.exp(total - fade) * sizes
        values = tl.load(values_ptr + rows[:, None] * value_stride + value_at[None, :], mask=inside[:, None] & in_p[None, :], other=0.0)
        keys = tl.load(mixed_ptr + rows[:, None] * mixed_stride + key_at[None, :], mask=inside[:, None] & in_n[None, :], other=0.0)
        weighted = (values.to(tl.float32) * weight[:, None]).to(values.dtype)
        state = state * tl.exp(total) + tl.dot(tl.trans(weighted), keys, input_precision=PRECISION)
    tl.store(last_ptr + (sequence * heads + head).to(tl.int64) * P * N + state_at, state, mask=in_state)


@triton.autotune(_configs((4, 1), (4, 2), (4, 2), (8, 1), heads=(1, 1, 4, 1)), key=[*_KEY, "BOUNDED"], **_TUNING)
@triton.jit
def _output_kernel(
    mixed_ptr, raw_ptr, bias_ptr, rates_ptr, skip_ptr, before_ptr, y_ptr, bounds_ptr,
    mixed_stride, mixed_group_stride, raw_stride, raw_group_stride, low, high,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    # Side by side run the heads of a group, which share b and c.
    parts: tl.constexpr = GROUP_HEADS // HEADS
    chunk, part, group = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    places = tl.arange(0, Q)
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    rows = tl.load(bounds_ptr + 2 * chunk).to(tl.int64) + places
    inside = rows < tl.load(bounds_ptr + 2 * chunk + 1)
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    line = mixed_ptr + rows[:, None] * mixed_stride + group.to(tl.int64) * mixed_group_stride
    in_n, in_p = _inside(inside, n, N, BLOCK_N), _inside(inside, p, P, BLOCK_P)
    b = tl.load(line + GROUP_HEADS * P + n[None, :], mask=in_n, other=0.0)
    c = tl.load(line + GROUP_HEADS * P + N + n[None, :], mask=in_n, other=0.0)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    causal = places[:, None] >= places[None, :]
    for number in range(HEADS):
        member = part * HEADS + number
        head = group * GROUP_HEADS + member
        sizes, _raw, _soft = _step_sizes(
            raw_ptr, rows, inside, raw_stride, group.to(tl.int64) * raw_group_stride + member, tl.load(bias_ptr + head), low, high
        )
        fade = tl.cumsum(sizes * tl.load(rates_ptr + head), 0)
        weights = tl.where(causal, tl.exp(tl.minimum(fade[:, None] - fade[None, :], 0.0)), 0.0) * scores * sizes[None, :]
        x = tl.load(line + member * P + p[None, :], mask=in_p, other=0.0)
        state_at = (chunk.to(tl.int64) * heads + head) * P * N + p[:, None] * N + n[None, :]
        state = _load_state(before_ptr + state_at, p, n, P, N, BLOCK_P, BLOCK_N)
        y = tl.dot(c, tl.trans(state), input_precision=PRECISION) * tl.exp(fade)[:, None]
        y += tl.dot(weights.to(x.dtype), x, input_precision=PRECISION)
        y += tl.load(skip_ptr + head) * x.to(tl.float32)
        tl.store(y_ptr + (rows[:, None] * heads + head) * P + p[None, :], y.to(y_ptr.dtype.element_ty), mask=in_p)


@triton.autotune(_configs((4, 1), (4, 2), (4, 1), (8, 1), heads=(1, 1, 4, 1)), key=_KEY, **_TUNING)
@triton.jit
def _head_gradient_kernel(
    grad_ptr, mixed_ptr, raw_ptr, bias_ptr, rates_ptr, skip_ptr, before_ptr, behind_ptr, grad_mixed_ptr, grad_raw_ptr, ties_ptr, sums_ptr,
    bounds_ptr, mixed_stride, mixed_group_stride, raw_stride, raw_group_stride, low, high, num_chunks,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of what each head has of its own: values, step sizes, rates, skips."""
    # Side by side run the heads of a group, which share b and c.
    parts: tl.constexpr = GROUP_HEADS // HEADS
    chunk, part, group = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    places = tl.arange(0, Q)
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    rows = tl.load(bounds_ptr + 2 * chunk).to(tl.int64) + places
    inside = rows < tl.load(bounds_ptr + 2 * chunk + 1)
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    width: tl.constexpr = GROUP_HEADS * P + 2 * N
    line = mixed_ptr + rows[:, None] * mixed_stride + group.to(tl.int64) * mixed_group_stride
    in_n, in_p = _inside(inside, n, N, BLOCK_N), _inside(inside, p, P, BLOCK_P)
    b = tl.load(line + GROUP_HEADS * P + n[None, :], mask=in_n, other=0.0)
    c = tl.load(line + GROUP_HEADS * P + N + n[None, :], mask=in_n, other=0.0)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    causal = places[:, None] >= places[None, :]
    for number in range(HEADS):
        member = part * HEADS + number
        head = group * GROUP_HEADS + member
        rate = tl.load(rates_ptr + head)
        sizes, raw, soft = _step_sizes(
            raw_ptr, rows, inside, raw_stride, group.to(tl.int64) * raw_group_stride + member, tl.load(bias_ptr + head), low, high
        )
        decay = sizes * rate
        fade = tl.cumsum(decay, 0)
        total = tl.sum(decay, 0)
        x = tl.load(line + member * P + p[None, :], mask=in_p, other=0.0)
        grad = tl.load(grad_ptr + (rows[:, None] * heads + head) * P + p[None, :], mask=in_p, other=0.0)
        wide_grad = grad.to(tl.float32)
        # The state before the chunk, as its tokens read it.
        state_at = (chunk.to(tl.int64) * heads + head) * P * N + p[:, None] * N + n[None, :]
        before = _load_state(before_ptr + state_at, p, n, P, N, BLOCK_P, BLOCK_N)
        read = tl.dot(c, tl.trans(before), input_precision=PRECISION)
        grad_l = tl.sum(read * wide_grad, 1) * tl.exp(fade)
        # The state behind it, as they write it.
        behind = _load_state(behind_ptr + state_at, p, n, P, N, BLOCK_P, BLOCK_N)
        until_end = tl.exp(total - fade)
        reached = tl.dot(b, tl.trans(behind), input_precision=PRECISION)
        wide_x = x.to(tl.float32)
        by_token = tl.sum(reached * wide_x, 1) * until_end
        skipped = tl.sum(tl.sum(wide_grad * wide_x, 1), 0)
        tl.store(sums_ptr + (chunk.to(tl.int64) + 2 * num_chunks) * heads + head, skipped)
        grad_x = reached * (until_end * sizes)[:, None] + tl.load(skip_ptr + head) * wide_grad
        grad_l -= by_token * sizes
        tie = 0.0
        for tile in tl.static_range(TILES):
            tie += tl.load(ties_ptr + (chunk.to(tl.int64) + tile * num_chunks) * heads + head)
        grad_total = tl.sum(by_token * sizes, 0) + tl.exp(total) * tie
        # Pairs of tokens. Both sums are over the same float32 products: in a sum over a suffix of the tokens they cancel.
        between = tl.where(causal, tl.exp(tl.minimum(fade[:, None] - fade[None, :], 0.0)), 0.0) * scores
        grad_x = tl.dot(tl.trans((between * sizes[None, :]).to(x.dtype)), grad, grad_x, input_precision=PRECISION)
        flow = tl.dot(grad, tl.trans(x), input_precision=PRECISION) * between
        by_pair = tl.sum(flow, 0)
        grad_l += tl.sum(flow * sizes[None, :], 1) - by_pair * sizes
        grad_sizes = by_token + by_pair
        at = (rows[:, None] * GROUPS + group) * width + member * P + p[None, :]
        tl.store(grad_mixed_ptr + at, grad_x.to(grad_mixed_ptr.dtype.element_ty), mask=in_p)
        # A decay acts on all that follows it in the chunk, and on the state behind.
        grad_decay = tl.sum(grad_l, 0) - tl.cumsum(grad_l, 0) + grad_l + grad_total
        grad_sizes += rate * grad_decay
        free = inside & (soft >= low) & (soft <= high)
        grad_raw = tl.where(free, grad_sizes * tl.sigmoid(raw), 0.0)
        raw_at = (rows * GROUPS + group) * GROUP_HEADS + member
        tl.store(grad_raw_ptr + raw_at, grad_raw.to(grad_raw_ptr.dtype.element_ty), mask=inside)
        tl.store(sums_ptr + chunk.to(tl.int64) * heads + head, tl.sum(grad_raw, 0))
        tl.store(sums_ptr + (chunk.to(tl.int64) + num_chunks) * heads + head, tl.sum(grad_decay * sizes, 0))


@triton.autotune(_configs((4, 2), (4, 1), (8, 2)), key=[*_KEY, "HEADS", "PARTS"], **_TUNING)
@triton.jit
def _group_gradient_kernel(
    grad_ptr, mixed_ptr, raw_ptr, bias_ptr, rates_ptr, before_ptr, behind_ptr, out_ptr, ties_ptr, bounds_ptr,
    mixed_stride, mixed_group_stride, raw_stride, raw_group_stride, low, high, out_stride, out_group_stride, num_tokens, num_chunks,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients of some channels of b and c: sums over the heads of a part of a group. And of each head the product of the state before
    the chunk and the gradient behind it, as far as these channels go."""
    # Side by side run the tiles of a part, which share values and gradients.
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    place, group = tl.program_id(0), tl.program_id(1)
    tile, part, chunk = place % tiles, place // tiles % PARTS, place // (tiles * PARTS)
    places = tl.arange(0, Q)
    p, n = tl.arange(0, BLOCK_P), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(bounds_ptr + 2 * chunk).to(tl.int64) + places
    inside = rows < tl.load(bounds_ptr + 2 * chunk + 1)
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    line = mixed_ptr + rows[:, None] * mixed_stride + group.to(tl.int64) * mixed_group_stride
    in_n, in_p = _inside(inside, n, N, BLOCK_N), _inside(inside, p, P, BLOCK_P)
    causal = places[:, None] >= places[None, :]
    grad_scores = tl.zeros((Q, Q), dtype=tl.float32)
    grad_b = tl.zeros((Q, BLOCK_N), dtype=tl.float32)
    grad_c = tl.zeros((Q, BLOCK_N), dtype=tl.float32)
    for number in range(HEADS):
        member = part * HEADS + number
        head = group * GROUP_HEADS + member
        sizes, _raw, _soft = _step_sizes(
            raw_ptr, rows, inside, raw_stride, group.to(tl.int64) * raw_group_stride + member, tl.load(bias_ptr + head), low, high
        )
        decay = sizes * tl.load(rates_ptr + head)
        fade = tl.cumsum(decay, 0)
        x = tl.load(line + member * P + p[None, :], mask=in_p, other=0.0)
        grad = tl.load(grad_ptr + (rows[:, None] * heads + head) * P + p[None, :], mask=in_p, other=0.0)
        state_at = (chunk.to(tl.int64) * heads + head) * P * N + p[:, None] * N + n[None, :]
        before = _load_state(before_ptr + state_at, p, n, P, N, BLOCK_P, BLOCK_N)
        behind = _load_state(behind_ptr + state_at, p, n, P, N, BLOCK_P, BLOCK_N)
        tie = tl.sum(tl.sum(before.to(tl.float32) * behind.to(tl.float32), 1), 0)
        tl.store(ties_ptr + (chunk.to(tl.int64) + tile * num_chunks) * heads + head, tie)
        between = tl.where(causal, tl.exp(tl.minimum(fade[:, None] - fade[None, :], 0.0)), 0.0) * sizes[None, :]
        grad_scores += tl.dot(grad, tl.trans(x), input_precision=PRECISION) * between
        grown = (grad.to(tl.float32) * tl.exp(fade)[:, None]).to(x.dtype)
        grad_c = tl.dot(grown, before, grad_c, input_precision=PRECISION)
        decayed = (x.to(tl.float32) * (tl.exp(tl.sum(decay, 0) - fade) * sizes)[:, None]).to(x.dtype)
        grad_b = tl.dot(decayed, behind, grad_b, input_precision=PRECISION)
    b = tl.load(line + GROUP_HEADS * P + n[None, :], mask=in_n, other=0.0)
    c = tl.load(line + GROUP_HEADS * P + N + n[None, :], mask=in_n, other=0.0)
    narrow = grad_scores.to(b.dtype)
    grad_c = tl.dot(narrow, b, grad_c, input_precision=PRECISION)
    grad_b = tl.dot(tl.trans(narrow), c, grad_b, input_precision=PRECISION)
    at = (part.to(tl.int64) * num_tokens + rows[:, None]) * out_stride + group.to(tl.int64) * out_group_stride + n[None, :]
    tl.store(out_ptr + at, grad_b.to(out_ptr.dtype.element_ty), mask=in_n)
    tl.store(out_ptr + at + N, grad_c.to(out_ptr.dtype.element_ty), mask=in_n)
