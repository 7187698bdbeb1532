# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each rank does to train, and to look at the same weights in another layout."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt import CheckpointManager
from mcore_moe import pop_expert_load
from mcore_parallel import ProcessGroups
from mcore_parallel.comm import all_reduce
from mcore_parallel.data import HuggingFaceTokenizer
from mcore_parallel.guard import Watchdog
from mcore_parallel.training import (
    Batch,
    JsonLinesWriter,
    RichProgress,
    TensorBoardWriter,
    Trainer,
    TrainerConfig,
    evaluate,
    model_state,
)
from tools.assemble import assemble, build_model, build_stage, datasets, objective, schedule, step_batches
from tools.recipes import RunConfig


class History:
    """Keeps the numbers of each step; a writer like the others."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        pass

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        points = [(step, values[name]) for step, values in self.rows if name in values]
        return [float(step) for step, _ in points], [value for _, value in points]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training left behind; the history is on the first rank only."""

    history: History
    validation_loss: float
    seconds: float
    num_parameters: int


def device_of(kind: str) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def train_rank(config: RunConfig, kind: str, watchdog: Watchdog | None = None) -> Trained:
    """Train from the newest checkpoint under ``config.output`` or from the beginning, validate and save, on this rank of the world."""
    device = device_of(kind)
    begin = time.perf_counter()
    parts = assemble(config, device)
    train_set, valid_set = datasets(config, _tokenizer(config))
    output, history = Path(config.output), History()
    first = parts.groups.world.is_first
    writers = [
        RichProgress(config.train.steps),
        JsonLinesWriter(output / "train.jsonl"),
        TensorBoardWriter(output / "tensorboard"),
        history,
    ] if first else []  # fmt: skip

    def data(consumed: int):
        stream = step_batches(config, train_set, parts.groups, device, consumed)
        return stream if watchdog is None else watchdog.watch(stream, start=trainer.state.step + 1)

    def probe() -> dict[str, float]:
        load = sum(pop_expert_load(parts.model).values(), start=torch.zeros(1, dtype=torch.int64, device=device))
        share = all_reduce(load, parts.groups.world).double()
        return {f"expert_{number}_share": value for number, value in enumerate((share / share.sum()).tolist())}

    trainer = Trainer(
        TrainerConfig(
            steps=config.train.steps,
            eval_every=config.train.eval_interval,
            save_every=config.train.checkpoint_interval or config.train.steps,
        ),
        parts.model,
        parts.sync,
        parts.optimizer,
        parts.objective,
        data,
        schedule(config),
        writers,
        CheckpointManager(output / "checkpoints"),
        evaluation=lambda: _validation(config, valid_set, parts.groups, device),
        probe=probe if config.moe else None,
        groups=parts.groups,
        pipeline=parts.pipeline,
        overlap=parts.overlap,
    )
    trainer.resume()
    trainer.run()
    loss = evaluate(parts.model, _validation(config, valid_set, parts.groups, device), parts.objective, groups=parts.groups)
    counted = sum(p.numel() for p in build_model(config, ProcessGroups.single(), "meta").parameters())
    return Trained(history=history, validation_loss=loss.mean.item(), seconds=time.perf_counter() - begin, num_parameters=counted)


def validate_rank(config: RunConfig, kind: str) -> float:
    """The validation loss of the newest checkpoint in the layout of ``config.plan``."""
    device = device_of(kind)
    groups = ProcessGroups.build(config.plan)
    model = build_stage(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=0)), groups, device)
    CheckpointManager(Path(config.output) / "checkpoints").load(model_state(model, groups), strict=False)
    _, valid_set = datasets(config, _tokenizer(config))
    return evaluate(model, _validation(config, valid_set, groups, device), objective(config), groups=groups).mean.item()


def _tokenizer(config: RunConfig) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {tokenizer.vocab_size} tokens of {config.data.tokenizer}; "
            f"set model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def _validation(config: RunConfig, dataset, groups: ProcessGroups, device: torch.device) -> Sequence[Batch]:
    stream = step_batches(config, dataset, groups, device)
    return [batch for _, step in zip(range(config.train.eval_batches), stream, strict=False) for batch in step]
