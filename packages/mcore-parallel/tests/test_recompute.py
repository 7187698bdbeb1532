# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recomputation gives the bits of a plain run and keeps less."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import OffloadConfig, RecomputeConfig, Step, causal_attention, discard_output, recompute
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import MainGradient, WeightGradientSink
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step

CONFIG = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=24)
CHOICES = {
    "core": RecomputeConfig(),
    "attention": RecomputeConfig(modules=("attention",)),
    "mlp": RecomputeConfig(modules=("mlp",)),
    "norm": RecomputeConfig(modules=("norm",)),
    "all parts": RecomputeConfig(modules=("norm", "attention", "mlp")),
    "norm and core": RecomputeConfig(modules=("norm", "core_attention"), preserve_rng_state=False),
    "full": RecomputeConfig(granularity="full"),
    "full in threes": RecomputeConfig(granularity="full", num_layers=3),
    "first layers": RecomputeConfig(granularity="full", method="block", num_layers=2),
}


def dropping_core(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
    """Attention that draws random numbers."""
    return F.dropout(causal_attention(q, k, v, layer, step), 0.3)


def run(config: RecomputeConfig | None, groups: ProcessGroups, **options) -> tuple[list[Tensor], int]:
    """Loss and gradients of two micro-batches, and the bytes kept for the backward of the first one."""
    model = GPTModel(CONFIG, groups, dtype=torch.float64, seed=1, recompute=config, **options)
    tokens = torch.randint(0, 16, (24,), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(5)
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    losses = []
    for microbatch in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(tokens, Step.causal(4, 6))[0]
        if microbatch == 0:
            size = sum(kept.values())
        loss = hidden.token_losses(tokens).sum()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, torch.rand(1), *(parameter.grad for parameter in model.parameters())], size


def compare(groups: ProcessGroups, **options) -> None:
    plain, size = run(None, groups, **options)
    for name, config in CHOICES.items():
        if "attention_core" in options and not config.preserve_rng_state:
            continue
        again, smaller = run(config, groups, **options)
        for ours, expected in zip(again, plain, strict=True):
            assert torch.equal(ours, expected), name
        assert smaller < size, (name, smaller, size)


def test_every_choice_has_the_bits_of_a_plain_run_and_keeps_less() -> None:
    compare(ProcessGroups.single())


def test_random_numbers_are_replayed() -> None:
    compare(ProcessGroups.single(), attention_core=dropping_core)


def check_ranks(tp: int) -> None:
    for sequence_parallel in (False, True):
        groups = ProcessGroups.build(ParallelPlan(tp=tp, sequence_parallel=sequence_parallel))
        compare(groups)
        if not sequence_parallel:
            full, _ = run(RecomputeConfig(granularity="full"), groups)
            shared, _ = run(RecomputeConfig(granularity="full", distribute_saved_activations=True), groups)
            for ours, expected in zip(shared, full, strict=True):
                assert torch.equal(ours, expected)
            for share in (None, groups.tp):
                leaf = torch.ones(4, 2, requires_grad=True)
                x = leaf * 2.0
                alive = weakref.ref(x)
                y = recompute(torch.exp, x, share=share)
                del x
                assert (alive() is None) == (share is not None), "the whole input is kept by nobody when it is shared"
                y.sum().backward()
                torch.testing.assert_close(leaf.grad, torch.full((4, 2), 2 * 2.718281828459045**2))


@pytest.mark.journey
@pytest.mark.world(2)
def test_every_choice_works_on_two_ranks(world) -> None:
    world(check_ranks, tp=2)


def partly(count: int, num_layers: int) -> RecomputeConfig:
    return RecomputeConfig(
        granularity="full", method="block", num_layers=num_layers, num_microbatches_with_partial_activation_checkpoints=count
    )


# Stage 0 of two holds two micro-batches at once, the last one a single one; layer by layer how often four micro-batches run again.
RUNS_AGAIN = [
    (partly(0, 1), {0: 4, 1: 4, 2: 4, 3: 4}),
    (partly(1, 1), {0: 4, 1: 2, 2: 4, 3: 0}),
    (partly(1, 0), {0: 2, 1: 2, 2: 0, 3: 0}),
    (partly(2, 1), {0: 4, 1: 0, 2: 4, 3: 0}),
]


def check_partial() -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    tokens = torch.arange(12).view(2, 6)
    batches = [Batch(tokens=tokens, labels=tokens.roll(-1), loss_mask=torch.ones(2, 6)) for _ in range(4)]

    def train(config: RecomputeConfig | None) -> tuple[list[Tensor], dict[int, int]]:
        model = GPTModel(CONFIG, groups, dtype=torch.float64, seed=1, recompute=config)
        runs = dict.fromkeys(model.stage_layers, -len(batches))
        for number in model.stage_layers:
            model.layers[str(number)].register_forward_pre_hook(lambda *_, number=number: runs.update({number: runs[number] + 1}))
        ddp = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
        train_step(model, batches, CrossEntropyObjective(), ddp, MegatronOptimizer(OptimizerConfig(lr=0.1), ddp, groups), lr=0.1)
        return [grad.clone() for grad in ddp.gradients().values()], runs

    plain, runs = train(None)
    assert set(runs.values()) == {0}
    for config, expected in RUNS_AGAIN:
        found, runs = train(config)
        assert runs == {layer: count for layer, count in expected.items() if layer in runs}
        assert len(runs) == 2 and all(map(torch.equal, found, plain))


@pytest.mark.journey
@pytest.mark.world(2)
def test_the_first_micro_batches_in_flight_run_only_a_part_again(world) -> None:
    world(check_partial)


def test_without_a_schedule_every_pass_runs_all_layers_again() -> None:
    assert partly(1, 1).spans(3) == [(0, 1, True), (1, 2, True), (2, 3, True)]
    assert partly(1, 1).spans(3, 0) == [(0, 1, True), (1, 3, False)]


def test_partial_recomputation_excludes_offloading() -> None:
    with pytest.raises(ValueError, match="exclude one another"):
        GPTModel(CONFIG, ProcessGroups.single(), recompute=partly(1, 1), offload=OffloadConfig(), seed=None)


def check_pipeline() -> None:
    class Ignore:
        def zero_grad_buffer(self): ...

        def no_sync(self):
            import contextlib

            return contextlib.nullcontext()

        def finish_grad_sync(self): ...

    class Keep:
        def step(self, *, grad_scale, lr):
            return type("Result", (), {"grad_norm": torch.zeros(()), "skipped": False})()

    groups = ProcessGroups.build(ParallelPlan(pp=2))
    tokens = torch.arange(12).view(2, 6)
    batches = [Batch(tokens=tokens, labels=tokens.roll(-1), loss_mask=torch.ones(2, 6)) for _ in range(3)]
    results = []
    for config in (None, CHOICES["all parts"], CHOICES["full"]):
        model = GPTModel(CONFIG, groups, dtype=torch.float64, seed=1, recompute=config)
        report = train_step(model, batches, CrossEntropyObjective(), Ignore(), Keep(), lr=0.1)
        results.append([torch.tensor(report.loss), *(parameter.grad for parameter in model.parameters())])
    for other in results[1:]:
        for ours, expected in zip(other, results[0], strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.world(2)
def test_recomputation_works_in_a_pipeline(world) -> None:
    world(check_pipeline)


def test_weight_gradients_added_by_the_layers_are_added_once() -> None:
    totals = []
    for config in (None, CHOICES["all parts"], CHOICES["full"]):
        model = GPTModel(CONFIG, ProcessGroups.single(), dtype=torch.float64, seed=1, recompute=config)
        sinks = [module for module in model.modules() if isinstance(module, WeightGradientSink)]
        mains = [MainGradient(torch.zeros_like(sink.weight)) for sink in sinks]
        for sink, main in zip(sinks, mains, strict=True):
            sink.accumulate_weight_gradients_into({"weight": main})
        tokens = torch.arange(12)
        model(tokens, Step.causal(2, 6))[0].loss_sum(tokens, torch.ones(12)).backward()
        totals.append([main.total for main in mains])
    for other in totals[1:]:
        assert all(torch.equal(ours, expected) for ours, expected in zip(other, totals[0], strict=True))


def test_discarded_output_is_gone_after_the_forward_and_comes_back() -> None:
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    runs: list[weakref.ref[Tensor]] = []

    def produce(x: Tensor) -> Tensor:
        y = x.exp() * x.sigmoid()
        runs.append(weakref.ref(y))
        return y

    def consume(y: Tensor) -> Tensor:
        return (y @ weight).relu() + (y.T.contiguous() @ y).sum()

    expected = torch.autograd.grad(consume(x.exp() * x.sigmoid()).sum(), (x, weight))
    z = discard_output(produce, consume, x).sum()
    gc.collect()
    assert len(runs) == 1 and runs[0]() is None
    for count in (2, 3):
        found = torch.autograd.grad(z, (x, weight), retain_graph=True)
        assert len(runs) == count, "one second run serves every place"
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        assert runs[-1]() is None


def test_a_second_tensor_of_the_producer_is_handed_back() -> None:
    x = torch.randn(5, requires_grad=True)

    def produce(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x * 2

    result, more = discard_output(produce, lambda y: y * y, x)
    expected = torch.autograd.grad((x.exp() ** 2 * (x * 2)).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((result * more).sum(), x), expected)
    with torch.no_grad():
        result, more = discard_output(produce, lambda y: y * y, x)
        assert torch.equal(result, x.exp() * x.exp()) and torch.equal(more, x * 2)


def test_a_function_that_changes_its_mind_is_named() -> None:
    calls = []

    def produce(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp() if len(calls) == 1 else x.exp().sin()

    y = discard_output(produce, lambda y: y * y, torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="the second run saved 2 tensors, the first 1"):
        y.sum().backward()


def test_nothing_is_set_up_without_gradients() -> None:
    x = torch.ones(2)
    with torch.no_grad():
        assert torch.equal(recompute(torch.exp, x), x.exp())
        assert torch.equal(discard_output(torch.exp, torch.sin, x), x.exp().sin())


# Torch makes an object of its own class, and warns of it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layers_compile_with_recomputation() -> None:
    tokens, step = torch.arange(6), Step.causal(1, 6)
    config = RecomputeConfig(modules=("norm", "mlp"))
    grads = []
    for compiled in (False, True):
        model = GPTModel(CONFIG, ProcessGroups.single(), layers=range(1), dtype=torch.float64, seed=1, recompute=config)
        layer = model.layers["0"]
        run = torch.compile(layer, backend="aot_eager") if compiled else layer
        run(model.embedding(tokens).detach().requires_grad_(), step)[0].square().sum().backward()
        grads.append([parameter.grad for parameter in layer.parameters()])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "none"}, "granularity='none' must be"),
        ({"method": "block"}, "method='block' says which layers run again as a whole; set granularity='full'"),
        ({"modules": ("norm",), "num_layers": 2}, "num_layers=2 says which layers run again as a whole"),
        ({"modules": ("mlp", "moe")}, r"modules holds \['moe'\]"),
        ({"modules": ()}, "modules is empty"),
        ({"modules": ("attention", "core_attention")}, "drop one"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"method": "random"}, "method='random'"),
        ({"distribute_saved_activations": True}, "needs granularity='full'"),
        ({"num_microbatches_with_partial_activation_checkpoints": 1}, "needs granularity='full' and method='block'"),
        ({"granularity": "full", "num_microbatches_with_partial_activation_checkpoints": 1}, "needs granularity='full' and method='block'"),
        ({"granularity": "full", "method": "block", "num_microbatches_with_partial_activation_checkpoints": -1}, "must not be negative"),
    ],
)
def test_bad_choices_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        RecomputeConfig(**options)


def test_spans_cover_every_layer_once() -> None:
    for config in CHOICES.values():
        for num_layers in range(6):
            spans = config.spans(num_layers)
            assert [layer for first, end, _ in spans for layer in range(first, end)] == list(range(num_layers))
    assert CHOICES["first layers"].spans(4) == [(0, 1, True), (1, 2, True), (2, 4, False)]
