# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What an iteration is told."""

import math
from dataclasses import asdict, dataclass, field

from mcore_rl._aggregation import Aggregation
from mcore_rl._fields import check_finite, check_integers
from mcore_rl._memory import MemorySwitch
from mcore_rl._objective._advantage import AdvantageConfig
from mcore_rl._objective._gae import GAEConfig
from mcore_rl._objective._kl import check_estimator
from mcore_rl._objective._shaping import OverlongPenalty
from mcore_rl._packing._packing import PackingConfig
from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs


@experimental_api
@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """One iteration: what is generated, how it is judged, and how often it is trained on.

    Raises:
        ValueError: a group of one, from which nothing can be learnt, a number out of its range, mini-batches that do not divide, bins that
            are shorter than a trajectory.
    """

    num_groups: int
    """Problems an iteration, over all ranks."""
    group_size: int
    """Answers a problem."""
    seq_len: int
    """Positions of a training row; prompt and answer must fit. ``packing`` has bins of at least so many."""
    micro_batch_size: int = 4
    generation_args: GenericGenerationArgs = field(default_factory=lambda: GenericGenerationArgs(temperature=1.0, max_tokens=32))
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Baseline and scale of rewards: GRPO, Dr. GRPO, RLOO, REINFORCE++."""
    gae: GAEConfig | None = None
    """PPO: advantages of tokens from the values of ``Learner.critic``, in place of ``advantage``; ``group_size`` may be 1 then."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses of tokens are averaged."""
    num_epochs: int = 1
    """Times that each rollout is trained on."""
    num_mini_batches: int = 1
    """Updates an epoch, each on an equal share of the rollouts."""
    old_logprobs: str = "trainer"
    """What ratios are to. trainer: its log-probabilities before the first of several updates, a forward pass of their own. inference: the
    engine's, which are the same bit by bit in a batch-invariant mode; in others the correction of the objective is 1, and ratios hold the
    difference."""
    replay_old_routing: bool = False
    """A mixture's tokens go in all updates to the experts that the pass of the old log-probabilities sent them to (R2), and not to those
    that an engine recorded (R3). For several updates; the first one's own routing is that of the pass."""
    packing: PackingConfig | None = None
    """Bins instead of ``micro_batch_size`` rows of ``seq_len``."""
    kl_in_reward: float = 0.0
    """Times the divergence of the old log-probabilities from the reference's, summed over an answer and taken from its reward, with
    ``gae`` token by token; needs a reference."""
    kl_in_reward_estimator: str = "k1"
    """Of ``kl_in_reward``: k1 (old - ref, whose gradient as a reward is that of the divergence), k2, k3 or abs (`kl_estimate`). That of
    ``kl_beta`` is ``GRPOObjective.kl_estimator``."""
    reward_clip: tuple[float, float] | None = None
    """Rewards below the first number count as it, and above the second as that; they are reported as they were. None for no limits."""
    overlong: OverlongPenalty | None = None
    """Taken from the reward of long answers, which is reported without it."""
    mask_truncated: bool = False
    """Answers that ``max_tokens`` ended are not trained on; their rewards count in the baseline of their group."""
    filter_equal_groups: bool = False
    """Groups whose rewards are all equal are replaced by others (dynamic sampling of DAPO); for ``group_size`` of 2 and more."""
    max_filter_ratio: float = 3.0
    """Groups asked for then, at most, for each that is wanted; what is missing after that is filled with such groups."""
    rollout_timeout_s: float = 7200.0
    """Limit of all rollouts of an iteration; groups go on with the answers that are there by then."""
    pad_id: int = 0
    bos_id: int | None = None
    """Token that begins a text, of the tokenizer; answers to a prompt that has it twice in a row are dropped. None for no check."""
    eod_id: int | None = None
    """Token that ends a text; a turn of the policy that goes on behind it is refused. None for no check."""
    memory: MemorySwitch = field(default_factory=MemorySwitch)
    """What trainer and engine give up of one device while the other one works."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "num_groups", "group_size", "seq_len", "micro_batch_size", "num_epochs", "num_mini_batches")
        check_integers(self, 0, "pad_id", *(name for name in ("bos_id", "eod_id") if getattr(self, name) is not None))
        check_finite(self, 1, "max_filter_ratio")
        check_finite(self, 0, "kl_in_reward")
        check_estimator(self.kl_in_reward_estimator, "kl_in_reward_estimator")
        if not self.kl_in_reward and self.kl_in_reward_estimator != GRPOConfig.kl_in_reward_estimator:
            raise ValueError(
                f"kl_in_reward_estimator={self.kl_in_reward_estimator!r} has no effect without kl_in_reward; set it, or leave this out"
            )
        if not self.filter_equal_groups and self.max_filter_ratio != GRPOConfig.max_filter_ratio:
            raise ValueError(
                f"max_filter_ratio={self.max_filter_ratio} has no effect without filter_equal_groups; set it to True, or leave this at "
                f"{GRPOConfig.max_filter_ratio}"
            )
        if self.reward_clip is not None and not (all(map(math.isfinite, self.reward_clip)) and self.reward_clip[0] < self.reward_clip[1]):
            raise ValueError(f"reward_clip={self.reward_clip} must be two finite numbers in ascending order; None for no limits")
        if self.old_logprobs not in ("trainer", "inference"):
            raise ValueError(f"old_logprobs={self.old_logprobs!r} must be trainer or inference")
        if self.replay_old_routing and (self.old_logprobs != "trainer" or self.num_updates == 1):
            raise ValueError(
                f"replay_old_routing=True replays what the trainer's old log-probabilities were computed with in later updates, found "
                f"old_logprobs={self.old_logprobs!r} and num_epochs * num_mini_batches = {self.num_updates}; set old_logprobs='trainer' "
                "and several updates, or it to False"
            )
        if self.gae is not None and self.advantage != AdvantageConfig():
            raise ValueError(f"advantage={self.advantage} has no effect beside gae; leave it out, or set gae=None")
        if self.group_size < (2 if self.gae is None else 1):
            raise ValueError(f"group_size={self.group_size} must be at least 2: an answer is judged against its group; or set gae")
        if self.group_size == 1 and self.filter_equal_groups:
            raise ValueError("filter_equal_groups=True replaces every group of group_size=1, whose reward equals itself; set it to False")
        if (count := self.num_groups * self.group_size) % self.num_mini_batches:
            raise ValueError(f"num_groups * group_size = {count} must be divisible by num_mini_batches={self.num_mini_batches}")
        if self.packing is not None and self.packing.bin_size < self.seq_len:
            raise ValueError(
                f"packing.bin_size={self.packing.bin_size} must be at least seq_len={self.seq_len}, as long as a trajectory may "
                "be; raise packing.bin_size, or lower seq_len"
            )
        if not 0 < self.rollout_timeout_s < math.inf:
            raise ValueError(f"rollout_timeout_s={self.rollout_timeout_s} must be positive and finite")
        if self.temperature == 0:
            raise ValueError("temperature=0 in generation_args draws the same answer every time; choose one above 0")

    @property
    def temperature(self) -> float:
        """At which answers are drawn."""
        return 1.0 if self.generation_args.temperature is None else self.generation_args.temperature

    def clipped(self, reward: float) -> float:
        """Within ``reward_clip``."""
        return reward if self.reward_clip is None else min(max(reward, self.reward_clip[0]), self.reward_clip[1])

    @property
    def drawing_args(self) -> GenericGenerationArgs:
        """``generation_args`` with what they leave open of the distribution said: that of the model, which no interface changes."""
        given = {name: value for name, value in asdict(self.generation_args).items() if value is not None}
        return GenericGenerationArgs(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **given})

    @property
    def longest_trajectory(self) -> int:
        """Tokens of prompt and answer that a row, or a bin, has room for."""
        return 1 + (self.seq_len if self.packing is None else self.packing.bin_size)

    @property
    def num_updates(self) -> int:
        """Of the weights, an iteration."""
        return self.num_epochs * self.num_mini_batches
