# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Settings and draws."""

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_inference import SamplingParams
from mcore_inference.sampling import SamplingRows, StructuredOutput, processed_log_probs, request_seed, sample, uniform
from mcore_inference.sampling._random import philox


def draw(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    return sample(logits, SamplingRows.of(params, seeds, positions, logits.shape[1])).tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == words


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    numbers = uniform(torch.full((20_000,), -7), torch.arange(20_000))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # 19 degrees of freedom; 43.8 is the 0.1% point
    assert len({request_seed(0, number) for number in range(1000)} | {request_seed(1, number) for number in range(1000)}) == 2000


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"top_p": 1.1}, {"top_p": -0.1}, {"top_k": -2}, {"min_p": 2},
        {"num_tokens_to_generate": -1},
        {"num_tokens_total": 0}, {"num_tokens_to_generate": 1, "num_tokens_total": 2}, {"top_n_logprobs": 1000}, {"stop_words": "word"},
        {"stop_words": [""]}, {"repetition_penalty": 0}, {"seed": 2**63}, {"termination_id": -2}, {"logit_bias": {1: math.inf}},
        {"min_tokens": -1},
        {"stop_words": ["x"] * 100}, {"temperature": "hot"},
        {"temperature": True}, {"temperature": None}, {"top_k": 1.0}, {"top_k": True}, {"top_k": None}, {"seed": 0.5}, {"seed": True},
        {"num_tokens_to_generate": 2.5}, {"num_tokens_to_generate": False}, {"num_tokens_total": "3"}, {"top_n_logprobs": np.float32(1)},
        {"min_tokens": None}, {"termination_id": 1.5}, {"termination_id": 2**40}, {"ignore_eos": 1}, {"return_log_probs": None},
        {"skip_prompt_log_probs": 0}, {"add_BOS": "yes"}, {"stop_token_ids": [1.0]}, {"stop_token_ids": [True]}, {"stop_token_ids": [-1]},
        {"stop_token_ids": 5}, {"stop_token_ids": None}, {"stop_token_ids": b"ab"}, {"stop_words": [1]}, {"stop_words": {"a": 1}},
        {"stop_words": 3}, {"logit_bias": {5: math.nan}}, {"logit_bias": {5: True}}, {"logit_bias": {5: "1"}}, {"logit_bias": {5: 1e5}},
        {"logit_bias": {True: 1}}, {"logit_bias": {1.0: 1}}, {"logit_bias": {"1": 1}}, {"logit_bias": {-1: 1}}, {"logit_bias": [[1, 2]]},
        {"allowed_token_ids": []}, {"allowed_token_ids": 5}, {"allowed_token_ids": [-1]}, {"allowed_token_ids": {1: 2}},
        {"bad_words": [""]}, {"bad_words": "x"}, {"bad_words": [3]}, {"bad_words": ["x"] * 65}, {"bad_words": ["x" * 1025]},
        {"logit_bias": {None: 1}}, {"presence_penalty": math.nan}, {"frequency_penalty": -math.inf}, {"top_p": 10**400}, {"min_p": [0.5]},
        {"processed_log_probs": True}, {"skip_prompt_log_probs": False},
    ],
)  # fmt: skip
def test_a_bad_setting_is_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_numbers_of_numpy_become_pythons() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int32(3), seed=np.int64(-7), min_tokens=np.uint8(1), top_p=np.float64(1),  # type: ignore[arg-type]
        stop_token_ids=np.array([4, 5]).tolist(), logit_bias={np.int64(5): np.float32(2)}, repetition_penalty=2,  # type: ignore[arg-type]
    )  # fmt: skip
    same = SamplingParams(
        temperature=0.5, top_k=3, seed=-7, min_tokens=1, top_p=1.0, stop_token_ids=(4, 5), logit_bias={5: 2.0}, repetition_penalty=2.0
    )
    assert params == same and repr(params) == repr(same)
    assert json.dumps(params.serialize()) == json.dumps(same.serialize())


def test_a_callers_mapping_can_change_without_the_settings() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[6] = math.nan
    assert params.logit_bias == {5: 1.0}


def test_settings_survive_json_and_unknown_ones_warn() -> None:
    few: dict[str, Any] = {"stop_token_ids": [2**24 + 1], "allowed_token_ids": range(3), "bad_words": ["c", "d"]}
    params = SamplingParams(temperature=0.5, top_k=2**25, stop_words=["a", "b"], logit_bias={5: -1.5}, seed=-4, **few)
    data = json.loads(json.dumps(params.serialize()))
    assert SamplingParams.deserialize(data) == params
    with pytest.warns(UserWarning, match="new_field"):
        assert SamplingParams.deserialize({**data, "new_field": 1}) == params
    formed = SamplingParams(structured_output=StructuredOutput(regex="a+"))
    with pytest.warns(UserWarning, match="structured_output of this version has no fields ..form_of_later.."):
        assert SamplingParams.deserialize({"structured_output": {"regex": "a+", "form_of_later": 1}}) == formed
    assert params.with_attributes({"top_k": 3}).top_k == 3
    with pytest.raises(ValueError, match="unknown fields"):
        params.with_attributes({"topk": 3})


def test_fields_that_megatron_sets_in_place_are_not_dropped_in_silence() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"add_attributes would set top_k, seed in place.*params\.with_attributes"):
        SamplingParams().add_attributes({"top_k": 3, "seed": 1})


@pytest.mark.parametrize(
    "bad",
    [
        {"logit_bias": 5}, {"logit_bias": [5]}, {"logit_bias": [[1, 2, 3]]}, {"logit_bias": [[[], 1]]}, {"logit_bias": [["5", 1]]},
        {"structured_output": 5}, {"structured_output": "x"}, {"structured_output": {}}, {"stop_words": 3}, {"seed": "x"},
    ],
)  # fmt: skip
def test_settings_of_wrong_types_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams.deserialize(bad)
    with pytest.raises(ValueError, match="SamplingParams must be a mapping of its fields and is a list"):
        SamplingParams.deserialize([bad])  # type: ignore[arg-type]


def test_budgets() -> None:
    assert SamplingParams().budget(5) == 30
    assert SamplingParams(num_tokens_to_generate=7).budget(5) == 7
    assert SamplingParams(num_tokens_total=7).budget(5) == 2
    assert SamplingParams(num_tokens_total=7).budget(50) == 0


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1, temperature=5)):
        assert draw(logits, [params] * 2, [1, 2], [0, 0]) == [1, 0]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.4, 0.3, 0.2, 0.1]),
        (SamplingParams(top_p=1.0, top_k=-1), [0.4, 0.3, 0.2, 0.1]),
        (SamplingParams(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (SamplingParams(top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(min_p=0.6), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (SamplingParams(top_p=1e-9), [1, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("draws", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_draws_follow_the_filtered_distribution(params: SamplingParams, expected: list[float], draws: int) -> None:
    # Shuffled, so that ids are not in the order of their scores.
    order = torch.tensor([2, 0, 3, 1])
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[order]
    tokens = draw(logits.repeat(draws, 1), [params] * draws, [99] * draws, list(range(draws)))
    counts = torch.bincount(torch.tensor(tokens), minlength=4)
    wanted = torch.tensor(expected)[order] * draws
    assert counts[wanted == 0].sum() == 0
    rows = SamplingRows.of([params], [99], [0], 4)
    torch.testing.assert_close(processed_log_probs(logits[None], rows).exp()[0], torch.tensor(expected).float()[order])
    possible = wanted > 0
    assert ((counts - wanted)[possible] ** 2 / wanted[possible]).sum() < 20  # 3 degrees of freedom; 16.3 is the 0.1% point


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_few_bits_are_drawn_as_the_numbers_that_they_are(dtype: torch.dtype) -> None:
    # Probabilities of a large vocabulary, summed in bfloat16, would lose most of the mass.
    V, draws = 5_000, 2_000
    logits = (torch.randn(V, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    rows = logits.repeat(8, 1)
    settings = [
        SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in [(1.0, 0.9, 0), (0.7, 1.0, 50), (1.0, 1.0, 0), (2.0, 0.5, 300)]
    ]
    for start in range(0, 40, 8):
        places = list(range(start, start + 8))
        assert draw(rows, settings * 2, [7] * 8, places) == draw(rows.double(), settings * 2, [7] * 8, places)
    # The kept half of the mass has half of the draws: 5 standard deviations.
    exact = logits.double().softmax(-1)
    order = exact.argsort(descending=True)
    head = order[: int((exact[order].cumsum(-1) < 0.5).sum())]
    tokens = torch.tensor([token for start in range(0, draws, 250) for token in draw(
        logits.repeat(250, 1), [SamplingParams()] * 250, [3] * 250, list(range(start, start + 250)))])  # fmt: skip
    share = float(torch.isin(tokens, head).double().mean())
    assert abs(share - float(exact[head].sum())) < 5 * 0.5 / draws**0.5


def test_a_greedy_row_is_sure_of_its_token() -> None:
    rows = SamplingRows.of([SamplingParams(temperature=0.0), SamplingParams(temperature=2.0)], [1, 1], [0, 0], 3)
    values = processed_log_probs(torch.tensor([[0.0, 3.0, 3.0]] * 2), rows)
    assert values[0].tolist() == [-math.inf, 0.0, -math.inf]
    torch.testing.assert_close(values[1], (torch.tensor([0.0, 3.0, 3.0]) / 2).log_softmax(-1))


def test_exactly_k_stay_when_scores_tie() -> None:
    logits = torch.zeros(2000, 6)
    tokens = draw(logits, [SamplingParams(top_k=3)] * 2000, [5] * 2000, list(range(2000)))
    assert set(tokens) == {0, 1, 2}


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.3, 1, 2]), top_k=rng.choice([0, 1, 5]), top_p=rng.choice([0, 0.4, 0.9]), min_p=rng.choice([0, 0.1])
        )
        for _ in range(64)
    ]
    logits = torch.randn(64, 50) * 3
    seeds, positions = [rng.randrange(-(2**63), 2**63) for _ in params], [rng.randrange(1000) for _ in params]
    together = draw(logits, params, seeds, positions)
    alone = [draw(logits[i : i + 1], [params[i]], [seeds[i]], [positions[i]])[0] for i in range(64)]
    assert together == alone


def test_rows_without_a_finite_best_score_are_marked_and_leave_others_alone() -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, 5.0], [-math.inf, -math.inf], [math.inf, 0.0], [-math.inf, 0.0]])
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_p=0.5)):
        tokens = draw(logits, [params] * 5, [3] * 5, [0] * 5)
        assert tokens[1:4] == [-1, -1, -1]
        assert tokens[0] in (0, 1) and tokens[4] == 1


def test_a_tiny_temperature_does_not_overflow() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4]])
    assert draw(logits, [SamplingParams(temperature=1e-6)], [1], [0]) == [0]
