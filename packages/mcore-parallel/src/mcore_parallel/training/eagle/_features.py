# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a target makes of a text, on disk: samples with the hidden states that a draft head learns from."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_parallel.comm import all_gather
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.training._batch import Batch
from mcore_parallel.training.distill import (
    TEACHER_HIDDEN,
    Shard,
    StoreLayout,
    StoreWriter,
    Teacher,
    open_shards,
    read_settings,
    run_missing,
)

_TORCH = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# numpy has no bfloat16; its bits travel as integers.
_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.int16}


class FeatureStoreError(ValueError):
    """A store that does not exist, is damaged, was made otherwise or for another target, or lacks a sample."""


# B samples, S tokens of each, D model, C modules.
@dataclass(frozen=True, kw_only=True)
class FeatureStoreConfig:
    """What the numbers of a store are; all that is written to it and learnt from it agrees.

    Raises:
        ValueError: a number out of its range, an unknown dtype.
    """

    target: str
    """Which weights: whatever identifies them to the user, for instance the SHA-256 of their checkpoint's manifest."""
    ends: str
    """``TargetEnds.digest`` of the target; those that a head is trained with must have the same."""
    seq_len: int
    """S."""
    hidden_size: int
    """D."""
    aux_modules: tuple[str, ...]
    """Modules of the target, in the order in which the head reads them."""
    dtype: str
    """Of the states: "float64", "float32", "float16" or "bfloat16"."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.dtype not in _TORCH:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(_TORCH)}")

    @property
    def sample_bytes(self) -> int:
        """On disk, but for a few."""
        states = (1 + len(self.aux_modules)) * self.hidden_size * np.dtype(_NUMPY[self.dtype]).itemsize
        return self.seq_len * (states + 12)


class FeatureStoreWriter(StoreWriter[FeatureStoreConfig]):
    """Adds samples to a store. Many may write to one folder, each under a name of its own; each sample goes to the disk as it comes.

    A shard is a folder that is renamed into place when it is complete: whatever is killed, a store holds whole shards, and a writer of the
    same name goes on behind them.

    Args:
        folder: of the store; made if it does not exist.
        config: must equal that of the samples that are there.
        name: of this writer (letters, digits, _).
        shard_samples: samples of a shard, the most that is lost when the writer is killed.

    Raises:
        FeatureStoreError: the folder holds samples made otherwise.
        ValueError: a name with other characters, a size below 1.
    """

    def __init__(self, folder: str | Path, config: FeatureStoreConfig, *, name: str = "0", shard_samples: int = 64) -> None:
        super().__init__(folder, config, _layout(config), name=name, shard_samples=shard_samples)

    def add(self, batch: Batch, hidden: Tensor, aux: Sequence[Tensor]) -> None:
        """The samples of a batch that are not there yet.

        Args:
            batch: [B, S], whole sequences.
            hidden: [B * S, D], behind the target's final norm.
            aux: C of [B * S, D].

        Raises:
            FeatureStoreError: other sizes or another dtype than the store's.
        """
        config, keys = self.config, self._keys(batch)
        expected, dtype = (len(keys) * config.seq_len, config.hidden_size), _TORCH[config.dtype]
        if any(x.shape != expected or x.dtype != dtype for x in (hidden, *aux)) or len(aux) != len(config.aux_modules):
            kinds = [(tuple(x.shape), str(x.dtype)) for x in (hidden, *aux)]
            raise FeatureStoreError(f"states {kinds} must be {1 + len(config.aux_modules)} of shape {expected} and dtype {config.dtype}")
        states = [_numpy(x.view(len(keys), config.seq_len, -1)) for x in (hidden, *aux)]
        small = {name: getattr(batch, name).cpu().numpy() for name in ("tokens", "labels", "loss_mask")}
        for row, key in enumerate(keys):
            values = {name: value[row] for name, value in small.items()}
            self._shards.add(key, {**values, "hidden": states[0][row], "aux": np.stack([x[row] for x in states[1:]])})


class FeatureStore:
    """Samples with features, mapped into memory: only what a batch takes is read.

    Args:
        folder: of the store.
        ends: ``TargetEnds.digest`` of the target that a head is trained with.
        aux_modules: of that head.

    Raises:
        FeatureStoreError: no store, a damaged shard, another target, other modules.
    """

    def __init__(self, folder: str | Path, *, ends: str, aux_modules: Sequence[str]) -> None:
        self.folder = Path(folder)
        self.config = config = read_settings(self.folder, FeatureStoreConfig, FeatureStoreError)
        if config.ends != ends:
            raise FeatureStoreError(
                f"{self.folder} holds features of {config.target}, whose embedding and output have the hash {config.ends[:16]}, "
                f"not {ends[:16]}; load the weights that made it, or extract again"
            )
        if config.aux_modules != tuple(aux_modules):
            raise FeatureStoreError(
                f"{self.folder} holds features of aux_modules={config.aux_modules}, not {tuple(aux_modules)}; extract again"
            )
        places = {key: (shard, row) for shard in open_shards(self.folder, _layout(config)) for row, key in enumerate(shard.samples())}
        # By their digests, so that an order does not depend on who wrote what.
        self._places: list[tuple[Shard, int]] = [places[key] for key in sorted(places)]

    def __len__(self) -> int:
        """Samples."""
        return len(self._places)

    def batch(self, numbers: Sequence[int], groups: ProcessGroups, *, device: torch.device | str = "cpu") -> Batch:
        """Samples as a batch whose extras are those of ``Teacher.label``.

        Args:
            numbers: of the samples, from 0; their order is the same for the same texts, whoever wrote them.
            groups: under sequence parallelism each tp rank gets the states of its share of the tokens.
            device: of the tensors.

        Raises:
            FeatureStoreError: a number that there is not.
        """
        if wrong := [number for number in numbers if not 0 <= number < len(self)]:
            raise FeatureStoreError(f"{self.folder} has no sample {wrong[0]} among its {len(self)}")
        places = [self._places[number] for number in numbers]

        def take(name: str, *index: Any) -> Tensor:
            return torch.from_numpy(np.stack([shard[name][(row, *index)] for shard, row in places]))

        def states(name: str, *index: Any) -> Tensor:
            rows = take(name, *index).flatten(0, 1)
            rows = rows.chunk(groups.tp.size)[groups.tp.rank] if groups.sequence_parallel else rows
            return rows.view(_TORCH[self.config.dtype]).to(device)

        aux = {f"{TEACHER_HIDDEN}.{name}": states("aux", number) for number, name in enumerate(self.config.aux_modules)}
        return Batch(
            tokens=take("tokens").long().to(device),
            labels=take("labels").long().to(device),
            loss_mask=take("loss_mask").to(device),
            extras={TEACHER_HIDDEN: states("hidden"), **aux},
        )


def record_features(
    teacher: Teacher, aux_modules: Sequence[str], steps: Iterable[Sequence[Batch]], writer: FeatureStoreWriter | None
) -> int:
    """Run a target over data and write its states down; batches that a store holds already are passed over.

    Every rank of the target's layout calls it. One rank of a replica writes: the first tp rank.

    Args:
        teacher: the target, made with ``capture=aux_modules``.
        aux_modules: what the head reads.
        steps: lists of micro-batches.
        writer: on the ranks that write (``distill.writes``), under a name of their own each; None on the others.

    Returns:
        Batches that the target ran over.

    Raises:
        ValueError: a layout with cp, a writer missing or too many.
    """
    return run_missing(teacher, steps, writer, functools.partial(_write_down, teacher.groups, tuple(aux_modules), writer))


def _write_down(groups: ProcessGroups, aux_modules: tuple[str, ...], writer: FeatureStoreWriter | None, batch: Batch) -> None:
    states = [batch.extras[name] for name in (TEACHER_HIDDEN, *(f"{TEACHER_HIDDEN}.{name}" for name in aux_modules))]
    if groups.sequence_parallel:
        states = [all_gather(x, groups.tp) for x in states]
    if writer is not None:
        writer.add(batch, states[0], states[1:])


def _layout(config: FeatureStoreConfig) -> StoreLayout:
    S, D, states = config.seq_len, config.hidden_size, _NUMPY[config.dtype]
    arrays = {
        "tokens": (np.int32, (S,)),
        "labels": (np.int32, (S,)),
        "loss_mask": (np.float32, (S,)),
        "hidden": (states, (S, D)),
        "aux": (states, (len(config.aux_modules), S, D)),
    }
    return StoreLayout(seq_len=S, arrays=arrays, error=FeatureStoreError, again="remove it and extract again")


def _numpy(x: Tensor) -> Any:
    x = x.detach().cpu()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
