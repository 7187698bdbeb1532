# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A prompt that is computed once for its answers gives what it gives with each of them."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, MambaModel, TransformerConfig, add_value_head, hybrid_config
from mcore_parallel.nn import MambaConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training.distill import DistillationObjective, Teacher
from mcore_rl import (
    Aggregation,
    BatchStyle,
    Critic,
    FrozenWeights,
    GAEConfig,
    GRPOConfig,
    GRPOObjective,
    ImportanceCorrection,
    Learner,
    PackingConfig,
    PackingContext,
    PolicyLossConfig,
    TokenRollout,
    ValueObjective,
)
from mcore_rl._loop._loop import check_iteration
from mcore_rl._loop._update import update
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._packing._shared_prompts import pack_units
from mcore_rl._reference import token_logprobs
from mcore_rl._rollouts._collect import Collection

SIZES = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=16, vocab_size=32, init_method_std=0.4)
MIXTURE = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_router_load_balancing_type="none")
GROUPS = (
    (6, ((3,), (1,), (5,), (2,))),
    # Turns of an environment between those of the policy.
    (4, ((2, -3, 4), (7,), (2, -1, 1))),
    # Nothing to share: a prompt of one token, none, an answer alone; and one that never came.
    (1, ((3,), (2,))),
    (0, ((4,), (3,))),
    (5, ((4,),)),
    (3, ((), (2,), (2,))),
)
"""Tokens of the prompt, and of each answer's parts; those of negative numbers are not the policy's."""


def rollouts(*, routed: bool = False) -> list[list[TokenRollout]]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(32, (count,), generator=generator).tolist()

    groups = []
    for number, (length, answers) in enumerate(GROUPS):
        prompt, group = tokens(length), []
        for parts in answers:
            mask = [False] * length + [part > 0 for part in parts for _ in range(abs(part))]
            experts = torch.rand(len(mask) - 1, 2, 4, generator=generator).argsort(-1)[..., :2].short() if routed else None
            if experts is not None and length:
                # The engine routes tokens of one prompt alike, and does not record those of its cache.
                is_cached = any(sum(other.generation_mask) for other in group)
                experts[: length - 1] = -1 if is_cached else torch.tensor([number % 3, 3])
            group.append(
                TokenRollout(
                    trajectory=prompt + tokens(len(mask) - length),
                    reward=torch.rand(1, generator=generator).item(),
                    generation_mask=mask,
                    logprobs=(-2 * torch.rand(sum(mask), generator=generator) - 1).tolist(),
                    env_id="env",
                    problem_id=str(number),
                    routed_experts=experts,
                )
            )
        groups.append(group)
    return groups


def flat(*, routed: bool = False) -> list[TokenRollout]:
    return [rollout for group in rollouts(routed=routed) for rollout in group]


def context(share: bool, bin_size: int = 24, *, routed: bool = False, style: BatchStyle | None = None, **ranks: int) -> PackingContext:
    packing = PackingConfig(bin_size=bin_size, share_prompts=share)
    return PackingContext.pack(flat(routed=routed), packing, style or BatchStyle(dtype=torch.float64), **ranks)


def model_of(*, mixture: bool = False, groups: ProcessGroups | None = None, **options: Any) -> GPTModel:
    more: dict[str, Any] = {"feed_forward": moe_feed_forward(MIXTURE)} if mixture else {}
    return GPTModel(SIZES, groups or ProcessGroups.single(), dtype=torch.float64, **more, **options)


def by_rollout(packed: PackingContext, values: list[Tensor]) -> list[Tensor]:
    return [value for _, value in sorted(zip(packed.rollouts, packed.of_rollouts(values), strict=True), key=lambda item: item[0])]


# -- where things lie --------------------------------------------------------------------------------------------------


def test_a_bin_holds_a_prompt_once_and_its_answers_behind_it() -> None:
    [group, *_] = rollouts()
    packed = PackingContext.pack(group, PackingConfig(bin_size=20, share_prompts=True))
    [batch] = packed.batches
    prompt, answers = list(group[0].trajectory[:6]), [list(rollout.trajectory[6:]) for rollout in group]
    # 5 tokens of the prompt; each answer begins with the sixth.
    expected = prompt[:5] + [token for answer in answers for token in [prompt[5], *answer[:-1]]]
    assert batch.tokens[0, :16].tolist() == expected
    assert batch.labels[0, :16].tolist() == prompt[1:] + [token for answer in answers for token in answer]
    assert batch.loss_mask[0].tolist() == [0.0] * 5 + [1.0] * 11 + [0.0] * 4
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 5, 8, 9, 14, 16, 20]
    assert batch.prefixes is not None and batch.prefixes.tolist() == [-1, 0, 0, 0, 0, -1]
    assert batch.step().positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 5, 6, 7, 8, 9, 5, 6, 0, 1, 2, 3]
    assert batch.valid is not None and batch.valid[0].tolist() == [True] * 16 + [False] * 4
    assert packed.efficiency == 0.8 and packed.bins == ((0, 1, 2, 3),)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("bin_size", [14, 24, 64])
def test_every_label_is_there_once_over_all_ranks(bin_size: int, num_ranks: int) -> None:
    contexts = [context(True, bin_size, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert len({len(packed.batches) for packed in contexts}) == 1
    assert sorted(number for packed in contexts for number in packed.rollouts) == list(range(len(flat())))
    for packed in contexts:
        for number, labels, own in zip(
            packed.rollouts,
            packed.of_rollouts([batch.labels for batch in packed.batches]),
            packed.of_rollouts([batch.loss_mask for batch in packed.batches]),
            strict=True,
        ):
            rollout = flat()[number]
            assert labels.tolist() == list(rollout.trajectory)[1:]
            assert own.tolist() == [float(written) for written in rollout.generation_mask[1:]]


@pytest.mark.parametrize("algorithm", ["first_fit_decreasing", "best_fit_decreasing", "next_fit"])
def test_groups_lie_in_bins_that_hold_them(algorithm: str) -> None:
    generator = random.Random(0)
    for trial in range(100):
        size, most = generator.randint(20, 60), generator.randint(1, 9)
        packing = PackingConfig(bin_size=size, max_sequences_per_bin=most, algorithm=algorithm, share_prompts=True)
        drawn = [
            TokenRollout(
                trajectory=[problem] * (length + answer),
                reward=0.0,
                generation_mask=[False] * length + [True] * answer,
                logprobs=[0.0] * answer,
                env_id="env",
                problem_id=str(problem),
            )
            for problem in range(generator.randint(1, 6))
            for length in [generator.randint(0, 15)]
            for answer in [generator.randint(1, 6) for _ in range(generator.randint(1, 12))]
        ]
        units = pack_units([RolloutHeader.of(rollout) for rollout in drawn], packing)
        assert sorted(number for unit in units for number in unit.members) == list(range(len(drawn))), trial
        assert all(unit.length <= size and len(unit.members) <= most for unit in units)
        packed = PackingContext.pack(drawn, packing)
        assert sorted(packed.rollouts) == list(range(len(drawn)))
        assert all(len(members) <= most for members in packed.bins)
        assert sum(unit.length for unit in units) <= sum(len(rollout.trajectory) - 1 for rollout in drawn)


def test_a_trajectory_alone_lies_as_without_sharing() -> None:
    single = [group[0] for group in rollouts()]
    one, other = (PackingContext.pack(single, PackingConfig(bin_size=24, share_prompts=share)) for share in (True, False))
    for mine, theirs in zip(one.batches, other.batches, strict=True):
        assert mine.prefixes is None and torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.labels, theirs.labels)


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bin_size", [14, 24, 64])
def test_log_probabilities_are_those_of_prompts_with_each_answer(bin_size: int) -> None:
    model, found = model_of(), []
    for share in (True, False):
        packed = context(share, bin_size)
        assert any(batch.prefixes is not None for batch in packed.batches) == share
        found.append(by_rollout(packed, token_logprobs(model, packed.batches, model.groups, temperature=0.7)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


OBJECTIVES = [
    GRPOObjective(entropy_weight=0.1, kl_beta=0.2, temperature=0.8),
    GRPOObjective(
        policy=PolicyLossConfig(ratio_level="sequence"), correction=ImportanceCorrection(level="sequence", mode="mask", low=0.1, veto=1e-3)
    ),
    GRPOObjective(policy=PolicyLossConfig(kind="cispo"), correction=ImportanceCorrection(level="geometric")),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["token", "sequence", "cispo"])
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
def test_losses_gradients_and_metrics_are_those_of_prompts_with_each_answer(objective: GRPOObjective, mode: str, mixture: bool) -> None:
    reference, old = model_of(seed=1), model_of(seed=2)
    results = []
    for share in (True, False):
        model = model_of(mixture=mixture)
        packed: Any = context(share, style=BatchStyle(dtype=torch.float64, aggregation=Aggregation(mode=mode)))
        packed = packed.with_advantages([(number % 5 - 2) / 2 for number in packed.rollouts])
        for name, scored in (("ref_logprobs", reference), ("old_logprobs", old)):
            packed = packed.with_extra(name, token_logprobs(scored, packed.batches, scored.groups, temperature=objective.temperature))
        totals: dict[str, Tensor] = {}
        for batch in packed.batches:
            output, _ = model(batch.tokens.flatten(), batch.step())
            report = objective(output, batch)
            for name, value in {"loss": report.sum, "count": report.count, **report.metrics}.items():
                totals[name] = totals.get(name, 0) + value
        results.append((totals, torch.autograd.grad(totals["loss"], list(model.parameters()))))
    (totals, gradients), (expected, theirs) = results
    assert totals.keys() == expected.keys() and totals["loss"] != 0
    for name, value in totals.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
    for one, other in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def learner_of(groups: ProcessGroups, **parts: Any) -> Learner:
    model = model_of(groups=groups)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), sync, groups)
    return Learner(model=model, groups=groups, sync=sync, optimizer=optimizer, **{"objective": GRPOObjective(kl_beta=0.1), **parts})


def config_of(share: bool, **fields: Any) -> GRPOConfig:
    packing = PackingConfig(bin_size=24, share_prompts=share)
    return GRPOConfig(**{"num_groups": 4, "group_size": 4, "seq_len": 24, "packing": packing, "num_epochs": 2, **fields})


def updates(groups: ProcessGroups, share: bool, **fields: Any) -> tuple[list[Any], list[Tensor]]:
    """Reports of all updates and the weights behind them."""
    parts: dict[str, Any] = {}
    if fields.get("gae") is not None:
        model = model_of(groups=groups, seed=3)
        head = add_value_head(model)
        sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
        optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), sync, groups)
        parts["critic"] = Critic(model=model, objective=ValueObjective(head=head), sync=sync, optimizer=optimizer, lr=1e-2)
    learner = learner_of(groups, **parts, reference=model_of(groups=groups, seed=1))
    config = config_of(share, **fields)
    check_iteration(config, learner)
    drawn = rollouts()[:-1] if fields.get("gae") is not None else rollouts()
    done = update(config, Collection.of(config, drawn, num_ranks=groups.dp.size), learner, 1e-2)
    return [*done.policy, *done.critic], [parameter.detach() for parameter in learner.model.parameters()]


def compare_updates(plan: ParallelPlan | None = None, **fields: Any) -> None:
    groups = ProcessGroups.single() if plan is None else ProcessGroups.build(plan)
    (reports, weights), (expected, theirs) = updates(groups, True, **fields), updates(groups, False, **fields)
    for one, other in zip(reports, expected, strict=True):
        assert one.num_tokens == other.num_tokens > 0
        assert one.loss == pytest.approx(other.loss, rel=1e-6, abs=1e-9) and one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-6, abs=1e-9)
    for one, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "fields",
    [{}, {"kl_in_reward": 0.1}, {"gae": GAEConfig(lam=0.9), "num_mini_batches": 2}, {"num_mini_batches": 2, "mask_truncated": True}],
    ids=["scored", "kl in reward", "ppo", "mini-batches"],
)
def test_updates_are_those_of_prompts_with_each_answer(fields: dict[str, Any]) -> None:
    compare_updates(**fields)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "plan", [pytest.param(ParallelPlan(tp=2), marks=pytest.mark.journey), ParallelPlan(pp=2), ParallelPlan(dp=2)], ids=["tp", "pp", "dp"]
)
def test_every_layout_updates_alike(world: Any, plan: ParallelPlan) -> None:
    world(compare_updates, plan=plan)


def test_a_prompt_is_routed_as_its_first_answer_recorded_it() -> None:
    model, style, drawn = model_of(mixture=True), BatchStyle(dtype=torch.float64), flat(routed=True)
    shared = context(True, routed=True)
    for batch in shared.batches:
        assert batch.prefixes is not None and batch.cu_seqlens is not None
        for prefix in {*batch.prefixes.tolist()} - {-1}:
            begin, end = batch.cu_seqlens[prefix : prefix + 2].tolist()
            assert bool((batch.extras["routed_experts"][0, begin:end] >= 0).all())
    # What the other answers found in the cache, as the first one recorded it.
    first = {rollout.problem_id: rollout.routed_experts for rollout in reversed(drawn)}
    for rollout in drawn:
        length, recorded = max(0, GROUPS[int(rollout.problem_id)][0] - 1), first[rollout.problem_id]
        assert rollout.routed_experts is not None and recorded is not None
        rollout.routed_experts[:length] = recorded[:length]
    apart = PackingContext.pack(drawn, PackingConfig(bin_size=24), style)
    found = [by_rollout(packed, token_logprobs(model, packed.batches, model.groups)) for packed in (shared, apart)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_prompt_is_not_split_over_ranks() -> None:
    with pytest.raises(ValueError, match="share_prompts=True and alignment=4 exclude one another: .* set alignment=1"):
        PackingConfig(bin_size=16, alignment=4, share_prompts=True)


def test_models_that_read_no_prompt_once_are_refused_before_anything_is_drawn() -> None:
    groups = ProcessGroups.single()
    further = GPTModel(dataclasses.replace(SIZES, mtp_num_layers=1), groups)
    with pytest.raises(ValueError, match="packing.share_prompts=True with reference: mtp_num_layers=1.*; or set share_prompts=False"):
        check_iteration(config_of(True), learner_of(groups, reference=further))
    linear = MambaModel(
        hybrid_config(
            "M*-", hidden_size=16, num_attention_heads=2, vocab_size=32, mamba=MambaConfig(head_dim=4, num_groups=2, state_dim=4)
        ),
        groups,
    )
    taught = {"teacher": Teacher(linear), "objective": DistillationObjective()}
    with pytest.raises(ValueError, match="packing.share_prompts=True with teacher: layer 0 mixes tokens by"):
        check_iteration(config_of(True), learner_of(groups, **taught))
    on_device = config_of(False, packing=PackingConfig(bin_size=24, device_bounds=True))
    with pytest.raises(ValueError, match="packing.device_bounds=True with reference: mtp_num_layers=1.*; or set device_bounds=False"):
        check_iteration(on_device, learner_of(groups, reference=further))
    with pytest.raises(ValueError, match="packing.device_bounds=True with teacher: layer 0 mixes tokens by"):
        check_iteration(on_device, learner_of(groups, **taught))
    exact = GPTModel(dataclasses.replace(SIZES, attention_backend="batch_invariant"), groups)
    with pytest.raises(ValueError, match="with reference: attention core BatchInvariantAttention reads the bounds of packed sequences on"):
        check_iteration(on_device, learner_of(groups, reference=exact))
    check_iteration(on_device, learner_of(groups, objective=GRPOObjective()))
    own = learner_of(groups)
    check_iteration(config_of(True), dataclasses.replace(own, reference=FrozenWeights(own.model)))
    check_iteration(config_of(False), learner_of(groups, reference=further))
