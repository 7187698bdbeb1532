# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reinforcement learning: the environment, how many answers are judged, and what is learnt from them."""

import dataclasses
import math
import re
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from mcore_rl import (
    AdvantageConfig,
    Aggregation,
    DPOObjective,
    GAEConfig,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    ImportanceCorrection,
    JudgeLimits,
    MemorySwitch,
    OverlongPenalty,
    PackingConfig,
    PolicyLossConfig,
)
from mcore_rl.envs import ArithmeticConfig, CodeConfig, CountdownConfig, MathsConfig

ENVIRONMENTS = ("countdown", "arithmetic", "calculator", "maths", "code", "character_share")
_SINGLE_TURN = frozenset(ENVIRONMENTS) - {"calculator"}
_IMPORTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class CharacterShareConfig:
    """Write more of some characters.

    Raises:
        ValueError: no prompts, or no characters.
    """

    prompts: tuple[str, ...] = ("a", "b")
    """Each begins a text."""
    wanted: str = "abcdefghijklmnopqrstuvwxyz"
    """Characters whose share of the text is its reward."""

    def __post_init__(self) -> None:
        if not self.prompts or not self.wanted:
            raise ValueError(f"prompts={list(self.prompts)} and wanted={self.wanted!r} must not be empty")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The model whose values PPO compares rewards with; it begins with the policy's weights.

    Raises:
        ValueError: a field out of its range.
    """

    lr: float = 1e-5
    """Learning rate of all its updates."""
    clip: float = 0.2
    """Largest change of a value that is rewarded, in an iteration; inf for none."""
    warmup_steps: int = 0
    """First iterations that train the critic alone."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"critic.lr={self.lr} must be a finite number above 0")
        if not self.clip > 0:
            raise ValueError(f"critic.clip={self.clip} must be above 0")
        if self.warmup_steps < 0:
            raise ValueError(f"critic.warmup_steps={self.warmup_steps} must not be negative")


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimisation: pairs of a preferred and a rejected answer, of a file or of the policy itself.

    Raises:
        ValueError: a field out of its range.
    """

    path: str = ""
    """JSON lines with ``prompt``, ``chosen`` and ``rejected``; no engine and no environment then. Empty for the best and the worst of
    ``rl.group_size`` answers to each problem of the environment."""
    num_evaluation: int = 0
    """First pairs of the file, which are evaluated and not trained on."""
    beta: float = 0.1
    """How strongly the policy is held to its reference."""
    label_smoothing: float = 0.0
    """The chance that a preference is the wrong way round, below 0.5."""

    def __post_init__(self) -> None:
        self.objective()
        if self.num_evaluation < 0 or (self.num_evaluation and not self.path):
            raise ValueError(
                f"dpo.num_evaluation={self.num_evaluation} counts pairs of dpo.path={self.path!r}; name a file, or set it to 0"
            )

    def objective(self) -> DPOObjective:
        """What is minimised."""
        return DPOObjective(beta=self.beta, label_smoothing=self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Engines on ranks of their own: the first ranks train, in the layout of ``plan``, and as many as ``num_engines`` more serve.

    Raises:
        ValueError: a field out of its range.
    """

    num_engines: int
    """Ranks that serve, each with a whole model, after the ``plan``'s; torchrun starts both."""
    max_lag: int = 1
    """Refits between the weights that answers begin with and those that learn from them; 0: the halves take turns."""
    partial: bool = True
    """Answers in flight go on while weights come, where the engines are ahead; False: a refit waits for them. Pairs always do."""
    timeout_s: float = 3600.0
    """Limit of waiting for the other half, in seconds, above ``rollout_timeout_s``; the rank that is waited for is named. It covers saves
    and evaluations, for which ``eval_samples`` adds ``rollout_timeout_s``."""

    def __post_init__(self) -> None:
        if self.num_engines < 1 or self.max_lag < 0 or not 0 < self.timeout_s < math.inf:
            raise ValueError(
                f"placement.num_engines={self.num_engines} must be at least 1, placement.max_lag={self.max_lag} at least 0, and "
                f"placement.timeout_s={self.timeout_s} a finite number above 0"
            )


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """Engines that run elsewhere, behind HTTP: they draw the answers, and take the weights of each iteration from a shared folder.

    Raises:
        ValueError: a field out of its range.
    """

    urls: tuple[str, ...]
    """Of the servers, with host and port and without path."""
    kind: str = "mcore"
    """mcore (`mcore serve --weights-folder`), vllm or sglang."""
    folder: str = ""
    """That trainer and servers share under one path; empty for OUTPUT/served. Weights are written there as a Hugging Face folder."""
    model: str = "mcore"
    """Name that the servers give the model; SGLang needs none."""
    api_key_file: str = ""
    """File with the bearer token that the servers ask for."""
    weights_key_file: str = ""
    """File with the one that they ask for with weights (`mcore serve --weights-token-file`); empty for that of ``api_key_file``."""
    logprobs: str = "processed"
    """What the servers report: processed, of the distribution that is drawn from, or raw, which allow temperature 1 alone."""
    in_flight: str = "recompute"
    """What answers in flight do when weights change: recompute their keys and values, keep those, or drain."""
    max_concurrency: int = 64
    """Answers that a rank asks a server for at a time."""
    timeout_s: float = 600.0
    """Limit of an answer, and of each call of an update, in seconds; the server that is waited for is named."""

    def __post_init__(self) -> None:
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"served.urls={list(self.urls)} must name at least one server, and each once")
        allowed = {
            "kind": ("mcore", "vllm", "sglang"),
            "logprobs": ("processed", "raw"),
            "in_flight": ("recompute", "keep", "drain"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"served.{name}={getattr(self, name)!r} must be one of {', '.join(values)}")
        if self.max_concurrency < 1 or not 0 < self.timeout_s < math.inf:
            raise ValueError(
                f"served.max_concurrency={self.max_concurrency} must be at least 1, and served.timeout_s={self.timeout_s} a finite number "
                "above 0"
            )


# What is for rewards alone.
_FOR_REWARDS = (
    *("policy", "advantage", "gae", "aggregation", "correction", "kl_beta", "kl_in_reward", "entropy_weight", "overlong"),
    *("reward_clip", "filter_equal_groups", "old_logprobs"),
)


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Group-relative policy optimisation. A step of the run is an iteration: answers are drawn, judged and trained on.

    ``train.global_batch_size`` is the number of answers of an update; an iteration has as many updates as it needs for all its answers.

    Raises:
        ValueError: an unknown environment, or choices that do not go together.
    """

    environment: str = "countdown"
    """countdown, arithmetic, calculator, maths, code, character_share, or PACKAGE.MODULE:NAME of a `mcore_rl.NumberedProblems`, or of
    `NumberedConversations`, made without arguments. calculator and others of several turns need a tokenizer with a chat template."""
    mixture: tuple[str, ...] = ()
    """Several environments in place of ``environment``, named as it is; they share the problems of an iteration, and each has all of those
    of an evaluation."""
    mixture_weights: tuple[float, ...] = ()
    """Share of the problems that each environment of ``mixture`` poses, in any unit, 0 for one that is evaluated only; empty for equal
    ones."""
    countdown: CountdownConfig = field(default_factory=CountdownConfig)
    """Of countdown."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    """Of arithmetic, and the sums of calculator."""
    maths: MathsConfig = field(default_factory=MathsConfig)
    """Of maths."""
    code: CodeConfig = field(default_factory=CodeConfig)
    """Of code."""
    character_share: CharacterShareConfig = field(default_factory=CharacterShareConfig)
    """Of character_share."""
    imitation_steps: int = 0
    """Updates on well-formed answers of the environment, right or wrong, before the first iteration: for a model of random weights."""
    imitation_tries: int = 1
    """Of so many answers to each problem the one of the best reward is imitated; 1 teaches the form alone."""
    imitation_lr: float = 1e-3
    """Learning rate of these."""
    imitation_lr_schedule: str = "constant"
    """constant, or cosine: a twentieth of these updates warms up, and the rate falls to a tenth by the last one."""
    num_groups: int = 8
    """Problems an iteration, over all ranks."""
    group_size: int = 8
    """Answers a problem."""
    generation_args: GenericGenerationArgs = field(default_factory=lambda: GenericGenerationArgs(temperature=1.0, max_tokens=32))
    """How answers are drawn."""
    num_epochs: int = 1
    """Times that each answer is trained on."""
    old_logprobs: str = "trainer"
    """trainer, or inference: ratios are to the engine's log-probabilities, and the pass that computes the trainer's is left out. With
    ``batch_invariant`` both are the same bit by bit."""
    policy: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Clip range, dual clip, CISPO, ratios of sequences."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Baseline and scale of rewards."""
    gae: GAEConfig | None = None
    """PPO: a critic's values in place of ``advantage``; groups may hold one answer."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Of ``gae``."""
    dpo: DPOConfig | None = None
    """Preferences in place of rewards: ``num_groups`` pairs an iteration, two answers each."""
    teacher: str = ""
    """On-policy distillation in place of rewards: a Hugging Face folder, a checkpoint or the folder of a run, whose distribution the policy
    takes over at each token that it writes (reverse divergence)."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses of tokens are averaged."""
    correction: ImportanceCorrection | None = field(default_factory=ImportanceCorrection)
    """Weights for the difference between engine and trainer; None for none."""
    kl_beta: float = 0.0
    """Of the divergence from the reference, in the loss."""
    kl_estimator: str | None = None
    """k1, k2, k3 or abs, of both; None for k3 in the loss and k1 in the reward."""
    kl_in_reward: float = 0.0
    """Of the divergence from the reference, in the reward."""
    reference: str = ""
    """The weights that these divergences are from, or ``dpo``'s: a Hugging Face folder, a checkpoint or the folder of a run, of the
    policy's own model and tokenizer; empty for the policy's first weights. The run keeps a copy, with which it goes on."""
    ref_model_sync_steps: int = 0
    """Iterations after which the reference follows the policy, again and again; 0 for never."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in them then; 1 for the policy itself."""
    entropy_weight: float = 0.0
    """Of the entropy of the policy, which is raised; 0 for none."""
    packing: PackingConfig | None = None
    """Bins instead of rows of ``train.seq_len``."""
    reward_clip: tuple[float, float] | None = None
    """Limits between which rewards are learnt from; None for none."""
    overlong: OverlongPenalty | None = None
    """Taken from the reward of long answers."""
    mask_truncated: bool = False
    """Answers that ``max_tokens`` ended are not trained on."""
    filter_equal_groups: bool = False
    """Groups whose rewards are all equal are replaced by others."""
    max_filter_ratio: float = 3.0
    """Groups asked for then, at most, for each that is wanted."""
    router_replay: bool | Literal["trainer"] = False
    """The learner sends each token to the experts that the engine sent it to; with trainer, in all updates of an iteration, to those of its
    own first pass, which computes the old log-probabilities."""
    rollout_timeout_s: float = 600.0
    """Limit of all answers of an iteration, in seconds; of an evaluation, that of the most likely ones, and again of those it draws."""
    eval_samples: int = 0
    """Answers that are drawn to each problem of an evaluation, beside the most likely one, for pass@k; 0 for none."""
    eval_on_start: bool = False
    """Evaluate before the first iteration, too, after imitation; ``train.jsonl`` has it as step 0."""
    engine_tp: int = 1
    """Adjacent ranks over which each engine divides its model, as `mcore serve --tp`; experts are spread over them where they are even.
    It need not be ``plan.tp``: there are as many engines as ranks of ``plan`` divided by it, and they share the problems."""
    cache_gb: float = 1.0
    """Memory of each engine for keys and values, in GB on each of its ranks."""
    max_requests: int = 64
    """Answers that each engine draws at a time, where its memory suffices."""
    weight_dtype: Literal["fp8", "fp8_weight_only"] | None = None
    """Of each engine's matmuls, rounded anew with each refit; None for the policy's. ``correction`` weighs what the rounding changes."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Of each engine's keys and values; None for the policy's."""

    judges: JudgeLimits | None = None
    """Answers are judged, and conversations held, in processes of their own on each rank, with limits of time and memory; None for the
    run's own process."""
    memory: MemorySwitch = field(default_factory=MemorySwitch)
    """What trainer and engine give up of a device while the other one works."""
    placement: PlacementConfig | None = None
    """Trainer and engines on ranks of their own; None for both on every rank."""
    served: ServedConfig | None = None
    """Engines behind HTTP, of this project, vLLM or SGLang; None for an engine on every rank."""

    def __post_init__(self) -> None:
        self._check_environments()
        if self.gae is None and self.critic != CriticConfig():
            raise ValueError("critic has no effect without gae; set rl.gae.lam=0.95, or leave critic out")
        self._check_instead()
        self._check_reference()
        self._check_placement()
        self._check_served()
        self._check_rounding()
        self._check_engine_ranks()
        if self.group_size < (least := 2 if self.gae is None else 1):
            reason = ": an answer is judged against its group" if least == 2 else ""
            raise ValueError(f"group_size={self.group_size} must be at least {least}{reason}")
        for name, least in (("imitation_steps", 0), ("eval_samples", 0), ("imitation_tries", 1), ("max_requests", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.old_logprobs not in ("trainer", "inference"):
            raise ValueError(f"old_logprobs={self.old_logprobs!r} must be trainer or inference")
        if self.kl_estimator is not None and not (self.kl_beta or self.kl_in_reward):
            raise ValueError(f"kl_estimator={self.kl_estimator!r} has no effect without a divergence; set kl_beta, or leave it out")
        if self.imitation_lr_schedule not in ("constant", "cosine"):
            raise ValueError(f"imitation_lr_schedule={self.imitation_lr_schedule!r} must be constant or cosine")
        if self.imitation_steps and (silent := [name for name in self.environments if name in ("character_share", "code")]):
            raise ValueError(f"imitation_steps needs an environment that shows answers, which {silent[0]} does not; set it to 0")
        for name in ("cache_gb", "imitation_lr", "rollout_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0")
        if self.generation_args.max_tokens is None or self.generation_args.max_tokens < 1:
            raise ValueError(f"generation_args.max_tokens={self.generation_args.max_tokens} must be at least 1")
        if self.dpo is None and not self.teacher and (name := self.generation_args.truncated_by):
            raise ValueError(
                f"generation_args.{name}={getattr(self.generation_args, name)} draws from another distribution than the one that is "
                "trained; leave it out"
            )

    def _check_environments(self) -> None:
        """Names that there are, and what those environments need."""
        if unknown := [name for name in self.environments if name not in ENVIRONMENTS and not _IMPORTED.fullmatch(name)]:
            raise ValueError(
                f"environment={unknown[0]!r} must be one of {', '.join(ENVIRONMENTS)}, or PACKAGE.MODULE:NAME of one of your own"
            )
        if self.mixture_weights and len(self.mixture_weights) != len(self.mixture):
            raise ValueError(
                f"mixture_weights={list(self.mixture_weights)} must be as many as the environments of mixture={list(self.mixture)}, or none"
            )
        for name, unset in (("maths", MathsConfig()), ("code", CodeConfig()), ("character_share", CharacterShareConfig())):
            own = getattr(self, name)
            if name not in self.environments and own != unset:
                field = next(item.name for item in dataclasses.fields(own) if getattr(own, item.name) != getattr(unset, item.name))
                raise ValueError(
                    f"{name}.{field}={getattr(own, field)!r} has no effect on {', '.join(self.environments)}; set "
                    f"rl.environment={name}, or leave it out"
                )
        if "maths" in self.environments and self.maths.judge == "math-verify" and self.judges is None:
            raise ValueError(
                "maths.judge='math-verify' simplifies what a model writes, which may take any time: set rl.judges.num_workers=2, or "
                "maths.judge='own'"
            )

    def _check_instead(self) -> None:
        """What learns from something else than rewards."""
        if self.dpo is None and not self.teacher:
            return
        name = "dpo" if self.dpo is not None else "teacher"
        if self.dpo is not None and self.teacher:
            raise ValueError(f"dpo and teacher={self.teacher!r} exclude each other; set rl.dpo=none, or rl.teacher=")
        unused = (*_FOR_REWARDS, *(("packing", "mask_truncated") if self.dpo is not None else ()))
        defaults = {item.name: item.default if item.default is not MISSING else item.default_factory() for item in dataclasses.fields(self)}  # type: ignore[operator]
        if named := [field for field in unused if getattr(self, field) != defaults[field]]:
            raise ValueError(f"{named[0]}={getattr(self, named[0])} has no effect beside {name}; leave it at {defaults[named[0]]}")
        if self.router_replay == "trainer":
            raise ValueError(f"router_replay='trainer' is of old log-probabilities, which {name} has none of; set it to true or false")
        if self.dpo is not None and self.dpo.path and (self.imitation_steps or self.eval_samples or self.judges is not None):
            raise ValueError("imitation_steps, eval_samples and judges are for an environment, and dpo.path has none; leave them out")
        if not self.needs_engine and self.placement is None and self.memory != MemorySwitch():
            name = next(item.name for item in dataclasses.fields(self.memory) if getattr(self.memory, item.name))
            raise ValueError(f"memory.{name} is for a run that draws answers, and dpo.path needs none; leave it at its default")

    def _check_reference(self) -> None:
        """Which weights it has, and when they are left for later ones."""
        if self.reference and not self.needs_reference:
            raise ValueError(f"reference={self.reference!r} has no effect without kl_beta, kl_in_reward or dpo; set one, or leave it out")
        steps, alpha = self.ref_model_sync_steps, self.ref_model_mixup_alpha
        if steps < 0 or not 0 < alpha <= 1:
            raise ValueError(
                f"ref_model_sync_steps={steps} must not be negative, and ref_model_mixup_alpha={alpha} lie above 0 and up to 1"
            )
        if steps and not self.needs_reference:
            raise ValueError(
                f"ref_model_sync_steps={steps} has no effect without a reference; set kl_beta, kl_in_reward or dpo, or set it to 0"
            )
        if not steps and alpha != RLConfig.ref_model_mixup_alpha:
            raise ValueError(f"ref_model_mixup_alpha={alpha} has no effect without ref_model_sync_steps; set it, or leave this at 0.6")

    def _check_placement(self) -> None:
        """What ranks that only train, or only serve, cannot do."""
        if self.placement is None:
            return
        beside = {"dpo.path": not self.needs_engine, "memory": self.memory != MemorySwitch()}
        if named := [name for name, is_set in beside.items() if is_set]:
            raise ValueError(f"{named[0]} needs no engines of their own ranks; leave it at its default, or set rl.placement=none")
        if self.num_groups < self.placement.num_engines:
            raise ValueError(f"num_groups={self.num_groups} must be at least placement.num_engines={self.placement.num_engines}; raise it")
        if self.placement.timeout_s <= self.rollout_timeout_s:
            raise ValueError(
                f"placement.timeout_s={self.placement.timeout_s:g} must be above rollout_timeout_s={self.rollout_timeout_s:g}: trainers "
                "wait for rollouts as long; raise placement.timeout_s, or lower rollout_timeout_s"
            )

    def _check_rounding(self) -> None:
        """Numbers of fewer bits in engines, which have to be there, and differ from the policy's."""
        rounded = {name: value for name in ("weight_dtype", "kv_cache_dtype") if (value := getattr(self, name)) is not None}
        for name, value in rounded.items():
            if not self.needs_engine:
                raise ValueError(f"{name}={value!r} is for an engine, and dpo.path needs none; leave it out")
            if self.old_logprobs == "inference":
                raise ValueError(
                    f"{name}={value!r} changes the engine's log-probabilities, and old_logprobs='inference' takes them for the policy's; "
                    "set old_logprobs=trainer"
                )

    def _check_engine_ranks(self) -> None:
        """Where an engine can span ranks."""
        if self.engine_tp < 1:
            raise ValueError(f"engine_tp={self.engine_tp} must be at least 1")
        beside = {"placement": self.placement is not None, "served": self.served is not None, "dpo.path": not self.needs_engine}
        if self.engine_tp > 1 and (named := [name for name, is_set in beside.items() if is_set]):
            raise ValueError(
                f"engine_tp={self.engine_tp} divides engines on the ranks that train, of which {named[0]} has none; set rl.engine_tp=1"
            )

    def _check_served(self) -> None:
        """What servers cannot do."""
        if self.served is None:
            return
        beside = {
            "weight_dtype": self.weight_dtype is not None,
            "kv_cache_dtype": self.kv_cache_dtype is not None,
            "placement": self.placement is not None,
            "memory.suspend_engine": self.memory.suspend_engine,
            "router_replay": self.router_replay is True,
            "dpo.path": not self.needs_engine,
        }
        if named := [name for name, is_set in beside.items() if is_set]:
            raise ValueError(f"{named[0]} needs engines of the run itself; leave it at its default, or set rl.served=none")

    @property
    def environments(self) -> tuple[str, ...]:
        """Names of those of ``mixture``, or of ``environment`` alone."""
        return self.mixture or (self.environment,)

    @property
    def needs_reference(self) -> bool:
        """Whether there is a reference."""
        return self.kl_beta != 0 or self.kl_in_reward != 0 or self.dpo is not None

    def trains_policy(self, step: int) -> bool:
        """Whether iteration ``step`` trains the policy, and not the critic of PPO alone."""
        return self.gae is None or step > self.critic.warmup_steps

    @property
    def needs_engine(self) -> bool:
        """Whether answers are drawn."""
        return self.dpo is None or not self.dpo.path

    def grpo(self, *, seq_len: int, micro_batch_size: int, global_batch_size: int, **ids: int | None) -> GRPOConfig:
        """An iteration; ``ids`` are those of special tokens, as of `GRPOConfig`.

        Raises:
            ValueError: sizes that do not go together.
        """
        count = self.num_groups * (self.group_size if self.dpo is None else 2)
        if count % global_batch_size:
            size = f"rl.group_size={self.group_size}" if self.dpo is None else "2"
            raise ValueError(
                f"rl.num_groups={self.num_groups} * {size} = {count} answers must be a multiple of "
                f"train.global_batch_size={global_batch_size}, those of an update"
            )
        if self.dpo is not None and (global_batch_size % 2 or micro_batch_size % 2):
            raise ValueError(
                f"train.global_batch_size={global_batch_size} and train.micro_batch_size={micro_batch_size} must be even: a pair has two "
                "answers"
            )
        most = self.generation_args.max_tokens or 0
        if self.needs_engine and most >= seq_len:
            raise ValueError(f"rl.generation_args.max_tokens={most} must lie below train.seq_len={seq_len}, which has the prompt, too")
        if self.overlong is not None:
            # Answers of several turns have more tokens than one.
            limits = {"rl.generation_args.max_tokens": most} if _SINGLE_TURN.issuperset(self.environments) else {"train.seq_len": seq_len}
            [(name, limit)] = limits.items()
            if (free := self.overlong.max_length - self.overlong.buffer) >= limit:
                raise ValueError(
                    f"rl.overlong.max_length={self.overlong.max_length} has no effect: up to max_length - buffer = {free} tokens nothing "
                    f"is taken, and {name}={limit} ends an answer; lower rl.overlong.max_length"
                )
        names = {item.name for item in dataclasses.fields(self)}
        shared: dict[str, Any] = {item.name: getattr(self, item.name) for item in dataclasses.fields(GRPOConfig) if item.name in names}
        shared |= {"seq_len": seq_len, "micro_batch_size": micro_batch_size, **ids}
        if self.kl_in_reward and self.kl_estimator is not None:
            shared["kl_in_reward_estimator"] = self.kl_estimator
        num_mini_batches, replays = count // global_batch_size, self.router_replay == "trainer"
        if replays and (self.old_logprobs != "trainer" or num_mini_batches * self.num_epochs == 1):
            raise ValueError(
                f"rl.router_replay='trainer' replays in later updates what the trainer's old log-probabilities were computed with, found "
                f"rl.old_logprobs={self.old_logprobs!r} and {num_mini_batches * self.num_epochs} updates an iteration; set "
                "rl.old_logprobs=trainer and rl.num_epochs=2, or it to false"
            )
        return GRPOConfig(**shared, num_mini_batches=num_mini_batches, replay_old_routing=replays)

    def objective(self) -> GRPOObjective | DPOObjective:
        """What is minimised; with a teacher, whoever loads it makes another one.

        Raises:
            ValueError: a field out of its range.
        """
        if self.dpo is not None:
            return self.dpo.objective()
        return GRPOObjective(
            policy=self.policy,
            kl_beta=self.kl_beta,
            kl_estimator=self.kl_estimator or GRPOObjective.kl_estimator,
            entropy_weight=self.entropy_weight,
            temperature=1.0 if self.generation_args.temperature is None else self.generation_args.temperature,
            correction=self.correction,
        )
