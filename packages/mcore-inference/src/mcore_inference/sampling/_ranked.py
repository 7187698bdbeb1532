# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel of draws with top-k, top-p and min-p, which sorts nothing; imported only when it runs.

Scores are at most 0, so their bits without the sign rise as they fall: bisection over these numbers finds the last one that stays. Only
counts and sums of weights are made of the row, about twenty times.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_inference.sampling._draw import SamplingRows
from mcore_inference.sampling._triton import part_sums, uniform

# R rows (requests), V vocabulary, N parts of it.

_TILE = 4096


def draw_ranked(
    logits_RV: Tensor, rows: SamplingRows, processed_R: Tensor, vocab_size: int, *, wants_log_probs: bool = True
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability, as ``sample`` draws it: every row by its own temperature, min-p, top-k and top-p.

    Args:
        logits_RV: [R, at least vocab_size], last stride 1.
        rows: settings.
        processed_R: [R] int64, 1 for the log-probability by which the token was drawn, 0 for that of the raw logits over all columns.
        vocab_size: ids that exist.
        wants_log_probs: False leaves the second result unwritten.

    Returns:
        [R] int64, -1 for a row that holds NaN or +inf, or no finite score; and [R] float32.
    """
    count, device = len(logits_RV), logits_RV.device
    tokens_R = torch.empty(count, dtype=torch.int64, device=device)
    log_probs_R = torch.empty(count, dtype=torch.float32, device=device)
    if count:
        sums = part_sums(logits_RV, rows.temperature, vocab_size, wants_log_probs=wants_log_probs)
        parts = sums.best_RN.shape[1]
        _ranked_kernel[(count,)](
            logits_RV, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position, processed_R, sums.best_RN,
            sums.raw_RN, tokens_R, log_probs_R, logits_RV.stride(0), vocab_size, parts,
            RAW=wants_log_probs, TILE=_TILE, PARTS=triton.next_power_of_2(parts), num_warps=16,
        )  # fmt: skip
    return tokens_R, log_probs_R


# As of the draws from all tokens.
_SETTINGS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr", "processed_ptr"]


@triton.jit(do_not_specialize_on_alignment=_SETTINGS)
def _ranked_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, processed_ptr, best_ptr, raw_ptr, tokens_ptr,
    log_probs_ptr, stride, vocab_size, parts, RAW: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part, tiles = tl.arange(0, PARTS), tl.cdiv(vocab_size, TILE)
    best_N = tl.load(best_ptr + row * parts + part, mask=part < parts, other=-float("inf"))
    broken = tl.sum((best_N != best_N).to(tl.int32), 0) > 0
    best = tl.max(tl.where(best_N == best_N, best_N, -float("inf")), 0)
    broken = broken | (best == float("inf")) | (best == -float("inf"))
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    greedy = temperature <= 0
    factor = tl.minimum((1.0 / tl.where(greedy, 1.0, temperature)).to(tl.float32), 3.4028234663852886e38)
    base = tl.where(broken, 0.0, best)
    logits = logits_ptr + row * stride

    # What stays: depths up to low, and of those in (low, high], which are equal, the first kept; sums of their weights are exact.
    low, high, kept = -1, 0, 1
    total = tl.full((), 1.0, tl.float64)
    if (not greedy) & (not broken):
        floor = _depth(tl.log(tl.load(min_p_ptr + row).to(tl.float64)).to(tl.float32))
        low = tl.minimum(floor, 0x7F7FFFFF)
        high, kept = low, 0
        count, total = _below(logits, base, factor, low, vocab_size, TILE, True)
        most = tl.load(top_k_ptr + row)
        if most < count:
            low, high, low_count, _, _, _ = _search(logits, base, factor, low, count, total, most, 0.0, vocab_size, TILE, False)
            kept = (most - low_count).to(tl.int32)
            _, total = _below(logits, base, factor, low, vocab_size, TILE, True)
            total += kept * tl.exp(-_score(high)).to(tl.float64)
            high_count, high_total = _below(logits, base, factor, high, vocab_size, TILE, True)
            # One alone may lie anywhere in (low, high].
            if high_count == most:
                total = high_total
            count = most.to(tl.int32)
        share = tl.load(top_p_ptr + row).to(tl.float64)
        if share < 1.0:
            low, high, low_count, low_total, high_count, high_total = _search(
                logits, base, factor, high, count, total, count + 1, share * total, vocab_size, TILE, True
            )
            each = (high_total - low_total) / (high_count - low_count)
            # The last that stays is the one with which the sum reaches the share.
            wanted = tl.ceil((share * total - low_total) / tl.maximum(each, 1e-300))
            kept = tl.minimum(tl.maximum(wanted, 1.0), (high_count - low_count).to(tl.float64)).to(tl.int32)
            total = tl.where(kept == high_count - low_count, high_total, low_total + kept * each)

    # Which tile the threshold falls into; where rounding carries it to the very end, the last with weight.
    threshold = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)) * total
    threshold = tl.where(greedy, 0.0, threshold)
    number, chosen, left = 0, 0, kept
    passed = tl.full((), 0.0, tl.float64)
    # Values of their own: of two names for one value the compiler carries but one through a loop.
    before, left_before = passed + 0.0, left + 0
    searching = True
    while searching & (number < tiles):
        depth, weight = _weights(logits, base, factor, number, vocab_size, TILE)
        edge = (depth > low) & (depth <= high)
        edges = tl.sum(edge.to(tl.int32), 0)
        edge_weight = tl.sum(tl.where(edge, weight, 0.0), 0)
        stays = tl.minimum(edges, left)
        sum_of = tl.sum(tl.where(depth <= low, weight, 0.0), 0) + tl.where(edges > 0, edge_weight / tl.maximum(edges, 1) * stays, 0.0)
        if sum_of > 0:
            chosen, before, left_before = number, passed, left
        passed += sum_of
        left -= stays
        searching = passed <= threshold
        number += 1

    # Which id in it, by bisection too: first the last of the equal scores that stays, then the first whose sum passes the threshold.
    depth, weight = _weights(logits, base, factor, chosen, vocab_size, TILE)
    place = tl.arange(0, TILE)
    edge = (depth > low) & (depth <= high)
    stays = depth <= low
    if kept > 0:
        end = _first(edge.to(tl.float64), left_before - 0.5, TILE)
        stays = stays | (edge & (place <= end) & (left_before > 0))
    weight = tl.where(stays, weight, 0.0)
    token = chosen * TILE + tl.minimum(_first(weight, threshold - before, TILE), tl.max(tl.where(weight > 0, place, 0), 0))
    token = tl.where(broken, -1, token).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    if RAW:
        raw_N = tl.load(raw_ptr + row * parts + part, mask=part < parts, other=-float("inf"))
        highest = tl.max(raw_N, 0)
        logit = tl.load(logits + tl.maximum(token, 0)).to(tl.float32)
        log_prob = logit - highest - tl.log(tl.sum(tl.exp(raw_N - highest), 0))
        if tl.load(processed_ptr + row) != 0:
            log_prob = tl.where(greedy, 0.0, (logit - base) * factor - tl.log(total.to(tl.float32)))
        tl.store(log_probs_ptr + row, log_prob)


@triton.jit
def _search(logits, base, factor, high, high_count, high_total, most, target, vocab_size, TILE: tl.constexpr, WEIGHS: tl.constexpr):
    """The depths (low, high] of the last score that stays, with counts and sums up to both: up to high there are ``most`` scores or
    the weight ``target``, up to low there are fewer. One score lies between, or equal ones, or those up to high are ``most``."""
    low, low_count = high * 0 - 1, high_count * 0
    low_total = high_total * 0
    steps = 0
    while (high - low > 1) & (high_count - low_count > 1) & (high_count != most):
        # Scores of -32 and -1/16 first: what is looked for mostly lies between.
        middle = low + (high - low) // 2
        probe = tl.where(steps == 0, 0x42000000, 0x3D800000)
        middle = tl.where((steps < 2) & (probe > low) & (probe < high), probe, middle)
        count, total = _below(logits, base, factor, middle, vocab_size, TILE, WEIGHS)
        enough = count >= most
        if WEIGHS:
            enough = total >= target
        low = tl.where(enough, low, middle)
        low_count = tl.where(enough, low_count, count)
        low_total = tl.where(enough, low_total, total)
        high = tl.where(enough, middle, high)
        high_count = tl.where(enough, count, high_count)
        high_total = tl.where(enough, total, high_total)
        steps += 1
    return low, high, low_count, low_total, high_count, high_total


@triton.jit
def _first(values, threshold, TILE: tl.constexpr):
    """The first place up to which the values sum to more than the threshold; the last where they never do."""
    place = tl.arange(0, TILE)
    low, high = -1, TILE - 1
    while high - low > 1:
        middle = (low + high) // 2
        passes = tl.sum(tl.where(place <= middle, values, 0.0), 0) > threshold
        low, high = tl.where(passes, low, middle), tl.where(passes, middle, high)
    return high


@triton.jit
def _below(logits, base, factor, depth, vocab_size, TILE: tl.constexpr, WEIGHS: tl.constexpr):
    """Scores up to a depth, and the sum of their weights."""
    count = tl.zeros((TILE,), dtype=tl.int32)
    total = tl.zeros((TILE,), dtype=tl.float64)
    for number in range(tl.cdiv(vocab_size, 4 * TILE)):
        # Four at a time, so that their loads overlap.
        for part in tl.static_range(4):
            score = _scores(logits, base, factor, 4 * number + part, vocab_size, TILE)
            inside = _depth(score) <= depth
            count += inside.to(tl.int32)
            if WEIGHS:
                total += tl.where(inside, tl.exp(score), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def _weights(logits, base, factor, number, vocab_size, TILE: tl.constexpr):
    score = _scores(logits, base, factor, number, vocab_size, TILE)
    return _depth(score), tl.exp(score).to(tl.float64)


@triton.jit
def _scores(logits, base, factor, number, vocab_size, TILE: tl.constexpr):
    """Of one tile, the best of the row 0; rounded as torch rounds them, so that ties are the same."""
    ids = number * TILE + tl.arange(0, TILE)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    return (values - base) * factor


@triton.jit
def _depth(score):
    """Bits without the sign: how far below 0."""
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _score(depth):
    return depth.to(tl.float32, bitcast=True)
