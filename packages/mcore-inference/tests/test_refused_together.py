# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine over several ranks that one of them refuses is made on none."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention, SamplingParams
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.world import run

SIZES = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, vocab_size=32)
SOON_S = 20.0
"""The most that a rank may wait on a slow machine."""


def outcome(call: Callable[[], Any]) -> tuple[str, float]:
    """What it raised, and after how long."""
    dist.barrier()
    begin, message = time.monotonic(), ""
    try:
        call()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return message, time.monotonic() - begin


def refuse(plan: ParallelPlan, experts: bool, device: str = "cpu", sizes: TransformerConfig = SIZES) -> list[tuple[str, float]]:
    groups, second = ProcessGroups.build(plan), dist.get_rank() == 1
    parts = {"feed_forward": moe_feed_forward(MoEConfig(num_moe_experts=4))} if experts else {}
    model = GPTModel(sizes, groups, attention_core=PagedAttention(), device=device, **parts).eval()
    context = DynamicInferenceContext.for_model(model, InferenceConfig(max_sequence_length=16, max_requests=4, block_size_tokens=16))
    engines = []
    results = [
        outcome(lambda: DynamicInferenceEngine(model, context, seed=0, max_waiting_requests=0 if second else 1)),
        outcome(lambda: DynamicInferenceEngine(model, context, seed=0, vocab_size=64 if second else 32)),
        outcome(lambda: DynamicInferenceEngine(model, context, seed="one")),  # type: ignore[arg-type]
        outcome(lambda: engines.append(DynamicInferenceEngine(model, context, seed=0))),
    ]
    [engine] = engines
    if second:
        engine.add_request([1, 2, 3], SamplingParams(num_tokens_to_generate=1))
    results.append(outcome(engine.warm_up))
    if second:
        engine.abort(0)
    results.append(outcome(engine.warm_up))
    return results


LAYOUTS = pytest.mark.parametrize(
    ("plan", "experts"),
    [(ParallelPlan(tp=2, sequence_parallel=False), False), (ParallelPlan(pp=2), False), (ParallelPlan(ep=2, dp=2), True)],
    ids=["tp", "pp", "ep"],
)


def check(results: list[list[tuple[str, float]]]) -> None:
    first, second = results
    reasons = {0: "ValueError: max_waiting_requests=0", 1: "ValueError: vocab_size=64", 4: "RuntimeError: warm_up needs an idle engine"}
    for number, reason in reasons.items():
        (told, waited_s), (own, _) = first[number], second[number]
        call = "warm_up" if number == 4 else "the engine"
        assert own.startswith(reason) and waited_s < SOON_S, own
        assert told == f"RankFailedError: rank 1 of the world refused {call}, which the 2 ranks of this engine make together; it says why"
    # What all refuse each says itself.
    assert first[2][0] == second[2][0] and first[2][0].startswith("ValueError: seed")
    assert [message for message, _ in (first[3], second[3], first[5], second[5])] == [""] * 4


@pytest.mark.world(2)
@LAYOUTS
def test_what_one_rank_refuses_is_refused_on_all_and_can_be_repeated(world, plan: ParallelPlan, experts: bool) -> None:
    check(world(refuse, plan=plan, experts=experts))


@pytest.mark.gpu
@LAYOUTS
def test_what_one_gpu_refuses_is_refused_on_all(plan: ParallelPlan, experts: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    sizes = dataclasses.replace(SIZES, hidden_size=64, ffn_hidden_size=64)
    check(run(refuse, 2, backend="nccl", timeout_s=120.0, plan=plan, experts=experts, device="cuda", sizes=sizes))
