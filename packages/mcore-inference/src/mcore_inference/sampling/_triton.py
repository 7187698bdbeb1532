# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels that draw one token a row; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference._triton_parts import best_and_weight, plain_temperature, raw_log_sum
from mcore_inference.sampling._plain import PartSums, PlainInputs

# R rows (requests), V vocabulary, N parts of it.

_TILE_PARTS = 64
"""Parts of a program that reads logits."""


def draw(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    processed_R: Tensor,
    vocab_size: int,
    *,
    wants_log_probs: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability.

    A row of temperature 0 takes its best token, the lowest id among equals. The others invert the cumulative distribution of
    logits / temperature, in the order of ids, at the uniform number of (seed, position), as ``sample`` does. The logits are read once.

    Args:
        logits_RV: [R, at least vocab_size], last stride 1.
        temperature_R: [R] floating point.
        seed_R: [R] int64.
        position_R: [R] int64, tokens generated before.
        processed_R: [R] int64, 1 for the log-probability by which the token was drawn, 0 for that of the raw logits over all columns.
        vocab_size: ids that exist.
        wants_log_probs: False leaves the second result unwritten.

    Returns:
        [R] int64, -1 for a row that holds NaN or +inf, or no finite score; and [R] float32.
    """
    rows, device = len(logits_RV), logits_RV.device
    tokens_R = torch.empty(rows, dtype=torch.int64, device=device)
    log_probs_R = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        sums = part_sums(logits_RV, temperature_R, vocab_size, wants_log_probs=wants_log_probs)
        settings = temperature_R, seed_R, position_R, processed_R
        _pick(logits_RV, settings, None, sums, (tokens_R, log_probs_R, None), vocab_size, wants_log_probs=wants_log_probs)
    return tokens_R, log_probs_R


def draw_plain(
    logits_RV: Tensor, inputs: PlainInputs, sums: PartSums | None, results_R2: Tensor, last_tokens: Tensor, vocab_size: int
) -> None:
    """The draws of ``draw`` for rows whose settings are read where they lie, so that a recording may hold them.

    Args:
        logits_RV: as of ``draw``.
        inputs: of as many rows; without draws nothing is written.
        sums: of the logits, by the kernel that computed them; None reads them.
        results_R2: int64, where token and bits of the log-probability in float64, if it is wanted, are left.
        last_tokens: int64, where the token of each line is left; a row without a finite score leaves 0.
        vocab_size: ids that exist.
    """
    if sums is None:
        sums = part_sums(logits_RV, None, vocab_size, wants_log_probs=True, words=inputs.words)
    _pick(logits_RV, (None,) * 4, inputs, sums, (results_R2, None, last_tokens), vocab_size, wants_log_probs=True)


def part_sums(
    logits_RV: Tensor, temperature_R: Tensor | None, vocab_size: int, *, wants_log_probs: bool, words: Tensor | None = None
) -> PartSums:
    """Of each part of a row: the best logit, the sum of weights beside it, and the log-sum of the raw logits (where it is wanted).

    Args:
        logits_RV, temperature_R, vocab_size: as of ``draw``.
        wants_log_probs: whether log-sums may be wanted.
        words: of ``PlainInputs``, in place of temperatures.
    """
    rows, columns = logits_RV.shape
    sums = PartSums.empty(rows, columns, logits_RV.device)
    parts = sums.best_RN.shape[1]
    _tile_kernel[(rows, triton.cdiv(parts, _TILE_PARTS))](
        logits_RV, temperature_R, words, sums.best_RN, sums.weight_RN, sums.raw_RN, logits_RV.stride(0), vocab_size, columns, parts,
        RAW=wants_log_probs, PARTS=_TILE_PARTS, PART=PartSums.part, num_warps=8,
    )  # fmt: skip
    return sums


def _pick(
    logits_RV: Tensor,
    settings: tuple[Tensor | None, ...],
    inputs: PlainInputs | None,
    sums: PartSums,
    results: tuple[Tensor, Tensor | None, Tensor | None],
    vocab_size: int,
    *,
    wants_log_probs: bool,
) -> None:
    rows, parts = sums.best_RN.shape
    words, lines = (None, None) if inputs is None else (inputs.words, inputs.lines_R)
    width = triton.next_power_of_2(parts)
    _pick_kernel[(rows,)](
        logits_RV, *settings, words, lines, sums.best_RN, sums.weight_RN, sums.raw_RN, *results, rows, logits_RV.stride(0), vocab_size,
        parts, RAW=wants_log_probs, PART=PartSums.part, PARTS=width, num_warps=8 if width <= 2048 else 16,
    )  # fmt: skip


# Settings of rows are rows of one tensor: where these begin depends on their number.
_SETTINGS = ["temperature_ptr", "seed_ptr", "position_ptr", "processed_ptr", "words_ptr", "lines_ptr"]


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "words_ptr"])
def _tile_kernel(
    logits_ptr, temperature_ptr, words_ptr, best_ptr, weight_ptr, raw_ptr, stride, vocab_size, columns, parts,
    RAW: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Of some parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    wanted = 2
    if words_ptr is not None:
        wanted = tl.load(words_ptr)
    if wanted > 0:
        ids = part[:, None] * PART + tl.arange(0, PART)[None, :]
        logits = tl.load(logits_ptr + row * stride + ids, mask=ids < columns, other=-float("inf")).to(tl.float32)
        if words_ptr is not None:
            temperature = plain_temperature(words_ptr, row)
        else:
            temperature = tl.load(temperature_ptr + row).to(tl.float32)
        best, weight = best_and_weight(logits, ids, vocab_size, 1.0 / tl.where(temperature > 0, temperature, 1.0))
        at = row * parts + part
        tl.store(best_ptr + at, best, mask=part < parts)
        tl.store(weight_ptr + at, weight, mask=part < parts)
        if RAW:  # noqa: SIM102, a constant of the kernel and a number of the device
            if wanted > 1:
                tl.store(raw_ptr + at, raw_log_sum(logits), mask=part < parts)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_SETTINGS)
def _pick_kernel(
    logits_ptr, temperature_ptr, seed_ptr, position_ptr, processed_ptr, words_ptr, lines_ptr, best_ptr, weight_ptr, raw_ptr, tokens_ptr,
    log_probs_ptr, last_tokens_ptr, rows, stride, vocab_size, parts, RAW: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if words_ptr is not None:
        wanted = tl.load(words_ptr)
        if wanted > 0:
            temperature, seed, position, processed = plain_settings(words_ptr, row, rows)
            token, log_prob = _picked(
                logits_ptr + row * stride, temperature, seed, position, processed, best_ptr + row * parts, weight_ptr + row * parts,
                raw_ptr + row * parts, vocab_size, parts, RAW, PART, PARTS,
            )  # fmt: skip
            tl.store(tokens_ptr + 2 * row, token)
            if wanted > 1:
                tl.store(tokens_ptr + 2 * row + 1, log_prob.to(tl.float64).to(tl.int64, bitcast=True))
            line = tl.load(lines_ptr + row)
            # Rows of padding have none.
            tl.store(last_tokens_ptr + line, tl.maximum(token, 0), mask=line >= 0)
    else:
        temperature, seed = tl.load(temperature_ptr + row).to(tl.float32), tl.load(seed_ptr + row)
        token, log_prob = _picked(
            logits_ptr + row * stride, temperature, seed, tl.load(position_ptr + row), tl.load(processed_ptr + row),
            best_ptr + row * parts, weight_ptr + row * parts, raw_ptr + row * parts, vocab_size, parts, RAW, PART, PARTS,
        )  # fmt: skip
        tl.store(tokens_ptr + row, token)
        if RAW:
            tl.store(log_probs_ptr + row, log_prob)


@triton.jit
def _picked(
    logits_ptr, temperature, seed, position, processed, best_ptr, weight_ptr, raw_ptr, vocab_size, parts,
    RAW: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The token of a row, and its log-probability, which means something if log-sums were written."""
    part = tl.arange(0, PARTS)
    inside = part < parts
    best_N = tl.load(best_ptr + part, mask=inside, other=-float("inf"))
    weight_N = tl.load(weight_ptr + part, mask=inside, other=0.0)
    broken = tl.sum((best_N != best_N).to(tl.int32), 0) > 0
    best = tl.max(tl.where(best_N == best_N, best_N, -float("inf")), 0)
    broken = broken | (best == float("inf")) | (best == -float("inf"))
    greedy = temperature <= 0
    scale = 1.0 / tl.where(greedy, 1.0, temperature)

    # Which part: sums of weights beside the row's best.
    base = tl.where(broken, 0.0, best)
    weight_N = tl.where(weight_N > 0, weight_N * tl.exp((best_N - base) * scale), 0.0).to(tl.float64)
    ends_N = tl.cumsum(weight_N, 0)
    total = tl.sum(weight_N, 0)
    threshold = uniform(seed, position) * total
    chosen = tl.sum((inside & (ends_N <= threshold)).to(tl.int32), 0)
    # Rounding may carry the threshold to the very end; the last part with weight is meant then.
    chosen = tl.minimum(chosen, tl.max(tl.where(weight_N > 0, part, 0), 0))
    before = tl.sum(tl.where(part < chosen, weight_N, 0.0), 0)

    # A greedy row looks in the first part that holds its best.
    first = tl.min(tl.where(inside & (best_N == best), part, PARTS), 0)
    chosen = tl.where(greedy, tl.minimum(first, parts - 1), chosen)

    # Which id in it.
    ids = chosen * PART + tl.arange(0, PART)
    logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    weights = tl.exp((logits - base) * scale).to(tl.float64)
    passed = tl.sum(((before + tl.cumsum(weights, 0) <= threshold) & (ids < vocab_size)).to(tl.int32), 0)
    drawn = tl.minimum(chosen * PART + passed, tl.max(tl.where(weights > 0, ids, 0), 0))
    taken = tl.min(tl.where(logits == best, ids, 2147483647), 0)
    token = tl.where(broken, -1, tl.where(greedy, taken, drawn)).to(tl.int64)
    log_prob = 0.0
    if RAW:
        raw_N = tl.load(raw_ptr + part, mask=inside, other=-float("inf"))
        highest = tl.max(raw_N, 0)
        logit = tl.load(logits_ptr + tl.maximum(token, 0)).to(tl.float32)
        raw = logit - highest - tl.log(tl.sum(tl.exp(raw_N - highest), 0))
        own = tl.where(greedy, 0.0, (logit - base) * scale - tl.log(total.to(tl.float32)))
        log_prob = tl.where(processed != 0, own, raw)
    return token, log_prob


@triton.jit
def plain_settings(words_ptr, row, rows):
    """Temperature, seed, position and kind of log-probability of a row, from the words of ``PlainRows``."""
    own = words_ptr + 4 + row
    low, high = tl.load(own + rows), tl.load(own + 2 * rows)
    seed = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    return tl.load(own).to(tl.float32, bitcast=True), seed, tl.load(own + 3 * rows).to(tl.int64), tl.load(own + 4 * rows)


@experimental_api
@triton.jit
def uniform(seed, position):
    """Philox 4x32-10 of (seed, position): a number of [0, 1) with 53 random bits."""
    zero = (position * 0).to(tl.uint32)
    c0, c1, c2, c3 = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32), zero, zero
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        low0, low2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0 = ((c0.to(tl.uint64) * 0xD2511F53) >> 32).to(tl.uint32)
        high2 = ((c2.to(tl.uint64) * 0xCD9E8D57) >> 32).to(tl.uint32)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    word = (c0.to(tl.uint64) << 21) ^ (c1 >> 11).to(tl.uint64)
    return word.to(tl.float64) * 1.1102230246251565e-16
