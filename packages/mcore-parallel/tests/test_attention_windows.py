# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which layers have a window, and what it hides."""

import pytest
import torch

from mcore_parallel.nn import get_sliding_window_causal_mask, is_layer_window_attention, reference_attention
from mcore_parallel.nn.attention._windows import MAX_PATTERN_LAYERS, parse_layer_pattern

WINDOWS = [(0, 0), (3, 0), (3, 2), (-1, 0), (-1, -1), (2, -1)]


def layers(choice: int | list[int] | str | None, count: int) -> list[int]:
    return [layer for layer in range(1, count + 1) if is_layer_window_attention((8, 0), choice, layer, num_layers=count)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 9), (4, 9), (5, 3)])
def test_the_mask_hides_what_the_definition_hides(window: tuple[int, int], queries: int, keys: int) -> None:
    mask = get_sliding_window_causal_mask(queries, keys, window)
    left, right = (keys + queries if limit < 0 else limit for limit in window)
    for i in range(queries):
        for j in range(keys):
            place = i + keys - queries
            assert mask[i, j] == (not place - left <= j <= place + right)


def test_no_limit_hides_nothing() -> None:
    assert not get_sliding_window_causal_mask(5, 9, (-1, -1)).any()


def test_equal_calls_share_a_mask_that_training_can_use() -> None:
    with torch.inference_mode():
        first = get_sliding_window_causal_mask(6, 11, (4, 0), "cpu")
    assert get_sliding_window_causal_mask(6, 11, (4, 0), "cpu") is first
    x = torch.zeros(6, 11, requires_grad=True)
    x.masked_fill(first, 1.0).sum().backward()
    assert torch.equal(x.grad == 0, first)


def test_a_mask_is_made_where_it_is_asked_for() -> None:
    assert get_sliding_window_causal_mask(2, 2, (0, 0), "meta").device.type == "meta"


def test_limits_below_minus_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"window_size=\(-2, 0\).*-1 for no limit"):
        get_sliding_window_causal_mask(2, 2, (-2, 0))


def test_a_mask_of_the_caller_adds_to_the_window() -> None:
    q, k, v = (torch.randn(6, 1, 4, dtype=torch.float64) for _ in range(3))
    own = torch.zeros(6, 6, dtype=torch.bool)
    own[:, 2] = True
    hidden = own | get_sliding_window_causal_mask(6, 6, (3, 0))
    scores = (q[:, 0] @ k[:, 0].T / 2).masked_fill(hidden, float("-inf"))
    torch.testing.assert_close(reference_attention(q, k, v, window=(3, 0), mask=own)[:, 0], scores.softmax(-1) @ v[:, 0])


def test_every_fourth_layer_of_eight_is_full() -> None:
    assert layers(4, 8) == [1, 2, 3, 5, 6, 7]
    assert layers(None, 3) == [1, 2, 3]
    assert layers(1, 3) == []
    assert not is_layer_window_attention(None, 4, 1)


@pytest.mark.parametrize("choice", [[1, 1, 1, 0, 1, 1, 1, 0], "([1]*3+[0]*1)*2", "2 * ([1,1] + [1] + [0])", "[1,1,1,0]*2", "4"])
def test_lists_and_patterns_equal_the_number(choice: list[int] | str) -> None:
    assert layers(choice, 8) == layers(4, 8)


def test_layers_that_predict_further_tokens_have_no_window() -> None:
    for choice in (None, 4, [1, 1], "[1]*2"):
        assert not is_layer_window_attention((8, 0), choice, 3, num_layers=2)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ([1, 0, 1], r"names 3 layers, but num_layers=4; give one entry a layer"),
        ("[1]*5", r"names 5 layers, but num_layers=4"),
        ([1, 0, 2, 1], r"holds 2; use 1 for a window"),
        (0, r"window_attn_skip_freq=0 must be at least 1"),
        (-3, r"window_attn_skip_freq=-3 must be at least 1"),
    ],
)
def test_lists_that_do_not_fit_are_refused(choice: int | list[int] | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        is_layer_window_attention((8, 0), choice, 1, num_layers=4)


def test_a_layer_outside_the_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names 2 layers, but layer_number=3"):
        is_layer_window_attention((8, 0), [1, 0], 3)
    with pytest.raises(ValueError, match=r"layer_number=0 must be at least 1"):
        is_layer_window_attention((8, 0), [1, 0], 0)


@pytest.mark.parametrize(
    ("pattern", "position"),
    [
        ("", 0),
        ("[1", 2),
        ("[1]*", 4),
        ("[1]+2", 3),
        ("[1]*[2]", 3),
        ("[1] [0]", 4),
        ("[1]]", 3),
        ("[-1]", 1),
        ("[1,]", 3),
        ("((1)", 4),
        ("[1]*1000000000", 4),
        (f"[1]*{MAX_PATTERN_LAYERS + 1}", 3),
        ("__import__('os').system('true')", 0),
        ("[1 for _ in x]", 3),
        ("(" * 60 + "1" + ")" * 60, 50),
    ],
)
def test_a_pattern_that_is_none_is_refused_with_its_position(pattern: str, position: int) -> None:
    with pytest.raises(ValueError, match=f"position {position}:"):
        parse_layer_pattern(pattern)
