# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layouts that the planner proposes, and the inputs it refuses."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, Site, TransformerConfig, dense_feed_forward, hybrid_config
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import interleaved_one_f_one_b, one_f_one_b, simulate
from mcore_parallel.planner import (
    Cluster,
    ExpertSizes,
    Layout,
    Limits,
    ModelSizes,
    PlannerError,
    Workload,
    estimate,
    find_model,
    propose,
    scale,
    step_cost,
)
from mcore_parallel.planner._cli import main
from mcore_parallel.planner._estimate import group_size, live_forwards
from mcore_parallel.planner._parameters import state_bytes
from mcore_parallel.planner._presets import PRESETS

TINY = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256)
EIGHT_B = Workload(model=find_model("llama3-8b"), sequence=8192, global_batch=64)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85), ("mixtral-8x7b", 46.70), ("qwen3-235b-a22b", 235.1)],
)
def test_a_preset_has_the_parameters_of_its_name(name: str, billions: float) -> None:
    assert find_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_finds_a_layout(name: str) -> None:
    found = propose(Workload(model=find_model(name), sequence=4096, global_batch=1024), 1024, Cluster(), top=2)
    assert all(proposal.fits and proposal.layout.plan.world_size == 1024 for proposal in found)


def test_parameters_of_all_ranks_add_up_to_the_model() -> None:
    experts = ExpertSizes(num_experts=8, topk=2, ffn_hidden_size=32)
    for model in (ModelSizes(config=TINY), ModelSizes(config=TINY, experts=experts)):
        work = Workload(model=model, sequence=64, global_batch=32)
        ep = 1 if model.experts is None else 4
        for plan in (ParallelPlan(tp=2, pp=2, ep=ep, dp=2), ParallelPlan(tp=1, pp=4, ep=ep, dp=4)):
            stages = [estimate(work, Layout(plan=plan), stage=stage) for stage in range(plan.pp)]
            # Norms and routers are whole on every tp rank.
            whole = (2 * TINY.num_layers + 1) * TINY.hidden_size + (TINY.num_layers * 8 * TINY.hidden_size if model.experts else 0)
            routed = 0 if model.experts is None else 3 * TINY.num_layers * 8 * 32 * TINY.hidden_size
            dense = model.num_parameters - whole - routed
            counted = sum(memory.params for memory in stages) // 2
            assert counted == dense // plan.tp + whole + routed // ep


FAMILIES: dict[str, TransformerConfig] = {
    "biases and learned positions": dataclasses.replace(
        TINY, normalization="LayerNorm", add_bias_linear=True, add_qkv_bias=True, activation="gelu",
        position_embedding_type="learned_absolute", max_position_embeddings=64, softmax_type="learnable", attention_output_gate=True,
    ),
    "latent attention, tied, further tokens": dataclasses.replace(
        TINY, num_query_groups=None, share_embeddings_and_output_weights=True, mtp_num_layers=2,
        latent_attention=LatentAttentionConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    ),
    "hybrid": hybrid_config(
        "M-G-|*-ME/*-", hidden_size=TINY.hidden_size, num_attention_heads=TINY.num_attention_heads, vocab_size=TINY.vocab_size,
        mamba=MambaConfig(head_dim=8, num_groups=2, state_dim=8),
        delta_net=GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_of_every_family_are_those_of_the_model(name: str, tp: int) -> None:
    config = FAMILIES[name]
    experts = ExpertSizes(num_experts=8, topk=2, ffn_hidden_size=32) if "E" in (config.hybrid_layer_pattern or "") else None
    work = Workload(model=ModelSizes(config=config, experts=experts), sequence=64, global_batch=32)
    plan = ParallelPlan(tp=tp, pp=2)
    stages = [estimate(work, Layout(plan=plan), stage=stage) for stage in range(2)]
    feed_forward = dense_feed_forward if experts is None else nothing
    built = GPTModel(config, ProcessGroups.single(), feed_forward=feed_forward, device="meta")
    expected = 0 if experts is None else 8 * config.hidden_size + 8 * 3 * 32 * config.hidden_size // plan.expert_tp
    for shard in named_shards(built):
        numel = math.prod(shard.spec.shape) // (tp if "tp" in shard.spec.shards else 1)
        # Both ends hold what further tokens look up.
        expected += numel * (2 if shard.name == "embedding.weight" and config.mtp_num_layers else 1)
    assert sum(memory.params for memory in stages) // 2 == expected
    assert all(memory.activations > 0 for memory in stages)
    assert propose(work, 8, Cluster(), top=1)[0].fits


def nothing(site: Site) -> torch.nn.Module:
    return torch.nn.Identity()


def test_a_mixer_that_tp_cannot_cut_is_an_error() -> None:
    experts = ExpertSizes(num_experts=8, topk=2, ffn_hidden_size=32)
    work = Workload(model=ModelSizes(config=FAMILIES["hybrid"], experts=experts), sequence=64, global_batch=32)
    with pytest.raises(PlannerError, match="tp=4 must divide num_groups of mamba=2"):
        estimate(work, Layout(plan=ParallelPlan(tp=4)))
    with pytest.raises(PlannerError, match="has 2 segments, but pp.vpp=4.1 virtual stages"):
        estimate(work, Layout(plan=ParallelPlan(pp=4)))


def test_states_are_those_of_the_optimizer() -> None:
    model = GPTModel(TINY, ProcessGroups.single(), dtype=torch.bfloat16)
    narrow: dict[str, Any] = {"use_precision_aware_optimizer": True}
    for options in (
        {},
        {"optimizer": "sgd"},
        narrow,
        {**narrow, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float8_e4m3fn},
        {**narrow, "store_param_remainders": False, "exp_avg_sq_dtype": torch.float16},
    ):
        config = OptimizerConfig(lr=1e-3, **options)
        sync = DistributedDataParallel(DistributedDataParallelConfig(), model, ProcessGroups.single())
        made = MegatronOptimizer(config, sync, ProcessGroups.single()).state_bytes["device"]
        numel = sum(shard.parameter.numel() for shard in named_shards(model))
        # The tables of the fused kernel exist on a GPU only.
        assert numel * (state_bytes(config, torch.bfloat16) - 8 / 1024) == pytest.approx(made, rel=1e-3)
        sync.close()


def test_live_forwards_are_those_of_the_schedules() -> None:
    for pp in range(1, 6):
        for vpp in range(1, 4 if pp > 1 else 2):
            for count in range(pp, 13):
                if vpp > 1 and not group_size(count, pp):
                    continue
                schedule = one_f_one_b if vpp == 1 else partial(interleaved_one_f_one_b, num_chunks=vpp)
                result = simulate([schedule(pp, stage, count) for stage in range(pp)])
                layout = Layout(plan=ParallelPlan(pp=pp, vpp=vpp))
                assert tuple(live_forwards(layout, stage, count) for stage in range(pp)) == result.peak_live


def test_more_of_an_axis_needs_less_of_what_it_cuts() -> None:
    def part(name: str, **degrees: int) -> int:
        return getattr(estimate(EIGHT_B, Layout(plan=ParallelPlan(**degrees)), stage=0), name)

    assert part("params", tp=2) < part("params") and part("params", pp=2) < part("params")
    assert part("activations", cp=2) * 2 == part("activations")
    assert part("activations", tp=2) < part("activations", tp=2, sequence_parallel=False)
    sliced = Layout(plan=ParallelPlan(dp=8), sync=DistributedDataParallelConfig(use_distributed_optimizer=True))
    assert estimate(EIGHT_B, sliced).optimizer * 8 == pytest.approx(estimate(EIGHT_B, Layout(plan=ParallelPlan(dp=8))).optimizer, rel=0.02)


def test_proposals_come_fastest_first_with_the_least_recomputation_that_fits() -> None:
    large = propose(EIGHT_B, 16, Cluster())
    small = propose(EIGHT_B, 16, Cluster(gpu_memory_gib=36), limits=Limits(fixed={"tp": 2, "pp": 1}))
    assert all(proposal.fits for proposal in large + small)
    assert large[0].recompute == "none" and small[0].recompute != "none"
    assert large[-1].cost.total > 0.97 * large[0].cost.total
    assert {(proposal.layout.plan.tp, proposal.layout.plan.pp) for proposal in small} == {(2, 1)}


def test_a_stage_waits_less_with_more_micro_batches_and_chunks() -> None:
    def bubble(batch: int, vpp: int) -> float:
        work = Workload(model=find_model("llama3-8b"), sequence=4096, global_batch=batch)
        cost = step_cost(work, Layout(plan=ParallelPlan(pp=4, vpp=vpp)), Cluster())
        return cost.bubble / cost.compute

    assert bubble(8, 1) == pytest.approx(3 / 8) and bubble(16, 1) == pytest.approx(3 / 16) and bubble(8, 2) == pytest.approx(3 / 16)


@pytest.mark.journey
def test_sixteen_thousand_gpus_are_planned() -> None:
    for name in ("llama3-405b", "kimi-k2-like"):
        found = propose(Workload(model=find_model(name), sequence=8192, global_batch=2048), 16_384, Cluster())
        assert found[0].fits and found[0].layout.plan.pp > 1


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        ({"tp": 16}, "tp=16 must divide num_query_groups=8"),
        ({"ep": 2, "dp": 2}, "ep=2 needs a model with experts"),
        ({"pp": 40}, "pp\\*vpp=40\\*1 must not exceed num_layers=32"),
        ({"dp": 3}, "must divide global_batch=64"),
        ({"cp": 3}, "2\\*cp=6 must divide sequence=8192"),
        ({"pp": 16, "vpp": 2, "dp": 8}, "vpp=2 needs at least pp=16 micro-batches, found 8"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(degrees: dict[str, int], says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        estimate(EIGHT_B, Layout(plan=ParallelPlan(**degrees)))


def test_a_model_is_read_from_its_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    theirs = {"num_hidden_layers": 32, "num_key_value_heads": 8, "intermediate_size": 14_336, "num_local_experts": 8}
    ours = {"hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32_000, "num_experts_per_tok": 2, "rope_theta": 1e6}
    path.write_text(json.dumps({**theirs, **ours, "architectures": ["Other"]}))
    assert find_model(str(path)) == find_model("mixtral-8x7b")
    with pytest.raises(PlannerError, match="no preset; did you mean llama3-70b"):
        find_model("llama-70b")
    path.write_text("[]")
    with pytest.raises(PlannerError, match="holds no JSON object"):
        find_model(str(path))


def plan(*words: str) -> int:
    return main(["--gpus", "16", "--sequence", "4096", "--global-batch", "64", *words])


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "llama3-8b", "num_layers=16", "--top", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4.5 B parameters; 16 GPUs") and len(lines) == 6 and lines[1].split()[:2] == ["tp", "pp"]
    assert "--set train.seq_len=4096" in lines[5]
    assert plan("--model", "mixtral-8x7b", "--json", "--fix", "ep=8") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpus"] == 16 and {layout["ep"] for layout in report["layouts"]} == {8}
    for layout in report["layouts"]:
        parts = layout["gib"]
        named = ("params", "grads", "optimizer", "activations", "buffers")
        assert parts["allocated"] == pytest.approx(sum(parts[name] for name in named), abs=0.01)


def test_the_command_says_what_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "llama3-405b", "--json") == 1
    captured = capsys.readouterr()
    assert not any(layout["fits"] for layout in json.loads(captured.out)["layouts"])
    assert "nothing fits" in captured.err and "what would help: more GPUs" in captured.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "llama3-8b", "num_layer=3"], "did you mean num_layers"),
        (["--model", "llama3-8b", "num_layers=many"], "must be field=value"),
        (["--model", "llama3-8b", "num_layers=1.5"], "num_layers=1.5 must be of type int"),
        (["--model", "num_layers=2"], "the model lacks hidden_size"),
        (["--model", "llama3-8b", "moe_router_topk=2"], "needs num_moe_experts"),
        (["--model", "llama3-8b", "--fix", "dp=2"], "fixes no axis"),
        (["--model", "llama3-8b", "--gpus", "0"], "gpus=0 must be at least 1"),
        (["--model", "llama3-8b", "--micro-batch", "3"], "must divide global_batch=64"),
        (["--model", "llama3-8b", "--gpu-memory-gib", "-1"], "gpu_memory_gib=-1.0 must be positive"),
        (["--model", "llama3-8b", "--fix", "tp=3"], "with tp=3 divide neither"),
    ],
)
def test_the_command_refuses_what_it_cannot_plan(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("degrees", "micro_batch", "global_batch", "measured_ms"),
    [
        ({"tp": 2, "dp": 2}, 2, 8, 794.7),
        ({"pp": 2, "dp": 2}, 1, 16, 1577.6),
        ({"pp": 2, "vpp": 2, "dp": 2}, 1, 16, 1512.7),
        ({"dp": 4}, 2, 8, 744.6),
    ],
)
def test_steps_are_near_those_measured_on_four_gpus(degrees, micro_batch, global_batch, measured_ms) -> None:
    work = Workload(model=find_model("llama3-8b"), sequence=4096, global_batch=global_batch, micro_batch=micro_batch)
    sync = DistributedDataParallelConfig(use_distributed_optimizer=True)
    cost = step_cost(work, Layout(plan=ParallelPlan(**degrees), sync=sync), Cluster())
    assert cost.total * 1e3 == pytest.approx(measured_ms, rel=0.04)


@pytest.mark.parametrize(
    ("degrees", "global_batch", "bandwidth", "measured_ms"),
    [
        ({}, 8, 4e12, 339.5),
        ({"dp": 2, "ep": 2}, 16, 3e12, 372.0),
        ({"dp": 2, "ep": 2}, 16, 3e12, 458.5),
        ({"dp": 2, "ep": 1, "etp": 2}, 16, 3e12, 571.4),
        ({"pp": 2}, 16, 3e12, 456.2),
    ],
    ids=["one H200", "direct stores", "all-to-all", "etp", "pp"],
)
def test_steps_of_a_mixture_are_near_those_measured(degrees, global_batch, bandwidth, measured_ms) -> None:
    sizes = {"num_layers": 6, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "vocab_size": 151936}
    experts = {"num_moe_experts": 128, "moe_router_topk": 8, "ffn_hidden_size": 768}
    work = Workload(model=find_model(overrides={**sizes, **experts}), sequence=4096, global_batch=global_batch, micro_batch=2)
    plan = ParallelPlan(**degrees)
    sync = DistributedDataParallelConfig(use_distributed_optimizer=plan.dp > 1)
    cost = step_cost(work, Layout(plan=plan, sync=sync), Cluster(memory_bandwidth=bandwidth))
    assert cost.total * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_scaling_grows_the_batch_or_keeps_it() -> None:
    points = scale(EIGHT_B, [64, 512], Cluster())
    assert [(point.gpus, point.batch, point.workload.global_batch) for point in points[:2]] == [(64, "grows", 64), (512, "grows", 512)]
    assert [point.batch for point in points[2:]] == ["stays"] * len(points[2:])
    assert points[0].efficiency == points[2].efficiency == 1.0
    assert 0.8 < points[1].efficiency <= 1.01 and points[1].efficiency >= points[-1].efficiency
    tokens = points[0].workload.tokens / points[0].proposal.cost.total / 64
    assert points[0].tokens_per_s_per_gpu == pytest.approx(tokens)


def test_more_hops_take_longer_when_nothing_hides_them() -> None:
    work = dataclasses.replace(EIGHT_B, global_batch=2048)
    layout = Layout(plan=ParallelPlan(dp=2048), sync=DistributedDataParallelConfig(use_distributed_optimizer=True))
    quick, slow = (step_cost(work, layout, Cluster(hop_s=hop)).data for hop in (1e-9, 1e-3))
    assert slow - quick == pytest.approx(2 * 4 * 255e-3, rel=0.5)


@pytest.mark.parametrize(("counts", "says"), [([64, 64], "numbers of GPUs that increase"), ([64, 65], "whole number")])
def test_scaling_refuses_numbers_that_do_not_fit(counts, says) -> None:
    with pytest.raises(PlannerError, match=says):
        scale(dataclasses.replace(EIGHT_B, global_batch=32), counts, Cluster())


def test_the_command_scales(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama3-8b", "--gpus", "64", "--sequence", "8192", "--global-batch", "64", "--scale", "128", "--json"]
    assert main(words) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["gpus"] for point in points][:2] == [64, 128] and points[0]["efficiency"] == 1.0
    assert main(words[:-1]) == 0
    assert "tokens_per_s_per_gpu" in capsys.readouterr().out
