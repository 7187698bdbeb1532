# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recipes of published sizes: as many parameters as published, layouts that fit, models that train and have a Hugging Face family."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mcore_parallel.data_parallel import DistributedDataParallelConfig
from mcore_parallel.planner import ExpertSizes, Layout, ModelSizes, RankMemory, Workload, estimate
from mcore_parallel.tensor_parallel import is_adapter
from mcore_parallel.training import Batch, train_step
from mcore_tools.assembly import assemble
from mcore_tools.cli import main
from mcore_tools.recipes import LAYOUTS, TUNING, Job, LoadConfig, RecipeError, RLConfig, RunConfig, SFTConfig, layout, override, recipe
from mcore_tools.training import check_run, describe_model

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


def memory(config: RunConfig) -> RankMemory:
    train = config.train
    workload = Workload(
        model=sizes(config),
        sequence=train.seq_len,
        global_batch=train.global_batch_size,
        micro_batch=train.micro_batch_size,
        optimizer=config.optimizer,
    )
    sync = DistributedDataParallelConfig(use_distributed_optimizer=config.optimizer.use_distributed_optimizer)
    strategy = config.fsdp.zero_dp_strategy if config.data_parallel == "fsdp" else None
    return estimate(workload, Layout(plan=config.plan, recompute=config.recompute, sync=sync, zero_dp_strategy=strategy))


@pytest.mark.parametrize(("name", "gpus"), [(name, gpus) for name, layouts in LAYOUTS.items() for gpus in layouts])
def test_a_layout_takes_its_gpus_and_fits_them(name: str, gpus: int) -> None:
    config = recipe(f"{name}@{gpus}")
    assert config.plan.world_size == gpus
    assert memory(config).total / 2**30 < GPU_GIB


def tuned(name: str, job: Job, changes: Sequence[str] = ()) -> RunConfig:
    """The run of `mcore sft` or `mcore rl` of a published model, but for its layout."""
    base = recipe(name)
    rows = {"seq_len": 1024, "global_batch_size": 64} if job == "rl" else {"seq_len": 4096, "global_batch_size": 8}
    sort: dict[str, Any] = {"rl": RLConfig()} if job == "rl" else {"sft": SFTConfig(data=("chat.jsonl",))}
    config = dataclasses.replace(base, load=LoadConfig(path="published"), train=dataclasses.replace(base.train, **rows), **sort)
    return override(config, [*(["lora.rank=16"] if job == "lora" else []), *changes])


JOBS = [(job, name, gpus) for job, models in TUNING.items() for name, layouts in models.items() for gpus in layouts]


@pytest.mark.parametrize(("job", "name", "gpus"), JOBS)
def test_a_layout_for_tuning_takes_its_gpus_and_fits_them(monkeypatch: pytest.MonkeyPatch, job: Job, name: str, gpus: int) -> None:
    config = tuned(name, job, layout(f"{name}@{gpus}", job))
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    check_run(config)
    part, num_parameters = memory(config), sizes(config).num_parameters
    total = part.total
    if job == "lora":
        # Adapters of rank 16 are below 2 % of the weights, with 18 bytes a parameter whole on each rank.
        assert config.lora is not None and config.lora.rank == 16
        total += int(0.02 * num_parameters * 18) - part.grads - part.optimizer
    if config.rl is not None:
        total += 2 * num_parameters + int(config.rl.cache_gb * 2**30) - part.optimizer * config.rl.memory.stream_optimizer
    assert total / 2**30 < GPU_GIB


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


@pytest.mark.parametrize("name", sorted(TUNING["lora"]))
def test_adapters_go_beside_the_layers_of_a_cut_and_take_a_step(name: str) -> None:
    cut = CUTS.get(name, ["model.num_layers=2", "model.num_attention_heads=8", "model.kv_channels=8"])
    (*_, fields) = (layout(f"{name}@{gpus}", "lora") for gpus in TUNING["lora"][name])
    targets = [field for field in fields if field.startswith("lora.")]
    config = override(tuned(name, "lora"), [*SMALL, *BATCH, *cut, *targets])
    parts = assemble(config, "cpu")
    begun = {key: parameter.detach().clone() for key, parameter in parts.model.named_parameters()}
    row = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 16))
    for _ in range(2):
        train_step(parts.model, [batch], parts.objective, parts.sync, parts.optimizer, lr=1e-3, groups=parts.groups)
    changed = {key for key, parameter in parts.model.named_parameters() if not torch.equal(parameter, begun[key])}
    assert changed and all(is_adapter(key) for key in changed)
    parts.close()


def test_a_number_of_gpus_without_a_layout_is_refused() -> None:
    with pytest.raises(RecipeError, match="'llama3_70b' has layouts for 8, 64 GPUs, found @2"):
        recipe("llama3_70b@2")
    with pytest.raises(RecipeError, match="'gpt_tiny' has no layouts, found @2"):
        recipe("gpt_tiny@2")
    with pytest.raises(RecipeError, match="rl 'qwen3_30b_a3b' has layouts for 8, 64 GPUs, found @1"):
        layout("qwen3_30b_a3b@1", "rl")
    with pytest.raises(RecipeError, match="no layout of rl for 'llama3_70b'; did you mean 'llama3_8b'"):
        layout("llama3_70b@64", "rl")


def test_the_planner_prints_fields_that_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama3-8b", "--gpus", "8", "--sequence", "8192", "--global-batch", "128", "--data-parallel", "fsdp"]
    assert main([*words, "--top", "1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    _, _, flags = line.partition("fields of a run: --set ")
    config = override(recipe("llama3_8b"), flags.split(" --set "))
    assert config.plan.dp * config.plan.tp * config.plan.pp == 8 and config.train.global_batch_size == 128
    assert main([*words, "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["fields"] == flags.split(" --set ")
