# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The planner's formulas for experts, and the script that compares estimates with runs."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.planner import Layout, Workload, estimate, find_model
from mcore_parallel.planner._cost import recompute_share
from tools.bench import memory_estimate

FIELDS = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256, "num_moe_experts": 4, "moe_ffn_hidden_size": 96}


@pytest.mark.parametrize("fields", [{}, {"activation": "gelu"}, {"activation": "relu", "add_bias_linear": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_have_the_parameters_and_keep_the_tensors_that_are_estimated(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    check_estimate(dtype, fields, None, None)


@pytest.mark.parametrize("modules", [(), ("moe_act",), ("shared_experts",), ("moe_act", "shared_experts")], ids=str)
def test_what_experts_recompute_is_not_kept(modules: tuple[str, ...]) -> None:
    check_estimate(torch.float32, {}, 80, RecomputeConfig(modules=modules) if modules else None)


def test_recomputed_parts_of_experts_take_a_share_of_the_time() -> None:
    model = find_model(overrides=FIELDS | {"moe_shared_expert_intermediate_size": 96})
    whole = recompute_share(model, RecomputeConfig(modules=("mlp",)))
    # Of the two picks of a token and the shared expert each has a third.
    assert recompute_share(model, RecomputeConfig(modules=("shared_experts",))) == pytest.approx(whole / 3)
    assert 0 < recompute_share(model, RecomputeConfig(modules=("moe_act",))) < whole / 3


def check_estimate(dtype: torch.dtype, fields: dict[str, Any], shared: int | None, recompute: RecomputeConfig | None) -> None:
    model = find_model(overrides=FIELDS | ({} if shared is None else {"moe_shared_expert_intermediate_size": shared}))
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **fields))
    mixture = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_ffn_hidden_size=96, moe_shared_expert_intermediate_size=shared))
    module = GPTModel(model.config, ProcessGroups.single(), feed_forward=mixture, recompute=recompute, dtype=dtype)
    work = Workload(model=model, sequence=128, global_batch=2, micro_batch=2, dtype=dtype)
    memory = estimate(work, Layout(plan=ParallelPlan(), recompute=recompute), kernels=False)
    assert memory.params == sum(parameter.nbytes for parameter in module.parameters())
    assert model.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = module(torch.zeros(256, dtype=torch.int64), Step.causal(2, 128))
    final_norm = 4 * 256 * (2 * 64 + 1)
    assert memory.activations + final_norm == pytest.approx(sum(storage.nbytes() for storage in storages.values()), rel=0.01)
    del output


@pytest.mark.journey
def test_the_script_writes_a_row_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_estimate, "launch", lambda work, ranks, *, device, **inputs: [work(**inputs) for _ in range(ranks)])
    monkeypatch.setattr(sys, "argv", ["memory_estimate", "--model", "tiny", "--steps", "1", "--output", str(tmp_path / "rows.json")])
    memory_estimate.main()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == len(memory_estimate.cases(1, "tiny", None))
    for row in rows:
        assert row["static_ratio"] == pytest.approx(1.0, abs=0.002)
        if not torch.cuda.is_available():
            assert row["measured"] is None and row["ratio"] is None


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_case_can_be_estimated(ranks: int) -> None:
    for case in memory_estimate.cases(ranks, "1b", "moe"):
        workload, layout = case.parts(4096, torch.bfloat16)
        assert layout.plan.world_size == ranks
        # On a GPU of 141 GiB.
        assert estimate(workload, layout).total < 130 * 2**30
