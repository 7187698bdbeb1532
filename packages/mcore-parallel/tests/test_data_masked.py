# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hidden tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_parallel.data import DataError, MaskedTokensConfig, MaskedTokensDataset, word_starts
from mcore_parallel.data.datasets._masked import hide_words, ngram_shares

S, V, MASK = 400, 50, 60
CONFIG = MaskedTokensConfig(mask_token=MASK)


class Texts:
    """Samples of S tokens, of which the last ten are padding and every fifth one is special."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, idx: int, /) -> dict[str, Tensor]:
        tokens = torch.randint(1, V, (S,), generator=torch.Generator().manual_seed(idx))
        tokens[::5], mask = 0, torch.ones(S)
        mask[-10:] = 0.0
        return {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": mask}


def test_shares_are_as_asked_and_special_tokens_stay() -> None:
    hidden = MaskedTokensDataset(Texts(), CONFIG, vocab_size=V, seed=1, special_tokens=[0])
    samples = [hidden[number] for number in range(len(hidden))]
    tokens, labels, chosen = (torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels", "loss_mask"))
    assert torch.equal(labels, torch.stack([Texts()[number]["tokens"] for number in range(30)]))
    assert chosen[:, -10:].sum() == 0
    assert not chosen[labels == 0].any()
    assert torch.equal(tokens[chosen == 0], labels[chosen == 0])
    candidates = (labels[:, :-10] != 0).sum().item()
    assert abs(chosen.sum().item() / candidates - 0.15) < 0.02
    shown, was = tokens[chosen == 1], labels[chosen == 1]
    assert abs((shown == MASK).double().mean().item() - 0.8) < 0.04
    assert abs((shown == was).double().mean().item() - 0.1) < 0.04
    assert shown[shown != MASK].max() < V


def test_the_choice_follows_from_seed_and_number() -> None:
    first, again, other = (MaskedTokensDataset(Texts(), CONFIG, vocab_size=V, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[3][name], again[3][name]) for name in first[3])
    assert not torch.equal(first[3]["loss_mask"], other[3]["loss_mask"])
    assert not torch.equal(first[3]["loss_mask"], first[4]["loss_mask"])


def test_a_sample_hides_one_token_at_least() -> None:
    rare = MaskedTokensDataset(Texts(), MaskedTokensConfig(mask_token=MASK, probability=1e-6), vocab_size=V, seed=1)
    assert [rare[number]["loss_mask"].sum().item() for number in range(5)] == [1.0] * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token": -1}, "mask_token=-1 must not be negative"),
        ({"probability": 0.0}, r"probability=0.0 must lie in \(0, 1\]"),
        ({"random_share": 0.6, "kept_share": 0.5}, "random_share=0.6 and kept_share=0.5 .* at most 1 together"),
    ],
)
def test_shares_out_of_range_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        MaskedTokensConfig(**{"mask_token": MASK, **changes})


def runs(chosen: Tensor) -> list[tuple[int, int]]:
    """(begin, end) of neighbours that are hidden."""
    edges = torch.diff(torch.nn.functional.pad(chosen.long(), (1, 1))).nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_whole_words_are_hidden_within_the_budget() -> None:
    starts = torch.arange(V) % 3 == 0  # a third of the ids begin a word
    hidden = MaskedTokensDataset(Texts(), CONFIG, vocab_size=V, seed=1, special_tokens=[0], word_starts=starts)
    shares = []
    for number in range(len(hidden)):
        sample = hidden[number]
        allowed = (Texts()[number]["loss_mask"] > 0) & (sample["labels"] != 0)
        begins = allowed & (starts[sample["labels"]] | ~torch.nn.functional.pad(allowed, (1, 0))[:-1])
        for begin, end in runs(sample["loss_mask"] > 0):
            assert allowed[begin:end].all() and begins[begin]
            assert end == S or begins[end] or not allowed[end]
        shares.append((sample["loss_mask"].sum() / allowed.sum()).item())
        assert sample["loss_mask"].sum() <= round(0.15 * allowed.sum().item())
    assert min(shares) > 0.14
    assert torch.equal(hidden[3]["tokens"], hidden[3]["tokens"])


@pytest.mark.parametrize("choice", ["inverse", "longer", "geometric"])
def test_runs_have_the_chances_asked_for(choice: str) -> None:
    shares = ngram_shares(choice, 3)
    assert shares.sum() == pytest.approx(1.0)
    expected = {"inverse": [6 / 11, 3 / 11, 2 / 11], "longer": [2 / 11, 3 / 11, 6 / 11], "geometric": [0.2, 0.16, 0.128]}[choice]
    assert shares == pytest.approx(np.array(expected) / sum(expected))
    source, counts, size = np.random.default_rng(1), np.zeros(4), 2000
    for _ in range(60):
        hidden = hide_words(np.ones(size, bool), np.ones(size, bool), 0.02, shares, source)
        for begin, end in runs(torch.from_numpy(hidden)):
            counts[min(end - begin, 4) - 1] += 1
    # Few are hidden, so runs seldom touch.
    assert counts[:3] / counts.sum() == pytest.approx(shares, abs=0.06)


def test_a_word_longer_than_the_budget_is_hidden_all_the_same() -> None:
    begins = np.array([True] + [False] * 19)
    assert hide_words(begins, np.ones(20, bool), 0.15, ngram_shares("inverse", 1), np.random.default_rng(0)).all()
    assert not hide_words(begins, np.zeros(20, bool), 0.15, ngram_shares("inverse", 1), np.random.default_rng(0)).any()


@pytest.mark.parametrize(
    ("vocab", "expected"),
    [
        ({"un": 0, "##able": 1, "##": 2, "[MASK]": 4}, [True, False, True, True, True]),
        ({"\u0120the": 0, "ing": 1, ".": 2, "\u2581a": 3, "\u00c3": 4}, [True, False, True, True, False]),
    ],
)
def test_word_starts_follow_the_marks_of_the_vocabulary(vocab: dict[str, int], expected: list[bool]) -> None:
    assert word_starts(vocab, 5).tolist() == expected
    with pytest.raises(DataError, match="no token marks where words begin"):
        word_starts({"a": 0}, 5)


def test_words_that_do_not_fit_are_errors() -> None:
    with pytest.raises(DataError, match="max_ngram=0 must be at least 1"):
        MaskedTokensConfig(mask_token=1, max_ngram=0)
    with pytest.raises(DataError, match="ngram_choice='shortest' one of inverse, longer, geometric"):
        MaskedTokensConfig(mask_token=1, ngram_choice="shortest")
    with pytest.raises(DataError, match=r"word_starts of shape \(3,\) must have one entry for each of vocab_size=50"):
        MaskedTokensDataset(Texts(), CONFIG, vocab_size=V, seed=1, word_starts=torch.ones(3, dtype=torch.bool))
