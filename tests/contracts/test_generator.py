# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What reinforcement learning asks of an engine: continuations with their log-probabilities, and taking over weights."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig, TransformerLayer
from mcore_parallel.nn import Step
from mcore_rl import GenericGenerationArgs, InferenceInterface, InferenceRequest, MegatronLocal, WeightSink, refit
from megatron_fsdp import fully_shard_model
from tests.contracts.conformance import mismatches

TOKENIZER = ByteTokenizer()
CONFIG = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=TOKENIZER.vocab_size, init_method_std=0.3
)


def policy(seed: int) -> GPTModel:
    return GPTModel(CONFIG, ProcessGroups.single(), dtype=torch.float64, seed=seed)


def engine() -> DynamicInferenceEngine:
    """An engine whose own weights are not those of any test."""
    model = GPTModel(CONFIG, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64, seed=99)
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=64, block_size_tokens=8, max_requests=8, max_tokens=64)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), TOKENIZER, vocab_size=CONFIG.vocab_size)


# A sink of weights, and the interface through which its continuations are asked for.
PROVIDERS: dict[str, Callable[[], tuple[WeightSink, InferenceInterface]]] = {
    "dynamic-engine": lambda: (sink := engine(), MegatronLocal(sink)),
}


@torch.no_grad()
def log_probs(model: GPTModel, tokens: list[int]) -> torch.Tensor:
    """[T, V] of what follows each token."""
    output, _ = model(torch.tensor(tokens), Step.causal(1, len(tokens)))
    return output.logits().log_softmax(-1)


def ask(interface: InferenceInterface, prompts: list[list[int]], temperature: float, n: int = 1):
    arguments = GenericGenerationArgs(temperature=temperature, max_tokens=6)
    return asyncio.run(interface.agenerate(InferenceRequest(prompts=prompts, n=n, generation_args=arguments)))


@pytest.mark.parametrize("name", PROVIDERS)
def test_continuations_come_from_the_weights_that_were_handed_over(name: str) -> None:
    sink, interface = PROVIDERS[name]()
    assert mismatches(sink, WeightSink) == []
    assert isinstance(interface, InferenceInterface)
    prompts = [list(interface.encode(text)) for text in ("one", "another")]
    seen = []
    for seed in (1, 2):
        model = policy(seed)
        refit(model, model.groups, sink)
        for prompt, [answer] in zip(prompts, ask(interface, prompts, temperature=0.0), strict=True):
            assert (list(answer.token_ids[: len(prompt)]), answer.prompt_length) == (prompt, len(prompt))
            known = log_probs(model, list(answer.token_ids))[len(prompt) - 1 : -1]
            assert known.argmax(-1).tolist() == list(answer.token_ids[len(prompt) :])
        seen.append(list(answer.token_ids))
    assert seen[0] != seen[1]


def test_the_biases_of_experts_come_with_the_weights() -> None:
    mixture = MoEConfig(
        num_moe_experts=8, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=8
    )
    parts: dict[str, Any] = {"feed_forward": moe_feed_forward(mixture), "dtype": torch.float64}
    served = GPTModel(CONFIG, ProcessGroups.single(), attention_core=PagedAttention(), seed=99, **parts)
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=64, block_size_tokens=8, max_requests=8, max_tokens=64)
    sink = DynamicInferenceEngine(served, DynamicInferenceContext.for_model(served, sizes), TOKENIZER, vocab_size=CONFIG.vocab_size)
    model = GPTModel(CONFIG, ProcessGroups.single(), seed=1, **parts)
    for number, buffer in enumerate(named_buffer_shards(model)):
        buffer.tensor.copy_(torch.randn(8, generator=torch.Generator().manual_seed(number)))
    refit(model, model.groups, sink)
    for name, tensor in served.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert any(name.endswith("router.expert_bias") for name in served.state_dict())
    with pytest.raises(ValueError, match=r"2 parameters did not come, among them .*router.expert_bias"):
        sink.load_weights((shard.name, shard.parameter) for shard in named_shards(model))


def check_fully_sharded(name: str) -> None:
    sink, interface = PROVIDERS[name]()
    prompt = list(interface.encode("one"))
    # Every rank hands its own engine the weights of the first one's policy, gathered one at a time.
    for seed, streams in ((1, True), (2, False)):
        model = fully_shard_model(policy(seed + dist.get_rank()), fsdp_unit_modules=[TransformerLayer])
        if streams:
            sink.load_weights(model.full_state_dict())
        else:
            refit(model.module, model.groups, sink)
        [[answer]] = ask(interface, [prompt], temperature=0.0)
        expected = log_probs(policy(seed), list(answer.token_ids))[len(prompt) - 1 : -1].argmax(-1)
        assert expected.tolist() == list(answer.token_ids[len(prompt) :])


@pytest.mark.world(2)
@pytest.mark.parametrize("name", PROVIDERS)
def test_a_fully_sharded_model_hands_its_weights_over(world, name: str) -> None:
    world(check_fully_sharded, name=name)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
@pytest.mark.parametrize("name", PROVIDERS)
def test_sampled_tokens_carry_the_policys_log_probabilities(name: str, temperature: float) -> None:
    sink, interface = PROVIDERS[name]()
    model = policy(1)
    refit(model, model.groups, sink)
    prompt = list(interface.encode("one"))
    [answers] = ask(interface, [prompt], temperature=temperature, n=4)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    for answer in answers:
        tokens = torch.tensor(answer.token_ids)
        scores = (log_probs(model, tokens.tolist())[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        expected = scores.gather(1, tokens[len(prompt) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(answer.logprobs, dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)


def test_a_caller_that_gives_up_leaves_nothing_running() -> None:
    sink = engine()
    interface = MegatronLocal(sink)
    arguments = GenericGenerationArgs(temperature=1.0, max_tokens=40)
    request = InferenceRequest(prompts=[list(interface.encode("one"))], n=3, generation_args=arguments)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(interface.agenerate(request), 0.01)
        [[answer]] = await interface.agenerate(InferenceRequest(prompts=request.prompts, generation_args=arguments))
        assert len(answer.logprobs) == 40

    asyncio.run(give_up())
    assert not sink.has_unfinished_requests()

    async def leave() -> None:
        asyncio.get_running_loop().create_task(interface.agenerate(request))
        await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert not sink.has_unfinished_requests()
    assert len(ask(interface, [list(interface.encode("one"))], 1.0)[0]) == 1
