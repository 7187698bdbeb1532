# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recipes of published sizes: as many parameters as published, layouts that fit, models that train and have a Hugging Face family."""

import json
import math

import pytest
import torch

from mcore_parallel.data_parallel import DistributedDataParallelConfig
from mcore_parallel.planner import ExpertSizes, Layout, ModelSizes, Workload, estimate
from mcore_parallel.training import Batch, train_step
from mcore_tools.assembly import assemble
from mcore_tools.cli import main
from mcore_tools.recipes import LAYOUTS, RecipeError, RunConfig, override, recipe
from mcore_tools.training import describe_model

GPU_GIB = 141 * 0.94
# Billions of parameters, as the models' cards say. The planner counts experts in DeepSeek's three dense layers too.
BILLIONS = {
    "deepseek_v3": 703.8, "gpt_oss_20b": 20.9, "llama3_70b": 70.6, "llama3_8b": 8.03, "nemotron_h_8b": 8.1, "qwen3_0_6b": 0.6,
    "qwen3_30b_a3b": 30.5, "qwen3_8b": 8.19,
}  # fmt: skip
FAMILIES = {
    "deepseek_v3": "deepseek3", "gpt_oss_20b": "gpt_oss", "llama3_70b": "llama", "llama3_8b": "llama", "nemotron_h_8b": "nemotron_h",
    "qwen3_0_6b": "qwen3", "qwen3_30b_a3b": "qwen3_moe", "qwen3_8b": "qwen3",
}  # fmt: skip


def sizes(config: RunConfig) -> ModelSizes:
    moe = config.moe
    if moe is None:
        return ModelSizes(config=config.model)
    experts = ExpertSizes(
        num_experts=moe.num_moe_experts,
        topk=moe.moe_router_topk,
        ffn_hidden_size=moe.moe_ffn_hidden_size or config.model.ffn_size,
        shared_ffn_hidden_size=moe.moe_shared_expert_intermediate_size or 0,
    )
    return ModelSizes(config=config.model, experts=experts)


@pytest.mark.parametrize(("name", "gpus"), [(name, gpus) for name, layouts in LAYOUTS.items() for gpus in layouts])
def test_a_layout_takes_its_gpus_and_fits_them(name: str, gpus: int) -> None:
    config = recipe(f"{name}@{gpus}")
    plan, train = config.plan, config.train
    assert plan.tp * plan.pp * plan.cp * plan.dp == gpus
    workload = Workload(
        model=sizes(config),
        sequence=train.seq_len,
        global_batch=train.global_batch_size,
        micro_batch=train.micro_batch_size,
        optimizer=config.optimizer,
    )
    sync = DistributedDataParallelConfig(use_distributed_optimizer=config.optimizer.use_distributed_optimizer)
    strategy = config.fsdp.zero_dp_strategy if config.data_parallel == "fsdp" else None
    layout = Layout(plan=plan, recompute=config.recompute, sync=sync, zero_dp_strategy=strategy)
    assert estimate(workload, layout).total / 2**30 < GPU_GIB


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_sizes_are_the_published_ones_and_the_model_can_be_exported(name: str) -> None:
    config = recipe(name)
    assert sizes(config).num_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert describe_model(config, None)["family"] == FAMILIES[name]


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


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_cut_of_the_model_takes_a_step(name: str) -> None:
    cut = CUTS.get(name, ["model.num_layers=2", "model.num_attention_heads=8", "model.kv_channels=8"])
    config = override(recipe(name), [*SMALL, *BATCH, *cut])
    parts = assemble(config, "cpu")
    row = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 16))
    losses = [
        train_step(parts.model, [batch], parts.objective, parts.sync, parts.optimizer, lr=1e-3, groups=parts.groups).loss for _ in range(2)
    ]
    assert losses[0] == pytest.approx(math.log(128), abs=0.5) and losses[1] < losses[0]
    parts.close()


def test_a_number_of_gpus_without_a_layout_is_refused() -> None:
    with pytest.raises(RecipeError, match="'llama3_70b' has layouts for 64 GPUs, found @8"):
        recipe("llama3_70b@8")
    with pytest.raises(RecipeError, match="'gpt_tiny' has no layouts, found @2"):
        recipe("gpt_tiny@2")


def test_the_planner_prints_fields_that_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama3-8b", "--gpus", "8", "--sequence", "8192", "--global-batch", "128", "--data-parallel", "fsdp"]
    assert main([*words, "--top", "1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    _, _, flags = line.partition("fields of a run: --set ")
    config = override(recipe("llama3_8b"), flags.split(" --set "))
    assert config.plan.dp * config.plan.tp * config.plan.pp == 8 and config.train.global_batch_size == 128
    assert main([*words, "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["fields"] == flags.split(" --set ")
