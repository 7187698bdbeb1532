# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each rank does to post-train the model with RL."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mcore_ckpt import CheckpointManager
from mcore_parallel.training import model_state
from mcore_rl import GenericGenerationArgs, GRPOConfig, GRPOObjective, IterationReport, Learner, MegatronLocal, grpo_iteration, refit
from mcore_rl.envs import CharacterShare
from mcore_tools.assembly import open_tokenizer
from mcore_tools.recipes import RunConfig
from mcore_tools.rl._policy import assemble_policy
from mcore_tools.serving import build_engine
from mcore_tools.training import device_of


def post_train_rank(config: RunConfig, kind: str, prompts: Sequence[str], wanted: str, iterations: int, lr: float) -> list[IterationReport]:
    """Group-relative policy optimisation from the newest checkpoint; the same reports on every rank."""
    device = device_of(kind)
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size)
    changed = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=lr, weight_decay=0.0))
    parts = assemble_policy(changed, tokenizer, device)
    CheckpointManager(Path(config.output) / "checkpoints").load(model_state(parts.model, parts.groups), strict=False)
    parts.optimizer.reload_model_params()
    rank = parts.groups.world.rank
    engine = build_engine(config, tokenizer, device, seed=rank)
    refit(parts.model, parts.groups, engine)
    interface = MegatronLocal(engine)
    agent = CharacterShare([*prompts[rank:], *prompts[:rank]], wanted)
    grpo = GRPOConfig(
        num_groups=8,
        group_size=8,
        seq_len=config.train.seq_len,
        micro_batch_size=16,
        generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=24),
    )
    learner = Learner(
        model=parts.model,
        groups=parts.groups,
        objective=GRPOObjective(),
        sync=parts.sync,
        optimizer=parts.optimizer,
        pipeline=parts.pipeline,
        overlap=parts.overlap,
    )
    reports = []
    columns = (
        TextColumn("post-training"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=rank != 0) as progress:
        task = progress.add_task("", total=iterations)
        for _ in range(iterations):
            report = grpo_iteration(
                grpo,
                agent=agent,
                interface=interface,
                engine=engine,
                learner=learner,
                lr=lr,
            )
            reports.append(report)
            progress.update(task, advance=1, description=f"reward {report.mean_reward:.3f}")
    return reports
