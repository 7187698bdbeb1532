# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The critic and the teacher of a fully sharded policy: they learn, and are read, as on one rank."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_ckpt import CheckpointManager, load
from mcore_ckpt.manifest import read_manifest
from mcore_parallel.training import Batch, train_step
from mcore_parallel.training.distill import DistillationConfig, DistillationObjective
from mcore_tools import reinforce
from mcore_tools.assembly import FullyShardedModel, open_tokenizer
from mcore_tools.launch import launch
from mcore_tools.recipes import RunConfig, override, recipe
from mcore_tools.rl import CRITIC, reinforce_rank
from mcore_tools.rl._critic import RunCritic
from mcore_tools.rl._policy import assemble_policy
from mcore_tools.rl._teacher import open_teacher
from tests.support.countdown import PACE, QUIET, SIZES, rows

CPU = torch.device("cpu")
BYTES = ("data.tokenizer=byte", "model.vocab_size=264")
MIXTURE = "moe.num_moe_experts=4 moe.moe_router_topk=2 moe.moe_ffn_hidden_size=32"
SHARDED = ["data_parallel=fsdp", "data_parallel=fsdp fsdp.zero_dp_strategy=optim_grads", "data_parallel=fsdp2"]


def configured(output: Path, *changes: str) -> RunConfig:
    """In float64, so that no wrong factor hides under a tolerance."""
    sets = [*SIZES, *PACE, *QUIET, *BYTES, "model.num_layers=2", "train.dtype=float64", "train.eval_interval=0", f"output={output}"]
    return override(recipe("countdown_tiny"), [*sets, *changes])


def micro_batches(step: int) -> list[Batch]:
    """Four, which the replicas share, with numbers that a critic could have given and should give."""
    draws = torch.Generator().manual_seed(step)
    batches = []
    for _ in range(4):
        row = torch.randint(256, (2, 9), generator=draws)
        mask = (torch.rand(2, 8, generator=draws) < 0.7).double()
        wanted = {name: torch.randn(2, 8, generator=draws, dtype=torch.float64) for name in ("returns", "old_values")}
        batches.append(Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=mask, extras=wanted))
    return batches


def train_critic(config: RunConfig, *, from_step: int, to_step: int) -> list[float]:
    """Its losses and gradient norms, and the values that it begins with; it is saved at the end."""
    assert config.rl is not None
    parts = assemble_policy(config, open_tokenizer("byte", 264), CPU)
    run = RunCritic(config, parts, CPU)
    run.begin() if from_step == 0 else run.load(from_step)
    critic, groups, numbers = run.critic, parts.groups, []
    for step in range(from_step, to_step):
        batches = micro_batches(step)
        own = batches[groups.dp.rank :: groups.dp.size]
        # Before a backward, and after a forward alone: the update must not read what that left behind.
        numbers += [value.abs().sum().item() for value in critic.values(batches, groups)]
        critic.model.train()
        report = train_step(critic.model, own, critic.objective, critic.sync, critic.optimizer, lr=critic.rate(1.0), groups=groups)
        numbers += [report.loss, report.grad_norm, *(value for _, value in sorted(report.metrics.items()))]
    run.save(to_step)
    run.close()
    return numbers


def stored(output: Path, step: int) -> dict[str, Tensor]:
    """Weights and the optimizer's state of a critic."""
    folder = CheckpointManager(output / CRITIC).folder(step)
    records = read_manifest(folder).tensors
    named = {name: torch.empty(record.shape, dtype=record.torch_dtype) for name, record in records.items()}
    load(named, folder)
    return named


def assert_close(output: Path, expected: Path, step: int) -> None:
    ours, theirs = stored(output, step), stored(expected, step)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


CRITICAL = ("rl.gae.lam=0.9", "rl.critic.lr=1e-2", "rl.kl_beta=0", "optimizer.lr=1e-3")


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "layout", [*SHARDED, "data_parallel=fsdp model.share_embeddings_and_output_weights=true", f"data_parallel=fsdp plan.ep=2 {MIXTURE}"]
)
def test_a_sharded_critic_learns_as_on_one_rank_and_goes_on_in_either_layout(world, layout: str, tmp_path: Path) -> None:
    sharded, one = tmp_path / "sharded", tmp_path / "one"
    model = [change for change in layout.split() if change.startswith(("model.", "moe."))]
    alone = configured(one, *CRITICAL, *model)
    beside = configured(sharded, *CRITICAL, "plan.dp=2", *layout.split())
    expected = [train_critic(alone, from_step=0, to_step=2), train_critic(alone, from_step=2, to_step=3)]
    assert expected[0][0] == 0.0 and expected[1][0] > 0.0
    for numbers in world(train_critic, config=beside, from_step=0, to_step=2):
        assert numbers == pytest.approx(expected[0], rel=1e-9, abs=1e-11)
    assert_close(sharded, one, 2)
    # On from its own checkpoint, and each from the other's.
    for numbers in world(train_critic, config=beside, from_step=2, to_step=3):
        assert numbers == pytest.approx(expected[1], rel=1e-9, abs=1e-11)
    assert_close(sharded, one, 3)
    crossed = dataclasses.replace(beside, output=str(one))
    for numbers in world(train_critic, config=crossed, from_step=2, to_step=3):
        assert numbers == pytest.approx(expected[1], rel=1e-9, abs=1e-11)
    assert train_critic(dataclasses.replace(alone, output=str(sharded)), from_step=2, to_step=3) == pytest.approx(expected[1], rel=1e-9)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model of another size."""
    output = tmp_path_factory.mktemp("rl") / "other"
    config = configured(output, "train.steps=1", "rl.imitation_steps=0", "rl.kl_beta=0", "model.ffn_hidden_size=48", "train.seed=7")
    reinforce_rank(reinforce.prepared(config, rank=0), "cpu")
    return output


def learn_from_teacher(config: RunConfig) -> list[float]:
    """Losses and gradient norms of a policy that learns its teacher's distributions."""
    tokenizer = open_tokenizer("byte", 264)
    parts = assemble_policy(config, tokenizer, CPU)
    groups, numbers = parts.groups, []
    teacher = open_teacher(config, tokenizer, groups, CPU)
    objective = DistillationObjective(config=DistillationConfig(reverse=True), teacher=teacher)
    parts.model.train()
    for step in range(3):
        own = teacher.label(micro_batches(step)[groups.dp.rank :: groups.dp.size])
        [chunk] = teacher.chunks
        if config.data_parallel == "fsdp":
            # Of its layers nothing is left gathered, and it has no memory for gradients.
            assert groups.dp.size == 2 and isinstance(parts.model, FullyShardedModel)
            assert all(not unit.gathered for unit in chunk.runtime.units[1:]) and len(chunk.runtime.units) > 2  # type: ignore[union-attr]
            assert all(shard.gradient is None for shard in chunk.flat_shards().values())  # type: ignore[operator]
        report = train_step(parts.model, own, objective, parts.sync, parts.optimizer, lr=1e-2, groups=groups)
        numbers += [report.loss, report.grad_norm]
    assert not any(parameter.requires_grad for parameter in chunk.parameters())
    parts.close()
    return numbers


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["data_parallel=fsdp", "data_parallel=fsdp fsdp.fsdp_double_buffer=true", "data_parallel=fsdp2"])
def test_a_sharded_policy_learns_from_a_sharded_teacher_as_on_one_rank(world, layout: str, other: Path, tmp_path: Path) -> None:
    changes = (f"rl.teacher={other}", "rl.kl_beta=0", "rl.imitation_steps=0")
    expected = learn_from_teacher(configured(tmp_path / "one", *changes))
    assert expected[0] > expected[-2] > 0
    for numbers in world(learn_from_teacher, config=configured(tmp_path / "two", *changes, "plan.dp=2", *layout.split())):
        assert numbers == pytest.approx(expected, rel=1e-9)


KINDS = {
    "critic": ("rl.gae.lam=0.9", "rl.critic.lr=1e-3", "rl.critic.warmup_steps=1", "critic/loss critic/value critic/grad_norm loss"),
    "teacher": ("rl.teacher=OTHER", "loss logits_distillation_loss grad_norm"),
}


@pytest.mark.journey
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharding", ["fsdp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_sharded_run_learns_what_a_replicated_one_learns(kind: str, sharding: str, other: Path, tmp_path: Path) -> None:
    *changes, names = (change.replace("OTHER", str(other)) for change in KINDS[kind])
    share = ("rl.environment=character_share", "rl.imitation_steps=0", "rl.kl_beta=0", "train.global_batch_size=8", "train.steps=2")
    outputs = {}
    for number, name in enumerate(("ddp", sharding)):
        outputs[name] = tmp_path / name
        sets = (*share, *changes, "plan.dp=2", "rl.generation_args.max_tokens=6", f"data_parallel={name}", "train.dtype=float32")
        config = reinforce.prepared(configured(outputs[name], *sets), rank=0)
        launch(reinforce_rank, 2, config=config, kind="cpu")
        if number:
            # A run that was interrupted goes on with all that it had.
            launch(reinforce_rank, 2, config=override(config, ["train.steps=3"]), kind="cpu")
    for beside, ours in zip(rows(outputs["ddp"]), rows(outputs[sharding]), strict=False):
        assert ours["reward"] == beside["reward"] and names.split()[0] in ours
        for name in set(names.split()).intersection(beside):
            assert ours[name] == pytest.approx(beside[name], rel=1e-3, abs=1e-6), name
    assert [row["step"] for row in rows(outputs[sharding])] == [1, 2, 3]
