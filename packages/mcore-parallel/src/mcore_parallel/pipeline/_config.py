# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which schedule a run uses and where its layers lie, as plain fields."""

import functools
from dataclasses import dataclass

from mcore_parallel.pipeline._layout import PipelineLayout
from mcore_parallel.pipeline._schedule import (
    Schedule,
    ScheduleError,
    combined_one_f_one_b,
    interleaved_one_f_one_b,
    one_f_one_b,
    zero_bubble,
)

_SCHEDULES = ("auto", "1f1b", "interleaved", "zero_bubble", "combined")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Schedule and placement of the layers; the numbers of stages and chunks come from the ``ParallelPlan`` (pp, vpp).

    Raises:
        ScheduleError: a schedule that does not exist, a field that the schedule does not read, a layout beside numbers for one.

    Example:
        >>> schedule = PipelineConfig(schedule="zero_bubble").build(num_chunks=1)
        >>> " ".join(map(str, schedule(2, 1, 2)))
        'F0 I0 F1 I1 W0 W1'
    """

    schedule: str = "auto"
    """1f1b, interleaved (vpp > 1), zero_bubble (backward in two parts), combined (forwards and backwards in pairs, any vpp); auto is
    1f1b, interleaved when vpp > 1."""
    group_size: int | None = None
    """Micro-batches that go through a chunk before the next chunk has its turn (interleaved, combined with vpp > 1); None for the
    smallest allowed."""
    delay_weight_grad: bool = False
    """Pair the forward with the input gradient only (combined)."""
    layout: str | None = None
    """Text of a ``PipelineLayout``, for instance "Ett|tt|tt|tL"; None for as even as can be."""
    account_for_embedding: bool = False
    """The embedding counts as a layer."""
    account_for_loss: bool = False
    """Output layer and loss count as a layer."""
    num_layers_in_first_stage: int | None = None
    """Where it differs from the others; None for even stages."""
    num_layers_in_last_stage: int | None = None
    """Where it differs from the others; None for even stages."""

    def __post_init__(self) -> None:
        if self.schedule not in _SCHEDULES:
            raise ScheduleError(f"schedule={self.schedule!r} must be one of {', '.join(_SCHEDULES)}")
        if self.delay_weight_grad and self.schedule != "combined":
            raise ScheduleError(f"delay_weight_grad=True needs schedule='combined', found {self.schedule!r}")
        if self.group_size is not None and self.schedule in ("1f1b", "zero_bubble"):
            raise ScheduleError(f"group_size={self.group_size} has no meaning for schedule={self.schedule!r}; leave it out")
        numbers = (self.account_for_embedding, self.account_for_loss, self.num_layers_in_first_stage, self.num_layers_in_last_stage)
        if self.layout is not None and any(value is not None and value is not False for value in numbers):
            raise ScheduleError(f"layout={self.layout!r} places every layer already; leave account_for_* and num_layers_in_* out")

    def build(self, num_chunks: int) -> Schedule:
        """The schedule for stages of ``num_chunks`` chunks, to hand to ``train_step`` or ``Trainer``. Keep the object over the steps.

        Raises:
            ScheduleError: a schedule that cannot have as many chunks.
        """
        name = self.schedule if self.schedule != "auto" else "1f1b" if num_chunks == 1 else "interleaved"
        if name in ("1f1b", "zero_bubble") and num_chunks > 1:
            raise ScheduleError(f"schedule={name!r} has one chunk a stage, found vpp={num_chunks}; set vpp=1, or schedule='interleaved'")
        if name == "interleaved" and num_chunks == 1:
            raise ScheduleError("schedule='interleaved' needs vpp of at least 2, found vpp=1; raise vpp, or set schedule='1f1b'")
        if self.group_size is not None and num_chunks == 1:
            raise ScheduleError(f"group_size={self.group_size} needs vpp of at least 2, found vpp=1; raise vpp or leave group_size out")
        if name == "combined":
            return functools.partial(
                combined_one_f_one_b, num_chunks=num_chunks, group_size=self.group_size, delay_weight_grad=self.delay_weight_grad
            )
        if name == "interleaved":
            return functools.partial(interleaved_one_f_one_b, num_chunks=num_chunks, group_size=self.group_size)
        return zero_bubble if name == "zero_bubble" else one_f_one_b

    def place(self, num_layers: int, *, num_stages: int, num_chunks: int, mtp_num_layers: int = 0) -> PipelineLayout:
        """Where the layers lie, and with the loss the depths that predict further tokens.

        Raises:
            ScheduleError: fewer layers than virtual stages, or a layout of another number of chunks.
            ValueError: what ``PipelineLayout`` raises.
        """
        if self.layout is not None:
            layout = PipelineLayout.parse(self.layout, num_stages=num_stages, num_layers=num_layers)
            if layout.num_chunks != num_chunks:
                raise ScheduleError(f"layout={self.layout!r} has {layout.num_chunks} chunks a stage, but vpp={num_chunks}; make them equal")
            return layout
        if num_layers + self.account_for_embedding + self.account_for_loss < num_stages * num_chunks:
            raise ScheduleError(
                f"num_layers={num_layers} are fewer than pp*vpp={num_stages}*{num_chunks} virtual stages; lower vpp or pp, or give a layout"
            )
        return PipelineLayout.even(
            num_layers,
            num_stages=num_stages,
            num_chunks=num_chunks,
            account_for_embedding=self.account_for_embedding,
            account_for_loss=self.account_for_loss,
            num_layers_in_first_stage=self.num_layers_in_first_stage,
            num_layers_in_last_stage=self.num_layers_in_last_stage,
            mtp_num_layers=mtp_num_layers,
        )
