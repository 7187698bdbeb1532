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
from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step, StreamNorm
from tests.support import world
from tests.support.interpreter import run_interpreted
from tests.support.peer_memory import MappedMemory
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
    """Of 8 rows and less ranks read each other's memory, which is that of this machine."""
    from mcore_inference.attention import _backends
    from mcore_inference.decoder import _decoder, _linear, _partial_sums

    _backends.has_kernels = lambda *_: True
    _decoder._STREAM_DTYPES = (torch.float32,)
    FusedDecoder.fits = staticmethod(lambda *_: True)
    _partial_sums.SymmetricBuffer = MappedPeers
    _partial_sums._ONE_SHOT_BYTES = 8 * 32 * torch.float32.itemsize
    _partial_sums.PartialSums.sum = lambda sums, partial: all_reduce(partial, sums._group)
    launches: list[Any] = []
    enter, logits = _linear.enter_stream, FusedDecoder.logits
    # As recorded decode steps do.
    FusedDecoder.logits = lambda decoder, tokens, step, rows: logits(decoder, tokens, step, None if len(rows) == len(tokens) else rows)
    _linear.enter_stream = lambda *rows, **options: launches.append(options.get("peers")) or enter(*rows, **options)
    fields: dict[str, Any] = {"qk_layernorm": True, "share_embeddings_and_output_weights": True}
    tokens = check("cpu", torch.float32, 1e-4, hidden_size=32, counts=(2, 9, 17), **fields)
    # Steps that decode, of 2, 9 and 2 requests: in front of the first layer is no sum.
    assert [peers is not None for peers in launches] == [False, True, True, False, False, False, False, True, True]
    return tokens


def check_memory_for_one_launch() -> None:
    """Rows that one program holds are summed where they are read; wider ones, and those elsewhere, before."""
    from mcore_inference.decoder import _partial_sums

    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_partial_sums, "SymmetricBuffer", MappedPeers)
        for width, fused in ((64, True), (8192, True), (8196, False)):
            sums = _partial_sums.PartialSums(groups.tp, 10, width, dtype=torch.float32, device=torch.device("cpu"))
            rows = sums.rows(10)
            assert rows is not None and rows.shape == (10, width) and sums.rows(11) is None
            peers = sums.peers(rows[:3])
            assert (peers is not None) == fused and sums.peers(torch.empty(3, width)) is None
            if peers is not None:
                assert peers.counters.shape == (2, 10) and not peers.counters.any()
                # A rank's own are where others look for them.
                assert peers.counters.data_ptr() == peers.addresses[groups.tp.rank] + peers.counters_at
                assert rows.data_ptr() == peers.addresses[groups.tp.rank] and peers.counters_at == rows.nbytes


@pytest.mark.world(2)
def test_rows_that_one_program_holds_are_summed_where_they_are_read(world) -> None:
    world(check_memory_for_one_launch)


class MappedPeers(MappedMemory):
    """Stands for a ``SymmetricBuffer``."""

    def __init__(self, group: Group, num_bytes: int, device: torch.device, *, timeout_s: float) -> None:
        super().__init__(group, num_bytes)

    @staticmethod
    def obstacle(group: Group, device: torch.device) -> None:
        return None


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


def check_launches(shapes: tuple[tuple[int, int], ...]) -> bool:
    return all(check_one_launch(*shape) for shape in shapes)


def check_one_launch(tokens: int, width: int) -> bool:
    """Sum, residual and norm in one launch have the bits of two, in a graph that is replayed while ranks are late by turns.

    False where the machine has none.
    """
    from mcore_inference.decoder._linear import enter_stream
    from mcore_inference.decoder._partial_sums import PartialSums

    groups = ProcessGroups.build(ParallelPlan(tp=torch.distributed.get_world_size(), sequence_parallel=False))
    device = torch.device("cuda", torch.cuda.current_device())
    sums = PartialSums(groups.tp, 64, width, dtype=torch.bfloat16, device=device)
    rows = sums.rows(tokens)
    if rows is None:
        return False
    peers = sums.peers(rows)
    assert peers is not None
    # The same on all ranks, whose parts are others.
    alike, own = (torch.Generator(device).manual_seed(seed) for seed in (100, groups.tp.rank))
    weight, residual = (torch.randn(*shape, generator=alike, device=device).bfloat16() for shape in ((width,), (tokens, width)))
    norm = StreamNorm(weight=weight, epsilon=1e-5, shift=1.0)
    parts = torch.randn(16, tokens, width, generator=own, device=device).bfloat16()
    turn, different, summed = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))

    def step(late: int) -> None:
        streams = []
        for number in range(4):
            if groups.tp.rank == (late + number // 2) % groups.tp.size:
                torch.cuda._sleep(20_000)
            # Both ways read the same parts, and each writes over what the other read.
            rows.copy_(parts.index_select(0, (turn + number // 2) % len(parts))[0])
            if number % 2:
                streams.append(enter_stream(sums.sum(rows), norm, residual_TD=residual))
            else:
                streams.append(enter_stream(rows, norm, residual_TD=residual, peers=peers))
        for one, two in (streams[:2], streams[2:]):
            for name in ("x", "scaled", "squares"):
                different.add_((getattr(one, name) != getattr(two, name)).sum())
            summed.add_(one.x.view(torch.int16).sum())
        turn.add_(1)

    step(0)
    torch.cuda.synchronize()
    graphs = []
    for late in range(groups.tp.size):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            step(late)
    for _ in range(100):
        for graph in graphs:
            graph.replay()
        step(0)
    torch.cuda.synchronize()
    assert turn.item() == 1 + 100 * (len(graphs) + 1) and different.item() == 0
    assert all_reduce(summed, groups.tp, "max").item() == all_reduce(summed, groups.tp, "min").item() != 0
    assert not peers.counters.any()
    return True


@pytest.mark.journey
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


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_launch_of_sum_residual_and_norm_has_the_bits_of_two(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    shapes = ((1, 4096), (16, 256), (13, 2048), (64, 4096), (32, 8192))
    assert run(check_launches, ranks, backend="nccl", timeout_s=100.0, shapes=shapes) == [True] * ranks


if __name__ == "__main__":
    # Ranks are forked from this process: in that of other worlds nothing is interpreted.
    world._server, world.start_server = multiprocessing.get_context("fork"), lambda: None  # type: ignore[assignment]
    one, two = run(check_interpreted, 2, timeout_s=100.0)
    assert one == two
    print("same")
