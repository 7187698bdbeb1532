# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine that is warmed up: nobody waits for a compiler, and nothing of it is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    MtpSpeculation,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
    get_mamba_inference_state_config_from_model,
)
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import MambaConfig
from tests.support.decode_graphs import serve_as_on_a_gpu

CONFIG = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.3, mtp_num_layers=1
)
NGRAMS, HEADS = (ExecutionConfig(speculation=which) for which in (NgramSpeculation(num_tokens=4), MtpSpeculation(num_tokens=3)))
PROMPTS = [[1, 2, 3], list(range(30)), [7]]
SETTINGS = [SamplingParams(temperature=float(i % 2), num_tokens_to_generate=5, seed=i, return_log_probs=True) for i in range(3)]


def make_engine(execution: ExecutionConfig | None = None, **fields: Any) -> DynamicInferenceEngine:
    model = GPTModel(CONFIG, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64).eval()
    sizes = InferenceConfig(**{"max_sequence_length": 64, "num_blocks": 40, "block_size_tokens": 4, "max_requests": 8, **fields})
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)


def results(engine: DynamicInferenceEngine) -> list[tuple[list[int], list[float]]]:
    return [(record.generated_tokens, record.generated_log_probs) for record in engine.generate(PROMPTS, SETTINGS)]


def rows_of(steps: list[Any]) -> set[tuple[int, ...]]:
    return {tuple(host.lengths_R.tolist()) for host in steps}


@pytest.mark.parametrize("execution", [NGRAMS, HEADS], ids=["ngrams", "heads"])
def test_steps_that_verify_proposals_and_passes_behind_prompts_are_run(execution: ExecutionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(execution, max_requests=3, max_tokens=16)
    executor, steps, passes = engine._executor, list[Any](), list[Any]()
    launched = executor._launched_logits
    monkeypatch.setattr(executor, "_launched_logits", lambda host, rows: (steps.append(host), launched(host, rows))[1])
    if executor.drafts is not None:
        run = executor.drafts._launch
        monkeypatch.setattr(executor.drafts, "_launch", lambda *inputs: (passes.append([one.draws for one in inputs[0]]), run(*inputs))[1])
    engine.warm_up()
    # A row has one token more than proposals.
    assert rows_of(steps) >= ({(5,), (5, 5), (5, 5, 5)} if executor.drafts is None else {(4,), (4, 4), (4, 4, 4), (16,), (1, 15)})
    assert passes == ([] if executor.drafts is None else [[True] * 3] * 3 * len(steps))


@pytest.mark.parametrize("execution", [None, NGRAMS, pytest.param(HEADS, marks=pytest.mark.journey)], ids=["plain", "ngrams", "heads"])
@pytest.mark.parametrize("fields", [{}, {"max_requests": 1}, {"max_tokens": 16}, {"max_sequence_length": 40, "block_size_tokens": 64}])
def test_nothing_is_counted_and_nothing_changes(execution: ExecutionConfig | None, fields: dict[str, Any]) -> None:
    engine, plain = make_engine(execution, **fields), make_engine(execution, **fields)
    wanted = results(plain)
    before = engine.stats()
    engine.warm_up()
    assert engine.stats() == before and engine.step_count == 0
    assert results(engine) == wanted
    # Cached beginnings are still known.
    again = [record.cached_prompt_tokens for record in plain.generate(PROMPTS, SETTINGS)]
    engine.warm_up()
    assert [record.cached_prompt_tokens for record in engine.generate(PROMPTS, SETTINGS)] == again


@pytest.mark.parametrize("execution", [None, NGRAMS, HEADS], ids=["plain", "ngrams", "heads"])
def test_it_is_warm_until_its_recordings_are_given_up(execution: ExecutionConfig | None) -> None:
    engine = make_engine(execution)
    assert not engine.is_warm
    engine.warm_up()
    assert engine.is_warm
    engine._executor.clear_graphs()
    assert not engine.is_warm
    engine.warm_up()
    assert engine.is_warm


def test_recurrent_states_are_left_clean() -> None:
    mamba = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4)
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=64, hybrid_layer_pattern="M*M-", mamba=mamba
    )

    def make() -> DynamicInferenceEngine:
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention()).eval()
        assert get_mamba_inference_state_config_from_model(model) is not None
        sizes = InferenceConfig(max_sequence_length=64, num_blocks=40, block_size_tokens=4, max_requests=4)
        return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))

    engine = make()
    engine.warm_up()
    assert results(engine) == results(make())


def check_split(plan: dict[str, int]) -> list[tuple[list[int], list[float]]]:
    groups = ProcessGroups.build(ParallelPlan(**plan, sequence_parallel=False))
    model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64).eval()
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=40, block_size_tokens=4, max_requests=8, max_tokens=32)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
    engine.warm_up()
    return results(engine)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_ranks_of_one_model_warm_up_together(world: Callable[..., Any], plan: dict[str, int]) -> None:
    wanted = results(make_engine(max_tokens=32))
    for own in world(check_split, plan=plan):
        assert [tokens for tokens, _ in own] == [tokens for tokens, _ in wanted]


def check_failed_draws() -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64).eval()
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=40, block_size_tokens=4, max_requests=8, max_tokens=32)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
    draws, wanted = engine._executor.draws.sampler, "could not draw in its warm-up"
    if model.is_last:
        draw, wanted = draws.draw, "no room for a draw"

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError(wanted)

        draws.draw = fail  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, torch.OutOfMemoryError), match=wanted):
        engine.warm_up()
    assert not engine.is_warm
    if model.is_last:
        draws.draw = draw  # type: ignore[method-assign]
    engine.warm_up()
    assert engine.is_warm


@pytest.mark.world(2, shared=True)
def test_a_warm_up_that_cannot_draw_fails_on_all_stages(world: Callable[..., Any]) -> None:
    world(check_failed_draws)


def check_recorded() -> None:
    serve_as_on_a_gpu()
    engine = make_engine()
    engine.warm_up()
    graphs, mixed = engine._executor.graphs, engine._executor.mixed_graphs
    assert graphs is not None and mixed is not None
    assert sorted(graphs._recorded) == graphs._sizes and set(mixed._recorded) == set(mixed._sizes)
    assert engine.stats()["graph_steps"] == 0


@pytest.mark.world(1)
def test_all_steps_are_recorded(world: Callable[..., Any]) -> None:
    world(check_recorded)


def test_a_busy_engine_and_a_suspended_one_refuse() -> None:
    engine = make_engine()
    engine.add_request([1, 2])
    with pytest.raises(RuntimeError, match="warm_up needs an idle engine, and this one has 1 unfinished requests"):
        engine.warm_up()
    engine.abort(0)
    engine.suspend()
    with pytest.raises(RuntimeError, match="warm_up needs an idle engine, and this one is suspended"):
        engine.warm_up()


@pytest.mark.gpu
@pytest.mark.parametrize("execution", [None, NGRAMS, HEADS], ids=["plain", "ngrams", "heads"])
def test_no_request_waits_for_a_compiler_behind_it(execution: ExecutionConfig | None) -> None:
    import triton

    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2, vocab_size=1000, normalization="RMSNorm",
        activation="swiglu", mtp_num_layers=1,
    )  # fmt: skip
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.bfloat16, device="cuda").eval()
    sizes = InferenceConfig(max_sequence_length=4096, max_requests=64, max_tokens=8192, block_size_tokens=64, buffer_size_gb=1.0)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)
    engine.warm_up()
    compiled: list[str] = []
    hooks = triton.knobs.runtime
    before, hooks.jit_post_compile_hook = hooks.jit_post_compile_hook, lambda **event: compiled.append(str(event["fn"].name))
    try:
        shapes = [[300], [304], [1500], [3000], [512] * 4, [500] * 5, [100] * 16, [300] * 40, [10] * 60, [4000, 7, 1]]
        kinds: list[dict[str, Any]] = [
            {}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}, {"return_log_probs": True},
            {"repetition_penalty": 1.1}, {"return_log_probs": True, "top_n_logprobs": 3},
            {"return_log_probs": True, "skip_prompt_log_probs": False},
        ]  # fmt: skip
        cases = [(shape, {}) for shape in shapes] + [([90] * n, kind) for kind in kinds for n in (1, 3, 16)]
        for number, (shape, fields) in enumerate(cases):
            prompts = [[(7 * number + 3 * place + at) % 1000 for at in range(length)] for place, length in enumerate(shape)]
            engine.generate(prompts, SamplingParams(num_tokens_to_generate=6, ignore_eos=True, **fields))
    finally:
        hooks.jit_post_compile_hook = before
    assert not compiled, compiled
    assert engine.stats()["graph_steps"] > 0.8 * engine.step_count
