# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recipes and the changing of their fields."""

import re

import pytest

from mcore_parallel.tensor_parallel import LoraConfig
from mcore_tools.recipes import RECIPES, RecipeError, override, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds(name: str) -> None:
    assert recipe(name).train.steps > 0


def test_fields_change_by_path_and_type() -> None:
    config = override(
        recipe("moe_tiny"), ["train.steps=7", "optimizer.lr=1e-4", "plan.sequence_parallel=false", "model.kv_channels=none", "moe=none"]
    )
    assert (config.train.steps, config.optimizer.lr, config.plan.sequence_parallel, config.model.kv_channels) == (7, 1e-4, False, None)
    assert config.moe is None
    assert recipe("moe_tiny").train.steps != 7


@pytest.mark.parametrize("patterns", ["layers.1?.mlp.*", "*.qkv, layers.[01].mlp.up", "out"])
def test_patterns_need_no_quotation_marks(patterns: str) -> None:
    assert override(LoraConfig(), [f"targets=[{patterns}]"]).targets == tuple(patterns.split(", "))


def test_changes_take_effect_together() -> None:
    # Neither of these is possible alone.
    for assignments in (["plan.ep=4", "plan.dp=4"], ["plan.dp=4", "plan.ep=4"]):
        assert override(recipe("moe_tiny"), [*assignments, "train.global_batch_size=32"]).plan.ep == 4
    assert override(recipe("moe_tiny"), ["train.steps=0", "train.steps=5"]).train.steps == 5


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.stpes=7", "did you mean 'steps'"),
        ("train.steps=seven", "train.steps='seven' is not of type int"),
        ("steps", "has no '='"),
        ("train.steps.more=1", "no field 'more'"),
        ("plan.tp=0", "tp=0 must be at least 1"),
        ("plan.ep=4", r"etp\*ep=1\*4 must divide tp\*cp\*dp=1\*1\*1=1"),
        ("train.steps=0", "steps=0 must be at least 1"),
        ("train.dtype=half", "dtype='half' must be one of float32"),
        ("train.global_batch_size=7", "global_batch_size=7 must be a multiple of train.micro_batch_size=8"),
        ("pipeline.schedule=gpipe", "schedule='gpipe' must be one of auto, 1f1b, interleaved, zero_bubble, combined"),
    ],
)
def test_bad_changes_name_what_is_wrong(assignment: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        override(recipe("moe_tiny"), [assignment])


@pytest.mark.parametrize(("assignments", "field"), [(["plan.ep=2"], "plan.ep=2"), (["plan.tp=2", "plan.dp=1", "plan.etp=2"], "plan.etp=2")])
def test_a_model_without_experts_divides_none(assignments: list[str], field: str) -> None:
    with pytest.raises(RecipeError, match=f"{field} divides experts, and the model has none"):
        override(recipe("gpt_tiny"), ["plan.dp=2", *assignments])


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'moe_tiny'"):
        recipe("moe_tny")


def test_what_torch_cannot_shard_is_named() -> None:
    tiny = recipe("gpt_tiny")
    assert override(tiny, ["plan.dp=2", "data_parallel=fsdp2"]).data_parallel == "fsdp2"
    for changes, message in {
        ("plan.dp=1",): "found plan.dp=1; raise dp, or set data_parallel=ddp",
        ("plan.dp=2", "plan.pp=2"): "data_parallel='fsdp2' needs plan.pp=1, found 2; set data_parallel=fsdp",
        ("plan.dp=2", "optimizer.optimizer=muon"): "data_parallel='fsdp2' cannot step with optimizer='muon'",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            override(tiny, [*changes, "data_parallel=fsdp2"])
    with pytest.raises(ValueError, match="data_parallel='fsdp2' does not divide experts"):
        override(recipe("moe_tiny"), ["plan.dp=2", "data_parallel=fsdp2"])


def test_what_runs_again_draws_no_other_noise() -> None:
    noisy = ["moe.moe_input_jitter_eps=0.01", "recompute.granularity=full"]
    assert override(recipe("moe_tiny"), noisy).recompute is not None
    with pytest.raises(ValueError, match=r"preserve_rng_state=False .* moe_input_jitter_eps=0\.01 draws some"):
        override(recipe("moe_tiny"), [*noisy, "recompute.preserve_rng_state=false"])
    graphed = ["moe.moe_input_jitter_eps=0.01", "cuda_graphs=[layers.*]"]
    assert override(recipe("moe_tiny"), graphed).cuda_graphs
    with pytest.raises(ValueError, match=r"cuda_graph\.recompute=true would draw others .* than moe_input_jitter_eps=0\.01 drew"):
        override(recipe("moe_tiny"), [*graphed, "cuda_graph.recompute=true"])
