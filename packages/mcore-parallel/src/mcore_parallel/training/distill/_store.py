# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A teacher's likeliest tokens on disk."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import all_reduce
from mcore_parallel.training._batch import Batch
from mcore_parallel.training.distill._divergence import vocab_parallel_top_k
from mcore_parallel.training.distill._shards import Shard, StoreLayout, StoreWriter, open_shards, read_settings, sample_keys
from mcore_parallel.training.distill._teacher import Teacher

LOG_PROBS, TOKEN_IDS = "teacher_log_probs", "teacher_token_ids"
"""Entries of ``Batch.extras``, [B, S, K]."""


class LogProbStoreError(ValueError):
    """A store that does not exist, is damaged, was made otherwise, or lacks a sample."""


@dataclass(frozen=True, kw_only=True)
class LogProbStoreConfig:
    """What the numbers of a store are; all that is written to it and learnt from it agrees.

    Raises:
        ValueError: a number out of its range.
    """

    teacher: str
    """Which weights: whatever identifies them to the user, for instance the SHA-256 of their manifest."""
    seq_len: int
    """Tokens of a sample."""
    top_k: int = 64
    """Tokens that are kept of each distribution."""
    temperature: float = 1.0
    """Of the log-probabilities; that of the student must be the same."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0")


class LogProbStoreWriter(StoreWriter[LogProbStoreConfig]):
    """Adds samples to a store. Many may write to one folder, each under a name of its own.

    A shard is a folder that is renamed into place when it is complete: whatever is killed, a store holds whole shards, and a writer of the
    same name goes on behind them.

    Args:
        folder: of the store; made if it does not exist.
        config: must equal that of the samples that are there.
        name: of this writer (letters, digits, _).
        shard_samples: samples of a shard.

    Raises:
        LogProbStoreError: the folder holds samples made otherwise.
        ValueError: a name with other characters, a size below 1.
    """

    def __init__(self, folder: str | Path, config: LogProbStoreConfig, *, name: str = "0", shard_samples: int = 1024) -> None:
        super().__init__(folder, config, _layout(config), name=name, shard_samples=shard_samples)

    def add(self, batch: Batch, log_probs: Tensor, token_ids: Tensor) -> None:
        """The samples of a batch that are not there yet.

        Args:
            batch: [B, S], whole sequences.
            log_probs: [B, S, K] float.
            token_ids: [B, S, K] integers.

        Raises:
            LogProbStoreError: other sizes than the store's.
        """
        keys = self._keys(batch)
        expected = (len(keys), self.config.seq_len, self.config.top_k)
        if log_probs.shape != expected or token_ids.shape != expected:
            shapes = f"{tuple(log_probs.shape)} and {tuple(token_ids.shape)}"
            raise LogProbStoreError(f"log_probs and token_ids of shapes {shapes} must both be [B, seq_len, top_k] = {expected}")
        values, ids = log_probs.float().cpu().numpy(), token_ids.to(torch.int32).cpu().numpy()
        for key, row, row_ids in zip(keys, values, ids, strict=True):
            self._shards.add(key, {"log_probs": row, "token_ids": row_ids})


class LogProbStore:
    """Reads a store; samples are found by their tokens, so that their order, the layout and the replicas may be others than before.

    Args:
        folder: of the store.
        temperature: at which the student is compared.

    Raises:
        LogProbStoreError: no store, a damaged shard, another temperature.
    """

    def __init__(self, folder: str | Path, *, temperature: float = 1.0) -> None:
        self.folder = Path(folder)
        self.config = read_settings(self.folder, LogProbStoreConfig, LogProbStoreError)
        if self.config.temperature != temperature:
            raise LogProbStoreError(
                f"{self.folder} holds log-probabilities at temperature={self.config.temperature}, not {temperature}; "
                "use that one, or write them down again"
            )
        self._layout = _layout(self.config)
        self._places: dict[bytes, tuple[Shard, int]] = {}
        for shard in open_shards(self.folder, self._layout):
            for row, key in enumerate(shard.samples()):
                self._places.setdefault(key, (shard, row))

    def __len__(self) -> int:
        """Samples."""
        return len(self._places)

    def label(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with the teacher's likeliest tokens as extras.

        Args:
            batches: whole sequences (before ``context_share``, which cuts the extras too).

        Raises:
            LogProbStoreError: a sample that is not there.
        """
        return [self._label(batch) for batch in batches]

    def _label(self, batch: Batch) -> Batch:
        keys = sample_keys(batch, self._layout)
        if missing := [number for number, key in enumerate(keys) if key not in self._places]:
            raise LogProbStoreError(
                f"{self.folder} has none of the rows {missing} of a batch among its {len(self)} samples; "
                "run the teacher over the same data, with the same seed and seq_len"
            )
        places = [self._places[key] for key in keys]
        device = batch.tokens.device
        log_probs = torch.from_numpy(np.stack([shard["log_probs"][row] for shard, row in places])).to(device)
        ids = torch.from_numpy(np.stack([shard["token_ids"][row] for shard, row in places])).to(device)
        return dataclasses.replace(batch, extras={**batch.extras, LOG_PROBS: log_probs, TOKEN_IDS: ids})


def record(teacher: Teacher, steps: Iterable[Sequence[Batch]], writer: LogProbStoreWriter | None) -> int:
    """Run a teacher over data and write its likeliest tokens down; batches that a store holds already are passed over.

    Every rank of the teacher's layout calls it. One rank of a replica writes: the first tp rank of the last pipeline stage.

    Args:
        teacher: runs.
        steps: lists of micro-batches, as the student's training gets them.
        writer: on the ranks that write (``writes``), under a name of their own each; None on the others.

    Returns:
        Batches that the teacher ran over.

    Raises:
        ValueError: a layout with cp, a writer missing or too many.
    """
    return run_missing(teacher, steps, writer, functools.partial(_write_down, teacher, writer=writer))


def writes(teacher: Teacher) -> bool:
    """Whether this rank hands ``record`` a writer."""
    return teacher.groups.pp.is_last and teacher.groups.tp.is_first


class _StepWriter(Protocol):
    """Knows what it has."""

    def holds(self, batch: Batch) -> bool: ...


@internal_api
def run_missing(teacher: Teacher, steps: Iterable[Sequence[Batch]], writer: _StepWriter | None, write_down: Callable[[Batch], None]) -> int:
    """Run a teacher over the batches that a writer does not hold, and hand them over labelled on the last pipeline stage.

    Args:
        teacher: runs.
        steps: lists of micro-batches.
        writer: as of ``record``.
        write_down: called by all tp ranks.

    Returns:
        Batches that the teacher ran over.

    Raises:
        ValueError: as of ``record``.
    """
    groups = teacher.groups
    if groups.cp.size > 1:
        raise ValueError(f"cp={groups.cp.size} cuts sequences, which are written down whole; run the teacher with cp=1")
    if (writer is not None) != writes(teacher):
        raise ValueError("a writer belongs on the first tp rank of the last pipeline stage of each replica, and nowhere else; ask writes()")
    count = 0
    for batches in steps:
        missing = [0 if writer is None or writer.holds(batch) else 1 for batch in batches]
        flags = torch.tensor(missing, device=batches[0].tokens.device)
        wanted = all_reduce(flags, groups.tp_pp, "max").tolist()
        todo = [batch for batch, flag in zip(batches, wanted, strict=True) if flag]
        count += len(todo)
        for batch in teacher.label(todo) if todo else ():
            if groups.pp.is_last:
                write_down(batch)
    return count


def _write_down(teacher: Teacher, batch: Batch, writer: LogProbStoreWriter | None) -> None:
    output = teacher.output(batch)
    # The first tp rank's settings are those of all.
    settings = torch.zeros(2, dtype=torch.float64, device=batch.tokens.device)
    if writer is not None:
        settings[0], settings[1] = writer.config.top_k, writer.config.temperature
    top_k, temperature = all_reduce(settings, teacher.groups.tp).tolist()
    with torch.no_grad():
        logits = output.logits()
    size = output.layer.unpadded_vocab_size
    log_probs, ids = vocab_parallel_top_k(logits, int(top_k), group=teacher.groups.tp, temperature=temperature, vocab_size=size)
    if writer is not None:
        shape = (*batch.tokens.shape, int(top_k))
        writer.add(batch, log_probs.view(shape), ids.view(shape))


def _layout(config: LogProbStoreConfig) -> StoreLayout:
    sample = (config.seq_len, config.top_k)
    arrays = {"log_probs": (np.float32, sample), "token_ids": (np.int32, sample)}
    return StoreLayout(seq_len=config.seq_len, arrays=arrays, error=LogProbStoreError, again="remove it and record again")
