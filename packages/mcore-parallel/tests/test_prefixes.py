# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Packed sequences behind a prefix see what they see where the prefix stands in front of each of them."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.context_parallel import SequenceSplitError, plan_prefixed, sequence_prefixes
from mcore_parallel.models import GPTModel, TransformerConfig, check_follows_prefixes
from mcore_parallel.nn import (
    AttentionSpec,
    LatentAttentionConfig,
    MambaConfig,
    RecomputeConfig,
    Step,
    causal_attention,
    choose_attention,
    reference_attention,
)
from mcore_parallel.nn.attention import MaskedAttention, follows_prefixes, track_max_logits
from mcore_parallel.training import Batch

HEADS, WIDTH, VALUES = 4, 6, 4
SIZES = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32, init_method_std=0.4
)


# N sequences, T tokens.
@dataclasses.dataclass(frozen=True)
class Packing:
    """Lengths of sequences, and which stands in front of each."""

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]

    @property
    def bounds(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def step(self) -> Step:
        return Batch(**self.fields(), **dict.fromkeys(("tokens", "labels"), torch.zeros(1, sum(self.lengths), dtype=torch.int64))).step()

    def fields(self) -> dict[str, Tensor]:
        return {
            "loss_mask": torch.ones(1, sum(self.lengths)),
            "cu_seqlens": torch.tensor(self.bounds),
            "prefixes": torch.tensor(self.prefixes),
        }

    def whole(self, number: int) -> tuple[Tensor, int]:
        """Rows of a sequence with what is in front of it, and how many of them are in front."""
        own = torch.arange(self.bounds[number], self.bounds[number + 1])
        if (prefix := self.prefixes[number]) < 0:
            return own, 0
        return torch.cat((torch.arange(self.bounds[prefix], self.bounds[prefix + 1]), own)), self.lengths[prefix]


PACKINGS = [
    Packing((9, 3, 5, 4), (-1, 0, 0, 0)),
    Packing((6, 4, 4, 6, 4, 4, 5), (-1, 0, 0, -1, 3, 3, -1)),
    Packing((3, 5, 2, 4, 1, 7, 2), (-1, -1, 0, 1, 0, 1, -1)),
    Packing((4, 0, 3, 0, 2), (-1, 0, 0, -1, 3)),
]

# Backend, softmax, window.
CORES = [
    ("sdpa", "vanilla", None),
    *itertools.product(("context_parallel", "reference"), ("vanilla", "learnable"), (None, (2, 0), (5, 0))),
]


def alone(packing: Packing, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Each sequence with its prefix in front of it, by the definition."""
    outs = []
    for number in range(len(packing.lengths)):
        rows, skipped = packing.whole(number)
        outs.append(reference_attention(q[rows], k[rows], v[rows], **options)[skipped:] if len(rows) else q.new_zeros(0, HEADS, VALUES))
    return torch.cat(outs)


@pytest.mark.parametrize("packing", PACKINGS, ids=range(len(PACKINGS)))
@pytest.mark.parametrize(("backend", "softmax_type", "window"), CORES)
def test_a_core_gives_what_sequences_alone_give(packing: Packing, backend: str, softmax_type: str, window: tuple[int, int] | None) -> None:
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=2, head_dim=WIDTH, value_dim=VALUES, window=window, softmax_type=softmax_type, dtype=torch.float64,
        device="cpu",
    )  # fmt: skip
    core = choose_attention(spec, ProcessGroups.single(), backend)
    assert follows_prefixes(core)
    generator = torch.Generator().manual_seed(0)
    T = sum(packing.lengths)
    shapes = ((T, HEADS, WIDTH), (T, 2, WIDTH), (T, 2, VALUES), (HEADS,))
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).mul(2).requires_grad_() for shape in shapes]
    q, k, v, sink = inputs
    learnt = {"sink": sink} if softmax_type == "learnable" else {}
    expected = alone(packing, q, k, v, window=window, **learnt)
    result = core(q, k, v, 0, packing.step(), **learnt)  # type: ignore[call-arg]
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    wanted = inputs if learnt else inputs[:3]
    pairs = zip(torch.autograd.grad(result, wanted, grad), torch.autograd.grad(expected, wanted, grad), strict=True)
    for own, theirs in pairs:
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


def test_tiles_cover_each_score_once_and_no_tile_reads_a_row_twice() -> None:
    generator = random.Random(0)
    for trial in range(200):
        lengths, prefixes = [], []
        for number in range(generator.randint(1, 9)):
            free = [other for other in range(number) if prefixes[other] < 0]
            prefixes.append(generator.choice([-1, *free]))
            lengths.append(generator.randint(0, 7))
        window = generator.choice([(-1, 0), (2, 0), (4, 0), (0, 0)])
        packing, T = Packing(tuple(lengths), tuple(prefixes)), sum(lengths)
        seen = torch.zeros(T, T, dtype=torch.int64)
        for tile in plan_prefixed(lengths, prefixes, window):
            for side in (tile.queries, tile.keys):
                rows = side.rows(torch.device("cpu"))
                assert len(rows.unique()) == len(rows), trial
            blocks = zip(tile.queries.starts, tile.queries.lengths, tile.keys.starts, tile.keys.lengths, strict=True)
            for query, queries, key, keys in blocks:
                ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
                left, right = tile.window
                seen[query : query + queries, key : key + keys] += ((left < 0) | (ahead >= -left)) & ((right < 0) | (ahead <= right))
        expected = torch.zeros(T, T, dtype=torch.int64)
        for number in range(len(lengths)):
            rows, skipped = packing.whole(number)
            ahead = torch.arange(len(rows)) - torch.arange(len(rows))[:, None]
            visible = (ahead <= 0) & ((window[0] < 0) | (ahead >= -window[0]))
            expected[rows[skipped:, None], rows] = visible[skipped:].long()
        assert torch.equal(seen, expected), trial


def test_answers_behind_one_prompt_are_one_block() -> None:
    own, behind = plan_prefixed((100, 20, 30, 40), (-1, 0, 0, 0), (-1, 0))
    assert own.queries.lengths == own.keys.lengths == (100, 20, 30, 40) and own.window == (-1, 0)
    assert (behind.queries.starts, behind.queries.lengths) == ((100,), (90,))
    assert (behind.keys.starts, behind.keys.lengths, behind.window) == ((0,), (100,), (-1, -1))


LATENT = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"position_embedding_type": "learned_absolute", "max_position_embeddings": 32}, {}),
        ({"window_size": (3, 0), "softmax_type": "off-by-one"}, {}),
        ({"latent_attention": LATENT, "num_query_groups": None}, {}),
        ({}, {"recompute": RecomputeConfig(granularity="selective", modules=("core_attention",))}),
        ({}, {"attention_core": causal_attention}),
    ],
    ids=["rotary", "learnt positions", "window and sink", "latent", "recomputed", "bare core"],
)
def test_a_model_gives_the_hidden_states_and_gradients_of_sequences_alone(fields: dict[str, Any], options: dict[str, Any]) -> None:
    packing = PACKINGS[1]
    model = GPTModel(dataclasses.replace(SIZES, **fields), ProcessGroups.single(), dtype=torch.float64, **options)
    check_follows_prefixes(model)
    tokens = torch.randint(32, (1, sum(packing.lengths)), generator=torch.Generator().manual_seed(1))
    shared = Batch(tokens=tokens, labels=tokens, **packing.fields())
    rows = [packing.whole(number) for number in range(len(packing.lengths))]
    index = torch.cat([some for some, _ in rows])
    own = torch.cat([torch.arange(len(some)) >= skipped for some, skipped in rows])
    apart = Batch(
        tokens=tokens[:, index],
        labels=tokens[:, index],
        loss_mask=torch.ones(1, len(index)),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(len(some) for some, _ in rows)]),
    )
    results = []
    for batch, kept in ((shared, slice(None)), (apart, own)):
        output, _ = model(batch.tokens.flatten(), batch.step())
        hidden = output.hidden[kept]
        model.zero_grad()
        (hidden.square() * torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)).sum().backward()
        results.append((hidden.detach(), [parameter.grad for parameter in model.parameters()]))
    (hidden, gradients), (expected, theirs) = results
    torch.testing.assert_close(hidden, expected, rtol=1e-9, atol=1e-11)
    for own_gradient, other in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(own_gradient, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([-1, 0], "must have an entry for each of the 3 sequences"),
        ([-1, 1, -1], "sequence 1 must name an earlier sequence that has no prefix, or -1, found 1"),
        ([-1, 0, 1], "sequence 2 must name an earlier sequence that has no prefix, or -1, found 1"),
        ([-1, -2, 0], "sequence 1 must name an earlier sequence"),
    ],
)
def test_numbers_that_are_no_prefixes_are_refused(prefixes: list[int], message: str) -> None:
    with pytest.raises(SequenceSplitError, match=message):
        sequence_prefixes(torch.tensor(prefixes), 3)


def test_a_batch_with_prefixes_is_packed_and_whole() -> None:
    row = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="prefixes are numbers of packed sequences; give their cu_seqlens, too"):
        Batch(tokens=row, labels=row, loss_mask=row.float(), prefixes=torch.tensor([-1]))
    batch = Batch(tokens=row, labels=row, **Packing((3, 2, 1), (-1, 0, 0)).fields())
    assert batch.step().positions.tolist() == [0, 1, 2, 3, 4, 3]


def split_over_cp() -> None:
    groups, packing = ProcessGroups.build(ParallelPlan(cp=2)), Packing((8, 4, 4), (-1, 0, 0))
    model, row = GPTModel(SIZES, groups), torch.zeros(1, 16, dtype=torch.int64)
    batch = Batch(tokens=row, labels=row, **packing.fields())
    works = (
        lambda: check_follows_prefixes(model),
        lambda: batch.context_share(groups.cp),
        lambda: model(row[0, :8], dataclasses.replace(packing.step(), positions=torch.zeros(8, dtype=torch.int64))),
    )
    for work, message in zip(works, ("over cp=2 ranks; set cp=1", "over cp=2 ranks; pack without", "attention core"), strict=True):
        with pytest.raises(ValueError, match=message):
            work()


@pytest.mark.world(2)
def test_sequences_of_context_parallel_ranks_have_no_prefixes(world: Any) -> None:
    world(split_over_cp)


def test_what_follows_no_prefixes_is_refused() -> None:
    groups, step = ProcessGroups.single(), PACKINGS[0].step()
    tokens = torch.zeros(sum(PACKINGS[0].lengths), dtype=torch.int64)
    masked = GPTModel(SIZES, groups, attention_core=MaskedAttention())
    for work in (lambda: check_follows_prefixes(masked), lambda: masked(tokens, step)):
        with pytest.raises(ValueError, match="attention core core does not follow prefixes of packed sequences; set attention_backend="):
            work()
    sizes = MambaConfig(head_dim=4, num_groups=2, state_dim=4)
    linear = GPTModel(dataclasses.replace(SIZES, hybrid_layer_pattern="M*", position_embedding_type="none", mamba=sizes), groups)
    with pytest.raises(ValueError, match="layer 0 mixes tokens by .*, which does not follow prefixes; use attention"):
        check_follows_prefixes(linear)
    with pytest.raises(SequenceSplitError, match="linear mixers go on from one state and follow no prefixes"):
        linear(tokens, step)
    further = GPTModel(dataclasses.replace(SIZES, mtp_num_layers=1), groups)
    for work in (lambda: check_follows_prefixes(further), lambda: further(tokens, step)):
        with pytest.raises(ValueError, match="mtp_num_layers=1: behind a prefix there are several next tokens"):
            work()
    watched = GPTModel(SIZES, groups)
    track_max_logits(watched)
    with pytest.raises(ValueError, match="layer 0 tracks its logits for QK-clip"):
        check_follows_prefixes(watched)
    with pytest.raises(ValueError, match="logits of sequences behind a prefix are not tracked"):
        watched(tokens, step)
    with pytest.raises(ValueError, match="Linear holds no GPTModel"):
        check_follows_prefixes(torch.nn.Linear(2, 2))
