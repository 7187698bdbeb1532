# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The folder of a run: its configuration, tokenizer, numbers and checkpoints."""

import importlib.util
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from mcore_ckpt import CheckpointManager
from mcore_parallel.training import JsonLinesWriter, RichProgress, TensorBoardWriter, TrackioWriter, WandbWriter, Writer
from mcore_tools.assembly import tokenizer_assets
from mcore_tools.recipes import LogConfig, RunConfig, config_text
from mcore_tools.reports import History, LiveReport
from mcore_tools.training._stored import RUN_FILE


def check_log(log: LogConfig, owner: str = "") -> None:
    """Whether what the numbers of a run are sent to is installed; ``owner`` stands before its fields where another config holds it.

    Raises:
        ValueError: names the field and the extra.
    """
    for project, library in ((log.wandb_project, "wandb"), (log.trackio_project, "trackio")):
        if project and importlib.util.find_spec(library) is None:
            field = f"{owner}log.{library}_project"
            raise ValueError(
                f'{field}={project!r} needs {library}, which is not installed: pip install "mcore-parallel[{library}]", or set {field}='
            )


def open_folder(config: RunConfig, history: History) -> list[Writer]:
    """Make the folder of a run, with its configuration and tokenizer; the writers of its numbers. On the first rank."""
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.yaml").write_text(config_text(config), encoding="utf-8")
    _keep_tokenizer(config.data.tokenizer, output / "tokenizer")
    return run_writers(config, history)


def run_writers(config: RunConfig, history: History) -> list[Writer]:
    """What shows and keeps the numbers of each step: the terminal, ``train.jsonl``, ``history``, and what ``log`` names. On the first
    rank."""
    output, log, text = Path(config.output), config.log, config_text(config)
    writers: list[Writer] = [RichProgress(config.train.steps), JsonLinesWriter(output / "train.jsonl")]
    if log.tensorboard:
        writers.append(TensorBoardWriter(output / "tensorboard"))
    shown: dict[str, Any] = yaml.safe_load(text) if log.wandb_project or log.trackio_project else {}
    if log.wandb_project:
        writers.append(WandbWriter(log.wandb_project, output, run_id=_identity(output / "wandb_run"), config=shown))
    if log.trackio_project:
        name = f"{output.name}-{_identity(output / 'trackio_run')}"
        writers.append(TrackioWriter(log.trackio_project, name=name, config=shown))
    writers.append(LiveReport(output / "report.html", output.name, config.train.steps, text, history) if log.html else history)
    return writers


def _identity(file: Path) -> str:
    """What a run is called where its numbers go, so that a start goes on with it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4), encoding="ascii")
    return file.read_text(encoding="ascii")


def run_checkpoints(config: RunConfig, group: dist.ProcessGroup | None = None) -> CheckpointManager:
    """Where a run saves: as many steps as it is told to keep, each with its assets; ``group`` has the ranks that save, None for all."""
    train = config.train
    return CheckpointManager(
        Path(config.output) / "checkpoints",
        keep=train.checkpoints_kept or None,
        keep_every=train.checkpoint_keep_interval or None,
        group=group,
        format=train.checkpoint_format,
        assets=run_assets(config),
    )


def run_assets(config: RunConfig) -> dict[str, Path | bytes]:
    """What each checkpoint of a run keeps beside its tensors: the tokenizer's files, and the whole run as ``run.yaml``."""
    return {**tokenizer_assets(config.data.tokenizer), RUN_FILE: config_text(config).encode()}


def _keep_tokenizer(name: str, folder: Path) -> None:
    """Put the tokenizer's files beside the checkpoints, so that the run's folder is all that a model needs."""
    folder.mkdir(exist_ok=True)
    for asset, content in tokenizer_assets(name).items():
        target = folder / asset.removeprefix("tokenizer/")
        if isinstance(content, bytes):
            target.write_bytes(content)
        elif content.resolve() != target.resolve():
            shutil.copyfile(content, target)
