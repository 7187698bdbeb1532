# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Patterns of hybrid stacks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_parallel.models import (
    LayerPattern,
    LayerPatternError,
    TransformerConfig,
    allocate_layers,
    get_layer_maps_from_layer_type_list,
    layer_maps_by_symbol,
    place_layers,
)
from mcore_parallel.nn import MambaConfig
from mcore_parallel.pipeline import PipelineConfig


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 0.25, 0.0), "MM*MM*MM"),
        ((8, 0.0, 0.0), "MMMMMMMM"),
        ((4, 1.0, 0.0), "****"),
        ((3, 0.0, 1.0), "---"),
        ((8, 0.0, 0.5), "M-M-M-M-"),
        ((9, 1 / 9, 4 / 9), "M-M-*M-M-"),
        ((5, 0.2, 0.0, "M-*-M"), "M-*-M"),
    ],
)
def test_ratios_spread_the_layers_evenly(arguments: tuple, expected: str) -> None:
    assert "".join(allocate_layers(*arguments)) == expected


@given(st.integers(1, 60), st.floats(0, 1), st.floats(0, 1))
def test_ratios_give_the_nearest_numbers(num_layers: int, attention: float, mlp: float) -> None:
    wanted = round(num_layers * attention), round(num_layers * mlp)
    if sum(wanted) > num_layers:
        with pytest.raises(LayerPatternError, match="lower one"):
            allocate_layers(num_layers, attention, mlp)
        return
    symbols = allocate_layers(num_layers, attention, mlp)
    assert (len(symbols), symbols.count("*"), symbols.count("-")) == (num_layers, *wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.1, 0.1), "num_layers=0 must be at least 1"),
        ((4, 1.5, 0.0), r"attention_ratio=1.5 must lie in \[0, 1\]"),
        ((4, 0.5, -0.1), r"mlp_ratio=-0.1 must lie in \[0, 1\]"),
        ((4, 0.0, 0.0, "MM"), "override_pattern='MM' must have num_layers=4 symbols .* found 2"),
        ((2, 0.0, 0.0, "M|M"), "no '|' or '/'"),
        ((2, 0.0, 0.0, "MX"), "'X' at position 1"),
    ],
)
def test_ratios_that_do_not_fit_are_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(LayerPatternError, match=message):
        allocate_layers(*arguments)


def test_maps_number_the_layers_of_each_kind() -> None:
    assert get_layer_maps_from_layer_type_list(list("M*-ME-+")) == ({1: 0, 6: 1}, {0: 0, 3: 1}, {2: 0, 5: 1}, {4: 0})
    by_symbol = layer_maps_by_symbol("MG*G")
    assert by_symbol == {"M": {0: 0}, "G": {1: 0, 3: 1}, "*": {2: 0}, "+": {}, "-": {}, "E": {}}
    with pytest.raises(LayerPatternError, match="layer 1 is 'G'.*layer_maps_by_symbol"):
        get_layer_maps_from_layer_type_list(["M", "G"])
    with pytest.raises(LayerPatternError, match="layer 2 is 'x'"):
        layer_maps_by_symbol("M*x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MM*D-", "'D' at position 3; write M .mamba.*latent attention.*pipeline segments"),
        ("M *", "' ' at position 1"),
        ("", "no layer before its first '/'"),
        ("|", "no layer"),
        ("/*-", "no layer"),
        ("M*|+", r"'\*' at position 1 with '\+' at position 3"),
        ("M*/*-/M", "'M' as depth 1"),
        ("M*/", "'' as depth 0"),
        ("M*/*|-", r"'\*|-' as depth 0"),
    ],
)
def test_patterns_that_cannot_be_read_name_symbol_and_position(text: str, message: str) -> None:
    with pytest.raises(LayerPatternError, match=message):
        LayerPattern.parse(text)


def test_segments_become_virtual_stages_in_the_order_of_the_chunks() -> None:
    layout = LayerPattern.parse("MM||*-|M-/*-/*-").layout(2, 2)
    assert [stage.layers for stage in layout.stages] == [range(2), range(2, 2), range(2, 4), range(4, 6)]
    assert [stage.layers for stage in layout.of_rank(0)] == [range(2), range(2, 4)]
    assert [stage.embedding for stage in layout.stages] == [True, False, False, False]
    assert [(stage.loss, stage.mtp_layers) for stage in layout.stages[2:]] == [(False, range(0)), (True, range(2))]
    with pytest.raises(LayerPatternError, match=r"has 4 segments, but pp\*vpp=3\*1 .* write 2 '|'"):
        LayerPattern.parse("MM||*-|M-").layout(3)
    even = LayerPattern.parse("M-M*/M").layout(2)
    assert [(stage.layers, stage.mtp_layers) for stage in even.stages] == [(range(2), range(0)), (range(2, 4), range(1))]


def test_a_run_places_the_layers_by_the_pattern_or_by_its_pipeline() -> None:
    sizes = {"num_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    hybrid = TransformerConfig(**sizes, hybrid_layer_pattern="M|*-", mamba=MambaConfig(head_dim=4, num_groups=1))
    assert [stage.layers for stage in place_layers(hybrid, PipelineConfig(), num_stages=2).stages] == [range(1), range(1, 3)]
    with pytest.raises(LayerPatternError, match=r"pipeline.layout='Et\|ttL' both place the layers"):
        place_layers(hybrid, PipelineConfig(layout="Et|ttL"), num_stages=2)
    further = TransformerConfig(**sizes, mtp_num_layers=2)
    assert place_layers(further, PipelineConfig(), num_stages=2).stages[1].mtp_layers == range(2)
    assert place_layers(further, PipelineConfig(layout="Ett|tmmL"), num_stages=2).stages[1].mtp_layers == range(2)
    for layout in ("Ett|tL", "Ett|tmL", "Ettt|m|m|L"):
        with pytest.raises(ValueError, match="depths 'm' beside the loss, but mtp_num_layers=2; write as many m"):
            place_layers(further, PipelineConfig(layout=layout), num_stages=2, num_chunks=1 + (layout.count("|") > 1))
