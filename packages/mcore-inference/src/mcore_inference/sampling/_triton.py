# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels that draw one token a row; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_inference._stability import experimental_api

# R rows (requests), V vocabulary, N tiles of it.

_TILE = 4096


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
        best_RN, weight_RN, raw_RN = tile_sums(logits_RV, temperature_R, vocab_size, wants_log_probs=wants_log_probs)
        tiles = best_RN.shape[1]
        _pick_kernel[(rows,)](
            logits_RV, temperature_R, seed_R, position_R, processed_R, best_RN, weight_RN, raw_RN, tokens_R, log_probs_R,
            logits_RV.stride(0), vocab_size, tiles, RAW=wants_log_probs, TILE=_TILE, TILES=triton.next_power_of_2(tiles), num_warps=8,
        )  # fmt: skip
    return tokens_R, log_probs_R


def tile_sums(logits_RV: Tensor, temperature_R: Tensor, vocab_size: int, *, wants_log_probs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of each tile of a row: the best logit, the sum of weights beside it, and the log-sum of the raw logits (where it is wanted)."""
    rows, columns = logits_RV.shape
    tiles = triton.cdiv(columns, _TILE)
    best_RN = torch.empty((rows, tiles), dtype=torch.float32, device=logits_RV.device)
    weight_RN, raw_RN = torch.empty_like(best_RN), torch.empty_like(best_RN)
    _tile_kernel[(rows, tiles)](
        logits_RV, temperature_R, best_RN, weight_RN, raw_RN, logits_RV.stride(0), vocab_size, columns, tiles,
        RAW=wants_log_probs, TILE=_TILE, num_warps=8,
    )  # fmt: skip
    return best_RN, weight_RN, raw_RN


# Settings of rows are rows of one tensor: where these begin depends on their number.
_SETTINGS = ["temperature_ptr", "seed_ptr", "position_ptr", "processed_ptr"]


@triton.jit(do_not_specialize_on_alignment=_SETTINGS[:1])
def _tile_kernel(
    logits_ptr, temperature_ptr, best_ptr, weight_ptr, raw_ptr, stride, vocab_size, columns, tiles, RAW: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Of one tile of a row: the best logit, the sum of weights, and that of the raw probabilities, both beside the tile's best.

    A tile with NaN says NaN."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < columns, other=-float("inf")).to(tl.float32)
    # Padding of the vocabulary counts in no draw, but in the model's own probabilities.
    scores = tl.where(ids < vocab_size, logits, -float("inf"))
    best = tl.max(scores, 0)
    broken = tl.sum((logits != logits).to(tl.int32), 0) > 0
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    safe = tl.where(best > -float("inf"), best, 0.0)
    weight = tl.sum(tl.exp((scores - safe) * scale), 0)
    at = row * tiles + tile
    tl.store(best_ptr + at, tl.where(broken, float("nan"), best))
    tl.store(weight_ptr + at, weight)
    if RAW:
        # As a log-sum: tiles are of different heights.
        highest = tl.max(logits, 0)
        raw = tl.sum(tl.exp(logits - tl.where(highest > -float("inf"), highest, 0.0)), 0)
        tl.store(raw_ptr + at, tl.where(highest > -float("inf"), highest + tl.log(raw), -float("inf")))


@triton.jit(do_not_specialize_on_alignment=_SETTINGS)
def _pick_kernel(
    logits_ptr, temperature_ptr, seed_ptr, position_ptr, processed_ptr, best_ptr, weight_ptr, raw_ptr, tokens_ptr, log_probs_ptr,
    stride, vocab_size, tiles, RAW: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    best_N = tl.load(best_ptr + row * tiles + tile, mask=inside, other=-float("inf"))
    weight_N = tl.load(weight_ptr + row * tiles + tile, mask=inside, other=0.0)
    broken = tl.sum((best_N != best_N).to(tl.int32), 0) > 0
    best = tl.max(tl.where(best_N == best_N, best_N, -float("inf")), 0)
    broken = broken | (best == float("inf")) | (best == -float("inf"))
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    greedy = temperature <= 0
    scale = 1.0 / tl.where(greedy, 1.0, temperature)

    # Which tile: sums of weights beside the row's best.
    base = tl.where(broken, 0.0, best)
    weight_N = tl.where(weight_N > 0, weight_N * tl.exp((best_N - base) * scale), 0.0).to(tl.float64)
    ends_N = tl.cumsum(weight_N, 0)
    total = tl.sum(weight_N, 0)
    threshold = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)) * total
    chosen = tl.sum((inside & (ends_N <= threshold)).to(tl.int32), 0)
    # Rounding may carry the threshold to the very end; the last tile with weight is meant then.
    chosen = tl.minimum(chosen, tl.max(tl.where(weight_N > 0, tile, 0), 0))
    before = tl.sum(tl.where(tile < chosen, weight_N, 0.0), 0)

    # A greedy row looks in the first tile that holds its best.
    if greedy:
        chosen = tl.min(tl.where(inside & (best_N == best), tile, TILES), 0)
        chosen = tl.minimum(chosen, tiles - 1)

    # Which id in it.
    ids = chosen * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    weights = tl.exp((logits - base) * scale).to(tl.float64)
    passed = tl.sum(((before + tl.cumsum(weights, 0) <= threshold) & (ids < vocab_size)).to(tl.int32), 0)
    drawn = tl.minimum(chosen * TILE + passed, tl.max(tl.where(weights > 0, ids, 0), 0))
    taken = tl.min(tl.where(logits == best, ids, 2147483647), 0)
    token = tl.where(broken, -1, tl.where(greedy, taken, drawn)).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    if RAW:
        raw_N = tl.load(raw_ptr + row * tiles + tile, mask=inside, other=-float("inf"))
        highest = tl.max(raw_N, 0)
        logit = tl.load(logits_ptr + row * stride + tl.maximum(token, 0)).to(tl.float32)
        log_prob = logit - highest - tl.log(tl.sum(tl.exp(raw_N - highest), 0))
        if tl.load(processed_ptr + row) != 0:
            log_prob = tl.where(greedy, 0.0, (logit - base) * scale - tl.log(total.to(tl.float32)))
        tl.store(log_probs_ptr + row, log_prob)


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
