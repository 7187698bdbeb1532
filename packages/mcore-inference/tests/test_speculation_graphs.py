# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recorded steps with proposals, and recorded passes of heads: tokens, log-probabilities and proposals of those without a recording."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EagleSpeculation,
    ExecutionConfig,
    InferenceConfig,
    MtpSpeculation,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_inference.decoder import FusedDecoder
from mcore_inference.engine._mixed_graphs import doubled_rows, proposal_sizes
from mcore_inference.engine._verification import Verification
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.models.eagle import DraftVocabulary, EagleConfig, EagleHead
from mcore_parallel.nn import LatentAttentionConfig
from tests.support.decode_graphs import record_eagerly, serve_as_on_a_gpu
from tests.support.interpreter import run_interpreted

V = 32
ONE = ProcessGroups.single()
CONFIG = TransformerConfig(
    num_layers=3, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=V, init_method_std=0.3, mtp_num_layers=2
)
LATENT = replace(
    CONFIG,
    latent_attention=LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    num_query_groups=None,
)
KINDS = ["ngram", "mtp, fewer tokens than heads", "mtp, more", "mtp, more, latent", "eagle", "eagle of few tokens"]
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.3, seed=2, frequency_penalty=0.5, logit_bias={7: 3.0}),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5, seed=4, top_k=5, top_p=0.7),
    SamplingParams(temperature=0.5, seed=5),
]


FUSED = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=V, init_method_std=0.3, mtp_num_layers=2,
    normalization="RMSNorm", activation="swiglu",
)  # fmt: skip


def speculation_of(kind: str, model: GPTModel, device: str) -> Any:
    if kind == "ngram":
        return NgramSpeculation(num_tokens=3, min_ngram=1)
    if kind.startswith("mtp"):
        return MtpSpeculation(num_tokens=4 if "more" in kind else 1)
    vocabulary = DraftVocabulary(torch.arange(0, V, 2), V) if "few tokens" in kind else None
    config = EagleConfig.of_target(model.config, draft_vocab_size=None if vocabulary is None else len(vocabulary))
    config = replace(config, transformer=replace(config.transformer, num_layers=2))
    head = EagleHead(config, ONE, vocabulary=vocabulary, attention_core=PagedAttention(), dtype=model.dtype, device=device, seed=5)
    return EagleSpeculation(head=head, num_tokens=3)


def build(
    kind: str | None,
    device: str,
    dtype: torch.dtype,
    use_graphs: bool | None = None,
    config: TransformerConfig = CONFIG,
    **sizes: Any,
) -> DynamicInferenceEngine:
    model = GPTModel(config, ONE, attention_core=PagedAttention(), dtype=dtype, device=device).eval()
    sizes = {"max_sequence_length": 96, "num_blocks": 40, "block_size_tokens": 16, "max_requests": 5, "max_tokens": 48} | sizes
    context = DynamicInferenceContext.for_model(model, InferenceConfig(**sizes))
    speculation = None if kind is None else speculation_of(kind, model, device)
    return DynamicInferenceEngine(model, context, seed=3, execution=ExecutionConfig(speculation=speculation, use_graphs=use_graphs))


def check_tokens(kind: str, device: str, dtype: torch.dtype, gap: float, sizes: dict[str, Any]) -> tuple[int, int]:
    """Steps, and those of them that were replayed."""
    rng = random.Random(0)
    settings = [replace(one, num_tokens_to_generate=9 + i, return_log_probs=True) for i, one in enumerate(SETTINGS)]
    # They repeat, so that n-grams have something to propose; prompts of one token, and in parts, are among them.
    prompts = [[1], *([rng.randrange(V) for _ in range(5 + 3 * i)] * 2 for i in range(5))]
    config = LATENT if "latent" in kind else CONFIG
    wanted = build(None, device, dtype, False, config, **sizes).generate(prompts, settings)
    launched, recorded = build(kind, device, dtype, False, config, **sizes), build(kind, device, dtype, None, config, **sizes)
    recorded.create_cuda_graphs()
    assert recorded.stats()["graph_steps"] == 0
    executor = recorded._executor
    graphs = [executor.graphs, executor.mixed_graphs, executor.proposal_graphs]
    graphs += [] if executor.drafts is None else [executor.drafts.graphs]
    made = [dict(each._recorded) for each in graphs if each is not None]
    assert len(made) == (3 if kind == "ngram" else 4)
    for engine in (launched, recorded):
        for own, theirs in zip(engine.generate(prompts, settings), wanted, strict=True):
            assert own.generated_tokens == theirs.generated_tokens
            assert own.generated_log_probs == pytest.approx(theirs.generated_log_probs, abs=gap)
        # A request that others do not keep company.
        assert engine.generate(prompts[2:3], settings[2])[0].generated_tokens == wanted[2].generated_tokens
    assert recorded.num_drafted == launched.num_drafted > 0 and recorded.num_accepted == launched.num_accepted > 0
    assert recorded.step_count == launched.step_count and launched.stats()["graph_steps"] == 0
    # All was recorded before.
    assert [dict(each._recorded) for each in graphs if each is not None] == made
    assert executor.proposal_graphs is not None and recorded.cuda_graph_proposal_count_map == executor.proposal_graphs.step_counts
    assert len(recorded.cuda_graph_proposal_count_map) > 2
    maps = (recorded.cuda_graph_request_count_map, recorded.cuda_graph_mixed_count_map, recorded.cuda_graph_proposal_count_map)
    assert sum(sum(counts.values()) for counts in maps) == recorded.stats()["graph_steps"]
    if executor.drafts is not None:
        assert executor.drafts.graphs is not None
        assert executor.drafts.graphs.request_counts.total() > 0.8 * sum(executor.proposal_graphs.step_counts.values())
    assert recorded.context.allocator.total_used == 0
    return recorded.step_count, int(recorded.stats()["graph_steps"])


def check_on_cpu(kind: str, sizes: dict[str, Any]) -> None:
    serve_as_on_a_gpu()
    num_steps, num_graph_steps = check_tokens(kind, "cpu", torch.float64, 1e-9, sizes)
    assert num_graph_steps > 0.8 * num_steps


ROOMY, TIGHT = {}, {"num_blocks": 26, "block_size_tokens": 4, "max_tokens": 17}


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param(kind, sizes, marks=() if sizes is ROOMY and kind in ("ngram", "eagle") else pytest.mark.journey)
        for kind, sizes in [*((kind, ROOMY) for kind in KINDS), ("mtp, more", TIGHT), ("eagle", TIGHT)]
    ],
)
def test_recorded_steps_with_proposals_give_the_tokens_of_plain_ones(world: Callable[..., Any], kind: str, sizes: dict[str, Any]) -> None:
    world(check_on_cpu, kind=kind, sizes=sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_with_proposals_give_the_tokens_of_plain_ones_on_a_gpu(kind: str) -> None:
    num_steps, num_graph_steps = check_tokens(kind, "cuda", torch.float32, 1e-4, ROOMY)
    assert num_graph_steps > 0.8 * num_steps


def check_fused(kind: str) -> None:
    """By the fused decoder, whose states the heads propose from what they propose from the states of the model's own forward."""
    results, take = [], Verification.take
    for fits in (False, True):
        proposed: list[list[int]] = []

        def watched(self: Verification, sampled: Any, drafts: Any, *rest: Any, proposed: list[list[int]] = proposed) -> Any:
            proposed += drafts
            return take(self, sampled, drafts, *rest)

        Verification.take = watched  # type: ignore[method-assign]
        FusedDecoder.fits = staticmethod(lambda *_, fits=fits: fits)
        engine = build(kind, "cpu", torch.float32, config=FUSED, max_requests=1, max_tokens=12)
        assert isinstance(engine._executor._decoder, FusedDecoder) == fits
        [record] = engine.generate([[1, 2, 3] * 3], SamplingParams(temperature=0.5, num_tokens_to_generate=5))
        assert engine._executor.proposal_graphs is not None and engine._executor.proposal_graphs.step_counts
        results.append((record.generated_tokens, proposed, engine.step_count, engine.stats()["graph_steps"]))
    assert results[0] == results[1] and results[0][1]


@pytest.mark.journey
def test_fused_decoders_verify_proposals_in_the_interpreter() -> None:
    run_interpreted(__file__, "eagle")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "mtp, more"])
def test_fused_decoders_verify_other_proposals_in_the_interpreter(kind: str) -> None:
    run_interpreted(__file__, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ngram", "mtp, more", "eagle"])
def test_bfloat16_steps_with_proposals_are_recorded(kind: str) -> None:
    # Heads and hidden states of sizes that the kernels of weights have.
    engine = build(kind, "cuda", torch.bfloat16, config=replace(FUSED, hidden_size=128, num_layers=3))
    assert engine._executor._decoder is not None
    engine.warm_up()
    prompts, params = [[1, 2, 3] * 4, [5, 6] * 5], SamplingParams(temperature=0.0, num_tokens_to_generate=40, logit_bias={11: 1e4})
    assert [record.generated_tokens for record in engine.generate(prompts, params)] == [[11] * 40] * 2
    assert engine.num_drafted > 0 and engine.stats()["graph_steps"] > 0.8 * engine.step_count


def check_sizes() -> None:
    serve_as_on_a_gpu()
    engine = build("mtp, more", "cpu", torch.float64, max_requests=3, max_tokens=12)
    executor = engine._executor
    assert executor.proposal_graphs is not None and executor.drafts is not None and executor.drafts.graphs is not None
    assert [str(size) for size in executor.proposal_graphs._sizes] == ["[5]: 1 P + 0 D", "[10]: 2 P + 0 D", "[12]: 3 P + 0 D"]
    # A head's pass has no more tokens than the step before it, and those that the head before left over.
    passes = ["[12]: 3 P + 0 D", "[15]: 3 P + 0 D", *["[3]: 0 P + 3 D"] * 2]
    assert [str(size) for size in executor.drafts.graphs._sizes(3)] == passes
    engine.warm_up()
    assert set(executor.drafts.graphs._recorded) == {(rows, ranked) for rows in (1, 2, 3) for ranked in (False, True)}
    # A prompt without proposals beside it: nothing but its last logits.
    engine.generate([list(range(9))], SamplingParams(num_tokens_to_generate=1))
    assert executor.mixed_graphs is not None
    assert (executor.mixed_graphs.step_counts.total(), executor.proposal_graphs.step_counts.total()) == (1, 0)
    executor.clear_graphs()
    assert not executor.drafts.graphs._recorded and not executor.proposal_graphs._recorded
    # With many requests passes are as large as recorded steps, whose memory is known to be there.
    drafts = build("mtp, more", "cpu", torch.float64, max_requests=5000, max_tokens=5000)._executor.drafts
    assert drafts is not None and drafts.graphs is not None
    assert [size.token_count for size in drafts.graphs._sizes(max(drafts.graphs._step_tokens))] == [2048, 4096, 2048, 2048]


@pytest.mark.journey
@pytest.mark.world(1)
def test_sizes_are_few_and_forgotten_together(world: Callable[..., Any]) -> None:
    world(check_sizes)


def test_rows_of_several_tokens_double() -> None:
    assert doubled_rows(1) == [1] and doubled_rows(64) == [1, 2, 4, 8, 16, 32, 64] and doubled_rows(65, 3) == [32, 64, 65]
    sizes = proposal_sizes(doubled_rows(1024), 5, 1 << 20)
    assert max(size.token_count for size in sizes) == 2048 and all(size.is_valid(1024, 5) or size.token_count == 2048 for size in sizes)


if __name__ == "__main__":
    from mcore_inference.attention import _backends, _core
    from mcore_inference.decoder import _decoder

    _backends.has_kernels = _core.has_kernels = lambda *_: True
    _decoder._STREAM_DTYPES = (torch.float32,)
    record_eagerly()
    for each in sys.argv[1:]:
        check_fused(each)
    print("same")
