# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The updates of an iteration send each token where the pass of the old log-probabilities sent it."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, score, score_and_route
from mcore_rl import AdvantageConfig, DPOObjective, FrozenWeights, GRPOConfig, GRPOObjective, Learner, PackingConfig, TokenRollout
from mcore_rl._loop import _update
from mcore_rl._loop._dpo import check_pairs
from mcore_rl._rollouts._collect import Collection

SIZES = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=2, ffn_hidden_size=16, vocab_size=32, init_method_std=0.4)
MIXTURE = MoEConfig(num_moe_experts=8, moe_router_topk=2, moe_layer_freq=(0, 1, 1))
ROUTED = (1, 2)
CONFIG = GRPOConfig(num_groups=2, group_size=4, seq_len=16, micro_batch_size=4, num_epochs=2, num_mini_batches=2, replay_old_routing=True)


def policy(groups: ProcessGroups, mixture: MoEConfig | None = MIXTURE) -> GPTModel:
    parts: dict[str, Any] = {} if mixture is None else {"feed_forward": moe_feed_forward(mixture)}
    return GPTModel(SIZES, groups, dtype=torch.float64, seed=3, **parts)


def routing_of(model: nn.Module, batch: Batch) -> Tensor:
    """[B, S, L, K] of a forward, -1 in the dense layer."""
    routed = torch.full((*batch.tokens.shape, SIZES.num_layers, 2), -1, dtype=torch.int16)

    def record(layer: int, experts: Tensor, weights: Tensor) -> None:
        routed[:, :, layer] = experts.view(*batch.tokens.shape, 2).short()

    with torch.no_grad():
        model(batch.tokens.flatten(), dataclasses.replace(batch.step(), routing_recorder=record))
    return routed


def logprobs(output: Any, batch: Batch) -> Tensor:
    return output.log_probs(batch.labels.flatten())


def check_layout(plan: ParallelPlan) -> None:
    groups = ProcessGroups.build(plan)
    draws = torch.Generator().manual_seed(1)
    tokens = [torch.randint(SIZES.vocab_size, (2, 17), generator=draws) for _ in range(3)]
    batches = [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 16)) for row in tokens]
    whole, own = policy(ProcessGroups.single()), policy(groups)
    values, routed = score_and_route(own, batches, logprobs)
    for value, batch, experts in zip(values, batches, routed, strict=True):
        torch.testing.assert_close(value, score(whole, [batch], logprobs)[0], rtol=1e-9, atol=1e-9)
        here = [layer for layer in ROUTED if str(layer) in own.layers]
        assert (experts is None) == (not here)
        if experts is not None:
            assert experts.dtype == torch.int16 and experts.shape == (2, 16, max(here) + 1, 2)
            wanted = routing_of(whole, batch)
            for layer in range(experts.shape[2]):
                assert torch.equal(experts[:, :, layer], wanted[:, :, layer]) if layer in here else bool((experts[:, :, layer] == -1).all())


def test_a_score_says_where_tokens_went() -> None:
    check_layout(ParallelPlan())


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=2),
        ParallelPlan(tp=2, sequence_parallel=False),
        ParallelPlan(pp=2),
        ParallelPlan(cp=2),
        ParallelPlan(dp=2, ep=2),
    ],
    ids=["sequence parallel", "tp", "pp", "cp", "ep"],
)
def test_every_layout_says_where_tokens_went(world, plan: ParallelPlan) -> None:
    world(check_layout, plan=plan)


def rollout(number: int, routed: bool) -> TokenRollout:
    draws = torch.Generator().manual_seed(number)
    length = int(torch.randint(6, 16, (), generator=draws))
    return TokenRollout(
        trajectory=torch.randint(SIZES.vocab_size, (length,), generator=draws).tolist(),
        reward=float(number % 3),
        generation_mask=[position > 1 for position in range(length)],
        logprobs=[-3.0] * (length - 2),
        env_id="env",
        problem_id=f"problem {number // 4}",
        # Of an engine, elsewhere than the trainer sends them.
        routed_experts=torch.tensor([6, 7]).expand(length - 1, SIZES.num_layers, 2).short() if routed else None,
    )


def learner(model: GPTModel, **parts: Any) -> Learner:
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, model.groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.1), sync, model.groups)
    return Learner(**{"model": model, "groups": model.groups, "objective": GRPOObjective(), "sync": sync, "optimizer": optimizer, **parts})


@pytest.mark.parametrize("routed", [False, True], ids=["afresh", "as an engine"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_later_updates_replay_the_routing_of_the_first_pass(packed: bool, routed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = policy(ProcessGroups.single()), _update.train_step
    first = policy(ProcessGroups.single())
    away: list[int] = []

    def train_step(trained: GPTModel, batches: list[Batch], *arguments: Any, **options: Any) -> Any:
        moved = 0
        for batch in batches:
            plain = dataclasses.replace(batch, extras={name: value for name, value in batch.extras.items() if name != "routed_experts"})
            there = routing_of(first.eval(), plain)
            assert torch.equal(batch.extras["routed_experts"], there)
            assert torch.equal(routing_of(trained, batch), there), "the policy of now goes where that of the beginning went"
            moved += int((routing_of(trained, plain) != there).sum())
        away.append(moved)
        return real(trained, batches, *arguments, **options)

    monkeypatch.setattr(_update, "train_step", train_step)
    config = dataclasses.replace(CONFIG, packing=PackingConfig(bin_size=32) if packed else None)
    collected = Collection.of(config, [[rollout(4 * group + number, routed) for number in range(4)] for group in range(2)])
    own = learner(model, objective=GRPOObjective(kl_beta=0.1), reference=FrozenWeights(model))
    done = _update.update(config, collected, own, 0.1)
    assert len(done.policy) == 4 and away[0] == 0 and min(away[1:]) > 0
    assert done.policy[0].metrics["ratio"] == pytest.approx(1.0, abs=1e-9)


def refuse_dense(plan: ParallelPlan) -> None:
    groups = ProcessGroups.build(plan)
    collected = Collection.of(CONFIG, [[rollout(4 * group + number, False) for number in range(4)] for group in range(2)])
    with pytest.raises(ValueError, match="replay_old_routing=True, and no layer of the model routes tokens; set it to False"):
        _update.update(CONFIG, collected, learner(policy(groups, None)), 0.1)


def test_a_policy_without_routers_has_nothing_to_replay() -> None:
    refuse_dense(ParallelPlan())


@pytest.mark.world(2, shared=True)
def test_stages_without_routers_have_nothing_to_replay_together(world) -> None:
    world(refuse_dense, plan=ParallelPlan(pp=2))


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="found old_logprobs='trainer' and num_epochs \\* num_mini_batches = 1; set old_log"):
        dataclasses.replace(CONFIG, num_epochs=1, num_mini_batches=1)
    with pytest.raises(ValueError, match="replay_old_routing=True replays what .* found old_logprobs='inference'"):
        dataclasses.replace(CONFIG, old_logprobs="inference")
    model = policy(ProcessGroups.single())
    pairs = learner(model, objective=DPOObjective(), reference=FrozenWeights(model))
    config = dataclasses.replace(CONFIG, advantage=AdvantageConfig())
    with pytest.raises(ValueError, match="replay_old_routing=True has no effect on pairs"):
        check_pairs(config, pairs)
