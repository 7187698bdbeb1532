# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The training loop."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import nn

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.pipeline import ModelChunks, Overlap
from mcore_parallel.pipeline import Schedule as PipelineSchedule
from mcore_parallel.training._batch import Batch
from mcore_parallel.training._dumps import StepDumps
from mcore_parallel.training._profile import ProfileConfig, ProfileWindow
from mcore_parallel.training._protocols import Checkpointer, DynamicLossScaler, GradSync, LossScaler, Objective, Optimizer, Schedule, Writer
from mcore_parallel.training._rerun import Rerun, SuspectResultError
from mcore_parallel.training._state import StatefulOptimizer, TensorShard, model_state, optimizer_state
from mcore_parallel.training._step import TrainReport, evaluate, train_step
from mcore_parallel.training._throughput import Throughput
from mcore_parallel.training._timers import Timers


class NonFiniteLossError(ArithmeticError):
    """Too many steps whose loss or gradient norm is not a usable number."""

    def __init__(self, step: int, report: TrainReport, reason: str) -> None:
        super().__init__(f"step {step}: loss={report.loss}, grad_norm={report.grad_norm}: {reason}")
        self.step = step
        self.report = report


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Length and rhythm of a run.

    Raises:
        ValueError: a negative number.
    """

    steps: int
    """Last step; the first is 1."""
    eval_every: int = 0
    """Evaluate after every n-th step; 0 for never."""
    save_every: int = 0
    """Save after every n-th step and after the last one, wherever the run ends without an error; 0 for never."""
    save_local_every: int = 0
    """Keep every n-th step on the nodes, where it is not saved; 0 for never."""
    timers_every: int = 0
    """Read ``timers`` after the first step and every n-th, which waits for the ranks; 0 for never."""
    per_layer_values: bool = True
    """Write auxiliary losses and the load of experts of each layer, beside their means over the layers."""
    max_skipped_steps: int = 0
    """Steps of the run that the optimizer may skip (gradients that are not finite) before it is an error; any number while the
    optimizer can lower its loss scale."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """How far a run is; part of every checkpoint."""

    step: int = 0
    """Steps done, skipped ones included."""
    consumed_samples: int = 0
    """Sequences of all replicas that were trained on; the position in the data."""
    skipped_steps: int = 0


class TrainableOptimizer(Optimizer, StatefulOptimizer, Protocol):
    """An optimizer that updates and whose state can be saved."""


class Trainer:
    """Trains a model step by step, evaluates, saves, and reports.

    Args:
        config: length and rhythm.
        model: this rank's stage; ``ModelChunks`` when it has several chunks.
        sync: sums its gradients.
        optimizer: updates it.
        objective: what is minimised.
        data: from a number of consumed samples to the micro-batches of each following step, one list a step.
        schedule: learning rates; step 1 has ``schedule.lr(0)``. A skipped step does not advance it.
        writers: take the numbers of each step, on the first rank of the layout only; closed at the end of ``run``.
        checkpointer: saves and restores; needed by ``save_every`` and ``resume``.
        save_local: keeps a step on the nodes, as a checkpointer's ``save`` (``LocalCheckpoints``); needed by ``save_local_every``. What
            ``resume`` loads is the checkpointer's choice.
        evaluation: the micro-batches of one evaluation; needed by ``eval_every``.
        probe: further numbers of a step (load of experts); called on every rank after each step.
        groups: the layout; None for ``model.groups``.
        pipeline: the order of forwards and backwards (``PipelineConfig.build``); None as in ``train_step``.
        overlap: interleaves the pairs of a combined schedule.
        stop: asked on every rank before each step (``StopSignals``); when one rank says yes, all end after the step and save.
        rerun: looks at each loss before the update and runs the step again when it cannot be right.
        throughput: adds operations a second to the numbers of a step.
        spans: a context around each part, by its name: "step" and in it "forward-backward", "grad-sync", "optimizer"; "batch" (waiting for
            data), "evaluate", "save", "load" (``TelemetrySpans``).
        timers: of these parts but "step"; seconds a step, by ``config.timers_every``, as ``time/<part>``.
        profile: the steps that are traced; closed at the end of ``run``.
        dumps: what is written down of some steps.

    Raises:
        ValueError: a rhythm without the part it needs.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module,
        sync: GradSync,
        optimizer: TrainableOptimizer,
        objective: Objective,
        data: Callable[[int], Iterable[Sequence[Batch]]],
        schedule: Schedule,
        writers: Sequence[Writer] = (),
        checkpointer: Checkpointer | None = None,
        *,
        save_local: Callable[[int, Mapping[str, Any], Mapping[str, Any]], object] | None = None,
        evaluation: Callable[[], Sequence[Batch]] | None = None,
        probe: Callable[[], Mapping[str, float]] | None = None,
        groups: ProcessGroups | None = None,
        pipeline: PipelineSchedule | None = None,
        overlap: Overlap | None = None,
        stop: Callable[[], bool] | None = None,
        rerun: Rerun | None = None,
        throughput: Throughput | None = None,
        spans: Callable[[str], AbstractContextManager[object]] = nullcontext,
        timers: Timers | None = None,
        profile: ProfileWindow | None = None,
        dumps: StepDumps | None = None,
    ) -> None:
        if config.save_every and checkpointer is None:
            raise ValueError(f"save_every={config.save_every} needs a checkpointer; pass one or set save_every=0")
        if config.save_local_every and save_local is None:
            raise ValueError(f"save_local_every={config.save_local_every} needs save_local; pass it or set save_local_every=0")
        if config.eval_every and evaluation is None:
            raise ValueError(f"eval_every={config.eval_every} needs evaluation batches; pass evaluation or set eval_every=0")
        if config.timers_every and timers is None:
            raise ValueError(f"timers_every={config.timers_every} needs timers; pass them or set timers_every=0")
        owner: Any = model[0] if isinstance(model, ModelChunks) else model
        self.config, self.model, self.sync, self.optimizer, self.objective = config, model, sync, optimizer, objective
        self.data, self.schedule, self.checkpointer = data, schedule, checkpointer
        self.save_local, self.evaluation, self.probe = save_local, evaluation, probe
        self.pipeline, self.overlap = pipeline, overlap
        self.groups: ProcessGroups = owner.groups if groups is None else groups
        self.writers = tuple(writers) if self.groups.world.is_first else ()
        self.stop, self.rerun, self.throughput, self.spans = stop, rerun, throughput, spans
        self.timers, self.dumps = timers, dumps
        self.profile = ProfileConfig().build() if profile is None else profile
        self.state = TrainerState()
        self.stopped = False
        """The run ended because a rank asked for it."""
        self._saved: int | None = None
        self._timed: int | None = None

    def tensors(self) -> dict[str, TensorShard | list[TensorShard]]:
        """All tensors of a checkpoint, live."""
        return {**model_state(self.model, self.groups), **optimizer_state(self.optimizer, self.groups)}

    def resume(self) -> TrainerState:
        """Continue from the newest checkpoint, if there is one.

        Raises:
            ValueError: there is no checkpointer.
        """
        if self.checkpointer is None:
            raise ValueError("resume needs a checkpointer; pass one to Trainer")
        if self.checkpointer.latest() is not None:
            with self._part("load"):
                _, extra = self.checkpointer.load(self.tensors())
            self.state = TrainerState(**extra["trainer"])
            self.optimizer.load_step_count(int(extra["optimizer_step"]))
            if self.rerun is not None and "rerun" in extra:
                self.rerun.load_state(extra["rerun"])
            self._saved = self.state.step
        return self.state

    def save(self) -> None:
        """Save model, optimizer and the state of the run.

        Raises:
            ValueError: there is no checkpointer.
        """
        if self.checkpointer is None:
            raise ValueError("save needs a checkpointer; pass one to Trainer")
        with self._part("save"):
            self.checkpointer.save(self.state.step, self.tensors(), self._extra())
        self._saved = self.state.step

    def _extra(self) -> dict[str, Any]:
        """What a step keeps beside its tensors."""
        extra: dict[str, Any] = {"trainer": asdict(self.state), "optimizer_step": self.optimizer.step_count}
        return extra if self.rerun is None else {**extra, "rerun": self.rerun.state()}

    def run(self) -> TrainerState:
        """Train up to ``config.steps``, to the end of the data or until ``stop``; call it once.

        Raises:
            NonFiniteLossError: more steps were skipped than allowed, or a loss that is not finite led to an update.
            SuspectResultError, InvalidResultError: of ``rerun``; before the first one the state before the step is saved.
        """
        self.model.train()
        try:
            self._train()
            self._save_end()
        except SuspectResultError:
            self._save_end()
            raise
        finally:
            self.profile.close()
            for writer in self.writers:
                writer.close()
        return self.state

    def _train(self) -> None:
        stream = iter(self.data(self.state.consumed_samples))
        begin = time.perf_counter()
        while self.state.step < self.config.steps and not self.stopped:
            self.profile.begin_step(self.state.step + 1)
            with self._part("batch"):
                batches = next(stream, None)
            if batches is None:
                break
            with self.spans("step"):
                values = self._step(batches)
            seconds = time.perf_counter() - begin
            tokens_per_s = sum(batch.tokens.numel() for batch in batches) * self.groups.dp_cp.size / seconds
            values |= {"step_s": seconds, "tokens_per_s": tokens_per_s}
            if self.throughput is not None:
                values |= self.throughput.values(tokens_per_s=tokens_per_s, num_ranks=self.groups.world.size)
            values |= self._after(self.state.step)
            values |= self._times(self.state.step)
            values |= self._end_profile(self.state.step)
            for writer in self.writers:
                writer.write(self.state.step, values)
            begin = time.perf_counter()

    def _save_end(self) -> None:
        """The last step, unless it is saved already."""
        if self.config.save_every and self.state.step and self._saved != self.state.step:
            self.save()

    def _step(self, batches: Sequence[Batch]) -> dict[str, float]:
        state = self.state
        lr = self.schedule.lr(state.step - state.skipped_steps)
        check = None if self.rerun is None else functools.partial(self.rerun.check, state.step + 1)
        with nullcontext(check) if self.dumps is None else self.dumps.step(state.step + 1, check) as check:
            report = train_step(
                self.model,
                batches,
                self.objective,
                self.sync,
                self.optimizer,
                lr=lr,
                groups=self.groups,
                pipeline=self.pipeline,
                overlap=self.overlap,
                vote=self.stop is not None and self.stop(),
                check=check,
                span=self._part,
            )
        self.stopped = report.votes > 0
        samples = sum(len(batch.tokens) for batch in batches) * self.groups.dp.size
        self.state = TrainerState(
            step=state.step + 1,
            consumed_samples=state.consumed_samples + samples,
            skipped_steps=state.skipped_steps + report.skipped,
        )
        self._check(report)
        values = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": lr, "num_tokens": report.num_tokens, "aux": report.aux}
        values |= {"num_samples": samples, "skipped_steps": self.state.skipped_steps, **report.metrics}
        if isinstance(self.optimizer, LossScaler) and (scale := self.optimizer.loss_scale) is not None:
            values["loss_scale"] = scale.item()
        values |= report.layers.values(per_layer=self.config.per_layer_values)
        values |= {} if self.rerun is None else self.rerun.pop_values()
        return {**values, **(self.probe() if self.probe else {})}

    def _check(self, report: TrainReport) -> None:
        step, skipped, allowed = self.state.step, self.state.skipped_steps, self.config.max_skipped_steps
        if report.skipped and skipped > allowed and not self._lowers_loss_scale(report):
            raise NonFiniteLossError(
                step, report, f"{skipped} steps were skipped, max_skipped_steps={allowed}; look at the data of this step"
            )
        if not report.skipped and not math.isfinite(report.loss):
            raise NonFiniteLossError(
                step, report, "the loss is not finite, but its gradient was and has been applied; resume from a checkpoint"
            )

    def _lowers_loss_scale(self, report: TrainReport) -> bool:
        """The step was skipped for the sake of a loss scale that can become smaller: that is how it is found."""
        optimizer = self.optimizer
        return not math.isfinite(report.grad_norm) and isinstance(optimizer, DynamicLossScaler) and optimizer.can_lower_loss_scale

    def _after(self, step: int) -> dict[str, float]:
        """Evaluation and saving, when they are due."""
        values: dict[str, float] = {}
        if self.evaluation is not None and self.config.eval_every and step % self.config.eval_every == 0:
            with self._part("evaluate"):
                evaluated = evaluate(self.model, self.evaluation(), self.objective, groups=self.groups)
            values = {"eval/loss": evaluated.mean.item()}
            values |= {f"eval/{name}": (value / evaluated.count).item() for name, value in evaluated.metrics.items()}
        if self.config.save_every and step % self.config.save_every == 0:
            self.save()
        elif self.save_local is not None and self._is_local(step):
            with self._part("save"):
                self.save_local(step, self.tensors(), self._extra())
        return values

    def _is_local(self, step: int) -> bool:
        """Whether a step that is not saved now is kept on the nodes; the last one is saved at once."""
        every = self.config.save_local_every
        return every > 0 and step % every == 0 and step < self.config.steps and not self.stopped

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Around a part of the run, for all who want to know."""
        timer = nullcontext() if self.timers is None else self.timers(name)
        with self.spans(name), self.profile.range(name), timer:
            yield

    def _times(self, step: int) -> dict[str, float]:
        """Seconds a step of each part since the last reading, when it is due; the first step, which compiles, is told by itself."""
        every, timers = self.config.timers_every, self.timers
        if timers is None or not every or (self._timed is not None and step % every):
            return {}
        first = self._timed is None
        times = timers.values(normalizer=1 if self._timed is None else step - self._timed, reset=not first)
        if first:
            timers.end_first_iteration()
        self._timed = step
        # What did not run since, such as the start-up, is left out.
        return {name: value for name, value in times.items() if value}

    def _end_profile(self, step: int) -> dict[str, float]:
        """How much of the traced steps waited for communication, in the line of the last one."""
        known = self.profile.communication
        self.profile.end_step(step)
        communication = self.profile.communication
        return {} if communication is None or communication is known else communication.values()
