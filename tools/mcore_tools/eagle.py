# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Train a draft head for a trained model, on one machine or many; a run goes on from its newest checkpoint.

torchrun --nproc-per-node 8 -m mcore_tools.eagle train --recipe gpt_tiny --target runs/gpt_tiny --set run.output=runs/head \\
    --set run.plan.dp=8 --set run.data.prefix=corpus

The tokenizer is the target's, where its folder holds one; else run.data.tokenizer names it.
With --set store=FOLDER the head learns from features on disk, which ``extract`` in place of ``train`` writes first. ``evaluate`` says how
many drafts of the newest checkpoint the target would accept, ``export`` writes it to --set published=FOLDER.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt import CheckpointManager
from mcore_parallel.comm import all_reduce
from mcore_parallel.guard import Watchdog
from mcore_parallel.models import GPTModel
from mcore_parallel.models.eagle import DraftVocabulary, EagleConfig, EagleHead, save_published
from mcore_parallel.pipeline import StageLayout
from mcore_parallel.training import (
    STOPPED_EXIT_CODE,
    Batch,
    StopSignals,
    evaluate,
    model_state,
)
from mcore_parallel.training.distill import Teacher, writes
from mcore_parallel.training.eagle import (
    EagleObjective,
    FeatureStore,
    FeatureStoreConfig,
    FeatureStoreWriter,
    TargetEnds,
    record_features,
)
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser
from mcore_tools.assembly import DTYPES, Samples, build_groups, build_model, datasets, open_tokenizer, step_batches
from mcore_tools.exit_code import under_way
from mcore_tools.recipes import RECIPES, RunConfig, recipe
from mcore_tools.torchrun import tell_launcher
from mcore_tools.training import (
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
from mcore_tools.whole_file import write_whole

PARTS = ("train", "valid")


@dataclass(frozen=True, kw_only=True)
class EagleRun:
    """One draft head.

    Raises:
        ValueError: choices that do not go together.
    """

    run: RunConfig
    """Plan, data, batches, optimizer and output of the head; its model is not read."""
    target: RunConfig
    """Its model, experts, dtype, and what ``load`` names, else the newest checkpoint of ``output``; plan and data are the head's."""
    head: str = ""
    """JSON file of the head's architecture (``EagleConfig``); empty for one layer like the target's."""
    draft_vocab_size: int = 0
    """Without a file: how many tokens the head proposes, the most frequent ones of the training samples; 0 for all."""
    store: str = ""
    """Folder of features to learn from, without running the target; empty to run it."""
    shard_samples: int = 64
    """Samples of a file of features."""
    published: str = ""
    """Folder that ``export`` writes."""
    num_steps: int = 7
    """Tokens that a row drafts in training."""
    decay: float = 0.8
    """Weight of each further one."""

    def __post_init__(self) -> None:
        run, target = self.run, self.target
        if run.plan.pp > 1 or run.plan.cp > 1 or run.data_parallel != "ddp":
            degrees = f"run.plan.pp={run.plan.pp}, run.plan.cp={run.plan.cp}, run.data_parallel={run.data_parallel!r}"
            raise ValueError(f"{degrees}; a head has tp and ddp only, set both degrees to 1 and run.data_parallel=ddp")
        unused = {"fp8": "none", "recompute": "none", "offload": "none", "batch_invariant": "false", "backend": "torch"}
        for name, default in unused.items():
            value = str(getattr(run, name))
            if value.lower() != default:
                raise ValueError(f"run.{name}={value} is for the layers of a model, and no head follows it; set run.{name}={default}")
        if run.train.dtype != target.train.dtype:
            raise ValueError(
                f"run.train.dtype={run.train.dtype} and target.train.dtype={target.train.dtype} must be equal; set "
                f"run.train.dtype={target.train.dtype}"
            )
        for name, trained in (("run", run), ("target", target)):
            if trained.encoder:
                raise ValueError(f"{name} must predict the next token; set {name}.{trained.encoder}=none")
        for name, least in (("num_steps", 1), ("shard_samples", 1), ("draft_vocab_size", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not self.decay > 0:
            raise ValueError(f"decay={self.decay} must be above 0")
        check_taken("target", target)
        self.architecture()

    def architecture(self) -> EagleConfig:
        """Of the head.

        Raises:
            ValueError: a file that cannot be, or for another target.
        """
        size = self.draft_vocab_size or None
        if not self.head:
            return EagleConfig.of_target(self.target.model, draft_vocab_size=size)
        if not Path(self.head).is_file():
            raise ValueError(
                f"head={self.head!r} is no file; name the JSON file of an architecture, or set head= for one layer like the target's"
            )
        config = EagleConfig.from_json(self.head)
        for name in ("hidden_size", "vocab_size"):
            theirs, mine = getattr(self.target.model, name), getattr(config.transformer, name)
            if theirs != mine:
                raise ValueError(f"{self.head}: transformer.{name}={mine} must be the target's, {theirs}; change it there, or set head=")
        return config


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """What a head does on the validation samples."""

    loss: float
    accepted_tokens: float
    """Drafts of a row that agree with the target, of ``num_steps``; with the target's own token one more is had for each of its passes."""
    step: int
    stopped: bool = False


class Workshop:
    """The parts that all commands share, on this rank of the world."""

    def __init__(self, config: EagleRun, kind: str) -> None:
        self.config = config
        self.device = device_of(kind)
        self.weights = trained_weights("target", config.target)
        self.groups = build_groups(config.run)
        tokenizer = open_tokenizer(config.run.data.tokenizer, config.target.model.vocab_size, "target.")
        self.samples: tuple[Samples, Samples] = datasets(config.run, tokenizer)
        self.architecture = config.architecture()
        self.vocabulary = self._vocabulary()

    @functools.cached_property
    def teacher(self) -> Teacher:
        """The target, running."""
        return Teacher(self._target(), capture=self.architecture.aux_modules)

    @functools.cached_property
    def ends(self) -> TargetEnds:
        """The target's, of a model without layers where features are on disk."""
        model = self._target(ends=True) if self.config.store else self.teacher.chunks[0]
        return TargetEnds(model, self.vocabulary)

    @functools.cached_property
    def stores(self) -> dict[str, FeatureStore]:
        """Of each part of the data."""
        options = {"ends": self.ends.digest(), "aux_modules": self.architecture.aux_modules}
        return {part: FeatureStore(Path(self.config.store) / part, **options) for part in PARTS}

    def head(self) -> EagleHead:
        """The head at its beginning."""
        train = self.config.run.train
        return EagleHead(
            self.architecture,
            self.groups,
            vocabulary=self.vocabulary,
            dtype=DTYPES[train.dtype],
            device=self.device,
            seed=train.seed,
        )

    def objective(self) -> EagleObjective:
        """What it minimises."""
        return EagleObjective(target=self.ends, num_steps=self.config.num_steps, decay=self.config.decay)

    def steps(self, part: str, consumed: int = 0) -> Iterator[list[Batch]]:
        """Micro-batches with features, one list a step, from sample ``consumed`` on; of a store in another order each time around."""
        run, training = self.config.run, part == "train"
        sizes = run.train.batch_sizes() if training else None
        if not self.config.store:
            stream = step_batches(run, self.samples[PARTS.index(part)], self.groups, self.device, consumed, sizes)
            yield from map(self.teacher.label, stream)
            return
        store, micro, dp = self.stores[part], run.train.micro_batch_size, self.groups.dp
        while True:
            size = run.train.global_batch_size if sizes is None else sizes.size(consumed)
            numbers = [self._place(number, len(store), shuffle=training) for number in range(consumed, consumed + size)][dp.rank :: dp.size]
            consumed += size
            yield [store.batch(numbers[first : first + micro], self.groups, device=self.device) for first in range(0, len(numbers), micro)]

    def validation(self) -> Sequence[Batch]:
        """The micro-batches of one evaluation."""
        return [batch for step in itertools.islice(self.steps("valid"), self.config.run.train.eval_batches) for batch in step]

    def _place(self, number: int, size: int, *, shuffle: bool) -> int:
        turn, place = divmod(number, size)
        return int(_order(size, self.config.run.train.seed + turn)[place]) if shuffle else place

    def _target(self, *, ends: bool = False) -> GPTModel:
        run, target = self.config.run, self.config.target
        train = dataclasses.replace(run.train, dtype=target.train.dtype)
        model = dataclasses.replace(target.model, mtp_num_layers=0) if target.model.hybrid_layer_pattern is None else target.model
        built = dataclasses.replace(target, model=model, plan=run.plan, pipeline=run.pipeline, train=train, data_parallel="ddp")
        layers = StageLayout(layers=range(0), embedding=True, loss=True, mtp_layers=range(0)) if ends else None
        target_model = build_model(built, self.groups, self.device, layers=layers)
        assert isinstance(target_model, GPTModel), "EagleRun refuses encoders"
        fill_model(model_state(target_model, self.groups), self.weights)
        return target_model

    def _vocabulary(self) -> DraftVocabulary | None:
        """Counted once, and kept beside the head's checkpoints."""
        size, total = self.architecture.draft_vocab_size, self.config.target.model.vocab_size
        if size is None:
            return None
        path = Path(self.config.run.output) / "draft_vocabulary.json"
        if self.groups.world.is_first and not path.exists():
            counts = torch.zeros(total, dtype=torch.int64)
            for number in range(len(self.samples[0])):
                counts += torch.bincount(torch.as_tensor(self.samples[0][number]["tokens"]), minlength=total)
            write_whole(path, json.dumps(DraftVocabulary.from_counts(counts, size).token_ids.tolist()))
        # The others wait for it.
        all_reduce(torch.zeros(1, device=self.device), self.groups.world)
        return DraftVocabulary(torch.tensor(json.loads(path.read_text(encoding="utf-8"))), total)


@functools.lru_cache(maxsize=2)
def _order(size: int, seed: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def extract_rank(config: EagleRun, kind: str) -> int:
    """Write down what the target makes of the training and validation samples; batches it ran over."""
    if not config.store:
        raise ValueError("store is empty; pass --set store=FOLDER to extract into")
    shop = Workshop(dataclasses.replace(config, store=""), kind)
    run, model = config.run, config.target.model
    settings = FeatureStoreConfig(
        target=weights_identity(shop.weights),
        ends=shop.ends.digest(),
        seq_len=run.train.seq_len,
        hidden_size=model.hidden_size,
        aux_modules=shop.architecture.aux_modules,
        dtype=config.target.train.dtype,
    )
    count = 0
    for part, samples, limit in zip(PARTS, shop.samples, (run.train.steps, run.train.eval_batches), strict=True):
        name = str(shop.groups.dp.rank)
        options = {"name": name, "shard_samples": config.shard_samples}
        writer = FeatureStoreWriter(Path(config.store) / part, settings, **options) if writes(shop.teacher) else None
        sizes = run.train.batch_sizes() if part == "train" else None
        with writer or contextlib.nullcontext():
            steps = itertools.islice(step_batches(run, samples, shop.groups, shop.device, 0, sizes), limit)
            count += record_features(shop.teacher, shop.architecture.aux_modules, steps, writer)
    return count


def train_head(config: EagleRun, kind: str, watchdog: Watchdog | None = None, stop: Callable[[], bool] | None = None) -> Drafted:
    """Train the head from its newest checkpoint or from the beginning, validate and save, on this rank of the world.

    A run that ``stop`` ends (asked before each step; one rank is enough) saves and is not validated.
    """
    shop, run = Workshop(config, kind), config.run
    head, data = shop.head(), functools.partial(shop.steps, "train")
    trainer = build_trainer(run, head, shop.groups, shop.objective(), data, shop.validation, watchdog=watchdog, stop=stop)
    trainer.resume()
    with under_way():
        trainer.run()
        if trainer.stopped:
            return Drafted(loss=float("nan"), accepted_tokens=float("nan"), step=trainer.state.step, stopped=True)
        return _measure(shop, head, trainer.state.step)


def evaluate_rank(config: EagleRun, kind: str) -> Drafted:
    """The newest checkpoint of the head on the validation samples; with ``published`` it is also written there."""
    shop = Workshop(config, kind)
    head = shop.head()
    step, _ = CheckpointManager(Path(config.run.output) / "checkpoints").load(model_state(head, shop.groups), strict=False)
    if config.published:
        save_published(head, config.published)
    return _measure(shop, head, step)


def _measure(shop: Workshop, head: EagleHead, step: int) -> Drafted:
    report = evaluate(head, shop.validation(), shop.objective(), groups=shop.groups)
    accepted = (report.metrics["accepted_tokens"] / report.count).item()
    return Drafted(loss=report.mean.item(), accepted_tokens=accepted, step=step)


def eagle_run(recipe_name: str, target: str) -> EagleRun:
    """A head by a recipe, in the dtype and with the tokenizer of its target: of a recipe, or what lies in a Hugging Face folder, a
    checkpoint or a run.

    Raises:
        RecipeError: a name that is no recipe, nor that of a folder.
        ValueError, CheckpointingException: of ``find_origin``.
    """
    taught = trained_run(target)
    run = with_tokenizer(recipe(recipe_name), taught)
    return EagleRun(run=dataclasses.replace(run, train=dataclasses.replace(run.train, dtype=taught.train.dtype)), target=taught)


def run_command(verb: str, config: EagleRun) -> int:
    """A command on this rank of the world that torchrun, Slurm or nobody started; the exit code.

    SIGTERM and SIGINT end training after a step, saved.
    """
    if verb == "export" and not config.published:
        raise ValueError("published is empty; pass --set published=FOLDER to export into")
    with place(config.run, "run") as (kind, watchdog):
        check_trained(config.target, "target.output", "train the target with `mcore train`, or give the folder of its run")
        if verb in ("evaluate", "export"):
            check_trained(config.run, "run.output", "train the head with `mcore eagle train`, or give the folder of its run")
        if verb == "extract":
            tell(f"the target ran over {extract_rank(config, kind)} batches a replica; {config.store} holds its features")
            return 0
        if verb == "train":
            with StopSignals() as stop:
                result = train_head(config, kind, watchdog, stop)
        else:
            result = evaluate_rank(config if verb == "export" else dataclasses.replace(config, published=""), kind)
        if result.stopped:
            message = f"stopped and saved after step {result.step}; start it again to go on"
            tell(message)
            tell_launcher(f"no failure: {message}")
            return STOPPED_EXIT_CODE
        length = f"acceptance length {1 + result.accepted_tokens:.3f} of {1 + config.num_steps}"
        tell(f"step {result.step}: loss {result.loss:.6f}, {length}")
        return 0


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore eagle", __doc__)
    parser.add_argument("verb", choices=("extract", "train", "evaluate", "export"), help="what to do, as above")
    parser.add_argument("--recipe", required=True, help=f"of the head's run, one of: {', '.join(RECIPES)}")
    parser.add_argument("--target", help="a Hugging Face folder, a run or a checkpoint; or the recipe of target.output (default: --recipe)")
    return command(
        parser,
        "run",
        EagleRun,
        lambda options: eagle_run(options.recipe, options.target or options.recipe),
        lambda options, config: run_command(options.verb, config),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
