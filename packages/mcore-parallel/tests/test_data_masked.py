# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hidden tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel.data import DataError, MaskedTokensConfig, MaskedTokensDataset

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
