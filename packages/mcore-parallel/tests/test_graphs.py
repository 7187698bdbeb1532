# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Blocks and iterations that are replayed, recorded here by a tape in place of a GPU."""

import dataclasses
import gc
import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import (
    CaptureError,
    CudaGraphConfig,
    ExternalCapture,
    GraphableMegatronModule,
    IterationGraph,
    ModuleGraphs,
    graph_modules,
)
from mcore_parallel.models import Aux, GPTModel, TransformerConfig
from mcore_parallel.nn import OffloadConfig, RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, evaluate, train_step
from mcore_parallel.training._aux import AuxSums
from tests.support.poisoned_gradients import PoisonedGradients, ZeroedGradients
from tests.support.poisoned_gradients import trained as stepwise
from tests.support.tape_capture import TapeCapture

CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=32)
B, S = 2, 8


def batch(number: int) -> Batch:
    tokens = torch.randint(CONFIG.vocab_size, (B, S + 1), generator=torch.Generator().manual_seed(number))
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(B, S))


def packed_batch(number: int) -> Batch:
    """Some sequences, other ones for each number, whose bounds are on the host."""
    draws = torch.Generator().manual_seed(number)
    ends = torch.randperm(B * S - 1, generator=draws)[: int(torch.randint(1, 5, (), generator=draws))] + 1
    bounds = torch.cat((torch.tensor([0]), ends.sort().values, torch.tensor([B * S])))
    tokens = torch.randint(CONFIG.vocab_size, (1, B * S + 1), generator=draws)
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(1, B * S), cu_seqlens=bounds)


@dataclass
class Run:
    """What ten steps left behind."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def trained(
    graphs: Callable[[nn.Module], Any] | None,
    *,
    fusion: bool = False,
    steps: int = 3,
    batch: Callable[[int], Batch] = batch,
    config: TransformerConfig = CONFIG,
    **options: Any,
) -> tuple[Run, Any]:
    groups = ProcessGroups.single()
    model = GPTModel(config, groups, dtype=torch.float64, seed=3, **options)
    sync = DistributedDataParallel(DistributedDataParallelConfig(gradient_accumulation_fusion=fusion), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01), sync, groups)
    held = None if graphs is None else graphs(model)
    reports = [
        train_step(model, [batch(2 * step + n) for n in range(2)], CrossEntropyObjective(), sync, optimizer, lr=0.01)
        for step in range(steps)
    ]
    names = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Run([report.loss for report in reports], [report.grad_norm for report in reports], names), held


def same(found: Run, wanted: Run) -> None:
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert found.parameters.keys() == wanted.parameters.keys()
    for name, value in wanted.parameters.items():
        assert torch.equal(found.parameters[name], value), name


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 3])
def test_replayed_blocks_add_to_zero_where_others_overwrite(warmup_steps: int, fusion: bool) -> None:
    """Captured before the first gradient of a step or between two, and replayed in both places."""

    def build() -> GPTModel:
        return GPTModel(CONFIG, ProcessGroups.single(), dtype=torch.float64, seed=3)

    def with_graphs(ddp: DistributedDataParallel) -> PoisonedGradients:
        graph_modules(ddp.module, config=CudaGraphConfig(warmup_steps=warmup_steps), capture=TapeCapture())
        return PoisonedGradients(ddp)

    options: dict[str, Any] = {"ddp": {"gradient_accumulation_fusion": fusion}}
    arguments = (build, ProcessGroups.single(), lambda model, step: [batch(2 * step + number) for number in range(2)])
    wanted, _ = stepwise(*arguments, ZeroedGradients, **options)
    found, _ = stepwise(*arguments, with_graphs, **options)
    assert all(torch.equal(ours, eager) for ours, eager in zip(found, wanted, strict=True))


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("patterns", [("layers.*",), ("layers.*.attention", "layers.*.mlp")])
def test_replayed_blocks_train_with_the_bits_of_the_eager_ones(patterns: tuple[str, ...], fusion: bool) -> None:
    capture = TapeCapture()
    wanted, _ = trained(None, fusion=fusion)
    found, graphed = trained(lambda model: graph_modules(model, patterns, capture=capture), fusion=fusion)
    same(found, wanted)
    report, blocks = graphed.report(), 2 * len(patterns)
    assert (report.graphs, capture.recorded) == (blocks, 2 * blocks), "one micro-batch is under way at a time"
    assert report.eager == {"warm-up": 3 * blocks}
    assert report.replays == (3 * 2 - 3) * blocks


@pytest.mark.parametrize("backend", [pytest.param(None, marks=pytest.mark.journey), "sdpa", "context_parallel", "reference"])
def test_layers_over_packed_sequences_run_from_one_graph_however_they_are_packed(backend: str | None) -> None:
    config = CONFIG if backend is None else dataclasses.replace(CONFIG, attention_backend=backend)

    def on_device(number: int) -> Batch:
        return packed_batch(number).with_device_bounds(6)

    wanted, _ = trained(None, batch=packed_batch, config=config, steps=4)
    eager, _ = trained(None, batch=on_device, config=config, steps=4)
    found, graphed = trained(
        lambda model: graph_modules(model, ("layers.*",), CudaGraphConfig(warmup_steps=1), capture=TapeCapture()),
        batch=on_device,
        config=config,
        steps=4,
    )
    same(found, eager)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12) and found.norms == pytest.approx(wanted.norms, rel=1e-12)
    report = graphed.report()
    assert report.graphs == CONFIG.num_layers and report.replays == (4 * 2 - 1) * CONFIG.num_layers


def test_counts_of_replayed_micro_batches_add_up() -> None:
    """A graph gives the counts of every micro-batch in the same memory."""
    sums, memory = AuxSums(), torch.tensor([1, 2])
    for number in range(3):
        memory.fill_(number + 1)
        sums.add(Aux(losses={}, counts={0: memory}), torch.ones(()))
    assert sums.counts[0].tolist() == [6, 6]


@pytest.mark.parametrize("config", [CudaGraphConfig(recompute=True), CudaGraphConfig(warmup_steps=0)])
def test_the_choices_keep_the_bits(config: CudaGraphConfig) -> None:
    wanted, _ = trained(None, steps=3)
    found, _ = trained(lambda model: graph_modules(model, config=config, capture=TapeCapture()), steps=3)
    same(found, wanted)


def test_recomputation_inside_blocks_is_recorded_with_them() -> None:
    recompute = RecomputeConfig(modules=("norm", "mlp"), preserve_rng_state=False)
    wanted, _ = trained(None, steps=3)
    found, graphed = trained(lambda model: graph_modules(model, capture=TapeCapture()), steps=3, recompute=recompute)
    same(found, wanted)
    assert graphed.report().replays == 2 * (6 - 3)


def test_a_caller_that_recomputes_keeps_blocks_eager_and_is_named() -> None:
    wanted, _ = trained(None, steps=2)
    found, graphed = trained(
        lambda model: graph_modules(model, capture=TapeCapture()), steps=2, recompute=RecomputeConfig(granularity="full")
    )
    same(found, wanted)
    report = graphed.report()
    assert report.graphs == 0
    assert any("CudaGraphConfig.recompute" in reason for reason in report.eager)


def check_pipeline(chunks: int) -> None:
    groups, pipeline = ProcessGroups.build(ParallelPlan(pp=2, vpp=chunks)), PipelineConfig()
    config = TransformerConfig(num_layers=4, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=32)
    layout = pipeline.place(4, num_stages=2, num_chunks=chunks)

    def run(graphed: bool) -> list[Any]:
        parts = [GPTModel(config, groups, layers=part, dtype=torch.float64, seed=3) for part in layout.of_rank(groups.pp.rank)]
        model: nn.Module = parts[0] if chunks == 1 else ModelChunks(parts)
        sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
        optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01), sync, groups)
        when = CudaGraphConfig(warmup_steps=1, capture_forward_only=True)
        graphs = graph_modules(model, config=when, capture=TapeCapture()) if graphed else None
        options: dict[str, Any] = {"lr": 0.01, "groups": groups, "pipeline": pipeline.build(chunks)}
        found: list[Any] = []
        for step in range(3):
            data = [batch(4 * step + n) for n in range(4)]
            found.append(train_step(model, data, CrossEntropyObjective(), sync, optimizer, **options).loss)
            found.append(evaluate(model, data, CrossEntropyObjective(), groups=groups).sum)
        if graphs is not None:
            # Before its backward a graph serves one micro-batch; those of an evaluation serve all.
            assert graphs.report().replays == 2 * 2 * 12 - graphs.report().eager["warm-up"]
            assert graphs.report().graphs > (2 if groups.pp.is_first else 1)
        sync.close()
        return found + [parameter.detach().clone() for parameter in model.parameters()]

    for found, wanted in zip(run(True), run(False), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))


@pytest.mark.world(2)
@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.journey)])
def test_replayed_layers_of_a_pipeline_have_the_bits_of_the_eager_ones(world: Callable[..., list[Any]], chunks: int) -> None:
    world(check_pipeline, chunks=chunks)


class Block(GraphableMegatronModule):
    """Takes a dict, gives a tuple with a constant."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, more: dict[str, Any]) -> tuple[Tensor, None, Tensor]:
        y = torch.tanh(x @ self.weight) * more["scale"]
        return y, None, (y > 0).sum()


def gradients(block: nn.Module, inputs: list[Tensor], scale: float, order: list[int]) -> tuple[list[Tensor], Tensor]:
    """Forwards of all inputs, then backwards in some order, as a pipeline does."""
    for parameter in block.parameters():
        parameter.grad = None
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [block(x, {"scale": torch.tensor(scale, dtype=torch.float64)}) for x in leaves]
    for place in order:
        outputs[place][0].square().sum().backward()
    grads = [leaf.grad for leaf in leaves]
    total = next(block.parameters()).grad
    assert total is not None and all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None], total


def test_micro_batches_under_way_have_graphs_of_their_own() -> None:
    plain, block = Block(), Block()
    capture = TapeCapture()
    graphs = block.enable_cuda_graphs(CudaGraphConfig(warmup_steps=0), capture=capture)
    inputs = [torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        found, total = gradients(block, inputs, 0.5, order)
        wanted, wanted_total = gradients(plain, inputs, 0.5, order)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert torch.equal(total, wanted_total)
    assert graphs.report().graphs == 3
    assert capture.recorded == 6
    # A forward whose result is dropped gives its graphs back.
    for _ in range(4):
        block(inputs[0].requires_grad_(), {"scale": torch.tensor(0.5, dtype=torch.float64)})
    assert graphs.report().graphs == 3


def test_outputs_without_a_gradient_and_constants_come_through() -> None:
    block = Block()
    block.enable_cuda_graphs(CudaGraphConfig(warmup_steps=0), capture=TapeCapture())
    x = torch.ones(2, 4, dtype=torch.float64)
    for factor in (1.0, -1.0):
        y, nothing, count = block(factor * x, {"scale": torch.tensor(1.0, dtype=torch.float64)})
        assert nothing is None and not count.requires_grad
        assert int(count) == int((y > 0).sum())


def test_another_shape_and_moved_parameters_are_recorded_anew() -> None:
    plain, block = Block(), Block()
    graphs = block.enable_cuda_graphs(CudaGraphConfig(warmup_steps=0), capture=TapeCapture())
    for rows in (2, 5, 2):
        inputs = [torch.ones(rows, 4, dtype=torch.float64)]
        assert torch.equal(gradients(block, inputs, 1.0, [0])[1], gradients(plain, inputs, 1.0, [0])[1])
    assert graphs.report().graphs == 2
    for module in (plain, block):
        module.weight.data = module.weight.data * 2.0
    inputs = [torch.ones(2, 4, dtype=torch.float64)]
    assert torch.equal(gradients(block, inputs, 1.0, [0])[1], gradients(plain, inputs, 1.0, [0])[1])


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


def test_parameters_and_buffers_that_a_module_holds_instead_are_recorded_anew() -> None:
    block, x = Shifted(), torch.ones(3)
    graphs = ModuleGraphs(block, CudaGraphConfig(warmup_steps=0, capture_forward_only=True), capture=TapeCapture())

    def both(wanted: float) -> None:
        with torch.no_grad():
            assert block(x).tolist() == [wanted] * 3
        block.zero_grad()
        result = block(x)
        result.sum().backward()
        assert result.tolist() == [wanted] * 3 and block.weight.grad is not None and block.weight.grad.tolist() == [1.0] * 3

    both(1.0)
    block.load_state_dict({"weight": torch.full((3,), 2.0), "shift": torch.full((3,), 5.0)}, assign=True)
    both(7.0)
    block.shift = torch.full((3,), 6.0)
    both(8.0)
    recorded = graphs._forwards.copy()
    both(8.0)
    assert graphs._forwards == recorded and graphs.report().graphs == 2


class Extended(nn.Module):
    """May lack its shift."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.register_parameter("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if self.shift is None else y + self.shift


def replaced_inner(block: Extended) -> None:
    block.inner = nn.Linear(3, 3, bias=False)


def given_shift(block: Extended) -> None:
    block.shift = nn.Parameter(torch.ones(3))


def given_bias(block: Extended) -> None:
    block.inner.bias = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("change", [replaced_inner, given_shift, given_bias])
@pytest.mark.parametrize("grad", [True, False])
def test_a_block_with_another_submodule_or_one_more_member_is_recorded_anew(change: Callable[[Extended], None], grad: bool) -> None:
    block, x = Extended(), torch.ones(2, 3, requires_grad=True)
    capture = TapeCapture()
    graphs = ModuleGraphs(block, CudaGraphConfig(warmup_steps=0, capture_forward_only=True), capture=capture)

    def result() -> list[float]:
        y = block(x)
        if grad:
            y.sum().backward()
        return y.detach().flatten().tolist()

    with torch.set_grad_enabled(grad):
        before = result()
        change(block)
        after = result()
        recorded = capture.recorded
        assert result() == after == graphs._forward(x).flatten().tolist() != before
    assert capture.recorded == recorded and graphs.report().graphs == 1
    assert not grad or all(parameter.grad is not None for parameter in block.parameters())


def test_calls_with_a_gradient_are_recorded_anew_where_other_parameters_need_one() -> None:
    block, x = nn.Linear(3, 3), torch.ones(2, 3)
    capture = TapeCapture()
    graphs = ModuleGraphs(block, CudaGraphConfig(warmup_steps=0, capture_forward_only=True), capture=capture)

    def both(*wanted: str) -> None:
        block.zero_grad()
        with torch.no_grad():
            block(x)
        block(x).sum().backward()
        assert {name for name, parameter in block.named_parameters() if parameter.grad is not None} == set(wanted)

    block.weight.requires_grad_(False)
    both("bias")
    # As behind an adapter that was merged.
    block.requires_grad_(True)
    both("weight", "bias")
    both("weight", "bias")
    block.bias.requires_grad_(False)
    both("weight")
    # A pair and once what needs no gradient.
    assert graphs.report().graphs == 2 and capture.recorded == 3 * 2 + 1


def test_a_part_alone_in_evaluation_is_recorded_anew() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))
    capture, x = TapeCapture(), torch.ones(2, 3)
    graphs = ModuleGraphs(block, CudaGraphConfig(warmup_steps=0, capture_forward_only=True), capture=capture)

    def both(wanted: Tensor) -> None:
        with torch.no_grad():
            assert torch.equal(block(x), wanted)
        y = block(x)
        assert torch.equal(y, wanted)
        y.sum().backward()

    both(torch.zeros(2, 3))
    block[1].eval()
    both(block[0](x))
    both(block[0](x))
    assert block.training and graphs.report().graphs == 2 and capture.recorded == 2 * 3


def test_parameters_are_judged_as_they_are_at_the_call() -> None:
    config, x = CudaGraphConfig(warmup_steps=0), torch.ones(2, 3)
    late = nn.Linear(3, 3, device="meta")
    graphs = ModuleGraphs(late, config, capture=TapeCapture())
    late.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)}, assign=True)
    late(x).sum().backward()
    assert (graphs.report().graphs, graphs.report().replays, graphs.report().eager) == (1, 1, {})

    block = nn.Linear(3, 3, bias=False)
    graphs = ModuleGraphs(block, config, capture=TapeCapture())
    for trainable in (False, True, False):
        block.weight = nn.Parameter(torch.eye(3), requires_grad=trainable)
        y = block(x)
        assert y.requires_grad == trainable
        if trainable:
            y.sum().backward()
            assert block.weight.grad is not None
    assert (graphs.report().graphs, graphs.report().replays) == (0, 1), "of one that needs no gradient any more no pair is kept"
    assert graphs.report().eager == {"nothing needs a gradient": 2}


def test_calls_that_cannot_be_replayed_run_as_ever_and_tell_why() -> None:
    block = Block()
    graphs = block.enable_cuda_graphs(CudaGraphConfig(warmup_steps=0), capture=TapeCapture())
    x, scale = torch.ones(2, 4, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    with torch.no_grad():
        block(x, {"scale": scale})
    block(x, {"scale": scale, "other": {1, 2}})
    block(x, {"scale": scale, "observe": lambda y: None})
    assert graphs.report().eager == {
        "no gradient is wanted": 1,
        "an input is a function, which a replay does not call": 1,
        "an input is a set, which has no key; pass tensors, numbers and dataclasses of them": 1,
    }
    y = block(x.requires_grad_(), {"scale": scale})[0].sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once for each forward"):
        y.backward()
    block.disable_cuda_graphs()
    assert "forward" not in vars(block)


@pytest.mark.parametrize("narrow_first", [True, False])
def test_calls_under_autocast_run_as_ever(narrow_first: bool) -> None:
    block, x = nn.Linear(3, 3), torch.ones(2, 3)
    graphs = ModuleGraphs(block, CudaGraphConfig(warmup_steps=0), capture=TapeCapture())
    for narrow in (narrow_first, not narrow_first):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            y = block(x)
        assert y.dtype == (torch.bfloat16 if narrow else torch.float32)
        y.sum().backward()
    reason = "autocast chooses its dtypes; give the block parameters and inputs of the dtype instead"
    assert graphs.report().replays == 1 and graphs.report().eager == {reason: 1}


def test_without_a_device_everything_runs_as_ever_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted, _ = trained(None, steps=1)
    found, graphed = trained(lambda model: graph_modules(model), steps=1)
    same(found, wanted)
    assert graphed.report().eager == {"there is no CUDA device": 4}
    graph = IterationGraph(lambda x: x + 1)
    assert graph(torch.ones(1)) == 2.0
    assert graph.report().eager == {"there is no CUDA device": 1}


def test_evaluation_stays_eager() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), seed=3)
    with graph_modules(model, config=CudaGraphConfig(warmup_steps=0), capture=TapeCapture()) as graphed:
        evaluate(model, [batch(0)], CrossEntropyObjective())
        assert graphed.report().eager == {"no gradient is wanted": 2}
    assert all("forward" not in vars(layer) for layer in model.layers.values())


def test_calls_without_a_gradient_are_captured_where_they_are_asked_for() -> None:
    plain = GPTModel(CONFIG, ProcessGroups.single(), dtype=torch.float64, seed=3)
    model = GPTModel(CONFIG, ProcessGroups.single(), dtype=torch.float64, seed=3)
    capture = TapeCapture()
    config = CudaGraphConfig(warmup_steps=1, capture_forward_only=True)
    with graph_modules(model, config=config, capture=capture) as graphed:
        for number in range(3):
            losses = [evaluate(each, [batch(number)], CrossEntropyObjective()).sum for each in (plain, model)]
            assert torch.equal(*losses)
            with torch.no_grad():
                for each in (plain, model):
                    for parameter in each.parameters():
                        parameter.mul_(1.01)
        report = graphed.report()
        assert (report.graphs, report.replays, report.eager) == (2, 4, {"warm-up": 2})
        # Of all layers, in which their results lie until the next one.
        assert capture.recorded == 2 and len(set(map(id, capture.pools))) == 1
        outputs = []
        for number in range(2):
            with torch.no_grad():
                outputs.append([each(batch(number).tokens.flatten(), batch(number).step())[0].hidden for each in (plain, model)])
        assert all(torch.equal(*pair) for pair in outputs), "what was given out stays"
        # A layer in training is another one, and so is one whose parameters lie elsewhere.
        assert graphed.report().graphs == 4
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.data = parameter.data * 2.0
        assert torch.equal(*(evaluate(each, [batch(3)], CrossEntropyObjective()).sum for each in (plain, model)))
        assert graphed.report().graphs == 4 and capture.recorded == 6
    assert graphed.report().graphs == 0


def test_a_star_names_parts_and_not_the_model_around_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with graph_modules(model, ("*",), capture=TapeCapture()) as graphed:
        assert list(graphed.blocks) == ["0", "1"]
    with graph_modules(model, ("",), capture=TapeCapture()) as graphed:
        assert [block.module for block in graphed.blocks.values()] == [model]


def test_dropped_pairs_go_while_forwards_stay_and_no_second_warm_up_follows() -> None:
    model = nn.ModuleDict({"0": Shifted(), "1": Shifted()})
    capture = TapeCapture()
    graphed = graph_modules(model, ("*",), CudaGraphConfig(warmup_steps=1, capture_forward_only=True), capture=capture)

    def both() -> None:
        for block in model.values():
            with torch.no_grad():
                assert block(torch.ones(3)).tolist() == [1.0] * 3
            block.zero_grad()
            block(torch.ones(3)).sum().backward()
            assert block.weight.grad.tolist() == [1.0] * 3

    both()
    both()
    assert graphed.report().graphs == 4 and graphed.report().eager == {"warm-up": 4}
    recorded, pairs = capture.recorded, [weakref.ref(graphs._pairs.copy().popitem()[1][0]) for graphs in graphed.blocks.values()]
    graphed.drop_pairs()
    gc.collect()
    assert graphed.report().graphs == 2 and not any(pair() for pair in pairs), "what they hold is given back"
    both()
    report = graphed.report()
    # A forward and a backward of each block.
    assert capture.recorded == recorded + 4 and (report.graphs, report.replays, report.eager) == (4, 8, {"warm-up": 4})


def test_another_library_captures_no_call_without_a_gradient() -> None:
    with pytest.raises(ValueError, match="capture_forward_only=True: cuda_graph_impl='transformer_engine' captures forwards with their"):
        CudaGraphConfig(capture_forward_only=True, cuda_graph_impl="transformer_engine")
    with pytest.raises(ValueError, match="capture_forward_only=True: an ExternalCapture captures forwards with their backwards alone"):
        ModuleGraphs(Block(), CudaGraphConfig(capture_forward_only=True), capture=ExternalCapture(lambda module, samples: module))


class Host(nn.Linear):
    """Says what no graph can hold of it."""

    def graph_obstacle(self) -> str | None:
        return None if self.bias is None else "bias=True asks the host; set it to False"


class Noisy(nn.Dropout):
    """Draws random numbers."""

    @property
    def noise_fields(self) -> str:
        return f"p={self.p}" if self.p else ""


def test_a_part_says_why_no_graph_can_hold_it() -> None:
    with pytest.raises(CaptureError, match="0: bias=True asks the host; set it to False"):
        ModuleGraphs(nn.Sequential(Host(2, 2)), capture=TapeCapture())
    ModuleGraphs(nn.Sequential(Host(2, 2, bias=False)), capture=TapeCapture())


def test_what_draws_random_numbers_is_not_run_again_in_a_backward() -> None:
    again = CudaGraphConfig(recompute=True)
    with pytest.raises(CaptureError, match=r"0 draws random numbers \(p=0.5\).*CudaGraphConfig.recompute=True would draw others"):
        ModuleGraphs(nn.Sequential(Noisy(0.5)), again, capture=TapeCapture())
    ModuleGraphs(nn.Sequential(Noisy(0.5)), capture=TapeCapture())
    ModuleGraphs(nn.Sequential(Noisy(0.0)), again, capture=TapeCapture())


def test_what_no_graph_can_hold_is_refused_before_the_first_step() -> None:
    groups = ProcessGroups.single()
    with pytest.raises(CaptureError, match=r"preserve_rng_state=False"):
        graph_modules(GPTModel(CONFIG, groups, seed=None, recompute=RecomputeConfig(modules=("mlp",))), capture=TapeCapture())
    with pytest.raises(CaptureError, match="leave offloading out"):
        graph_modules(GPTModel(CONFIG, groups, seed=None, offload=OffloadConfig(modules=("mlp",))), capture=TapeCapture())
    model = GPTModel(CONFIG, groups, seed=None)
    with pytest.raises(ValueError, match=r"'layer\.\*'"):
        graph_modules(model, ["layer.*"], capture=TapeCapture())
    with pytest.raises(ValueError, match="around it"):
        graph_modules(model, ["layers.*", "layers.*.mlp"], capture=TapeCapture())
    with pytest.raises(ValueError, match="patterns choose 'layers.0' and '' around it"):
        graph_modules(model, ["", "layers.*"], capture=TapeCapture())
    handle = model.layers["1"].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="mlp has forward hooks"):
        graph_modules(model, capture=TapeCapture())
    assert all("forward" not in vars(layer) for layer in model.layers.values()), "a refusal leaves nothing behind"
    handle.remove()
    graph_modules(model, capture=TapeCapture())
    with pytest.raises(ValueError, match="replaced already"):
        ModuleGraphs(model.layers["0"], capture=TapeCapture())


class Replacing(nn.Module):
    """Counts its calls in another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        if self.last is None:
            self.last = torch.zeros(3)
        return x * self.weight


@pytest.mark.parametrize(("external", "grad"), [(False, False), (False, True), (True, True)])
def test_a_forward_that_replaces_its_buffers_is_refused_and_they_stay(external: bool, grad: bool) -> None:
    part, capture = Replacing(), ExternalCapture(library) if external else TapeCapture()
    block, seen = nn.Sequential(part), part.seen
    graphs = ModuleGraphs(block, CudaGraphConfig(warmup_steps=0, capture_forward_only=not external), capture=capture)
    refused = pytest.raises(
        CaptureError, match=r"Sequential sets 0\.seen, 0\.last, which a replay does not; let that be there before, and write"
    )
    with torch.set_grad_enabled(grad), refused:
        block(torch.ones(3, requires_grad=True))
    assert part.seen is seen and seen == 0.0 and part.last is None and graphs.report().graphs == 0


@pytest.mark.parametrize("steps", [-1])
def test_negative_warm_ups_are_refused(steps: int) -> None:
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        CudaGraphConfig(warmup_steps=steps)
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        IterationGraph(lambda: None, warmup_steps=steps)


def library(module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """Captures as Transformer Engine does: one pass for real, then a forward and a backward over inputs whose memory stays."""
    wanted = [tensor for tensor in samples if tensor.requires_grad]
    capture = TapeCapture()

    def backward(outputs: tuple[Tensor, ...], grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        ends = [tensor for tensor in outputs if tensor.requires_grad]
        return torch.autograd.grad(ends, wanted, grads, allow_unused=True, retain_graph=True)

    warm = module(*samples)
    backward(warm, [torch.full_like(tensor, float("nan")) for tensor in warm if tensor.requires_grad])
    outputs, replay_forward = capture.record(lambda: module(*samples), None)
    grads_out = [torch.zeros_like(tensor) for tensor in outputs if tensor.requires_grad]
    grads_in, replay_backward = capture.record(lambda: backward(outputs, grads_out), None)

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            for sample, tensor in zip(samples, inputs, strict=True):
                if sample.data_ptr() != tensor.data_ptr():
                    sample.copy_(tensor)
            replay_forward()
            return tuple(tensor.detach() for tensor in outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            for target, grad in zip(grads_out, grads, strict=True):
                target.copy_(grad)
            replay_backward()
            given = iter(grads_in)
            return tuple(next(given) if sample.requires_grad else None for sample in samples)

    return Graphed.apply


@pytest.mark.parametrize("fusion", [False, True])
def test_blocks_that_a_library_captures_train_with_the_bits_of_the_eager_ones(fusion: bool) -> None:
    wanted, _ = trained(None, fusion=fusion)
    found, graphed = trained(lambda model: graph_modules(model, capture=ExternalCapture(library)), fusion=fusion)
    same(found, wanted)
    report = graphed.report()
    assert report.graphs == 2, "one micro-batch is under way at a time"
    assert report.replays == 2 * (3 * 2 - 3)


def test_a_library_captures_a_pair_for_each_micro_batch_under_way() -> None:
    block = nn.Linear(3, 3, dtype=torch.float64)
    graphs = ModuleGraphs(block, CudaGraphConfig(warmup_steps=0), capture=ExternalCapture(library))
    inputs = [torch.full((2, 3), float(number), dtype=torch.float64, requires_grad=True) for number in range(1, 4)]
    first, second = block(inputs[0]), block(inputs[1])
    first.sum().backward()
    third = block(inputs[2])
    (second.sum() + third.sum()).backward()
    assert graphs.report().graphs == 2
    torch.testing.assert_close(block.weight.grad, torch.full((3, 3), 2.0 * (1 + 2 + 3), dtype=torch.float64))
    again = block(inputs[0])
    again.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once for each forward"):
        again.sum().backward()
    with pytest.raises(CaptureError, match="no input of Linear needs a gradient.*use 'local'"):
        block(torch.ones(1, 3, dtype=torch.float64))


def test_who_captures_is_a_choice_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not CudaGraphConfig().is_external
    assert CudaGraphConfig(external_cuda_graph=True).is_external and CudaGraphConfig(cuda_graph_impl="transformer_engine").is_external
    with pytest.raises(ValueError, match="cuda_graph_impl='full' must be one of 'local', 'transformer_engine'"):
        CudaGraphConfig(cuda_graph_impl="full")
    assert CudaGraphConfig(external_cuda_graph=True).capture() is None or torch.cuda.is_available()
    if importlib.util.find_spec("transformer_engine") is None:
        monkeypatch.setattr("mcore_parallel.graphs._module.why_not", lambda: "")
        with pytest.raises(CaptureError, match=r"transformer_engine, which is not installed: pip install 'mcore-parallel\[te\]', or use"):
            CudaGraphConfig(external_cuda_graph=True).capture()
