# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights that come while answers are generated: tokens are kept, each with its version and its log-probability, within a bound."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.training import Batch
from mcore_rl import GenericGenerationArgs, InferenceRequest, InferenceResponse, MegatronLocal, TokenRollout
from mcore_rl._reference import token_logprobs
from mcore_rl.envs import CharacterShare

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=TOKENIZER.vocab_size, init_method_std=0.3)
ARGS = GenericGenerationArgs(temperature=1.0, max_tokens=24)
STEPS_BEFORE = 8


def policy(seed: int) -> GPTModel:
    return GPTModel(SIZES, ProcessGroups.single(), seed=seed).eval()


def interface(max_lag: int | None = None) -> MegatronLocal:
    model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=0).eval()
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=64, max_requests=4, block_size_tokens=8))
    return MegatronLocal(DynamicInferenceEngine(model, context, TOKENIZER, seed=1), max_lag=max_lag)


def held(local: MegatronLocal, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The engine waits after some steps: the event that says so, and the one that lets it go on."""
    there, go_on, step, counts = threading.Event(), threading.Event(), local.engine.step, iter(range(10**6))

    def counted() -> Any:
        result = step()
        if next(counts) == STEPS_BEFORE:
            there.set()
            assert go_on.wait(20)
        return result

    monkeypatch.setattr(local.engine, "step", counted)
    return there, go_on


async def refit_in_the_middle(local: MegatronLocal, events: tuple[threading.Event, threading.Event], seeds: list[int]) -> Any:
    """What is drawn while the weights of ``seeds`` come after some tokens."""
    there, go_on = events
    agent = CharacterShare(["ab"], "abc")
    task = asyncio.ensure_future(agent.group_rollout(local, size=3, args=ARGS))
    await asyncio.to_thread(there.wait, 20)
    loads = [asyncio.ensure_future(local.load_weights(policy(seed).named_parameters())) for seed in seeds]
    await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.gather(*loads)
    return await task


def logprobs(rollout: TokenRollout, seed: int) -> list[float]:
    """Of the tokens that were drawn, by a model of one seed."""
    tokens = torch.tensor([list(rollout.trajectory)])
    batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(1, tokens.shape[1] - 1))
    [values] = token_logprobs(policy(seed), [batch], ProcessGroups.single(), temperature=1.0)
    return [value for value, drawn in zip(values[0].tolist(), rollout.generation_mask[1:], strict=True) if drawn]


def test_new_weights_end_old_answers_of_an_event_loop_in_another_thread_in_that_loop() -> None:
    local, is_open = interface(max_lag=0), threading.Event()

    async def wait_until_old() -> bool:
        stale = asyncio.get_running_loop().create_future()
        beside._open[stale] = 0
        is_open.set()
        async with asyncio.timeout(100):
            await stale
        return True

    beside = local.with_seed(3)
    with ThreadPoolExecutor(1) as threads:
        # In debug mode an event loop refuses what comes from other threads.
        waiting = threads.submit(asyncio.run, wait_until_old(), debug=True)
        assert is_open.wait(100)
        asyncio.run(local.load_weights(policy(7).named_parameters()))
        assert waiting.result(100)


def test_tokens_are_kept_and_each_has_its_version_and_its_log_prob(monkeypatch: pytest.MonkeyPatch) -> None:
    local = interface()
    rollouts = asyncio.run(refit_in_the_middle(local, held(local, monkeypatch), [7]))
    assert len(rollouts) == 3 and local.num_redrawn == 0
    for rollout in rollouts:
        versions = list(rollout.weight_versions)
        assert versions == sorted(versions) and versions[0] == 0 and versions[-1] == 1 and versions.count(0) >= STEPS_BEFORE - 2
        by_seed = {0: logprobs(rollout, 0), 1: logprobs(rollout, 7)}
        for number, (version, logprob) in enumerate(zip(versions, rollout.logprobs, strict=True)):
            assert logprob == pytest.approx(by_seed[version][number], abs=1e-4)
        # The versions are two policies.
        assert max(abs(one - other) for one, other in zip(by_seed[0], by_seed[1], strict=True)) > 0.05
        assert TokenRollout.from_json(json.loads(json.dumps(rollout.to_json()))).weight_versions == versions


def test_answers_that_would_be_too_old_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    local = interface(max_lag=1)
    rollouts = asyncio.run(refit_in_the_middle(local, held(local, monkeypatch), [7, 8]))
    # None is lost, and none has tokens of the first weights.
    assert len(rollouts) == 3 and local.num_redrawn == 3
    assert all(set(rollout.weight_versions) == {2} and len(rollout.weight_versions) > 0 for rollout in rollouts)
    assert not local.engine.has_unfinished_requests()


def test_answers_within_the_bound_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    local = interface(max_lag=2)
    rollouts = asyncio.run(refit_in_the_middle(local, held(local, monkeypatch), [7, 8]))
    assert local.num_redrawn == 0 and all(rollout.weight_versions[0] == 0 for rollout in rollouts)
    assert all(rollout.weight_versions[-1] == 2 for rollout in rollouts)


def test_weights_come_while_nobody_waits() -> None:
    local = interface(max_lag=0)
    asyncio.run(local.load_weights(policy(7).named_parameters(), version=5))
    [[answer]] = asyncio.run(local.agenerate(InferenceRequest(prompts=[[65]], generation_args=ARGS)))
    assert set(answer.weight_versions or ()) == {5}


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_lag=-1 must not be negative"):
        interface(max_lag=-1)
    with pytest.raises(ValueError, match="weight_versions has 2 entries for 1 generated tokens"):
        InferenceResponse(response="", token_ids=[1, 2], prompt_length=1, logprobs=[-1.0], weight_versions=[0, 0])
    shared: dict[str, Any] = {"reward": 0.0, "env_id": "e", "problem_id": "p"}
    with pytest.raises(ValueError, match="weight_versions has 1 entries for 2 generated tokens of p"):
        TokenRollout(trajectory=[1, 2], generation_mask=[True, True], logprobs=[-1.0, -1.0], weight_versions=[0], **shared)
