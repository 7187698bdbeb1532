# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recipes of published sizes: as many parameters as published, layouts that fit, models that train and have a Hugging Face family."""

import json
import math

import pytest
import torch

from mcore_ckpt.megatron._args import args_of
from mcore_parallel.tensor_parallel import is_adapter
from mcore_parallel.training import Batch, train_step
from mcore_tools.assembly import assemble
from mcore_tools.cli import main
from mcore_tools.recipes import (
    KINDS,
    LAYOUTS,
    TUNING,
    Kind,
    RecipeError,
    layout,
    layouts_of,
    leanest,
    missing_layout,
    override,
    recipe,
    run_memory,
    sized_run,
)
from mcore_tools.recipes._memory import model_sizes
from mcore_tools.training import check_run, describe_model
from tools.docs.layouts import PAGES, ROOT, page

# Billions of parameters, as the models' cards say. The planner counts experts in DeepSeek's three dense layers too.
BILLIONS = {
    "deepseek_v3": 703.8, "gpt_oss_20b": 20.9, "llama3_70b": 70.6, "llama3_8b": 8.03, "nemotron_h_8b": 8.1, "qwen3_0_6b": 0.6,
    "qwen3_1_7b": 1.72, "qwen3_4b": 4.02, "qwen3_8b": 8.19, "qwen3_14b": 14.8, "qwen3_32b": 32.8, "qwen3_30b_a3b": 30.5,
}  # fmt: skip
FAMILIES = {
    "deepseek_v3": "deepseek3", "gpt_oss_20b": "gpt_oss", "llama3_70b": "llama", "llama3_8b": "llama", "nemotron_h_8b": "nemotron_h",
    "qwen3_0_6b": "qwen3", "qwen3_1_7b": "qwen3", "qwen3_4b": "qwen3", "qwen3_8b": "qwen3", "qwen3_14b": "qwen3", "qwen3_32b": "qwen3",
    "qwen3_30b_a3b": "qwen3_moe",
}  # fmt: skip


# Sizes of a family differ in numbers alone.
ONE_OF_EACH_FAMILY = list({family: name for name, family in FAMILIES.items()}.values())

PAIRS = [(kind, name, gpus) for kind in KINDS for name in LAYOUTS for gpus in layouts_of(kind, name)]
MISSING = [(kind, name, gpus) for kind in KINDS for name in LAYOUTS for gpus in (1, 2, 8, 64) if gpus not in layouts_of(kind, name)]


@pytest.mark.parametrize(("kind", "name", "gpus"), PAIRS)
def test_a_layout_takes_its_gpus_and_fits_them(monkeypatch: pytest.MonkeyPatch, kind: Kind, name: str, gpus: int) -> None:
    config = sized_run(name, kind, layouts_of(kind, name)[gpus])
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    check_run(config)
    assert run_memory(config).gib < 141 * 0.94


@pytest.mark.parametrize(("kind", "name", "gpus"), MISSING)
def test_where_there_is_no_layout_not_even_the_leanest_fits(kind: Kind, name: str, gpus: int) -> None:
    lean = leanest(name, kind, gpus)
    assert lean is not None and lean[1].gib > 141 * 0.94
    text = missing_layout(name, kind, gpus)
    assert "\n" not in text and f"takes {lean[1].gib:.0f} GiB a GPU (" in text
    fewest = min(layouts_of(kind, name), default=min(layouts_of("sft", name)))
    assert fewest > gpus or kind == "rl"
    assert f"{name}@{fewest}" in text


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not layouts_of("rl", name)])
def test_a_trainer_whose_answers_servers_draw_fits_as_the_refusal_says(name: str) -> None:
    gpus = min(layouts_of("sft", name))
    fields = [field for field in layouts_of("sft", name)[gpus] if not field.startswith("train.")]
    config = sized_run(name, "rl", [*fields, "rl.served.urls=[http://127.0.0.1:8000]"])
    assert config.plan.world_size == gpus and run_memory(config).gib < 141 * 0.94


@pytest.mark.journey
def test_the_tables_of_the_guides_are_what_the_planner_says() -> None:
    for path, kinds in PAGES.items():
        assert page(ROOT / path, kinds) == (ROOT / path).read_text(encoding="utf-8"), "python -m tools.docs.layouts --write"


def test_memory_of_adapters_and_of_rounded_weights_is_that_of_the_parts() -> None:
    config = sized_run("qwen3_0_6b", "lora")
    parts = assemble(override(config, ["train.dtype=float32"]), "meta").model
    adapters = sum(parameter.numel() for name, parameter in parts.named_parameters() if is_adapter(name))
    memory = run_memory(config)
    assert memory.adapters == 18 * adapters and memory.gradients == memory.optimizer == memory.loading == 0
    rounded = run_memory(override(config, ["lora.base_dtype=fp8_weight_only"]))
    frozen = sum(
        parameter.numel()
        for name, parameter in parts.named_parameters()
        if name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))
    )
    assert rounded.loading == memory.weights and rounded.weights == memory.weights - frozen


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_sizes_are_the_published_ones_and_the_model_can_be_exported(name: str) -> None:
    config = recipe(name)
    assert model_sizes(config).num_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert describe_model(config, None)["family"] == FAMILIES[name]


def test_a_model_that_no_family_expresses_says_its_sizes_for_megatron() -> None:
    config = override(recipe("qwen3_30b_a3b"), ["model.rotary_interleaved=true"])
    described = describe_model(config, None)
    assert described.keys() == {"config"}
    args = args_of(described["config"])
    assert args["rotary_interleaved"] is True and args["num_experts"] == 128 and args["moe_router_topk"] == 8


SMALL = ["model.hidden_size=64", "model.vocab_size=128", "model.ffn_hidden_size=96", "train.dtype=float32", "train.seq_len=16"]
BATCH = ["train.global_batch_size=2", "train.micro_batch_size=2"]
# Two layers or four of each kind, in the recipe's own proportions where it has some.
CUTS = {
    "deepseek_v3": ["model.num_layers=4", "model.num_attention_heads=2", "moe.moe_layer_freq=[0,1,1,1]", "moe.moe_ffn_hidden_size=32"],
    "gpt_oss_20b": ["model.num_layers=2", "model.num_attention_heads=8", "model.kv_channels=8", "moe.moe_ffn_hidden_size=32"],
    "nemotron_h_8b": [
        "model.num_layers=4",
        "model.hybrid_layer_pattern=M-*-",
        "model.mamba.num_groups=1",
        "model.num_attention_heads=8",
        "model.kv_channels=8",
    ],
    "qwen3_30b_a3b": ["model.num_layers=2", "model.num_attention_heads=8", "model.kv_channels=8", "moe.moe_ffn_hidden_size=32"],
}


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_a_cut_of_the_model_takes_a_step(name: str) -> None:
    cut = CUTS.get(name, ["model.num_layers=2", "model.num_attention_heads=8", "model.kv_channels=8"])
    # On one GPU as its layout says, where the whole model has one: with hosted state and narrow gradients, too.
    config = override(recipe(name), [*layouts_of("pretrain", name).get(1, ()), *SMALL, *BATCH, *cut])
    parts = assemble(config, "cpu")
    row = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 16))
    losses = [
        train_step(parts.model, [batch], parts.objective, parts.sync, parts.optimizer, lr=1e-3, groups=parts.groups).loss for _ in range(2)
    ]
    assert losses[0] == pytest.approx(math.log(128), abs=0.5) and losses[1] < losses[0]
    parts.close()


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_adapters_go_beside_the_layers_of_a_cut_and_take_a_step(name: str) -> None:
    cut = CUTS.get(name, ["model.num_layers=2", "model.num_attention_heads=8", "model.kv_channels=8"])
    (*_, fields) = TUNING["lora"][name].values()
    targets = [field for field in fields if field.startswith(("lora.", "moe."))]
    config = sized_run(name, "lora", [*SMALL, *BATCH, *cut, *targets])
    parts = assemble(config, "cpu")
    begun = {key: parameter.detach().clone() for key, parameter in parts.model.named_parameters()}
    row = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 16))
    for _ in range(2):
        train_step(parts.model, [batch], parts.objective, parts.sync, parts.optimizer, lr=1e-3, groups=parts.groups)
    changed = {key for key, parameter in parts.model.named_parameters() if not torch.equal(parameter, begun[key])}
    assert changed and all(is_adapter(key) for key in changed)
    parts.close()


def test_a_number_of_gpus_without_a_layout_is_refused_by_figures() -> None:
    with pytest.raises(
        RecipeError, match=r"'llama3_70b' does not fit 2 GPUs of 141 GiB: .* 139 GiB a GPU \(weights 66, .* llama3_70b@4 is the smallest"
    ):
        recipe("llama3_70b@2")
    with pytest.raises(RecipeError, match="2 GPUs are enough for mcore sft with adapters"):
        layout("llama3_70b@2", "sft")
    with pytest.raises(RecipeError, match=r"weights while they load 131, .* llama3_70b@2 is the smallest"):
        layout("llama3_70b@1", "lora")
    with pytest.raises(
        RecipeError, match=r"\(engine 165, .* with answers of servers \(rl.served.urls\) the fields of deepseek_v3@32 of mcore sft do"
    ):
        layout("deepseek_v3@64", "rl")
    # Engines over ranks are part of the leanest one.
    with pytest.raises(RecipeError, match=r"\(engine 67, .* llama3_70b@4 is the smallest"):
        layout("llama3_70b@2", "rl")
    with pytest.raises(RecipeError, match="rl 'llama3_70b' has layouts for 4, 8, 64 GPUs, found @16; .* --set rl.engine_tp=8"):
        layout("llama3_70b@16", "rl")


def test_a_number_of_gpus_that_would_fit_is_refused_with_fields_that_do() -> None:
    with pytest.raises(RecipeError, match="sft 'qwen3_8b' has layouts for 1, 2, 8, 64 GPUs, found @4") as refused:
        layout("qwen3_8b@4", "sft")
    _, *fields = str(refused.value).split(" --set ")
    config = sized_run("qwen3_8b", "sft", fields)
    assert config.plan.world_size == 4 and run_memory(config).gib < 141 * 0.94


def test_names_and_numbers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RecipeError, match="'gpt_tiny' has no layouts, found @2"):
        recipe("gpt_tiny@2")
    with pytest.raises(RecipeError, match="rl 'qwen3_8b' has layouts for 1, 2, 8, 64 GPUs, found @0"):
        layout("qwen3_8b@0", "rl")
    with pytest.raises(RecipeError, match="sft 'qwen3_8b' wants a number of GPUs, found @many; there are: qwen3_8b@1, "):
        layout("qwen3_8b@many", "sft")
    with pytest.raises(RecipeError, match="no layout of rl for 'llama3_71b'; did you mean 'llama3_70b'"):
        layout("llama3_71b@64", "rl")


def test_the_planner_prints_fields_that_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama3-8b", "--gpus", "8", "--sequence", "8192", "--global-batch", "128", "--data-parallel", "fsdp"]
    assert main([*words, "--top", "1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    _, _, flags = line.partition("fields of a run: --set ")
    config = override(recipe("llama3_8b"), flags.split(" --set "))
    assert config.plan.dp * config.plan.tp * config.plan.pp == 8 and config.train.global_batch_size == 128
    assert main([*words, "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["fields"] == flags.split(" --set ")
