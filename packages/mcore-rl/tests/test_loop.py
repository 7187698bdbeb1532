# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An iteration over any layout: same rollouts, same weights everywhere, a policy that learns."""

import asyncio
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import Group, ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.backends import Fp8Config, choose_backend, quantize_base
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, dense_feed_forward
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import PipelineConfig, Schedule
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from mcore_rl import (
    AdvantageConfig,
    Aggregation,
    FrozenWeights,
    GAEConfig,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    IterationReport,
    Learner,
    MegatronLocal,
    OverlongPenalty,
    PackingConfig,
    Problem,
    RewardOnlyAgent,
    TokenRollout,
    gather_weights,
    grpo_iteration,
    refit,
    with_ref_logprobs,
)
from mcore_rl._loop import _loop as loop_module
from mcore_rl._loop import _update
from mcore_rl._loop._loop import check_iteration
from mcore_rl._loop._update import _shaped
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._reference import token_logprobs
from mcore_rl.envs import CharacterShare

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=-(-TOKENIZER.vocab_size // 8) * 8
)
CONFIG = GRPOConfig(
    num_groups=2, group_size=16, seq_len=16, micro_batch_size=8, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8)
)
SMALLER = dataclasses.replace(CONFIG, group_size=8, micro_batch_size=4)
"""As many micro-batches of half the rows."""
OBJECTIVE = GRPOObjective()


def iterate(
    plan: ParallelPlan,
    iterations: int,
    device: str = "cpu",
    config: GRPOConfig = CONFIG,
    objective: GRPOObjective = OBJECTIVE,
    agent: RewardOnlyAgent | None = None,
    swap_reference: bool = False,
    batch_invariant: bool = False,
    unpadded_vocab_size: int = TOKENIZER.vocab_size,
    pipeline: Schedule | None = None,
) -> list[IterationReport]:
    groups = ProcessGroups.build(plan)
    backend = choose_backend(batch_invariant=batch_invariant)
    # Rows of padding are never drawn, so the policy has none.
    model, frozen = (GPTModel(SIZES, groups, unpadded_vocab_size=unpadded_vocab_size, device=device, backend=backend) for _ in range(2))
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups)
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8), device=device)
    copy = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=5, device=device, backend=backend).eval()
    engine = DynamicInferenceEngine(copy, context, TOKENIZER, seed=groups.world.rank, vocab_size=TOKENIZER.vocab_size)
    refit(model, groups, engine)
    agent = agent or CharacterShare(["a", "b"][groups.world.rank % 2 :], "abcdefghijklmnopqrstuvwxyz")
    interface = MegatronLocal(engine)
    reference = None
    if objective.kl_beta or config.kl_in_reward:
        reference = FrozenWeights(model) if swap_reference else frozen
    learner = Learner(
        model=model, groups=groups, objective=objective, sync=sync, optimizer=optimizer, reference=reference, pipeline=pipeline
    )
    reports = []
    for _ in range(iterations):
        reports.append(
            grpo_iteration(
                config, agent=agent, interface=interface, engine=engine, learner=learner, lr=2e-2,
            )
        )  # fmt: skip
    for name, full in gather_weights(model, groups):
        assert torch.equal(full, dict(copy.named_parameters())[name]), name
    return reports


def check_refit(plan: ParallelPlan) -> None:
    """What is gathered from a layout is what one rank holds from the same seed, each parameter once."""
    groups = ProcessGroups.build(plan)
    for sizes in (SIZES, dataclasses.replace(SIZES, share_embeddings_and_output_weights=True)):
        whole = {shard.name: shard.parameter for shard in named_shards(GPTModel(sizes, ProcessGroups.single()))}
        gathered = list(gather_weights(GPTModel(sizes, groups), groups))
        assert [name for name, _ in gathered] == list(whole)
        assert all(torch.equal(full, whole[name]) for name, full in gathered)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, pp=2), ParallelPlan(tp=2, dp=2), ParallelPlan(pp=2, dp=2)])
def test_gathered_weights_are_the_global_ones(world, plan: ParallelPlan) -> None:
    world(check_refit, plan=plan)


def test_the_policy_learns_and_engine_and_trainer_agree() -> None:
    reports = iterate(ParallelPlan(), 8)
    assert sum(report.mean_reward for report in reports[-2:]) > 1.2 * sum(report.mean_reward for report in reports[:2])
    assert all(report.train.metrics["logprob_mismatch"] < 1e-5 for report in reports)
    assert reports[0].train.metrics["ratio"] == pytest.approx(1.0)


@pytest.mark.journey
def test_engine_and_trainer_agree_bit_by_bit_with_a_batch_invariant_backend() -> None:
    reports = iterate(ParallelPlan(), 2, batch_invariant=True, config=SMALLER)
    assert [report.train.metrics["logprob_mismatch"] for report in reports] == [0.0, 0.0]
    assert [report.train.metrics["ratio"] for report in reports] == [1.0, 1.0]


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.journey)], ids=["rows", "packed"])
def test_old_log_probs_of_a_batch_invariant_engine_save_a_pass_and_change_no_bit(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, num_groups=1, group_size=4, micro_batch_size=2, num_epochs=2, num_mini_batches=2)
    if packed:
        config = dataclasses.replace(config, packing=PackingConfig(bin_size=32))
    passes = []
    score = _update.token_logprobs

    def counted(*inputs: Any, **options: Any) -> list[torch.Tensor]:
        passes.append(inputs)
        return score(*inputs, **options)

    monkeypatch.setattr(_update, "token_logprobs", counted)
    trainer = iterate(ParallelPlan(), 2, batch_invariant=True, config=config)
    assert len(passes) == 2 * config.num_mini_batches
    inference = iterate(ParallelPlan(), 2, batch_invariant=True, config=dataclasses.replace(config, old_logprobs="inference"))
    assert len(passes) == 2 * config.num_mini_batches
    for ours, theirs in zip(trainer, inference, strict=True):
        assert len(ours.updates) == 4
        assert [(one.loss, one.grad_norm, one.metrics) for one in ours.updates] == [
            (one.loss, one.grad_norm, one.metrics) for one in theirs.updates
        ]
    assert any(update.metrics["ratio"] != 1.0 for update in trainer[-1].updates)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(dp=2)])
def test_ranks_see_the_same_rollouts_and_keep_one_policy(world, plan: ParallelPlan) -> None:
    first, second = world(iterate, plan=plan, iterations=2, config=SMALLER)
    for ours, theirs in zip(first, second, strict=True):
        assert (ours.mean_reward, ours.num_rollouts, ours.train.loss) == (theirs.mean_reward, theirs.num_rollouts, theirs.train.loss)
        assert ours.train.metrics["logprob_mismatch"] < 1e-5


@pytest.mark.parametrize(
    "args",
    [
        GenericGenerationArgs(temperature=0.5, max_tokens=8),
        GenericGenerationArgs(temperature=1.7, max_tokens=8),
        GenericGenerationArgs(max_tokens=8),
    ],
    ids=lambda args: f"temperature-{args.temperature}",
)
def test_engine_and_trainer_agree_at_the_temperature_of_the_policy(args: GenericGenerationArgs) -> None:
    config = dataclasses.replace(CONFIG, generation_args=args)
    reports = iterate(ParallelPlan(), 2, config=config, objective=GRPOObjective(temperature=config.temperature))
    assert all(report.train.metrics["logprob_mismatch"] < 1e-5 for report in reports)
    assert reports[0].train.metrics["ratio"] == pytest.approx(1.0)


def test_the_reference_is_the_policy_at_first_and_stays_where_it_was() -> None:
    config = dataclasses.replace(CONFIG, generation_args=GenericGenerationArgs(temperature=0.8, max_tokens=8))
    first, second, third = iterate(ParallelPlan(), 3, config=config, objective=GRPOObjective(kl_beta=0.1, temperature=0.8))
    assert abs(first.train.metrics["kl"]) < 1e-9
    assert third.train.metrics["kl"] > second.train.metrics["kl"] > 1e-6


def check_reference(plan: ParallelPlan) -> None:
    """Every layout makes the log-probabilities that one rank makes, in evaluation mode and without a gradient."""
    groups, generator = ProcessGroups.build(plan), torch.Generator().manual_seed(0)
    tokens = torch.randint(SIZES.vocab_size, (3, 2, 9), generator=generator)
    batches = [Batch(tokens=rows[:, :-1], labels=rows[:, 1:], loss_mask=torch.ones(2, 8)) for rows in tokens]
    model = GPTModel(SIZES, groups, dtype=torch.float64).train()
    scored = with_ref_logprobs(model, batches, groups, temperature=0.7)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    whole = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    for batch, share in zip(batches, scored, strict=True):
        output, _ = whole(batch.tokens.flatten(), batch.step())
        logits = output.logits().detach() / 0.7
        expected = logits.log_softmax(-1).gather(1, batch.labels.flatten()[:, None]).view(batch.labels.shape)
        torch.testing.assert_close(share.extras["ref_logprobs"], expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(share.labels, batch.labels) and not share.extras["ref_logprobs"].requires_grad


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(cp=2)], ids=str)
def test_reference_log_probs_are_those_of_one_rank(world, plan: ParallelPlan) -> None:
    world(check_reference, plan=plan)


class Unreachable(CharacterShare):
    async def get_prompt(self, *, validation: bool = False) -> Problem:
        raise AssertionError("something was generated")


@pytest.mark.parametrize(("name", "value"), [("top_k", 4), ("top_p", 0.9)])
def test_answers_of_a_truncated_distribution_are_not_trained_on(name: str, value: float) -> None:
    args = GenericGenerationArgs(**{name: value})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nothing: Any = None
    learner = Learner(model=nn.Identity(), groups=ProcessGroups.single(), objective=OBJECTIVE, sync=nothing, optimizer=nothing)
    with pytest.raises(ValueError, match=f"generation_args.{name}={value} draws from another distribution than the one that is trained"):
        check_iteration(dataclasses.replace(CONFIG, generation_args=args), learner)
    check_iteration(dataclasses.replace(CONFIG, generation_args=GenericGenerationArgs(top_k=0, top_p=1.0)), learner)


def test_what_an_iteration_leaves_open_no_interface_chooses() -> None:
    config = dataclasses.replace(CONFIG, generation_args=GenericGenerationArgs(max_tokens=8))
    chosen = GenericGenerationArgs(temperature=0.7, top_k=20, top_p=0.9).add(config.drawing_args)
    assert chosen == GenericGenerationArgs(temperature=1.0, top_k=0, top_p=1.0, max_tokens=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": GRPOObjective(kl_beta=0.1)}, "kl_beta=0.1 needs a frozen reference model; pass reference, or set kl_beta=0"),
        ({"objective": GRPOObjective(temperature=0.5)}, "objective.temperature=0.5 must be that of generation_args, 1.0"),
        ({"groups": dataclasses.replace(ProcessGroups.single(), dp=Group((0, 1, 2), 0))}, "num_groups .* = 32 must be divisible by dp=3"),
    ],
    ids=["reference", "temperature", "dp"],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_generated(options: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {"model": nn.Identity(), **dict.fromkeys(("sync", "optimizer"))}
    parts |= {"groups": ProcessGroups.single(), "objective": GRPOObjective()}
    nobody: Any = None
    with pytest.raises(ValueError, match=message):
        grpo_iteration(CONFIG, agent=Unreachable(["x"], "a"), interface=nobody, engine=nobody, learner=Learner(**(parts | options)), lr=1.0)


def train_over_all_rows(plan: ParallelPlan) -> str:
    try:
        iterate(plan, 1, unpadded_vocab_size=SIZES.vocab_size)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


VOCABULARIES = (
    f"the engine draws from vocab_size={TOKENIZER.vocab_size} ids, and log-probabilities of the policy are over "
    f"unpadded_vocab_size={SIZES.vocab_size}"
)


def test_an_engine_that_draws_fewer_ids_than_the_policy_has_is_refused() -> None:
    assert VOCABULARIES in train_over_all_rows(ParallelPlan())


@pytest.mark.world(2)
def test_a_stage_without_an_output_layer_hears_of_the_vocabulary(world) -> None:
    first, last = world(train_over_all_rows, plan=ParallelPlan(pp=2))
    assert first.startswith("ranks failed: {1:") and VOCABULARIES in first and VOCABULARIES in last


class Unreliable(CharacterShare):
    """Every third judgement fails; one prompt never comes when asked for it."""

    def __init__(self, silent_after: int = 10**9) -> None:
        super().__init__(["a", "b"], "abcdefghijklmnopqrstuvwxyz")
        self.num_prompts = self.num_judged = 0
        self.silent_after = silent_after

    async def get_prompt(self, *, validation: bool = False) -> Problem:
        self.num_prompts += 1
        if self.num_prompts > self.silent_after:
            await asyncio.sleep(60)
        return await super().get_prompt()

    async def get_reward(self, response: str, problem: Problem) -> float:
        self.num_judged += 1
        if self.num_judged % 3 == 0:
            raise RuntimeError("judge fell over")
        return await super().get_reward(response, problem)


@pytest.mark.parametrize(
    ("silent_after", "timeout_s", "dropped"),
    [(10**9, 60.0, 10), pytest.param(1, 6.0, 5 + 16, marks=pytest.mark.journey)],
    ids=["judge", "deadline"],
)
def test_the_survivors_are_trained_on_and_the_others_counted(silent_after: int, timeout_s: float, dropped: int) -> None:
    config = dataclasses.replace(CONFIG, rollout_timeout_s=timeout_s)
    [report] = iterate(ParallelPlan(), 1, config=config, agent=Unreliable(silent_after))
    assert (report.num_rollouts, report.num_dropped) == (32 - dropped, dropped)
    assert not report.train.skipped


def drop_on_ranks() -> tuple[int, int, float]:
    [report] = iterate(ParallelPlan(dp=2), 1, agent=Unreliable())
    return report.num_rollouts, report.num_dropped, report.train.loss


@pytest.mark.world(2)
def test_data_ranks_train_on_survivors_that_do_not_divide(world) -> None:
    one, other = world(drop_on_ranks)
    assert one == other and one[:2] == (22, 10)


def fail_on_one_rank() -> str:
    class Failing(CharacterShare):
        async def group_rollout(self, *parts: Any, **options: Any) -> list[TokenRollout]:
            raise ConnectionError("no problems here")

    groups = ProcessGroups.build(ParallelPlan(dp=2))
    agent = Failing(["a"], "a") if groups.dp.rank else None
    try:
        iterate(ParallelPlan(dp=2), 1, agent=agent)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.world(2)
def test_a_rank_whose_rollouts_fail_is_named_on_the_others(world) -> None:
    one, other = world(fail_on_one_rank)
    assert one.startswith("RuntimeError: ranks failed: {1:") and "no problems here" in one
    assert other == "ConnectionError: no problems here"


@pytest.mark.gpu
def test_the_policy_learns_on_a_gpu() -> None:
    reports = iterate(ParallelPlan(), 8, device="cuda")
    assert sum(report.mean_reward for report in reports[-2:]) > 1.2 * sum(report.mean_reward for report in reports[:2])


def test_sizes_that_cannot_learn_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size=1 must be at least 2"):
        GRPOConfig(num_groups=1, group_size=1, seq_len=8)
    with pytest.raises(ValueError, match="temperature=0 in generation_args draws the same answer"):
        GRPOConfig(num_groups=1, group_size=2, seq_len=8, generation_args=GenericGenerationArgs(temperature=0.0))
    with pytest.raises(ValueError, match="rollout_timeout_s=0 must be positive"):
        GRPOConfig(num_groups=1, group_size=2, seq_len=8, rollout_timeout_s=0)
    with pytest.raises(ValueError, match="rollout_timeout_s=inf must be positive and finite"):
        GRPOConfig(num_groups=1, group_size=2, seq_len=8, rollout_timeout_s=math.inf)
    with pytest.raises(ValueError, match="max_filter_ratio=2.0 has no effect without filter_equal_groups"):
        GRPOConfig(num_groups=1, group_size=2, seq_len=8, max_filter_ratio=2.0)
    with pytest.raises(ValueError, match="filter_equal_groups=True replaces every group of group_size=1"):
        GRPOConfig(num_groups=1, group_size=1, seq_len=8, gae=GAEConfig(), filter_equal_groups=True)
    with pytest.raises(ValueError, match="packing.bin_size=7 must be at least seq_len=8, as long as a trajectory may be"):
        GRPOConfig(num_groups=1, group_size=2, seq_len=8, packing=PackingConfig(bin_size=7))


class Hopeless(CharacterShare):
    async def get_reward(self, response: str, problem: Problem) -> float:
        raise RuntimeError("judge fell over")


def test_an_iteration_without_any_survivor_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no rollout of 2 groups of 16 is left"):
        iterate(ParallelPlan(), 1, agent=Hopeless(["a"], "a"))


def check_updates(plan: ParallelPlan, packed: bool) -> list[float]:
    """The first of several updates is on policy, the later ones are not; every rank takes part in each."""
    config = dataclasses.replace(
        SMALLER, num_epochs=2, num_mini_batches=2, kl_in_reward=0.05, advantage=AdvantageConfig(baseline="leave_one_out", scale="none")
    )
    if packed:
        packing = PackingConfig(bin_size=24, alignment=2 * plan.cp if plan.cp > 1 else 1)
        config = dataclasses.replace(config, packing=packing, aggregation=Aggregation(mode="sequence_mean"))
    objective = GRPOObjective(kl_beta=0.01, kl_estimator="k2")
    first, second = iterate(plan, 2, config=config, objective=objective, swap_reference=packed)
    for report in (first, second):
        ratios = [update.metrics["ratio"] for update in report.updates]
        assert ratios[0] == pytest.approx(1.0, abs=1e-6) and all(abs(ratio - 1) > 1e-6 for ratio in ratios[1:])
        assert report.updates[0].metrics["is_weight"] == pytest.approx(1.0, abs=1e-4)
    assert abs(first.updates[0].metrics["kl"]) < 1e-9 < second.updates[0].metrics["kl"]
    return [update.loss for report in (first, second) for update in report.updates]


def test_an_iteration_says_how_long_answers_are_how_full_bins_and_how_far_numerics_lie_apart() -> None:
    [report] = iterate(ParallelPlan(), 1, config=dataclasses.replace(CONFIG, packing=PackingConfig(bin_size=64)))
    lengths = torch.tensor(report.lengths, dtype=torch.float64)
    assert len(lengths) == report.num_rollouts == 32 and report.mean_turns == 1.0
    assert (report.mean_length, report.std_length) == pytest.approx((lengths.mean().item(), lengths.std(correction=0).item()))
    assert (report.min_length, report.max_length) == (lengths.min(), lengths.max())
    # One token of a prompt predicts the first of an answer: as many labels as generated tokens.
    assert report.packing_efficiency == pytest.approx(lengths.sum().item() / (64 * -(-lengths.sum().item() // 64)), abs=0.2)
    metrics = report.train.metrics
    assert abs(metrics["mismatch_k1"]) < 1e-5 and 0 <= metrics["mismatch_k3"] < 1e-8 and 0 <= metrics["probability_gap"] < 1e-5
    assert iterate(ParallelPlan(), 1)[0].packing_efficiency is None


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_rollouts_are_trained_on_several_times(packed: bool) -> None:
    check_updates(ParallelPlan(), packed)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    ("plan", "packed"),
    [(ParallelPlan(dp=2), True), (ParallelPlan(pp=2), False), pytest.param(ParallelPlan(cp=2), True, marks=pytest.mark.journey)],
    ids=str,
)
def test_all_ranks_see_one_loss_of_each_update(world, plan: ParallelPlan, packed: bool) -> None:
    one, other = world(check_updates, plan=plan, packed=packed)
    assert one == other


def check_schedule(schedule: str) -> tuple[list[float], list[float], set[str]]:
    """Norms of gradients by one forward, one backward, by another schedule, and the kinds of its actions that ran."""
    built, kinds = PipelineConfig(schedule=schedule).build(1), set()

    def watched(num_stages: int, stage: int, num_microbatches: int) -> Any:
        actions = built(num_stages, stage, num_microbatches)
        kinds.update(name for action in actions for name in (type(action).__name__, str(action)[0]))
        return actions

    plan, config = ParallelPlan(pp=2), dataclasses.replace(CONFIG, num_mini_batches=2)
    expected, found = (iterate(plan, 2, config=config, pipeline=pipeline) for pipeline in (None, watched))
    norms = [[update.grad_norm for report in reports for update in report.updates] for reports in (expected, found)]
    return norms[0], norms[1], kinds


@pytest.mark.world(2)
@pytest.mark.parametrize(("schedule", "kind"), [pytest.param("zero_bubble", "W", marks=pytest.mark.journey), ("combined", "Combined")])
def test_updates_follow_the_schedule_of_the_learner(world, schedule: str, kind: str) -> None:
    for expected, norms, kinds in world(check_schedule, schedule=schedule):
        assert kind in kinds and norms == pytest.approx(expected, rel=1e-3)


def test_frozen_weights_are_those_of_their_time_and_leave_the_policy_alone() -> None:
    model = GPTModel(SIZES, ProcessGroups.single())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    frozen = FrozenWeights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="inside"), frozen.swapped() as swapped:
        assert all(torch.equal(a, b) for a, b in zip(swapped.parameters(), before, strict=True))
        raise RuntimeError("inside")
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(torch.equal(a, b + 1.0) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_follow_the_model_as_far_as_they_are_told(dtype: torch.dtype) -> None:
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=dtype)
    frozen, first = FrozenWeights(model), [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)

    def values() -> list[torch.Tensor]:
        with frozen.swapped() as swapped:
            return [parameter.detach().clone() for parameter in swapped.parameters()]

    frozen.refresh(0.25)
    for value, before, own in zip(values(), first, model.parameters(), strict=True):
        expected = 0.75 * before.double() + 0.25 * own.detach().double()
        assert value.dtype == dtype and torch.allclose(value.double(), expected, atol=1e-6 if dtype == torch.float32 else 1e-2)
    frozen.refresh()
    assert all(torch.equal(value, own) for value, own in zip(values(), model.parameters(), strict=True))
    for alpha in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="mixup_alpha=.* must lie above 0 and up to 1"):
            frozen.refresh(alpha)


def test_frozen_weights_beside_an_eight_bit_base_follow_the_adapters() -> None:
    groups = ProcessGroups.single()
    model = GPTModel(SIZES, groups)
    add_lora(model, LoraConfig(rank=2, base_dtype="fp8_weight_only"), groups)
    quantize_base(model)
    frozen, batch = FrozenWeights(model), Batch(tokens=torch.arange(8)[None], labels=torch.arange(1, 9)[None], loss_mask=torch.ones(1, 8))
    [before] = token_logprobs(model, [batch], groups)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                parameter.add_(1.0)
    [after] = token_logprobs(model, [batch], groups)
    assert torch.equal(token_logprobs(frozen, [batch], groups)[0], before) and not torch.equal(after, before)
    for mixup_alpha in (0.5, 1.0):
        frozen.refresh(mixup_alpha)
        assert torch.equal(token_logprobs(frozen, [batch], groups)[0], after) == (mixup_alpha == 1.0)


@pytest.mark.parametrize("feed_forward", [dense_feed_forward, moe_feed_forward(MoEConfig(num_moe_experts=4, moe_ffn_hidden_size=32))])
def test_a_reference_that_follows_leaves_no_eight_bit_copies_of_older_values(feed_forward: Any) -> None:
    groups, backend = ProcessGroups.single(), choose_backend("torch", fp8=Fp8Config(recipe="tensorwise"))
    sizes = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=32, ffn_hidden_size=32)
    model = GPTModel(sizes, groups, backend=backend, feed_forward=feed_forward)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-1), sync, groups)
    row = torch.arange(33).remainder(32)[None]
    batches = [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, 32))]
    frozen = FrozenWeights(model)
    train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=1e-1)
    [policy] = token_logprobs(model, batches, groups)
    # Straight after a pass of the reference, at whose addresses the newer values will lie.
    [first] = token_logprobs(frozen, batches, groups)
    assert not torch.equal(first, policy)
    frozen.refresh()
    assert torch.equal(token_logprobs(frozen, batches, groups)[0], policy)
    assert torch.equal(token_logprobs(model, batches, groups)[0], policy)


def refit_sliced() -> list[bool]:
    """Whether parameters of a sliced optimizer are on their way, whenever an engine takes weights."""
    groups, on_their_way = ProcessGroups.build(ParallelPlan(dp=2)), []
    model = GPTModel(SIZES, groups, unpadded_vocab_size=TOKENIZER.vocab_size)
    sync = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, use_distributed_optimizer=True), sync, groups)
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8))
    copy = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention()).eval()
    engine = DynamicInferenceEngine(copy, context, TOKENIZER, seed=groups.world.rank)
    learner = Learner(model=model, groups=groups, objective=OBJECTIVE, sync=sync, optimizer=optimizer)
    inner = loop_module.refit

    def watched(*arguments: Any) -> None:
        on_their_way.append(any(work is not None for work in sync._gather._works))
        inner(*arguments)

    loop_module.refit = watched  # type: ignore[assignment]
    try:
        agent, interface = CharacterShare(["a", "b"], "abcdefgh"), MegatronLocal(engine)
        grpo_iteration(CONFIG, agent=agent, interface=interface, engine=engine, learner=learner, lr=2e-2)
    finally:
        loop_module.refit = inner
    return on_their_way


@pytest.mark.world(2, shared=True)
def test_engines_take_no_weights_that_are_on_their_way(world) -> None:
    assert world(refit_sliced) == [[False]] * 2


class Late:
    """Parameters that arrive no sooner than somebody waits for them; conforms to ``Pending``."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [parameter.detach() for parameter in model.parameters()]
        self.values = [parameter.clone() for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.zero_()

    def wait(self) -> None:
        for parameter, value in zip(self.parameters, self.values, strict=True):
            parameter.copy_(value)


def reference_of_gathers(groups: ProcessGroups, waits: bool) -> dict[str, torch.Tensor]:
    """Weights of a reference straight after steps of its policy, and of that; where it waits, all gathers of a step have ended before."""
    row = torch.arange(17).add(groups.world.rank).remainder(32)[None]
    batches = [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, 16))]
    model = GPTModel(SIZES, groups)
    sync = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, use_distributed_optimizer=True), sync, groups)

    def train() -> None:
        train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=2e-2, groups=groups)
        assert any(work is not None for work in sync._gather._works)
        sync.finish_param_sync()
        if not waits:
            sync._gather._works[0] = Late(model)

    def own() -> torch.Tensor:
        sync.finish_param_sync()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def kept(reference: FrozenWeights) -> torch.Tensor:
        return torch.cat([value.flatten() for value in reference._values])

    train()
    frozen = FrozenWeights(model)
    made = kept(frozen)
    train()
    with frozen.swapped():
        # Whatever is still on its way arrives here.
        swapped = own()
    policy = own()
    train()
    frozen.refresh()
    return {"made": made, "swapped": swapped, "policy": policy, "refreshed": kept(frozen), "last": own()}


def unequal_references() -> list[str]:
    """What of a reference depends on gathers that are on their way."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    behind, meanwhile = (reference_of_gathers(groups, waits) for waits in (True, False))
    assert torch.equal(behind["made"], behind["swapped"]) and not torch.equal(behind["swapped"], behind["policy"])
    return [name for name, value in behind.items() if not torch.equal(value, meanwhile[name])]


@pytest.mark.world(2, shared=True)
def test_references_wait_for_gathers_that_are_on_their_way(world) -> None:
    assert world(unequal_references) == [[]] * 2


class Alternating(CharacterShare):
    """The groups of every second problem all earn the same."""

    async def get_reward(self, response: str, problem: Problem) -> float:
        return 0.5 if problem.problem_id == "0" else await super().get_reward(response, problem)


def test_groups_of_equal_rewards_are_replaced() -> None:
    config = dataclasses.replace(CONFIG, filter_equal_groups=True)
    [report] = iterate(ParallelPlan(), 1, config=config, agent=Alternating(["a", "b"], "abcdefghijklmnopqrstuvwxyz"))
    # Of a, b, a, b the first and third are left out.
    assert (report.num_rollouts, report.num_dropped, report.num_filtered) == (32, 0, 2 if report.mean_reward != 0.5 else 0)
    assert report.std_reward > 0


class Constant(CharacterShare):
    async def get_reward(self, response: str, problem: Problem) -> float:
        return 1.0


def test_an_environment_of_equal_rewards_ends_all_the_same() -> None:
    config = dataclasses.replace(CONFIG, filter_equal_groups=True, max_filter_ratio=2.0)
    [report] = iterate(ParallelPlan(), 1, config=config, agent=Constant(["a"], "a"))
    assert (report.num_rollouts, report.num_filtered, report.mean_reward) == (32, 2, 1.0)


def test_long_answers_lose_reward_in_the_advantage_only() -> None:
    config = dataclasses.replace(CONFIG, overlong=OverlongPenalty(max_length=8, buffer=4), advantage=AdvantageConfig(scale="none"))
    [report] = iterate(ParallelPlan(), 1, config=config, agent=Constant(["a"], "a"))
    assert report.mean_reward == 1.0 and (report.std_reward, report.train.skipped) == (0.0, False)


def test_rewards_beyond_their_limits_count_as_these_and_are_reported_as_they_are() -> None:
    drawn = TokenRollout(trajectory=(1, 2), reward=7.0, generation_mask=(False, True), logprobs=None, env_id="e", problem_id="p")
    header = RolloutHeader.of(drawn)
    longest = OverlongPenalty(max_length=1, buffer=1)
    clipped = dataclasses.replace(CONFIG, reward_clip=(-1.0, 2.0), overlong=longest)
    assert [_shaped(clipped, dataclasses.replace(header, reward=reward)) for reward in (7.0, 0.5, -3.0)] == [1.0, -0.5, -2.0]
    [report] = iterate(ParallelPlan(), 1, config=dataclasses.replace(CONFIG, reward_clip=(0.0, 0.5)), agent=Constant(["a"], "a"))
    assert report.mean_reward == 1.0 and report.group_rewards == ((1.0, 0.0),) * 2


def test_a_reference_that_is_missing_is_named() -> None:
    config = dataclasses.replace(CONFIG, kl_in_reward=0.1)
    with pytest.raises(ValueError, match="kl_in_reward=0.1 needs a frozen reference"):
        parts: dict[str, Any] = {"model": nn.Identity(), **dict.fromkeys(("sync", "optimizer"))}
        nobody: Any = None
        learner = Learner(groups=ProcessGroups.single(), objective=GRPOObjective(), **parts)
        grpo_iteration(config, agent=Unreachable(["x"], "a"), interface=nobody, engine=nobody, learner=learner, lr=1.0)
