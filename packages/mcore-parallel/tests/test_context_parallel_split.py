# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which tokens and which scores fall to a context-parallel rank."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel import Group
from mcore_parallel.context_parallel import SequenceSplitError, sequence_lengths, zigzag_indices, zigzag_inverse
from mcore_parallel.context_parallel._partial import _has_its_mask
from mcore_parallel.context_parallel._ring import plan_ring
from mcore_parallel.context_parallel._tiles import plan_tiles
from mcore_parallel.context_parallel._zigzag import segments
from mcore_parallel.training import Batch


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Ranks, and lengths they can share."""
    size = draw(st.integers(1, 5))
    unit = 2 * size if size > 1 else 1
    return size, [unit * n for n in draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))]


windows = st.one_of(st.just((-1, 0)), st.tuples(st.integers(-1, 30), st.just(0)), st.tuples(st.integers(-1, 12), st.integers(-1, 12)))


@given(layouts())
def test_ranks_share_all_tokens_and_the_inverse_puts_them_back(layout: tuple[int, list[int]]) -> None:
    size, lengths = layout
    x = torch.arange(sum(lengths))
    shares = [x[zigzag_indices(lengths, size, rank)] for rank in range(size)]
    assert {len(share) for share in shares} == {len(x) // size}
    assert torch.equal(torch.cat(shares)[zigzag_inverse(lengths, size)], x)
    # Sequence by sequence, in rising position.
    assert all(torch.equal(share, share.sort().values) for share in shares)


@given(layouts())
def test_ranks_have_equally_many_causal_scores(layout: tuple[int, list[int]]) -> None:
    size, lengths = layout
    starts = torch.tensor([0, *lengths]).cumsum(0)
    position = torch.arange(sum(lengths)) - torch.repeat_interleave(starts[:-1], torch.tensor(lengths))
    assert len({int((position[zigzag_indices(lengths, size, rank)] + 1).sum()) for rank in range(size)}) == 1


def test_the_shares_of_two_packed_sequences() -> None:
    assert zigzag_indices([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_indices([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag_indices(6, 1, 0).tolist() == list(range(6))


def as_flash_kernels_take_it(window: tuple[int, int], keys: int) -> tuple[int, int]:
    """A limit beyond the keys is none, and none beside another limit is the number of keys."""
    left, right = (limit if limit < keys else -1 for limit in window)
    return (left, right) if left < 0 and right < 0 else (keys if left < 0 else left, keys if right < 0 else right)


@settings(max_examples=60, deadline=None)
@given(layouts(), windows)
def test_tiles_cover_each_visible_score_once(layout: tuple[int, list[int]], window: tuple[int, int]) -> None:
    size, lengths = layout
    T, (left, right) = sum(lengths), window
    distance = [torch.arange(n) - torch.arange(n)[:, None] for n in lengths]
    wanted = torch.block_diag(*(((left < 0) | (d >= -left)) & ((right < 0) | (d <= right)) for d in distance)).int()
    for rank in range(size):
        seen = torch.zeros(T, T, dtype=torch.int32)
        own = zigzag_indices(lengths, size, rank)
        for source in range(size):
            theirs = zigzag_indices(lengths, size, source)
            for tile in plan_tiles(segments(lengths, size, rank), segments(lengths, size, source), window):
                rows = tile.queries.rows(torch.device("cpu"))
                assert len(rows.unique()) == len(rows)
                for i, n, j, m in zip(tile.queries.starts, tile.queries.lengths, tile.keys.starts, tile.keys.lengths, strict=True):
                    low, high = as_flash_kernels_take_it(tile.window, max(tile.keys.lengths))
                    block = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
                    inside = ((low < 0) | (block >= -low)) & ((high < 0) | (block <= high))
                    # A query without a key would have a log-sum-exp of minus infinity.
                    assert inside.any(1).all()
                    seen[own[i : i + n, None], theirs[j : j + m]] += inside.int()
        assert torch.equal(seen[own], wanted[own])


def test_a_causal_rank_computes_two_blocks_or_less_with_each_other_rank() -> None:
    for size in (2, 4, 8):
        for rank in range(size):
            rounds = plan_ring([16 * size], size, rank, (-1, 0))
            assert [len(round_.tiles) for round_ in rounds] == [1] * size
            scores = [sum(t.queries.lengths[0] * t.keys.lengths[0] for t in round_.tiles) for round_ in rounds[1:]]
            # Half of the scores of two shares of 16 tokens: nothing that is masked.
            assert scores == [16 * 16 // 2] * (size - 1)


def test_distances_out_of_every_window_have_no_round() -> None:
    # Chunks of 8 tokens: a window of 8 reaches into the chunk before, whose rank is a neighbour.
    assert [round_.distance for round_ in plan_ring([16 * 8], 8, 3, (8, 0))] == [0, 1, 7]
    assert [round_.distance for round_ in plan_ring([16 * 8], 8, 3, (0, 0))] == [0]
    assert [round_.distance for round_ in plan_ring([16 * 8], 8, 0, (10, 0))] == [0, 1, 2, 6, 7]
    # Every rank has the same rounds, even where it computes nothing.
    assert [len(round_.tiles) for round_ in plan_ring([16 * 8], 8, 0, (8, 0))] == [2, 0, 1]


@pytest.mark.parametrize("bounds", [[0], [1, 4], [0, 4, 3], [[0, 4]]])
def test_bounds_that_are_none_are_refused(bounds: list[int]) -> None:
    with pytest.raises(SequenceSplitError, match=r"cu_seqlens=.*must be one row of bounds that begins with 0 and never falls"):
        sequence_lengths(torch.tensor(bounds))
    assert sequence_lengths(torch.tensor([0, 4, 4, 9])) == (4, 0, 5)


@pytest.mark.parametrize(("lengths", "size"), [((8, 6), 2), ((8, 4), 4), ((9,), 3)])
def test_a_length_that_two_chunks_a_rank_do_not_divide_is_refused(lengths: tuple[int, ...], size: int) -> None:
    with pytest.raises(SequenceSplitError, match=re.escape(f"of length {lengths[-1]} must be a multiple of 2 * cp = {2 * size}; pad it")):
        zigzag_indices(lengths, size, 0)


def share_of(batch: Batch, size: int, rank: int) -> Batch:
    return batch.context_share(Group(tuple(range(size)), rank))


def whole_batch(**options: object) -> Batch:
    tokens = torch.arange(16).view(2, 8)
    fields: dict[str, object] = {"tokens": tokens, "labels": tokens + 1, "loss_mask": tokens / 16, **options}
    return Batch(**fields)  # type: ignore[arg-type]


def test_a_batch_is_cut_with_its_positions_and_extras() -> None:
    extras = {"advantages": torch.arange(16.0).view(2, 8), "teacher": torch.zeros(2, 8, 3), "temperature": torch.ones(2)}
    whole = whole_batch(extras=extras)
    share = share_of(whole, 2, 0)
    assert share.tokens.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert torch.equal(share.labels, share.tokens + 1) and torch.equal(share.loss_mask, share.tokens / 16)
    assert share.extras["advantages"].tolist() == share.tokens.tolist()
    assert share.extras["teacher"].shape == (2, 4, 3) and share.extras["temperature"] is extras["temperature"]
    step = share.step()
    assert (step.batch_size, step.seq_len, step.cu_seqlens) == (2, 4, None)
    assert step.positions.tolist() == [0, 1, 6, 7] * 2
    moved = share_of(whole_batch(positions=whole.tokens * 10), 2, 1)
    assert moved.step().positions.tolist() == (moved.tokens * 10).flatten().tolist()


def test_packed_sequences_are_cut_one_by_one() -> None:
    bounds = torch.tensor([0, 4, 8, 16])
    whole = whole_batch(cu_seqlens=bounds)
    assert whole.step().positions.tolist() == [*range(4), *range(4), *range(8)]
    share = share_of(whole, 2, 1)
    assert share.tokens.tolist() == [[1, 2, 5, 6], [10, 11, 12, 13]]
    step = share.step()
    assert step.positions.tolist() == [1, 2, 1, 2, 2, 3, 4, 5] and step.cu_seqlens is bounds


def test_a_share_is_not_cut_again_and_one_rank_gets_all() -> None:
    whole = whole_batch()
    assert share_of(whole, 1, 0) is whole
    share = share_of(whole, 2, 0)
    assert share_of(share, 2, 0) is share
    with pytest.raises(SequenceSplitError, match=r"context_size=2 ranks does not fit cp=4; cut the whole batch"):
        share_of(share, 4, 0)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(SequenceSplitError, match=r"sequence 0 of length 8 must be a multiple of 2 \* cp = 6"):
        share_of(whole_batch(), 3, 0)
    short = whole_batch(cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(SequenceSplitError, match=r"cu_seqlens end at 8, but tokens hold B \* S = 16"):
        share_of(short, 2, 0)
    with pytest.raises(SequenceSplitError, match=r"cu_seqlens end at 8"):
        dataclasses.replace(short).step()


def test_cudnn_takes_every_tile_of_whole_causal_sequences() -> None:
    for size in (1, 2, 4, 8):
        for rank in range(size):
            tiles = [tile for round_ in plan_ring([256 * size, 256 * size], size, rank, (-1, 0)) for tile in round_.tiles]
            assert tiles and all(_has_its_mask(tile) for tile in tiles)
    assert not any(_has_its_mask(tile) for round_ in plan_ring([1024], 2, 0, (100, 0)) for tile in round_.tiles)
    assert not any(_has_its_mask(tile) for round_ in plan_ring([64], 1, 0, (-1, 0)) for tile in round_.tiles)
    # Two sequences of different lengths are no batch.
    assert not any(_has_its_mask(tile) for round_ in plan_ring([1024, 512], 1, 0, (-1, 0)) for tile in round_.tiles)
