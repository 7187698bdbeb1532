# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine records the experts of each token, and the trainer sends it to the same ones."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_inference.decoder import FusedDecoder
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_buffer_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    BatchStyle,
    DPOObjective,
    FrozenWeights,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    Learner,
    MegatronLocal,
    PackingConfig,
    PackingContext,
    TokenRollout,
    grpo_iteration,
    refit,
    rollout_batches,
    with_old_logprobs,
    with_ref_logprobs,
)
from mcore_rl._loop._dpo import check_pairs
from mcore_rl._loop._loop import check_iteration
from mcore_rl.agent._sibling_routing import routed_as_siblings
from mcore_rl.envs import CharacterShare

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=2,
    ffn_hidden_size=48,
    vocab_size=-(-TOKENIZER.vocab_size // 8) * 8,
    init_method_std=0.2,
)
MIXTURE = MoEConfig(num_moe_experts=8, moe_router_topk=2, moe_layer_freq=(0, 1, 1))


def policy(groups: ProcessGroups, *, mixture: MoEConfig = MIXTURE, **options: Any) -> GPTModel:
    return GPTModel(SIZES, groups, feed_forward=moe_feed_forward(mixture), unpadded_vocab_size=TOKENIZER.vocab_size, **options)


def engine_of(model: GPTModel, execution: ExecutionConfig | None = None, **sizes: Any) -> DynamicInferenceEngine:
    limits = InferenceConfig(**{"max_sequence_length": 64, "max_requests": 32, "block_size_tokens": 8, "num_blocks": 64, **sizes})
    execution = execution or ExecutionConfig(record_routing=True)
    return DynamicInferenceEngine(
        model.eval(), DynamicInferenceContext.for_model(model, limits), TOKENIZER, vocab_size=TOKENIZER.vocab_size, execution=execution
    )


def served(dtype: torch.dtype = torch.float32, execution: ExecutionConfig | None = None, **sizes: Any) -> DynamicInferenceEngine:
    return engine_of(policy(ProcessGroups.single(), attention_core=PagedAttention(), dtype=dtype), execution, **sizes)


def routing_of(model: GPTModel, tokens: list[int]) -> Tensor:
    """[T, L, K] of a forward without a cache; zeros in the dense layer."""
    experts = torch.zeros(len(tokens), SIZES.num_layers, 2, dtype=torch.int16)

    def record(layer: int, experts_TK: Tensor, probs_TK: Tensor) -> None:
        experts[:, layer] = experts_TK

    with torch.no_grad():
        model(torch.tensor(tokens), dataclasses.replace(Step.causal(1, len(tokens)), routing_recorder=record))
    return experts


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("execution", "sizes"),
    [
        (ExecutionConfig(record_routing=True), {}),
        (ExecutionConfig(record_routing=True, run_ahead=True), {}),
        (ExecutionConfig(record_routing=True, speculation=NgramSpeculation()), {}),
        (ExecutionConfig(record_routing=True), {"num_blocks": 9, "enable_prefix_caching": False}),
        (ExecutionConfig(record_routing=True), {"max_tokens": 8, "max_requests": 8}),
    ],
    ids=["plain", "run ahead", "speculation", "preempted", "chunks"],
)
def test_the_engine_records_what_its_model_chooses(execution: ExecutionConfig, sizes: dict[str, Any]) -> None:
    engine = served(torch.float64, execution, **sizes)
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [7], [9] * 20]
    records = engine.generate(prompts, SamplingParams(temperature=1.0, num_tokens_to_generate=20, ignore_eos=True))
    assert (engine.num_preemptions > 0) == ("num_blocks" in sizes)
    plain = policy(ProcessGroups.single(), dtype=torch.float64)
    for record in records:
        tokens = [*record.prompt_tokens, *record.generated_tokens]
        assert record.routed_experts is not None and record.routed_experts.dtype == torch.int16
        assert torch.equal(record.routed_experts, routing_of(plain, tokens[:-1]))


class ModelDecoder:
    """Stands for the fused decoder, which computes with the modules of the model."""

    def __init__(self, model: GPTModel) -> None:
        self.model = model

    def logits(self, tokens_T: Tensor, step: Step, rows_R: Tensor | None = None) -> Tensor:
        output: Any = self.model(tokens_T, step)[0]
        return output.logits() if rows_R is None else output.logits(rows_R)

    def take_states(self) -> dict[str, Tensor]:
        return {}


def test_a_fused_decoder_gets_steps_that_record() -> None:
    model = policy(ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64)
    engine: Any = engine_of(model)
    engine._executor._decoder = ModelDecoder(model)
    [record] = engine.generate([[1, 2, 3]], SamplingParams(temperature=1.0, num_tokens_to_generate=5, ignore_eos=True))
    plain = policy(ProcessGroups.single(), dtype=torch.float64)
    assert torch.equal(record.routed_experts, routing_of(plain, [*record.prompt_tokens, *record.generated_tokens][:-1]))


class OwnKernels(torch.nn.Linear):
    """A feed-forward that has kernels of its own."""

    def streamed(self) -> "OwnKernels":
        return self


def test_a_fused_decoder_that_records_calls_the_routers() -> None:
    model: Any = policy(ProcessGroups.single(), attention_core=PagedAttention())
    for layer in model.layers.values():
        layer.mlp = OwnKernels(2, 2)
    for records_routing in (False, True):
        decoder: Any = FusedDecoder(model, 4, records_routing=records_routing)
        assert [kernels is None for kernels in decoder._feed_forwards] == [records_routing] * 3
        assert decoder._streams is not records_routing


def test_tokens_found_in_the_cache_are_routed_afresh() -> None:
    engine = served()
    prompt = list(range(20))
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=4, ignore_eos=True)
    [first], [second] = engine.generate([prompt], params), engine.generate([prompt], params)
    assert first.routed_experts is not None and second.routed_experts is not None
    assert bool((first.routed_experts >= 0).all()) and second.cached_prompt_tokens == 16
    assert bool((second.routed_experts[:16] == -1).all()) and torch.equal(second.routed_experts[16:20], first.routed_experts[16:20])


def test_a_model_without_experts_records_nothing() -> None:
    dense = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention())
    with pytest.raises(ValueError, match="record_routing=True, and no layer of the model has experts"):
        engine_of(dense)
    quiet = served(execution=ExecutionConfig())
    [record] = quiet.generate([[1, 2]], SamplingParams(num_tokens_to_generate=2))
    assert record.routed_experts is None


def record_over_stages() -> str:
    try:
        engine_of(policy(ProcessGroups.build(ParallelPlan(pp=2)), attention_core=PagedAttention()))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.world(2, shared=True)
def test_stages_of_a_pipeline_record_nothing(world) -> None:
    assert (
        world(record_over_stages)
        == ["record_routing=True needs all layers on a rank, found pp=2; serve with pp=1, or leave it at False"] * 2
    )


def test_siblings_say_where_the_tokens_of_a_cached_prompt_went() -> None:
    engine, model = served(max_sequence_length=128), policy(ProcessGroups.single()).eval()
    agent, args = CharacterShare(["x" * 64], "abc"), GenericGenerationArgs(temperature=1.0, max_tokens=16)
    group = asyncio.run(agent.group_rollout(MegatronLocal(engine), size=8, args=args))
    again = asyncio.run(agent.group_rollout(MegatronLocal(engine), size=2, args=args))
    assert len(group) == 8
    for rollout in group:
        experts = rollout.routed_experts
        assert experts is not None and bool((experts >= 0).all())
        assert torch.equal(experts[:64], routing_of(model, list(rollout.trajectory))[:64])
    # Nobody of a later group recorded what was in the cache before.
    for rollout in again:
        assert rollout.routed_experts is not None and bool((rollout.routed_experts[:48] == -1).all())


def test_siblings_fill_what_follows_from_the_same_tokens_alone() -> None:
    def made(tokens: list[int], experts: list[int] | None) -> TokenRollout:
        rows = None if experts is None else torch.tensor(experts, dtype=torch.int16).view(-1, 1, 1)
        mask = [False, False, *[True] * (len(tokens) - 2)]
        return TokenRollout(
            trajectory=tokens, reward=0.0, generation_mask=mask, logprobs=None, env_id="e", problem_id="p", routed_experts=rows
        )

    group = [
        made([1, 2, 3, 4], [-1, 5, 6]),
        made([1, 2, 9], [7, -1]),
        made([8, 2, 3, 4], [0, 0, 0]),
        made([1, 2], None),
        made([1, 2, 3, 4, 5], [-1, -1, -1, 3]),
        # Nobody knows where its own last token went, and others where the prompt's did.
        made([1, 2, 6, 6], [-1, -1, -1]),
    ]
    filled = [
        None if rollout.routed_experts is None else rollout.routed_experts.flatten().tolist() for rollout in routed_as_siblings(group)
    ]
    assert filled == [[7, 5, 6], [7, 5], [0, 0, 0], None, [7, 5, 6, 3], [7, 5, -1]]
    assert group[0].routed_experts is not None and group[0].routed_experts.flatten().tolist() == [-1, 5, 6]


# -- the trainer -------------------------------------------------------------------------------------------------------


def rollouts(engine: DynamicInferenceEngine, count: int = 24) -> list[TokenRollout]:
    agent = CharacterShare(["a", "b", "c"], "abc")
    args = GenericGenerationArgs(temperature=1.0, max_tokens=24)

    async def ask() -> list[TokenRollout]:
        stream = agent.get_grouped_rollouts(MegatronLocal(engine), num_groups=3, size=count // 3, args=args)
        return [rollout async for group in stream for rollout in group]

    return asyncio.run(ask())


def mismatch(model: GPTModel, drawn: list[TokenRollout], *, packed: bool = False) -> float:
    """Mean |log-probability of the trainer - that of the engine|."""
    style = BatchStyle(pad_id=0)
    if packed:
        batches = PackingContext.pack(drawn, PackingConfig(bin_size=64), style).batches
    else:
        batches = rollout_batches(drawn, [0.0] * len(drawn), seq_len=32, micro_batch_size=8, style=style)
    total = count = 0.0
    for batch in with_old_logprobs(model, batches, model.groups):
        keep = batch.loss_mask != 0
        total += (batch.extras["old_logprobs"] - batch.extras["inference_logprobs"])[keep].abs().sum().item()
        count += keep.sum().item()
    return total / count


def without(drawn: list[TokenRollout]) -> list[TokenRollout]:
    return [dataclasses.replace(rollout, routed_experts=None) for rollout in drawn]


@pytest.mark.journey
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_replay_takes_away_what_other_experts_add_to_the_mismatch(packed: bool) -> None:
    # Among many experts some are nearly equally good, and the one that is best depends on the last bits.
    mixture = MoEConfig(num_moe_experts=64, moe_router_topk=2, moe_layer_freq=(0, 1, 1))
    engine = engine_of(policy(ProcessGroups.single(), mixture=mixture, attention_core=PagedAttention(), dtype=torch.bfloat16))
    model = policy(ProcessGroups.single(), mixture=mixture, seed=1)
    with torch.no_grad():
        for own, other in zip(model.parameters(), engine.model.parameters(), strict=True):
            own.copy_(other)
    drawn = rollouts(engine)
    replayed, fresh = mismatch(model, drawn, packed=packed), mismatch(model, without(drawn), packed=packed)
    assert replayed < 0.6 * fresh, (replayed, fresh)


def test_equal_numerics_have_no_mismatch_and_equal_routing() -> None:
    engine = served(torch.float64)
    drawn = rollouts(engine, 6)
    model = policy(ProcessGroups.single(), dtype=torch.float64)
    assert mismatch(model, drawn) < 1e-7
    # Its own router would choose others now.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.neg_()
    batches = rollout_batches(drawn, [0.0] * len(drawn), seq_len=32, micro_batch_size=6)
    [batch] = batches
    seen: dict[int, Tensor] = {}

    def record(layer: int, experts: Tensor, probs: Tensor) -> None:
        seen[layer] = experts

    with torch.no_grad():
        model(batch.tokens.flatten(), dataclasses.replace(batch.step(), routing_recorder=record))
    for row, rollout in enumerate(drawn):
        assert rollout.routed_experts is not None
        length = len(rollout.routed_experts)
        for layer in (1, 2):
            assert torch.equal(seen[layer].view(6, 32, 2)[row, :length].short(), rollout.routed_experts[:, layer])


def test_the_reference_routes_for_itself() -> None:
    drawn = rollouts(served(), 6)
    reference = policy(ProcessGroups.single(), seed=3)
    batches, plain = (rollout_batches(some, [0.0] * 6, seq_len=32, micro_batch_size=6) for some in (drawn, without(drawn)))
    [one], [other] = (with_ref_logprobs(reference, some, reference.groups) for some in (batches, plain))
    assert torch.equal(one.extras["ref_logprobs"], other.extras["ref_logprobs"]) and "routed_experts" in one.extras


def test_frozen_weights_route_by_the_expert_bias_of_their_time() -> None:
    mixture = dataclasses.replace(MIXTURE, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    model = policy(ProcessGroups.single(), mixture=mixture)
    batches = rollout_batches(without(rollouts(served(), 6)), [0.0] * 6, seq_len=32, micro_batch_size=6)
    frozen, biases = FrozenWeights(model), [buffer.tensor for buffer in named_buffer_shards(model) if buffer.name.endswith("expert_bias")]

    def scores() -> torch.Tensor:
        return with_ref_logprobs(frozen, batches, model.groups)[0].extras["ref_logprobs"]

    before, places = scores(), [bias.data_ptr() for bias in biases]
    for bias in biases:
        bias.uniform_(-1, 1, generator=torch.Generator().manual_seed(4))
    moved = [bias.clone() for bias in biases]
    assert len(biases) == 2 and torch.equal(scores(), before)
    assert all(torch.equal(bias, other) for bias, other in zip(biases, moved, strict=True))
    assert [bias.data_ptr() for bias in biases] == places
    frozen.refresh()
    assert not torch.equal(scores(), before)


def test_rollouts_carry_their_routing_through_json() -> None:
    [rollout, *_] = rollouts(served(), 3)
    other = TokenRollout.from_json(json.loads(json.dumps(rollout.to_json())))
    assert (
        other.to_json() == json.loads(json.dumps(rollout.to_json()))
        and other.routed_experts is not None
        and rollout.routed_experts is not None
    )
    assert torch.equal(other.routed_experts, rollout.routed_experts)
    assert TokenRollout.from_json(without([rollout])[0].to_json()).routed_experts is None
    with pytest.raises(ValueError, match=r"routed_experts of shape \[1, 3, 2\] must be \["):
        dataclasses.replace(rollout, routed_experts=rollout.routed_experts[:1])
    with pytest.raises(ValueError, match="record them with one model"):
        rollout_batches(
            [rollout, dataclasses.replace(rollout, routed_experts=rollout.routed_experts[:, :2])],
            [0.0, 0.0],
            seq_len=32,
            micro_batch_size=2,
        )


def test_sinkhorn_replays_nothing() -> None:
    mixture = MoEConfig(num_moe_experts=4, moe_router_load_balancing_type="sinkhorn", moe_router_topk=1)
    model = policy(ProcessGroups.single(), mixture=mixture)
    step = dataclasses.replace(Step.causal(1, 4), routed_experts=torch.zeros(4, 3, 1, dtype=torch.int16))
    with pytest.raises(ValueError, match="'sinkhorn' routes a whole batch at once"):
        model(torch.arange(4), step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn': what is trained is another policy"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps=0.1: what is trained is another policy"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True: what is trained is another policy"),
    ],
)
@pytest.mark.filterwarnings("ignore:moe_router_force_load_balancing")
def test_a_router_that_trains_otherwise_than_it_draws_is_refused(options: dict[str, Any], message: str) -> None:
    groups = ProcessGroups.single()
    parts: Any = dict.fromkeys(("sync", "optimizer"))
    model = policy(groups, mixture=dataclasses.replace(MIXTURE, **options))
    config = GRPOConfig(num_groups=2, group_size=2, seq_len=32)
    with pytest.raises(ValueError, match=message):
        check_iteration(config, Learner(model=model, groups=groups, objective=GRPOObjective(), **parts))
    with pytest.raises(ValueError, match=message):
        check_pairs(config, Learner(model=model, groups=groups, objective=DPOObjective(), reference=model, **parts))
    check_iteration(config, Learner(model=policy(groups), groups=groups, objective=GRPOObjective(), **parts))


def iterate(plan: ParallelPlan) -> list[float]:
    groups = ProcessGroups.build(plan)
    model = policy(groups)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3, weight_decay=0.0), sync, groups)
    engine = served()
    refit(model, groups, engine)
    learner = Learner(model=model, groups=groups, objective=GRPOObjective(), sync=sync, optimizer=optimizer)
    config = GRPOConfig(num_groups=2, group_size=4, seq_len=32, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=16))
    parts: dict[str, Any] = {"agent": CharacterShare(["a", "b"], "abc"), "interface": MegatronLocal(engine), "engine": engine}
    return [grpo_iteration(config, **parts, learner=learner, lr=1e-3).train.metrics["logprob_mismatch"] for _ in range(2)]


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "plan",
    [pytest.param(ParallelPlan(tp=2), marks=pytest.mark.journey), ParallelPlan(pp=2), ParallelPlan(cp=2), ParallelPlan(dp=2, ep=2)],
    ids=["tp", "pp", "cp", "ep"],
)
def test_every_layout_replays(world, plan: ParallelPlan) -> None:
    one, other = world(iterate, plan=plan)
    assert one == other and max(one) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [True, False], ids=["graphs", "no graphs"])
def test_graphs_record_what_they_route(use_graphs: bool) -> None:
    sizes = dataclasses.replace(SIZES, hidden_size=256, num_attention_heads=4, ffn_hidden_size=128, init_method_std=0.05)
    mixture = dataclasses.replace(MIXTURE, num_moe_experts=16)
    served_model, plain = (
        GPTModel(sizes, ProcessGroups.single(), feed_forward=moe_feed_forward(mixture), dtype=torch.bfloat16, device="cuda", **core)
        for core in ({"attention_core": PagedAttention()}, {})
    )
    execution = ExecutionConfig(record_routing=True, use_graphs=use_graphs)
    engine = engine_of(served_model, execution, block_size_tokens=16)
    prompts = [[number, 2, 3, 4] for number in range(20)]
    records = engine.generate(prompts, SamplingParams(temperature=1.0, num_tokens_to_generate=40, ignore_eos=True))
    assert bool(engine.cuda_graph_request_count_map) == use_graphs
    same = total = 0
    for record in records:
        tokens = [*record.prompt_tokens, *record.generated_tokens]
        expected = torch.zeros(len(tokens) - 1, 3, 2, dtype=torch.int16)

        def record_layer(layer: int, experts: Tensor, probs: Tensor, expected: Tensor = expected) -> None:
            expected[:, layer] = experts.cpu()

        step = dataclasses.replace(Step.causal(1, len(tokens) - 1, "cuda"), routing_recorder=record_layer)
        with torch.no_grad():
            plain(torch.tensor(tokens[:-1], device="cuda"), step)
        assert record.routed_experts is not None and bool((record.routed_experts >= 0).all())
        same += int((record.routed_experts.sort(-1).values == expected.sort(-1).values).all(-1).sum())
        total += expected.shape[0] * expected.shape[1]
    # In bfloat16 a few near ties fall otherwise.
    assert same > 0.95 * total, (same, total)
