# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Train a student on what a trained teacher makes of the same text, on one machine or many; a run goes on from its newest checkpoint.

torchrun --nproc-per-node 8 -m tools.distill --recipe gpt_tiny --teacher gpt_tiny --set teacher.output=runs/gpt_tiny \\
    --set student.model.num_layers=2 --set student.output=runs/student --set student.data.prefix=corpus \\
    --set student.data.tokenizer=tokenizer.json

With --set store=FOLDER the student learns from log-probabilities on disk, which the same command with --record writes first.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mcore_ckpt import CheckpointingException, CheckpointManager
from mcore_parallel import ProcessGroups
from mcore_parallel.data import HuggingFaceTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.guard import Watchdog
from mcore_parallel.optim import MegatronOptimizer
from mcore_parallel.pipeline import ModelChunks
from mcore_parallel.training import (
    STOPPED_EXIT_CODE,
    Batch,
    JsonLinesWriter,
    NonFiniteLossError,
    RichProgress,
    StopSignals,
    TensorBoardWriter,
    Trainer,
    TrainerConfig,
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
    LogProbStoreWriter,
    RatioBalancer,
    Teacher,
    quantize_student,
    record,
    writes,
)
from tools.assemble import DTYPES, Samples, build_model, build_stage, datasets, schedule, step_batches
from tools.journey import History, Trained
from tools.pretrain import join
from tools.recipes import RECIPES, RunConfig, override, recipe


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """One distillation.

    Raises:
        ValueError: choices that do not go together.
    """

    student: RunConfig
    teacher: RunConfig
    """Its model, experts, dtype and ``output``, whose newest checkpoint is loaded; plan, data and batches are the student's."""
    temperature: float = 1.0
    reverse: bool = False
    temperature_squared: bool = False
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
            if run.masked:
                raise ValueError(f"{name} must predict the next token; set {name}.masked=none")
        if self.targets != "base" and not student.model.mtp_num_layers:
            raise ValueError(f"targets={self.targets} needs heads that predict further tokens; set student.model.mtp_num_layers")
        if self.quantize and dataclasses.replace(student.model, mtp_num_layers=0) != dataclasses.replace(teacher.model, mtp_num_layers=0):
            raise ValueError(f"quantize={self.quantize} begins with the teacher's weights; make student.model equal to teacher.model")
        if student.model.vocab_size != teacher.model.vocab_size:
            raise ValueError(
                f"student.model.vocab_size={student.model.vocab_size} and teacher.model.vocab_size={teacher.model.vocab_size} must be equal"
            )
        if student.data_parallel != "ddp":
            raise ValueError(f"student.data_parallel={student.data_parallel!r} has no distillation; set it to ddp")
        if self.store and (self.pairs or self.reverse):
            raise ValueError("a store holds likely tokens only, no hidden states; set pairs= and reverse=false, or store=")
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


def build_teacher(config: DistillConfig, groups: ProcessGroups, device: torch.device) -> Teacher:
    """The teacher with the weights of its newest checkpoint, in the student's layout."""
    student, teacher = config.student, config.teacher
    train = dataclasses.replace(student.train, dtype=teacher.train.dtype)
    run = dataclasses.replace(teacher, plan=student.plan, pipeline=student.pipeline, train=train, data_parallel="ddp")
    model = build_stage(run, groups, device)
    CheckpointManager(Path(teacher.output) / "checkpoints").load(model_state(model, groups), strict=False)
    return Teacher(model, capture=config.build().teacher_modules, groups=groups)


def record_rank(config: DistillConfig, kind: str) -> int:
    """Write down what the teacher makes of the student's training and validation samples; batches it ran over."""
    if not config.store:
        raise ValueError("store is empty; pass --set store=FOLDER to record into")
    device, student = _device(kind), config.student
    groups = ProcessGroups.build(student.plan)
    teacher = build_teacher(config, groups, device)
    step = CheckpointManager(Path(config.teacher.output) / "checkpoints").latest()
    settings = LogProbStoreConfig(
        teacher=f"{config.teacher.output} step {step}", seq_len=student.train.seq_len, top_k=config.top_k, temperature=config.temperature
    )
    writer = LogProbStoreWriter(config.store, settings, name=str(groups.dp.rank)) if writes(teacher) else None
    with writer or contextlib.nullcontext():
        steps = (student.train.steps, student.train.eval_batches)
        return sum(
            record(teacher, itertools.islice(step_batches(student, part, groups, device, 0, sizes), count), writer)
            for part, count, sizes in zip(_datasets(student), steps, (student.train.batch_sizes(), None), strict=True)
        )


def distill_rank(config: DistillConfig, kind: str, watchdog: Watchdog | None = None, stop: Callable[[], bool] | None = None) -> Trained:
    """Train the student from its newest checkpoint or from the beginning, validate and save, on this rank of the world.

    A run that ``stop`` ends (asked before each step; one rank is enough) saves and is not validated: its loss is NaN.
    """
    device, run, losses = _device(kind), config.student, config.build()
    begin = time.perf_counter()
    groups = ProcessGroups.build(run.plan)
    teacher = None if config.store else build_teacher(config, groups, device)
    source = LogProbStore(config.store, temperature=config.temperature) if teacher is None else teacher
    model = build_stage(run, groups, device)
    train_set, valid_set = _datasets(run)
    if config.quantize:
        CheckpointManager(Path(config.teacher.output) / "checkpoints").load(model_state(model, groups), strict=False)
        steps = itertools.islice(step_batches(run, valid_set, groups, device), run.train.eval_batches)
        quantize_student(model, config.quantize, [batch for step in steps for batch in step], groups=groups)
    projection = _project(config, model, groups, device)
    slices = run.optimizer.use_distributed_optimizer
    sync = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=slices), model, groups)
    output, history = Path(run.output), History()
    writers = [
        RichProgress(run.train.steps),
        JsonLinesWriter(output / "train.jsonl"),
        TensorBoardWriter(output / "tensorboard"),
        history,
    ] if groups.world.is_first else []  # fmt: skip

    def data(consumed: int) -> Iterator[Sequence[Batch]]:
        for batches in step_batches(run, train_set, groups, device, consumed, run.train.batch_sizes()):
            yield source.label(batches)

    def watched(consumed: int) -> Iterator[Sequence[Batch]]:
        stream = data(consumed)
        yield from stream if watchdog is None else watchdog.watch(stream, start=trainer.state.step + 1)

    def validation() -> Sequence[Batch]:
        stream = step_batches(run, valid_set, groups, device)
        return source.label([batch for _, step in zip(range(run.train.eval_batches), stream, strict=False) for batch in step])

    with HiddenCapture(model, losses.student_modules) as capture:
        objective = DistillationObjective(
            config=losses,
            teacher=teacher,
            capture=capture,
            projection=projection,
            balancer=RatioBalancer(skip_lm_loss=config.skip_lm_loss, kd_loss_scale=config.kd_loss_scale),
        )
        trainer = Trainer(
            TrainerConfig(
                steps=run.train.steps, eval_every=run.train.eval_interval, save_every=run.train.checkpoint_interval or run.train.steps
            ),
            model,
            sync,
            MegatronOptimizer(run.optimizer, sync, groups),
            objective,
            watched,
            schedule(run),
            writers,
            CheckpointManager(output / "checkpoints"),
            evaluation=validation,
            groups=groups,
            pipeline=run.pipeline.build(run.plan.vpp),
            stop=stop,
        )
        trainer.resume()
        trainer.run()
        loss = float("nan") if trainer.stopped else evaluate(model, validation(), objective, groups=groups).mean.item()
    counted = sum(parameter.numel() for parameter in build_model(run, ProcessGroups.single(), "meta").parameters())
    return Trained(
        history=history,
        validation_loss=loss,
        seconds=time.perf_counter() - begin,
        num_parameters=counted,
        stopped_at=trainer.state.step if trainer.stopped else None,
    )


def _project(config: DistillConfig, model: nn.Module, groups: ProcessGroups, device: torch.device) -> HiddenProjection | None:
    """The map between the widths, where the losses are; it is trained and saved with the student."""
    mine, theirs = config.student.model.hidden_size, config.teacher.model.hidden_size
    chunk = model[-1] if isinstance(model, ModelChunks) else model
    if not config.pairs or mine == theirs or not getattr(chunk, "is_last", True):
        return None
    projection = HiddenProjection(mine, theirs, groups, dtype=DTYPES[config.student.train.dtype], device=device)
    model.add_module("distill_projection", projection)
    return projection


def _device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def _datasets(run: RunConfig) -> tuple[Samples, Samples]:
    tokenizer = HuggingFaceTokenizer(run.data.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ValueError(
            f"student.model.vocab_size={run.model.vocab_size} is smaller than the {tokenizer.vocab_size} tokens of the tokenizer"
        )
    return datasets(run, tokenizer)


def distill(config: DistillConfig, *, only_record: bool = False) -> int:
    """Train, or record, on this rank of the world that torchrun, Slurm or nobody started; the exit code.

    SIGTERM and SIGINT end training after a step, saved.
    """
    for name in ("prefix", "tokenizer"):
        if not getattr(config.student.data, name):
            raise ValueError(f"student.data.{name} is empty; make the corpus with mcore-preprocess and pass --set student.data.{name}=PATH")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(join(config.student, kind)) if "WORLD_SIZE" in os.environ else None
        code = 0
        if only_record:
            message = f"the teacher ran over {record_rank(config, kind)} batches a replica; {config.store} holds what it finds likely"
        else:
            trained = distill_rank(config, kind, watchdog, stack.enter_context(StopSignals()))
            message = f"validation loss {trained.validation_loss:.6f} after {trained.seconds:.0f} s"
            if trained.stopped_at is not None:
                code, message = STOPPED_EXIT_CODE, f"stopped and saved after step {trained.stopped_at}; start it again to go on"
            message += f"; checkpoints under {config.student.output}"
        if int(os.environ.get("RANK", "0")) == 0:
            print(message)
        return code


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, help=f"of the student, one of: {', '.join(RECIPES)}")
    parser.add_argument("--teacher", required=True, help="recipe the teacher was trained by")
    parser.add_argument("--record", action="store_true", help="run the teacher only, and write its likeliest tokens into the store")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, for instance student.plan.tp=2")
    arguments = parser.parse_args()
    try:
        base = DistillConfig(student=recipe(arguments.recipe), teacher=recipe(arguments.teacher))
        return distill(override(base, arguments.set), only_record=arguments.record)
    except (ValueError, OSError, ImportError, CheckpointingException, NonFiniteLossError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
