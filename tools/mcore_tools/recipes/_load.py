# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a run begins with."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What a run begins with. Once its output folder holds a checkpoint, the run goes on from the newest and ``path`` is not looked at: the
    command that starts a run also starts it again.

    Raises:
        ValueError: a number out of its range, or fields that say what to read where there is nothing to read.
    """

    path: str = ""
    """A checkpoint of another run, or its folder of steps; empty to begin with random weights."""
    step: int | None = None
    """Which of the steps in ``path``; None for the newest."""
    take: Literal["weights", "position", "all"] = "weights"
    """Each with those before it: the "weights"; the "position", that is the count of steps and the place in the data; or "all", with the
    optimizer's state, so that the other run goes on. A fresh optimizer has its masters from the weights."""
    upcycle: bool = False
    """The weights of ``path`` are of a dense model with these layers, of whose feed-forwards the experts become copies or slices
    (``upcycle_state_dict``). The run's own steps are mixtures, and are taken as they are."""
    adapter: str = ""
    """Folder of an adapter in PEFT's format, which a run with lora trains further beside the weights of ``path``. It says what lora is."""
    required: bool = False
    """Refuse to begin with random weights, as where the output folder of a run that should go on is not there."""
    override: tuple[str, ...] = ()
    """Fields of the model, such as model.rotary_base, that may differ from those which the weights were made with; others are refused. With
    train.dtype the weights of a checkpoint may be rounded; a dtype that holds all their values needs no word. Of ``adapter`` the fields
    lora.rank, which may grow, lora.alpha, and lora.targets, of which there may be more."""

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 0:
            raise ValueError(f"step={self.step} must not be negative; give none for the newest")
        if self.upcycle and (not self.path or self.take != "weights"):
            raise ValueError(
                f"upcycle=true makes a mixture of the weights of a dense model, found path={self.path!r} and take={self.take!r}; "
                "name that model with load.path, and set load.take=weights"
            )
        if self.adapter and not self.path:
            raise ValueError(
                f"adapter={self.adapter!r} is one beside the weights of path, which is empty; name its base model with load.path"
            )
        if not self.path and (self.step is not None or self.take != "weights"):
            raise ValueError(
                f"step={self.step} and take={self.take!r} choose from path, which is empty: a run goes on from the newest step of its own; "
                "to go back to an older one begin another folder with output=NEW load.path=OLD/checkpoints load.step=NUMBER load.take=all"
            )
