# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Mistakes that loops of reinforcement learning are known for, and the tests that would see them here.

temperature 0 becomes another one, limits are not passed on
    test_known_traps: test_interfaces_pass_on_how_to_draw
of an answer that was interrupted the last part alone counts
    test_known_traps: test_an_answer_that_lost_its_cache_blocks_is_whole
advantages and log-probabilities in the model's dtype
    test_known_traps: test_a_policy_in_bfloat16_has_its_numbers_in_float32
the entropy of the drawn token in place of the whole
    test_objective: test_sum_metrics_and_gradients_equal_the_definition
the end of an answer has no log-probability in bins
    test_known_traps: test_the_end_of_an_answer_counts_and_has_its_log_probability
padding that is the end token takes it away
    test_known_traps: test_the_end_of_an_answer_counts_and_has_its_log_probability
bins are filled by another rule than the named one
    test_packing: test_first_fit_is_the_textbook_one
a small weight starves its environment, or ends nothing
    test_multi_task: test_every_prefix_has_its_shares
groups of a remote environment come all at once, or not
    test_known_traps: test_groups_of_a_remote_environment_come_as_they_end
a failure of a worker is lost, and all wait
    test_agent: test_a_reward_that_is_no_number_is_an_error_with_a_name
... in a stream that runs ahead
    test_rollout_stream: test_a_failing_environment_reaches_whoever_takes
an answer is evaluated as a program, or its last line alone
    test_countdown: test_what_is_no_sum_is_refused_at_once
... where the answer stands elsewhere
    test_countdown: test_answers_earn_what_they_are_worth
a failure leaves the trainer without its memory
    test_memory: test_all_memory_comes_back_when_generation_fails
rollouts that no data rank has a place for are dropped
    test_loop: test_data_ranks_train_on_survivors_that_do_not_divide
every rollout goes to every rank
    test_delivery: test_what_a_rank_receives_grows_with_its_share_and_not_with_the_world
the reference is computed though nothing asks for it
    test_known_traps: test_a_reference_that_nothing_asks_for_is_not_computed
the policy's weights lie elsewhere while the reference scores, and what holds their addresses reads others
    test_known_traps: test_frozen_weights_lie_where_the_policy_is_read_from
weights go between layouts only where one divides the other
    test_known_traps: test_weights_go_from_two_ranks_to_three
... and between any others
    test_refit_plan: test_fifty_pairs_of_layouts_carry_every_weight
a comparison of weights that a tolerance makes true
    test_transfer: test_engines_of_other_layouts_have_equal_weights
a rollout of text fails for want of masks
    test_known_traps: test_rollouts_of_text_are_learnt_from_in_tokens_of_the_policy
a layout of layers is evaluated as a program
    ../../mcore-moe/tests/test_config: test_a_text_that_is_no_list_of_layers_is_refused_and_never_run
"""

import asyncio
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.chunks import Box
from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, score
from mcore_rl import (
    BatchStyle,
    BestAndWorst,
    EnvironmentServer,
    FrozenWeights,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    Learner,
    MegatronLocal,
    NumberedProblems,
    PackingConfig,
    PackingContext,
    Problem,
    RemoteEnvironment,
    Rollout,
    TokenRollout,
    WeightShard,
    grpo_iteration,
    plan_refit,
    refit,
    rollout_batches,
)
from mcore_rl._loop import _update as update_module
from mcore_rl._loop._loop import rollout_means
from mcore_rl._loop._update import update
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._reference import token_logprobs
from mcore_rl._rollouts._collect import Collection, draw
from mcore_rl._text_rollouts import in_tokens
from mcore_rl.envs import CharacterShare
from tests.support.refit_layouts import carried

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=TOKENIZER.vocab_size, init_method_std=0.3)
FOLDER = Path(__file__).parent


def policy(dtype: torch.dtype = torch.float32) -> GPTModel:
    return GPTModel(SIZES, ProcessGroups.single(), dtype=dtype).eval()


def engine(model: GPTModel, **limits: Any) -> DynamicInferenceEngine:
    copy = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), dtype=next(model.parameters()).dtype).eval()
    context = DynamicInferenceContext.for_model(
        copy, InferenceConfig(**{"max_sequence_length": 64, "max_requests": 16, "block_size_tokens": 8, **limits})
    )
    made = DynamicInferenceEngine(copy, context, TOKENIZER, seed=1)
    refit(model, model.groups, made)
    return made


def ask(interface: InferenceInterface, prompt: list[int], n: int = 1, **args: Any) -> list[InferenceResponse]:
    request = InferenceRequest(prompts=[prompt], n=n, generation_args=GenericGenerationArgs(**args))
    return asyncio.run(interface.agenerate(request))[0]


def judged(tokens: list[int], prompt: int, logprobs: list[float]) -> TokenRollout:
    mask = [place >= prompt for place in range(len(tokens))]
    return TokenRollout(trajectory=tokens, reward=1.0, generation_mask=mask, logprobs=logprobs, env_id="env", problem_id="p")


def trained_logprobs(model: GPTModel, rollout: TokenRollout) -> list[float]:
    """Of the tokens that the policy wrote, by the trainer."""
    batches = rollout_batches([rollout], [1.0], seq_len=len(rollout.trajectory), micro_batch_size=1)
    [values] = token_logprobs(model, batches, model.groups)
    return values[batches[0].loss_mask != 0].tolist()


def test_the_table_names_tests_that_there_are() -> None:
    named = re.findall(r"(\S+): (test_\w+)$", __doc__ or "", re.MULTILINE)
    assert len(named) == (__doc__ or "").count(": test_") >= 20
    for file, name in named:
        assert f"def {name}(" in (FOLDER / f"{file}.py").read_text(), f"{file}: {name}"


def test_interfaces_pass_on_how_to_draw() -> None:
    model = policy()
    interface, prompt = MegatronLocal(engine(model)), [65, 66]
    greedy = [ask(interface, prompt, temperature=0.0, max_tokens=8)[0] for _ in range(2)]
    tokens = list(prompt)
    for _ in range(8):
        batch = Batch(tokens=torch.tensor([tokens]), labels=torch.tensor([tokens]), loss_mask=torch.ones(1, len(tokens)))
        [likeliest] = score(model, [batch], lambda output, _: output.logits().argmax(-1).float())
        tokens.append(int(likeliest[0, -1]))
    assert [list(answer.token_ids) for answer in greedy] == [tokens, tokens]
    # One token that may be drawn is the likeliest one, at any temperature.
    assert list(ask(interface, prompt, temperature=3.0, top_k=1, max_tokens=8)[0].token_ids) == tokens
    drawn = ask(interface, prompt, n=8, max_tokens=5)
    assert {len(answer.logprobs) for answer in drawn} <= {1, 2, 3, 4, 5} and len({tuple(answer.token_ids) for answer in drawn}) > 4
    # What is left open is the model's own distribution.
    assert drawn[0].logprobs == pytest.approx(
        trained_logprobs(model, judged(list(drawn[0].token_ids), 2, list(drawn[0].logprobs))), abs=1e-5
    )


def test_an_answer_that_lost_its_cache_blocks_is_whole() -> None:
    model = policy()
    # Of four answers of 4 blocks each, 6 have room.
    local = engine(model, max_requests=4, num_blocks=6)
    answers = ask(MegatronLocal(local), [65, 66], n=4, max_tokens=24)
    assert local.num_preemptions > 0
    for answer in answers:
        rollout = judged(list(answer.token_ids), 2, list(answer.logprobs))
        assert answer.prompt_length == 2 and (answer.finish_reason == "stop" or len(answer.logprobs) == 24)
        assert list(answer.logprobs) == pytest.approx(trained_logprobs(model, rollout), abs=1e-5)


def _exact(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def test_a_policy_in_bfloat16_has_its_numbers_in_float32() -> None:
    model = policy(torch.bfloat16)
    tokens = list(range(40, 60))
    batches = rollout_batches([judged(tokens, 4, [-1.0] * 16)], [1 / 3], seq_len=20, micro_batch_size=1)
    assert batches[0].extras["advantages"].max().item() == torch.tensor(1 / 3).item()
    [values] = token_logprobs(model, batches, model.groups)
    [expected] = score(model, batches, lambda output, batch: _exact(output.logits(), batch.labels.flatten()))
    assert values.dtype == torch.float32 and values.tolist()[0][:19] == pytest.approx(expected.tolist()[0][:19], abs=1e-5)


@pytest.mark.parametrize("pad_id", [0, TOKENIZER.eod])
def test_the_end_of_an_answer_counts_and_has_its_log_probability(pad_id: int) -> None:
    end = TOKENIZER.eod
    rollouts = [judged([5, 6, 7, end], 2, [-0.5, -0.25]), judged([5, 8, end], 1, [-1.0, -2.0])]
    rows = rollout_batches(rollouts, [1.0, 1.0], seq_len=6, micro_batch_size=2, style=BatchStyle(pad_id=pad_id))
    packed = PackingContext.pack(rollouts, PackingConfig(bin_size=8), BatchStyle(pad_id=pad_id))
    for batches in (rows, packed.batches):
        ends = [
            batch.extras["inference_logprobs"][place].item()
            for batch in batches
            for place in map(tuple, ((batch.labels == end) & (batch.loss_mask != 0)).nonzero().tolist())
        ]
        assert sorted(ends) == [-2.0, -0.25]
        assert sum(batch.loss_mask.sum().item() for batch in batches) == 4


class OneLate(InferenceInterface):
    """Answers, the first prompt's as late as the test says."""

    def __init__(self, gate: asyncio.Event) -> None:
        self.gate = gate

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        if bytes(prompt) == b"0":
            await self.gate.wait()
        return [[InferenceResponse(response="x", token_ids=[*prompt, 120], prompt_length=len(prompt), logprobs=[-1.0])]]


class Counting(NumberedProblems):
    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=str(number))

    async def get_reward(self, response: str, problem: Problem) -> float:
        return float(len(response))


def test_groups_of_a_remote_environment_come_as_they_end() -> None:
    async def collect(remote: RemoteEnvironment) -> list[str]:
        gate, order = asyncio.Event(), []
        async for group in remote.get_grouped_rollouts(OneLate(gate), num_groups=3, size=2, args=GenericGenerationArgs(max_tokens=1)):
            assert len(group) == 2 and group[0].reward == 1.0
            order.append(group[0].problem_id)
            if len(order) == 2:
                gate.set()
        return order

    with EnvironmentServer(Counting("counting")) as server:
        order = asyncio.run(asyncio.wait_for(collect(RemoteEnvironment(server.url)), 30))
    assert sorted(order[:2]) == ["1", "2"] and order[2] == "0"


@pytest.mark.parametrize(("kl_beta", "kl_in_reward", "passes"), [(0.0, 0.0, 0), (0.1, 0.0, 1), (0.0, 0.1, 1)])
def test_a_reference_that_nothing_asks_for_is_not_computed(
    kl_beta: float, kl_in_reward: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inner, scored = policy(), update_module.token_logprobs, []
    frozen = FrozenWeights(model)
    monkeypatch.setattr(update_module, "token_logprobs", lambda of, *rest, **options: scored.append(of) or inner(of, *rest, **options))
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, model.groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, model.groups)
    objective = GRPOObjective(kl_beta=kl_beta)
    learner = Learner(model=model, groups=model.groups, objective=objective, sync=sync, optimizer=optimizer, reference=frozen)
    config = GRPOConfig(
        num_groups=1,
        group_size=4,
        seq_len=8,
        kl_in_reward=kl_in_reward,
        generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=4),
    )
    own = engine(model)
    report = grpo_iteration(config, agent=CharacterShare(["a"], "abc"), interface=MegatronLocal(own), engine=own, learner=learner, lr=1e-3)
    assert scored.count(frozen) == passes and ("kl" in report.train.metrics) == bool(passes)


def test_frozen_weights_lie_where_the_policy_is_read_from() -> None:
    model = policy()
    own = [(parameter.data_ptr(), parameter.untyped_storage().nbytes()) for parameter in model.parameters()]
    frozen = FrozenWeights(model)
    for _ in range(2):
        with frozen.swapped() as swapped:
            assert [(parameter.data_ptr(), parameter.untyped_storage().nbytes()) for parameter in swapped.parameters()] == own
    assert [(parameter.data_ptr(), parameter.untyped_storage().nbytes()) for parameter in model.parameters()] == own


def test_weights_go_from_two_ranks_to_three() -> None:
    def shards(num_ranks: int, first: int) -> list[WeightShard]:
        bounds = [10 * rank // num_ranks for rank in range(num_ranks + 1)]
        boxes = [Box((low, 0), (high - low, 3)) for low, high in itertools.pairwise(bounds)]
        return [WeightShard(name="w", rank=first + rank, shape=(10, 3), box=box) for rank, box in enumerate(boxes)]

    whole = {"w": torch.randn(10, 3, dtype=torch.float64)}
    for one, other in ((2, 3), (3, 2), (3, 7)):
        sources, destinations = shards(one, 0), shards(other, 8)
        plan = plan_refit(sources, destinations)
        results = list(carried(plan, whole, sources, destinations))
        assert len(results) == other and all(torch.equal(value, expected) for _, value, expected in results)


class Texts(CharacterShare):
    """Makes rollouts of text."""

    async def group_rollout(self, interface: InferenceInterface, *, size: int, args: GenericGenerationArgs) -> list[Any]:
        return list(TEXTS[:size])


TEXTS = [
    Rollout(trajectory=f"a{answer}", prompt_length=1, reward=reward, env_id="texts", problem_id="0")
    for answer, reward in (("b", 1.0), ("c", 0.0))
]


def test_rollouts_of_text_are_learnt_from_in_tokens_of_the_policy() -> None:
    model = policy()
    own, config = engine(model), GRPOConfig(num_groups=1, group_size=2, seq_len=8, num_epochs=2)
    interface = MegatronLocal(own)
    drawn = draw(config, Texts(["a"], "a"), interface, 1)
    assert drawn.failure is None
    [[first, second]] = drawn.groups
    assert first.trajectory == (*interface.encode("a"), *interface.encode("b")) and first.generation_mask == (False, True)
    assert first.logprobs is None and (first.reward, second.reward) == (1.0, 0.0)
    header = RolloutHeader.of(first)
    assert header.rollout(header.encode(first)).logprobs is None and header.num_bytes() == len(header.encode(first))
    assert TokenRollout.from_json(first.to_json()).logprobs is None
    collected = Collection.of(config, drawn.groups)
    assert rollout_means(config, collected, None)["without_logprobs"] == 1.0
    pairs = BestAndWorst(Texts(["a"], "a"), group_size=2)
    [pair] = asyncio.run(pairs.get_contrastive_rollouts(interface, num_pairs=1, args=GenericGenerationArgs()))
    assert (pair.chosen, pair.rejected) == (first, second)
    with pytest.raises(TypeError, match="the agent made a str; let it make TokenRollouts, or Rollouts beside an interface"):
        in_tokens("ab", interface)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="old_logprobs='inference' takes the engine's .* problem '0' of environment 'texts' has none"):
        Collection.of(dataclasses.replace(config, old_logprobs="inference"), drawn.groups)


def test_without_log_probabilities_of_the_engine_the_loss_is_that_of_equal_ones() -> None:
    config = GRPOConfig(num_groups=1, group_size=2, seq_len=8, num_epochs=2)
    results = []
    for known in (True, False):
        model, groups = policy(), ProcessGroups.single()
        sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
        optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), sync, groups)
        learner = Learner(model=model, groups=groups, objective=GRPOObjective(), sync=sync, optimizer=optimizer)
        texts = [in_tokens(rollout, MegatronLocal(engine(model))) for rollout in TEXTS]
        if known:
            # The trainer's own, as of an engine without a mismatch.
            batches = rollout_batches(texts, [0.0, 0.0], seq_len=8, micro_batch_size=2)
            [row] = token_logprobs(model, batches, groups, temperature=1.0)
            texts = [dataclasses.replace(text, logprobs=(float(row[n, 0]),)) for n, text in enumerate(texts)]
        done = update(config, Collection.of(config, [texts]), learner, 1e-2)
        results.append([(report.loss, report.grad_norm, report.metrics["is_weight"], report.metrics["ratio"]) for report in done.policy])
    for (*one, weight, ratio), (*other, corrected, same_ratio) in zip(*results, strict=True):
        assert other == pytest.approx(one, rel=1e-6) and weight == pytest.approx(1.0, abs=1e-6) and corrected == 1.0
        assert same_ratio == pytest.approx(ratio, rel=1e-6)
