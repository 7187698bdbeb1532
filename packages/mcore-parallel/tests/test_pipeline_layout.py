# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which virtual stage holds what."""

import pytest
from torch import nn

from mcore_parallel.pipeline import ModelChunks, PipelineLayout, StageLayout, partition_layers


def sizes(layout: PipelineLayout) -> list[int]:
    return [len(stage.layers) for stage in layout.stages]


def test_every_layer_is_placed_once_in_order() -> None:
    for stages in range(1, 6):
        for chunks in range(1, 4):
            for layers in range(stages * chunks, 30):
                for embedding, loss in ((False, False), (True, False), (False, True), (True, True)):
                    layout = PipelineLayout.even(
                        layers, num_stages=stages, num_chunks=chunks, account_for_embedding=embedding, account_for_loss=loss
                    )
                    assert [number for stage in layout.stages for number in stage.layers] == list(range(layers))
                    assert layout.num_chunks == chunks and layout.num_layers == layers
                    counted = [size + embedding * (i == 0) + loss * (i == stages * chunks - 1) for i, size in enumerate(sizes(layout))]
                    assert max(counted) - min(counted) <= 1
                    assert [stage.embedding for stage in layout.stages] == [i == 0 for i in range(stages * chunks)]
                    assert [stage.loss for stage in layout.stages] == [i == stages * chunks - 1 for i in range(stages * chunks)]
    assert [stage.layers for stage in PipelineLayout.even(10, num_stages=4).stages] == [
        partition_layers(10, 4, stage) for stage in range(4)
    ]


def test_embedding_and_loss_may_count_as_a_layer() -> None:
    assert sizes(PipelineLayout.even(6, num_stages=4, account_for_embedding=True, account_for_loss=True)) == [1, 2, 2, 1]
    # One of each a stage: the ends hold no layer.
    assert sizes(PipelineLayout.even(2, num_stages=4, account_for_embedding=True, account_for_loss=True)) == [0, 1, 1, 0]


def test_the_end_stages_may_be_given_their_number() -> None:
    assert sizes(PipelineLayout.even(10, num_stages=4, num_layers_in_first_stage=1)) == [1, 3, 3, 3]
    assert sizes(PipelineLayout.even(10, num_stages=4, num_layers_in_first_stage=1, num_layers_in_last_stage=3)) == [1, 3, 3, 3]
    layout = PipelineLayout.even(16, num_stages=4, num_chunks=2, num_layers_in_first_stage=2, num_layers_in_last_stage=2)
    assert sizes(layout) == [1, 3, 3, 1, 1, 3, 3, 1]
    assert layout.of_rank(1) == [StageLayout(layers=range(1, 4)), StageLayout(layers=range(9, 12))]
    assert sizes(PipelineLayout.even(4, num_stages=3, num_layers_in_last_stage=0)) == [2, 2, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers_in_first_stage": 3, "num_chunks": 2}, "num_layers_in_first_stage=3 must be a multiple of num_chunks=2"),
        ({"num_layers_in_last_stage": 1, "account_for_loss": True}, "num_layers_in_last_stage=1 and account_for_loss=True exclude"),
        ({"num_layers_in_first_stage": 1, "account_for_embedding": True}, "num_layers_in_first_stage=1 and account_for_embedding=True"),
        ({"num_layers_in_first_stage": 2, "num_stages": 1}, "needs more than one stage"),
        ({"num_layers_in_first_stage": 2, "num_layers_in_last_stage": 2}, "hold 4 of num_layers=8; give them all layers"),
        ({"num_stages": 9}, "num_layers=8 must be at least the number of pipeline stages 9"),
    ],
)
def test_numbers_that_do_not_fit_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineLayout.even(8, **{"num_stages": 2, **options})  # type: ignore[arg-type]


def test_text_and_lists_say_the_same() -> None:
    layout = PipelineLayout.parse("Et*3|(tt|)*29,m|L", num_stages=8, num_layers=61)
    assert layout.num_chunks == 4 and sizes(layout) == [3, *[2] * 29, 0, 0]
    assert layout.stage(0) == StageLayout(layers=range(3), embedding=True)
    assert layout.stage(6, chunk=3) == StageLayout(layers=range(61, 61), mtp_layers=range(1))
    assert layout.stage(7, chunk=3) == StageLayout(layers=range(61, 61), loss=True)
    assert layout.stage(2, chunk=1).layers == range(21, 23)
    nested = PipelineLayout.parse([["embedding", "t"], "t*2", [], ["decoder", "mtp", "mtp", "L"]], num_stages=4)
    assert nested == PipelineLayout.parse("E t | tt | | t mm L", num_stages=4)
    assert nested.stages[3] == StageLayout(layers=range(3, 4), mtp_layers=range(2), loss=True)
    assert sizes(PipelineLayout.parse("E((t|)*2t|)*2L", num_stages=7)) == [1, 1, 1, 1, 1, 1, 0]
    assert sizes(PipelineLayout.parse("Et|(t)tL", num_stages=2)) == [1, 2]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|x|tL", "leaves 'x' unread"),
        ("E(t|tL", r"leaves '\(' unread"),
        ("Et*|L", r"leaves '\*' unread"),
        ("t|tL", "must hold one E, first"),
        ("Et|t", "one L, last"),
        ("EtE|L", "must hold one E"),
        ("|EtL", "must hold one E, first in its first stage"),
        ("EtL|", "one L, last in its last"),
        ("Em|tL", "has an m before a t"),
        ("Et|t|tL", "has 3 virtual stages, no multiple of num_stages=2"),
        ([["embedding"], ["decoded", "loss"]], "names 'decoded'; write one of E, t, m, L, embedding"),
        ("Et|L", "places 1 layers, but num_layers=2"),
    ],
)
def test_a_layout_that_cannot_be_is_named(layout: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineLayout.parse(layout, num_stages=2, num_layers=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stage=1 chunk=0 must lie within 1 stages of 1 chunks"):
        PipelineLayout.parse("EtL", num_stages=1).stage(1)


def test_chunks_are_one_module_under_global_names() -> None:
    def part(**children: nn.Module) -> nn.Module:
        module = nn.Module()
        for name, child in children.items():
            module.add_module(name, child)
        return module

    first = part(embedding=nn.Embedding(2, 2), layers=nn.ModuleDict({"0": nn.Linear(1, 1)}), output=None)  # type: ignore[arg-type]
    second = part(layers=nn.ModuleDict({"4": nn.Linear(1, 1)}), output=nn.Dropout())
    chunks = ModelChunks([first, second])
    assert [name for name, _ in chunks.named_parameters()] == [
        "embedding.weight", "layers.0.weight", "layers.0.bias", "layers.4.weight", "layers.4.bias"
    ]  # fmt: skip
    assert list(chunks) == [first, second] and len(chunks) == 2 and chunks[1] is second
    assert [name for name, _ in first.named_parameters()] == ["embedding.weight", "layers.0.weight", "layers.0.bias"]
    chunks.eval()
    assert not (first.training or second.training or second.get_submodule("output").training)
    with pytest.raises(ValueError, match="two chunks have a child 'layers'"):
        ModelChunks([first, part(layers=nn.ModuleDict({"0": nn.Linear(1, 1)}))])
    with pytest.raises(ValueError, match="Linear owns 'weight' itself"):
        ModelChunks([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="holds no model chunk"):
        ModelChunks([])
