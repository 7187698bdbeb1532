# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The fused decoder over tensor-parallel ranks against the whole model."""

import multiprocessing
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
)
from mcore_inference.decoder import FusedDecoder
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from tests.support import world
from tests.support.interpreter import run_interpreted
from tests.support.world import run

LLAMA: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu"}
# Of few rows, and of more than stream their weights.
COUNTS = (2, 17)


def prompts(count: int) -> list[list[int]]:
    return [[(7 * row + 3 * place) % 60 for place in range(3 + row % 4)] for row in range(count)]


def check(device: str, dtype: torch.dtype, gap: float, *, hidden_size: int, counts: tuple[int, ...], **fields: Any) -> list[list[int]]:
    """Every token is the best one of the whole model's forward over the sequence, up to ``gap``; the tokens of this rank."""
    sizes = {"num_layers": 1 if device == "cpu" else 2, "ffn_hidden_size": 2 * hidden_size, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_query_groups": 2}
    config = TransformerConfig(hidden_size=hidden_size, init_method_std=0.3, **sizes, **heads, **LLAMA, **fields)
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))
    split = GPTModel(config, groups, attention_core=PagedAttention(), device=device, dtype=dtype).eval()
    whole = GPTModel(config, ProcessGroups.single(), dtype=dtype).eval().double()
    assert FusedDecoder.fits(split)
    tokens = []
    for use_graphs in (True, False) if device == "cuda" else (False,):
        memory = InferenceConfig(max_sequence_length=64, max_requests=32, max_tokens=40, block_size_tokens=16, num_blocks=100)
        context = DynamicInferenceContext.for_model(split, memory)
        engine = DynamicInferenceEngine(split, context, execution=ExecutionConfig(use_graphs=use_graphs))
        for count in counts:
            params = SamplingParams(temperature=0, num_tokens_to_generate=2 if device == "cpu" else 12, return_log_probs=True)
            records = engine.generate(prompts(count), params)
            for prompt, record in zip(prompts(count), records, strict=True):
                sequence = torch.tensor([*prompt, *record.generated_tokens])
                with torch.no_grad():
                    scores = whole(sequence, Step.causal(1, len(sequence)))[0].logits()[len(prompt) - 1 : -1]
                picked = scores.gather(1, sequence[len(prompt) :, None])[:, 0]
                assert (scores.amax(1) - picked).max() <= gap * scores.std()
                log_probs = scores.log_softmax(-1).gather(1, sequence[len(prompt) :, None])[:, 0]
                assert (torch.tensor(record.generated_log_probs) - log_probs).abs().mean() <= gap
            tokens += [record.generated_tokens for record in records]
    return tokens


def check_interpreted() -> list[list[int]]:
    from mcore_inference.attention import _backends
    from mcore_inference.decoder import _decoder

    _backends.has_kernels = lambda *_: True
    _decoder._STREAM_DTYPES = (torch.float32,)
    FusedDecoder.fits = staticmethod(lambda *_: True)
    fields: dict[str, Any] = {"qk_layernorm": True, "share_embeddings_and_output_weights": True}
    return check("cpu", torch.float32, 1e-4, hidden_size=32, counts=COUNTS, **fields)


def check_gpu(**fields: Any) -> list[list[int]]:
    torch.manual_seed(0)
    return check("cuda", torch.bfloat16, 0.3, hidden_size=256, counts=COUNTS, **fields)


def check_memory_of_peers(tokens: int, width: int) -> bool:
    """The one-shot sum is that of the ranks, again and again, and in a graph; False where the machine has none."""
    from mcore_inference.decoder._partial_sums import PartialSums

    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))
    device = torch.device("cuda", torch.cuda.current_device())
    sums = PartialSums(groups.tp, 64, width, dtype=torch.bfloat16, device=device)
    rows = sums.rows(tokens)
    if rows is None:
        return False

    def everyones(turn: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(turn)
        return [torch.randn(tokens, width, generator=generator).bfloat16().to(device) for _ in range(2)]

    source = torch.empty_like(rows)
    graph = torch.cuda.CUDAGraph()
    rows.copy_(source)
    sums.sum(rows)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        rows.copy_(source)
        recorded = sums.sum(rows)
    for turn in range(50):
        parts = everyones(turn)
        wanted = (parts[0].float() + parts[1].float()).bfloat16()
        rows.copy_(parts[groups.tp.rank])
        assert torch.equal(sums.sum(rows), wanted)
        source.copy_(parts[groups.tp.rank])
        graph.replay()
        assert torch.equal(recorded, wanted)
    return True


def test_split_decoders_draw_the_tokens_of_the_whole_model_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"qk_layernorm": True, "share_embeddings_and_output_weights": True}])
def test_split_decoders_draw_the_tokens_of_the_whole_model_on_gpus(fields: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one, two = run(check_gpu, 2, backend="nccl", timeout_s=100.0, **fields)
    assert one == two


@pytest.mark.gpu
def test_one_shot_sums_are_those_of_the_ranks() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for tokens, width in ((1, 4096), (16, 256), (13, 2048)):
        assert run(check_memory_of_peers, 2, backend="nccl", timeout_s=60.0, tokens=tokens, width=width) == [True, True]


if __name__ == "__main__":
    # Ranks are forked from this process: in that of other worlds nothing is interpreted.
    world._server, world.start_server = multiprocessing.get_context("fork"), lambda: None  # type: ignore[assignment]
    one, two = run(check_interpreted, 2, timeout_s=100.0)
    assert one == two
    print("same")
