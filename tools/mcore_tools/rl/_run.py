# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each rank does to learn from rewards: where the run begins, its iterations, its evaluations and its checkpoints."""

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_inference import DynamicInferenceEngine
from mcore_parallel.comm import all_gather, all_reduce
from mcore_parallel.guard import Watchdog
from mcore_parallel.training import NonFiniteLossError, TrainerState, TrainReport, Writer
from mcore_parallel.training.distill import DistillationConfig, DistillationObjective
from mcore_rl import (
    BestAndWorst,
    ContrastiveRollout,
    GRPOConfig,
    InferenceInterface,
    IterationReport,
    Learner,
    PreferencePairs,
    StreamPosition,
    WeightSink,
    dpo_iteration,
    grpo_iteration,
    preference_margins,
    refit,
    rendezvous,
)
from mcore_tools.assembly import Parts, schedule
from mcore_tools.exit_code import under_way
from mcore_tools.recipes import RunConfig
from mcore_tools.reports import EXAMPLES, History
from mcore_tools.rl._attempts import attempt_seed, begin_attempt
from mcore_tools.rl._conversations import local_interfaces, open_policy_tokenizer, prompt_length, served_interface
from mcore_tools.rl._critic import RunCritic
from mcore_tools.rl._engines import asks_engine, engine_groups, engine_patience, sampling_limit_s, sharing_engines, step_may_hang, watched
from mcore_tools.rl._environment import build_environment, close_environment, open_environment
from mcore_tools.rl._evaluation import evaluation_means, evaluation_share, num_problems
from mcore_tools.rl._examples import write_examples
from mcore_tools.rl._halves import Halves, build_run_engine, run_grpo, serve_half
from mcore_tools.rl._imitation import imitate
from mcore_tools.rl._policy import assemble_policy
from mcore_tools.rl._reference import RunReference
from mcore_tools.rl._served import served_engines
from mcore_tools.rl._teacher import open_teacher
from mcore_tools.training import (
    RunCheckpoints,
    check_stored,
    describe_model,
    describe_optimizer,
    device_of,
    find_source,
    first_folder,
    graph_remark,
    open_folder,
    run_checkpoints,
)

_DRAWN = (
    *(
        "reward",
        "reward_std",
        "group_reward_min",
        "group_reward_max",
        "group_reward_std",
        "num_dropped",
        "num_filtered",
        "group_similarity",
        "truncated",
        "rollout_s",
        "refit_s",
    ),
    *("to_generation_s", "generate_s", "to_training_s", "exchange_s", "pack_s", "score_s", "num_turns"),
)
_NUM_LENGTHS = 32
"""Bars of the histogram of lengths, up to the longest answer."""


@dataclass(frozen=True, kw_only=True)
class Reinforced:
    """What a run left behind; the history is on the first rank only."""

    history: History
    reward: float
    """Mean of the last evaluation, or of the last iteration where none was made; NaN when nothing was done."""
    seconds: float
    num_iterations: int = 0
    """Made by this call, on ranks that train; 0 where the run had come to its end before."""
    stopped_at: int | None = None
    """The iteration after which the run ended because it was asked to; None when it came to its end."""
    remarks: tuple[str, ...] = ()
    """What this rank's graphs have to say."""


def reinforce_rank(config: RunConfig, kind: str, watchdog: Watchdog | None = None, stop: Callable[[], bool] | None = None) -> Reinforced:
    """Learn from rewards, from the newest checkpoint under ``config.output`` or as ``config.load`` says, on this rank of the world.

    Raises:
        ValueError: there is nothing to begin with, it is of another model, or an environment that cannot be made; nothing was written.
        NonFiniteLossError: a loss or a gradient that is no finite number, more often than ``train.max_skipped_steps``.
    """
    begin = time.perf_counter()
    stop = config.train.stop_of(stop)
    halves = None if config.rl is None or config.rl.placement is None else Halves(config)
    if halves is not None and not halves.placement.trains:
        reward, stopped = serve_half(config, halves, device_of(kind), watchdog, stop)
        return Reinforced(history=History(), reward=reward, seconds=time.perf_counter() - begin, stopped_at=stopped)
    run = _Run(config, kind, halves)
    history, writers = History(), []
    if run.parts.groups.world.is_first:
        history = History.read(Path(config.output) / "train.jsonl", run.state.step)
        writers = open_folder(config, history)
    try:
        run.start()
        first = run.state.step
        with under_way():
            reward = run.iterate(writers, watchdog, stop)
        remarks = run.remarks()
    finally:
        for writer in writers:
            writer.close()
        run.close(sys.exception())
    stopped = run.state.step if run.stopped else None
    done, seconds = run.state.step - first, time.perf_counter() - begin
    return Reinforced(history=history, reward=reward, seconds=seconds, num_iterations=done, stopped_at=stopped, remarks=remarks)


class _Run:
    """The parts of a run on this rank, and how far it is."""

    def __init__(self, config: RunConfig, kind: str, halves: Halves | None = None) -> None:
        assert config.rl is not None
        self.halves, self.loop = halves, None
        groups, self._group = (None, None) if halves is None else (halves.placement.groups, halves.checkpoint_group)
        self.config, self.rl = config, config.rl
        # Answers are judged where an engine is asked for them.
        made = open_environment if halves is None and asks_engine(config) else build_environment
        self.environment = made(self.rl) if self.rl.needs_engine else None
        self.own = run_checkpoints(config, self._group)
        source = find_source(config.load, self.own, group=self._group)
        origin = first_folder(config.load, self.own, source)
        check_stored(config, origin, is_own=source is None)
        self.device = device_of(kind)
        self.tokenizer = open_policy_tokenizer(config, self.environment)
        self._check_length()
        self.pairs = self._open_pairs()
        self.parts: Parts = assemble_policy(config, self.tokenizer, self.device, groups)
        self.described = describe_model(config, origin)
        stored = {**self.described, **describe_optimizer(config)}
        self.checkpoints = RunCheckpoints(config.load, self.own, source, self.parts.optimizer, stored, self._group)
        self.critic = None if self.rl.gae is None else RunCritic(config, self.parts, self.device, self._group)
        self.reference = RunReference(config, self.parts, self._group) if self.rl.needs_reference else None
        self.rates = schedule(config)
        self.state, self.position = TrainerState(), StreamPosition()
        if (newest := self.own.latest()) is not None:
            self.state = TrainerState(step=newest)
        self.stopped = False
        self.engines = self.parts.groups.world
        """Who shares the problems; this rank's engine, or pairs of a file, have its ``rank``."""
        self.engine: WeightSink | None = None
        self.interface: InferenceInterface | None = None
        self.evaluator: InferenceInterface | None = None
        self.first: dict[str, float] = {}
        """What there is to say before the first iteration."""

    def _check_length(self) -> None:
        """Whether a row has room for any problem of the first iteration and its answer; one that is too long, or cannot be posed, loses its
        answers alone."""
        if self.environment is None:
            return
        longest, answer = self.config.train.seq_len, self.rl.generation_args.max_tokens or 0
        length, failure = 0, None
        for number in range(self.rl.num_groups):
            try:
                length = prompt_length(self.environment, self.tokenizer, number)
            except Exception as error:
                failure = error
                continue
            if length + answer <= longest:
                return
        if failure is not None:
            raise failure
        raise ValueError(
            f"train.seq_len={longest} must hold a problem, and none of the first {self.rl.num_groups} fits: the last has {length} tokens, "
            f"and rl.generation_args.max_tokens={answer}; raise it"
        )

    def _open_pairs(self) -> PreferencePairs | None:
        """Of a file."""
        dpo, train = self.rl.dpo, self.config.train
        if dpo is None or not dpo.path:
            return None
        # The last token of a row is a label alone.
        return PreferencePairs(dpo.path, self.tokenizer, max_tokens=train.seq_len + 1, num_evaluation=dpo.num_evaluation, seed=train.seed)

    def start(self) -> None:
        """Weights, reference, engine and the place in the problems."""
        config, parts = self.config, self.parts
        fresh = self.own.latest() is None
        if self.reference is not None and not fresh:
            self.reference.load(self.state.step)
        if self.checkpoints.latest() is not None:
            _, extra = self.checkpoints.load(parts.state())
            self.state = TrainerState(**extra["trainer"])
            parts.optimizer.load_step_count(int(extra["optimizer_step"]))
            self.position = stored_position(extra)
            self._tell(f"goes on from {self.checkpoints.loaded}")
        attempt = begin_attempt(Path(config.output), self.state.step) if parts.groups.world.is_first else 0
        if self.halves is not None:
            self.halves.begin(self.state.step, self.position, attempt)
        if fresh and not self.state.step and self.rl.imitation_steps and self.environment is not None:
            begin = time.perf_counter()
            loss = imitate(config, parts, self.environment, self.tokenizer, self.device)
            if parts.graphs is not None:
                # They keep activations of rows, and what follows may come in bins.
                parts.graphs.drop_pairs()
            self.first |= {"imitation_loss": loss, "imitation_s": time.perf_counter() - begin}
            self._tell(f"loss {loss:.4f} after {self.rl.imitation_steps} steps of imitation in {self.first['imitation_s']:.0f} s")
        if self.reference is not None and fresh:
            self.reference.begin(self.tokenizer)
        self._start_source(attempt)
        objective, teacher = self.rl.objective(), None
        if self.rl.teacher:
            teacher = open_teacher(config, self.tokenizer, parts.groups, self.device, self._group)
            objective = DistillationObjective(config=DistillationConfig(reverse=True), teacher=teacher)
        self.learner = Learner(
            model=parts.model,
            groups=parts.groups,
            objective=objective,
            sync=parts.sync,
            optimizer=parts.optimizer,
            reference=None if self.reference is None else self.reference.frozen,
            critic=None if self.critic is None else self.critic.critic,
            teacher=teacher,
            pipeline=parts.pipeline,
            overlap=parts.overlap,
        )
        if self.halves is not None:
            self.loop = self.halves.loop(run_grpo(config, self.tokenizer), learner=self.learner)
        if self.critic is not None and fresh:
            self.critic.begin()
        elif self.critic is not None:
            self.critic.load(self.state.step)

    def _start_source(self, attempt: int) -> None:
        """Where pairs, or problems and answers, come from: the next ones of a run that goes on.

        Args:
            attempt: times that the run began at this step before, as the first rank knows.
        """
        config, parts, world = self.config, self.parts, self.parts.groups.world
        if self.halves is not None:
            return
        if self.environment is None:
            assert self.pairs is not None
            self.pairs.start_at(self.position, rank=world.rank, num_ranks=world.size)
            return
        divided = engine_groups(config)
        self.engines = sharing_engines(divided, world)
        self.environment.start_at(self.position, rank=self.engines.rank, num_ranks=self.engines.size)
        # What was drawn before the run was interrupted is not drawn again.
        attempt = int(all_reduce(torch.tensor([attempt], dtype=torch.int64, device=self.device), world, op="max"))
        seed = attempt_seed(config.train.seed, rank=self.engines.rank, step=self.state.step, attempt=attempt)
        if self.rl.served is not None:
            *interfaces, self.engine = served_engines(config, self.rl.served, self.tokenizer, self.described, world, seed)
            self.interface, self.evaluator = (
                served_interface(one, self.environment, self.tokenizer, config.train.seq_len) for one in interfaces
            )
            refit(parts.model, parts.groups, self.engine)
            return
        self.engine = build_run_engine(config, self.tokenizer, self.device, seed, divided)
        refit(parts.model, parts.groups, self.engine)
        self.rl.memory.check(**self._takes_turns)
        self.rl.memory.training(self.engine)
        self.interface, self.evaluator = local_interfaces(self.engine, self.environment, seed, engine_patience(config))

    @property
    def _takes_turns(self) -> dict[str, Any]:
        """What ``rl.memory`` moves."""
        critic = None if self.critic is None else self.critic.critic
        return {"optimizer": self.parts.optimizer, "sync": self.parts.sync, "engine": self.engine, "critic": critic}

    def _iteration(self, grpo: GRPOConfig, step: int, lr: float) -> IterationReport:
        trains = self.rl.trains_policy(step)
        if self.loop is not None:
            return self.loop.iterate(lr, train_policy=trains)
        parts: dict[str, Any] = {"interface": self.interface, "engine": self.engine, "learner": self.learner, "lr": lr}
        if self.rl.dpo is None:
            return grpo_iteration(grpo, agent=self.environment, **parts, train_policy=trains)  # type: ignore[arg-type]
        if self.pairs is not None:
            return dpo_iteration(grpo, pairs=self.pairs, **parts)
        assert self.environment is not None
        return dpo_iteration(grpo, pairs=BestAndWorst(self.environment, group_size=self.rl.group_size), **parts)

    def iterate(self, writers: Iterable[Writer], watchdog: Watchdog | None, stop: Callable[[], bool]) -> float:
        """The iterations that are left, and their numbers; the last reward."""
        train = self.config.train
        grpo = run_grpo(self.config, self.tokenizer)
        numbers = range(self.state.step + 1, train.steps + 1)
        reward, saved = float("nan"), self.state.step
        if self.rl.eval_on_start and not self.state.step:
            if self.loop is not None:
                self.loop.begin()
            self.first |= self.evaluate()
            for writer in writers:
                writer.write(0, self.first)
        for step in watched(self.config, numbers, watchdog):
            begin = time.perf_counter()
            # What draws from torch's state, an environment for instance, draws in a run that goes on what it would have drawn.
            torch.manual_seed(train.seed + step)
            lr = self.rates.lr(self.state.step - self.state.skipped_steps)
            report = self._iteration(grpo, step, lr)
            self._count(report)
            if self.reference is not None:
                self.reference.follow(step)
            values = {
                **_values(report, per_layer=self.config.log.per_layer_values),
                **self._of_environments(report),
                **self._length_shares(report.lengths),
                "lr": lr,
                "skipped_steps": self.state.skipped_steps,
            }
            if self.loop is not None:
                values["lag"] = report.lag
                values |= _lags(report)
            if self.pairs is None and self.parts.groups.world.is_first:
                write_examples(Path(self.config.output) / EXAMPLES, step, report.examples, self.tokenizer)
            if self.pairs is not None:
                # Of a file nobody draws and nobody judges.
                values = {name: value for name, value in values.items() if name not in _DRAWN}
            reward = report.mean_reward if self.pairs is None else float("nan")
            if train.eval_interval and step % train.eval_interval == 0:
                evaluated = self.evaluate()
                values |= evaluated
                reward = evaluated.get("eval/reward", reward)
            if train.checkpoint_interval and step % train.checkpoint_interval == 0:
                self.save()
                saved = step
            values["step_s"] = time.perf_counter() - begin
            for writer in writers:
                writer.write(step, values)
            if self._agree(stop()):
                self.stopped = step < train.steps
                break
        if saved != self.state.step:
            self.save()
        return reward

    def remarks(self) -> tuple[str, ...]:
        """What became of the calls of layers that ``cuda_graphs`` names."""
        graphs = {"": self.parts.graphs, "critic: ": None if self.critic is None else self.critic.graphs}
        return tuple(f"{owner}{graph_remark(held)}" for owner, held in graphs.items() if held is not None)

    def close(self, error: BaseException | None) -> None:
        """Give up hooks, and what is on its way, because the run is at its end or because of an error."""
        if self.rl.engine_tp > 1 and isinstance(self.engine, DynamicInferenceEngine) and not step_may_hang(error):
            # Its recorded graphs hold communicators, which cannot be destroyed before.
            self.engine.close()
        if self.loop is not None:
            self.loop.close()
        self.parts.close()
        if self.critic is not None:
            self.critic.close()
        close_environment(self.environment)

    def evaluate(self) -> dict[str, float]:
        """The most likely answers to ``train.eval_batches * rl.num_groups`` problems, the same each time, shared by the ranks; pass@k of
        further ones. Of a file's pairs, those that are not trained on."""
        if self.pairs is not None:
            return self._preferred(self.pairs.evaluation)
        assert self.environment is not None
        env_ids = self.environment.env_ids
        if self.halves is not None:
            return self.halves.evaluated(env_ids)
        assert self.evaluator is not None
        world = self.parts.groups.world
        with self.rl.memory.generating(**self._takes_turns):
            count = num_problems(self.config, self.engines.rank, self.engines.size)
            sums = evaluation_share(self.config, self.environment, self.evaluator, count)
        # In a collective ranks would wait for each other no longer than those of a step of training.
        limit_s = self.rl.rollout_timeout_s + sampling_limit_s(self.config) + self.config.guard.limit_s
        rendezvous(world, limit_s, "answers of an evaluation")
        totals = all_reduce(torch.tensor(sums, dtype=torch.float64, device=self.device), world).tolist()
        return dict(evaluation_means(self.config, env_ids, totals))

    def _preferred(self, pairs: Sequence[ContrastiveRollout]) -> dict[str, float]:
        """How often, and by how much, the policy prefers what it should."""
        dpo, dp, train = self.rl.dpo, self.parts.groups.dp, self.config.train
        if dpo is None or not pairs:
            return {}
        own = pairs[dp.rank :: dp.size]
        sizes = {"seq_len": train.seq_len, "micro_batch_size": train.micro_batch_size, "num_pairs": -(-len(pairs) // dp.size)}
        margins = preference_margins(own, self.learner, **sizes)
        sums = torch.stack([(margins > 0).double().sum(), dpo.beta * margins.sum()])
        accuracy, margin = (all_reduce(sums, dp) / len(pairs)).tolist()
        return {"eval/accuracy": accuracy, "eval/margin": margin}

    def save(self) -> None:
        """A checkpoint with the position in the problems."""
        world = self.parts.groups.world
        source = self.environment or self.pairs
        assert source is not None
        # Where engines run ahead, what was drawn and not trained on is posed again.
        if self.loop is None:
            posed = all_gather(torch.tensor([source.num_posed], dtype=torch.int64, device=self.device), world)
            num_taken = tuple(map(int, posed[:: self.rl.engine_tp].tolist()))
        else:
            num_taken = self.loop.num_posed
        self.position = dataclasses.replace(self.position.shared_by(len(num_taken)), num_taken=num_taken)
        extra: Mapping[str, Any] = {
            "trainer": dataclasses.asdict(self.state),
            "optimizer_step": self.parts.optimizer.step_count,
            "rl": {"problems": dataclasses.asdict(self.position)},
        }
        for beside in (self.reference, self.critic):
            if beside is not None:
                beside.save(self.state.step)
        self.checkpoints.save(self.state.step, self.parts.state(), extra)

    def _of_environments(self, report: IterationReport) -> dict[str, float]:
        """What each environment earned, where there are several."""
        if self.environment is None or len(self.environment.env_ids) < 2:
            return {}
        return {
            f"env/{name}/{key}": value
            for name, own in report.environments.items()
            for key, value in (
                ("reward", own.mean_reward),
                ("reward_std", own.std_reward),
                ("answer_length", own.mean_length),
                ("truncated", own.truncated),
                ("num_rollouts", own.num_rollouts),
            )
        }

    def _length_shares(self, lengths: Sequence[int]) -> dict[str, float]:
        """Shares of the answers by their lengths: ``length/32-63`` of those of 32 to 63 tokens; none of a file's."""
        if self.pairs is not None:
            return {}
        width = -(-(self.rl.generation_args.max_tokens or self.config.train.seq_len) // _NUM_LENGTHS)
        counts = Counter(length // width * width for length in lengths)
        return {f"length/{first}-{first + width - 1}": count / len(lengths) for first, count in sorted(counts.items())}

    def _count(self, report: IterationReport) -> None:
        skipped = sum(update.skipped for update in (*report.updates, *report.critic_updates))
        state = self.state
        self.state = TrainerState(
            step=state.step + 1,
            consumed_samples=state.consumed_samples + report.num_rollouts,
            skipped_steps=state.skipped_steps + skipped,
        )
        allowed = self.config.train.max_skipped_steps
        if skipped and self.state.skipped_steps > allowed:
            reason = f"{self.state.skipped_steps} updates were skipped, train.max_skipped_steps={allowed}; lower optimizer.lr"
            raise NonFiniteLossError(self.state.step, (*report.updates, *report.critic_updates)[-1], reason)

    def _agree(self, wanted: bool) -> bool:
        """Whether any rank wants to stop."""
        if self.halves is not None:
            return self.halves.agree(wanted)
        world = self.parts.groups.world
        return bool(all_reduce(torch.tensor([float(wanted)], device=self.device), world).item())

    def _tell(self, text: str) -> None:
        if self.parts.groups.world.is_first:
            print(text)


def stored_position(extra: Mapping[str, Any]) -> StreamPosition:
    """Where a run was in its problems, by its checkpoint. One of a run that kept a single number goes on behind the farthest rank."""
    stored = extra.get("rl", {})
    return StreamPosition.of(**stored.get("problems", {"first": stored.get("position", 0)}))


def _values(report: IterationReport, *, per_layer: bool) -> dict[str, float]:
    """The numbers of an iteration; with ``per_layer`` those of each layer with experts, too."""
    num_tokens = report.mean_length * report.num_rollouts
    metrics = _means(report.updates, per_layer=per_layer)
    if report.updates:
        # Of the weights that drew the answers; later updates have others.
        metrics |= {name: value for name, value in report.updates[0].metrics.items() if name == "logprob_mismatch"}
    if report.critic_updates:
        critic = _means(report.critic_updates)
        error = critic["value_error_squared"] - critic["value_error"] ** 2
        spread = critic["return_squared"] - critic["return"] ** 2
        metrics |= {f"critic/{name}": critic[name] for name in ("loss", "grad_norm", "value", "return", "value_clipped")}
        metrics["critic/explained_variance"] = 1 - error / spread if spread > 0 else 0.0
    values = {
        "reward": report.mean_reward,
        "reward_std": report.std_reward,
        "answer_length": report.mean_length,
        "answer_length_min": report.min_length,
        "answer_length_max": report.max_length,
        "answer_length_std": report.std_length,
        "num_turns": report.mean_turns,
        "truncated": report.truncated,
        "num_rollouts": report.num_rollouts,
        "num_dropped": report.num_dropped,
        "num_filtered": report.num_filtered,
        "rollout_s": report.rollout_s,
        "train_s": report.train_s,
        "refit_s": report.refit_s,
        "to_generation_s": report.to_generation_s,
        "generate_s": report.generate_s,
        "to_training_s": report.to_training_s,
        "exchange_s": report.exchange_s,
        "pack_s": report.pack_s,
        "score_s": report.score_s,
        "tokens_per_s": num_tokens / (report.rollout_s + report.train_s + report.refit_s),
    }
    if report.group_rewards:
        means, spreads = zip(*report.group_rewards, strict=True)
        values |= {"group_reward_min": min(means), "group_reward_max": max(means), "group_reward_std": sum(spreads) / len(spreads)}
    if (apart := report.mismatch) is not None:
        values |= {
            "inference_ratio": apart.weight_mean,
            "inference_ratio_min": apart.weight_min,
            "inference_ratio_max": apart.weight_max,
            "probability_gap_min": apart.probability_gap_min,
            "probability_gap_max": apart.probability_gap_max,
            "inference_probability": apart.inference_probability,
            "inference_probability_min": apart.inference_probability_min,
            "inference_probability_max": apart.inference_probability_max,
        }
    if report.without_logprobs:
        values["without_logprobs"] = report.without_logprobs
    if report.group_similarity is not None:
        values["group_similarity"] = report.group_similarity
    if report.packing_efficiency is not None:
        values["packing_efficiency"] = report.packing_efficiency
    if metrics.get("is_weight_squared"):
        values["effective_sample_size"] = metrics["is_weight"] ** 2 / metrics["is_weight_squared"]
    return values | metrics


def _lags(report: IterationReport) -> dict[str, float]:
    """How old the tokens are: the mean, and the share of each age in refits."""
    if report.token_lag is None:
        return {}
    num_tokens = sum(report.tokens_by_lag.values())
    return {"token_lag": report.token_lag, **{f"token_lag/{lag}": number / num_tokens for lag, number in report.tokens_by_lag.items()}}


def _means(updates: Sequence[TrainReport], *, per_layer: bool = False) -> dict[str, float]:
    """Of the losses, norms and metrics of updates, and of what their layers report; nothing of none."""
    if not updates:
        return {}
    rows = []
    for update in updates:
        layers = update.layers.values(per_layer=per_layer)
        experts = {"aux": update.aux, **layers} if layers else {}
        rows.append({**update.metrics, **experts, "loss": update.loss, "grad_norm": update.grad_norm})
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
