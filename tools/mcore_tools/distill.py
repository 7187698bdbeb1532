# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Train a student on what a trained teacher makes of the same text, on one machine or many; a run goes on from its newest checkpoint.

torchrun --nproc-per-node 8 -m mcore_tools.distill --recipe gpt_tiny --teacher runs/gpt_tiny \\
    --set student.model.num_layers=2 --set student.output=runs/student --set student.data.prefix=corpus

The tokenizer is the teacher's, where its folder holds one; else student.data.tokenizer names it.
With --set store=FOLDER the student learns from log-probabilities on disk, which the same command with --record writes first.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mcore_ckpt.storage import Folder
from mcore_parallel import ProcessGroups
from mcore_parallel.guard import Watchdog
from mcore_parallel.pipeline import ModelChunks
from mcore_parallel.training import (
    STOPPED_EXIT_CODE,
    Batch,
    StopSignals,
    evaluate,
    model_state,
)
from mcore_parallel.training.distill import (
    DistillationConfig,
    DistillationObjective,
    HiddenCapture,
    HiddenPair,
    HiddenProjection,
    LogProbStore,
    LogProbStoreConfig,
    LogProbStoreError,
    LogProbStoreWriter,
    RatioBalancer,
    Teacher,
    quantize_student,
    record,
    writes,
)
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser
from mcore_tools.assembly import DTYPES, Samples, build_groups, build_stage, datasets, open_tokenizer, step_batches, validation_batches
from mcore_tools.exit_code import under_way
from mcore_tools.recipes import RECIPES, RunConfig, recipe
from mcore_tools.reports import History
from mcore_tools.torchrun import tell_launcher
from mcore_tools.training import (
    HuggingFaceFolder,
    Trained,
    build_trainer,
    check_taken,
    check_trained,
    command,
    device_of,
    fill_model,
    place,
    tell,
    trained_run,
    trained_weights,
    weights_identity,
    with_tokenizer,
)


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """One distillation.

    Raises:
        ValueError: choices that do not go together.
    """

    student: RunConfig
    """The run that learns."""
    teacher: RunConfig
    """Its model, experts, dtype, and what ``load`` names, else the newest checkpoint of ``output``; plan, data and batches are the
    student's."""
    temperature: float = 1.0
    """Divides the logits of both."""
    reverse: bool = False
    """KL(student || teacher), which seeks one mode of the teacher instead of covering all."""
    temperature_squared: bool = False
    """Multiply the divergence by the temperature's square, so that its gradients keep their size."""
    skip_lm_loss: bool = True
    """Leave the labels out."""
    kd_loss_scale: float = 1.0
    """Weight of distillation beside the labels."""
    pairs: str = ""
    """Hidden states to be brought together, "STUDENT=TEACHER[=LOSS]" with commas between: layers.1=layers.3=mse,final_norm=final_norm."""
    store: str = ""
    """Folder of log-probabilities to learn from, without running the teacher; empty to run it."""
    top_k: int = 64
    """Tokens a store keeps of each distribution."""
    targets: str = "base"
    """What of the student learns: base, mtp (its heads that predict further tokens) or both."""
    quantize: str = ""
    """Preset of nvidia-modelopt (FP8_DEFAULT_CFG): the student begins with the teacher's weights and computes quantised; empty for
    neither."""

    def __post_init__(self) -> None:
        student, teacher = self.student, self.teacher
        for name, run in (("student", student), ("teacher", teacher)):
            if run.encoder:
                raise ValueError(f"{name} must predict the next token; set {name}.{run.encoder}=none")
        if self.targets != "base" and not student.model.mtp_num_layers:
            raise ValueError(f"targets={self.targets} needs heads that predict further tokens; set student.model.mtp_num_layers")
        if self.quantize and dataclasses.replace(student.model, mtp_num_layers=0) != dataclasses.replace(teacher.model, mtp_num_layers=0):
            raise ValueError(f"quantize={self.quantize} begins with the teacher's weights; make student.model equal to teacher.model")
        if student.model.vocab_size != teacher.model.vocab_size:
            raise ValueError(
                f"student.model.vocab_size={student.model.vocab_size} and teacher.model.vocab_size={teacher.model.vocab_size} differ; "
                f"set student.model.vocab_size={teacher.model.vocab_size}, and the teacher's tokenizer"
            )
        if student.data_parallel != "ddp":
            raise ValueError(f"student.data_parallel={student.data_parallel!r} has no distillation; set it to ddp")
        if self.store and (self.pairs or self.reverse):
            raise ValueError("a store holds likely tokens only, no hidden states; set pairs= and reverse=false, or store=")
        check_taken("teacher", teacher)
        self.build()

    def build(self) -> DistillationConfig:
        """The losses.

        Raises:
            ValueError: pairs that are no pairs, numbers out of range.
        """
        names = [pair.split("=") for pair in self.pairs.split(",") if pair]
        if wrong := [pair for pair in names if not 2 <= len(pair) <= 3]:
            raise ValueError(f"pairs holds {'='.join(wrong[0])!r}; write STUDENT=TEACHER or STUDENT=TEACHER=LOSS, with commas between")
        pairs = tuple(HiddenPair(student=name[0], teacher=name[1], **({"loss": name[2]} if name[2:] else {})) for name in names)
        return DistillationConfig(
            targets=self.targets,
            temperature=self.temperature,
            reverse=self.reverse,
            temperature_squared=self.temperature_squared,
            pairs=pairs,
        )


def build_teacher(config: DistillConfig, weights: Folder | HuggingFaceFolder, groups: ProcessGroups, device: torch.device) -> Teacher:
    """The teacher with its weights, in the student's layout."""
    student, teacher = config.student, config.teacher
    train = dataclasses.replace(student.train, dtype=teacher.train.dtype)
    run = dataclasses.replace(teacher, plan=student.plan, pipeline=student.pipeline, train=train, data_parallel="ddp")
    model = build_stage(run, groups, device)
    fill_model(model_state(model, groups), weights)
    return Teacher(model, capture=config.build().teacher_modules, groups=groups)


def record_rank(config: DistillConfig, kind: str) -> int:
    """Write down what the teacher makes of the student's training and validation samples; batches it ran over."""
    if not config.store:
        raise ValueError("store is empty; pass --set store=FOLDER to record into")
    device, student = device_of(kind), config.student
    weights = trained_weights("teacher", config.teacher)
    groups = build_groups(student)
    teacher = build_teacher(config, weights, groups, device)
    settings = LogProbStoreConfig(
        teacher=weights_identity(weights),
        seq_len=student.train.seq_len,
        top_k=config.top_k,
        temperature=config.temperature,
    )
    writer = _open_store(config.store, settings, name=str(groups.dp.rank)) if writes(teacher) else None
    with writer or contextlib.nullcontext():
        steps = (student.train.steps, student.train.eval_batches)
        return sum(
            record(teacher, itertools.islice(step_batches(student, part, groups, device, 0, sizes), count), writer)
            for part, count, sizes in zip(_datasets(student), steps, (student.train.batch_sizes(), None), strict=True)
        )


def _open_store(folder: str, settings: LogProbStoreConfig, *, name: str) -> LogProbStoreWriter:
    try:
        return LogProbStoreWriter(folder, settings, name=name)
    except LogProbStoreError as error:
        try:
            stored = LogProbStore(folder, temperature=settings.temperature).config
        except LogProbStoreError:
            raise error from None
        # A place without a digest of what lies there.
        if dataclasses.replace(stored, teacher=settings.teacher) != settings or settings.teacher.rpartition(" ")[0] != stored.teacher:
            raise
        raise LogProbStoreError(
            f"{folder} names the place of its teacher alone, {stored.teacher}, and not which weights lay there; if they are those of now, "
            f"set teacher in its store.json to {json.dumps(settings.teacher)}, or else set store to another folder"
        ) from error


def distill_rank(config: DistillConfig, kind: str, watchdog: Watchdog | None = None, stop: Callable[[], bool] | None = None) -> Trained:
    """Train the student from its newest checkpoint or from the beginning, validate and save, on this rank of the world.

    A run that ``stop`` ends (asked before each step; one rank is enough) saves and is not validated: its loss is NaN.
    """
    device, run, losses = device_of(kind), config.student, config.build()
    begin = time.perf_counter()
    weights = None if config.store and not config.quantize else trained_weights("teacher", config.teacher)
    groups = build_groups(run)
    teacher = None if config.store or weights is None else build_teacher(config, weights, groups, device)
    source = LogProbStore(config.store, temperature=config.temperature) if teacher is None else teacher
    model = build_stage(run, groups, device)
    train_set, valid_set = _datasets(run)
    if config.quantize and weights is not None:
        fill_model(model_state(model, groups), weights, untrained=("mtp.",))
        quantize_student(model, config.quantize, validation_batches(run, valid_set, groups, device), groups=groups)
    projection = _project(config, model, groups, device)
    history = History()

    def data(consumed: int) -> Iterator[Sequence[Batch]]:
        for batches in step_batches(run, train_set, groups, device, consumed, run.train.batch_sizes()):
            yield source.label(batches)

    def validation() -> Sequence[Batch]:
        return source.label(validation_batches(run, valid_set, groups, device))

    with HiddenCapture(model, losses.student_modules) as capture:
        objective = DistillationObjective(
            config=losses,
            teacher=teacher,
            capture=capture,
            projection=projection,
            balancer=RatioBalancer(skip_lm_loss=config.skip_lm_loss, kd_loss_scale=config.kd_loss_scale),
        )
        pipeline = run.pipeline.build(run.plan.vpp)
        options = {"history": history, "pipeline": pipeline, "watchdog": watchdog, "stop": stop}
        trainer = build_trainer(run, model, groups, objective, data, validation, **options)
        trainer.resume()
        with under_way():
            trainer.run()
            loss = float("nan") if trainer.stopped else evaluate(model, validation(), objective, groups=groups).mean.item()
    return Trained.of(trainer, run, history, loss=loss, begin=begin)


def _project(config: DistillConfig, model: nn.Module, groups: ProcessGroups, device: torch.device) -> HiddenProjection | None:
    """The map between the widths, where the losses are; it is trained and saved with the student."""
    mine, theirs = config.student.model.hidden_size, config.teacher.model.hidden_size
    chunk = model[-1] if isinstance(model, ModelChunks) else model
    if not config.pairs or mine == theirs or not getattr(chunk, "is_last", True):
        return None
    projection = HiddenProjection(mine, theirs, groups, dtype=DTYPES[config.student.train.dtype], device=device)
    model.add_module("distill_projection", projection)
    return projection


def _datasets(run: RunConfig) -> tuple[Samples, Samples]:
    return datasets(run, open_tokenizer(run.data.tokenizer, run.model.vocab_size, "student."))


def distill(config: DistillConfig, *, only_record: bool = False) -> int:
    """Train, or record, on this rank of the world that torchrun, Slurm or nobody started; the exit code.

    SIGTERM and SIGINT end training after a step, saved.
    """
    with place(config.student, "student") as (kind, watchdog):
        if only_record or not config.store:
            check_trained(config.teacher, "teacher.output", "train the teacher with `mcore train`, or give the folder of its run")
        if only_record:
            tell(f"the teacher ran over {record_rank(config, kind)} batches a replica; {config.store} holds what it finds likely")
            return 0
        with StopSignals() as stop:
            trained = distill_rank(config, kind, watchdog, stop)
        message = f"validation loss {trained.validation_loss:.6f} after {trained.seconds:.0f} s"
        if trained.stopped_at is not None:
            message = f"stopped and saved after step {trained.stopped_at}; start it again to go on"
            tell_launcher(f"no failure: {message}")
        tell(f"{message}; checkpoints under {config.student.output}")
        return 0 if trained.stopped_at is None else STOPPED_EXIT_CODE


def distill_config(recipe_name: str, teacher: str) -> DistillConfig:
    """A student by a recipe, of a teacher by a recipe or in a Hugging Face folder, a checkpoint or a run, with its vocabulary and
    tokenizer.

    Raises:
        RecipeError: a name that is no recipe, nor that of a folder.
        ValueError, CheckpointingException: of ``find_origin``.
    """
    student, taught = recipe(recipe_name), trained_run(teacher)
    model = dataclasses.replace(student.model, vocab_size=taught.model.vocab_size)
    return DistillConfig(student=with_tokenizer(dataclasses.replace(student, model=model), taught), teacher=taught)


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore distill", __doc__)
    parser.add_argument("--recipe", required=True, help=f"of the student, one of: {', '.join(RECIPES)}")
    parser.add_argument("--teacher", required=True, help="a Hugging Face folder, a run or a checkpoint; or the recipe of teacher.output")
    parser.add_argument("--record", action="store_true", help="run the teacher only, and write its likeliest tokens into the store")
    return command(
        parser,
        "student",
        DistillConfig,
        lambda options: distill_config(options.recipe, options.teacher),
        lambda options, config: distill(config, only_record=options.record),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
