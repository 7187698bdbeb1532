# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Estimated memory against tensors that are alive in real steps."""

import dataclasses
import importlib
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, ModelOutput, TransformerConfig, hybrid_config, place_layers
from mcore_parallel.nn import LatentAttentionConfig, RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineConfig
from mcore_parallel.planner import Layout, ModelSizes, Workload, estimate
from mcore_parallel.planner._activations import head_bytes, stage_activations
from mcore_parallel.planner._parameters import stage_parts
from mcore_parallel.planner._sizes import sizes
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step

B, S = 2, 64
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
GROUPED = TransformerConfig(**SIZES, num_query_groups=2)
NARROW = TransformerConfig(**SIZES, ffn_hidden_size=96, kv_channels=24)
RECOMPUTE = {
    "nothing": None,
    "core": RecomputeConfig(),
    "attention": RecomputeConfig(modules=("attention",)),
    "mlp": RecomputeConfig(modules=("mlp",)),
    "norm": RecomputeConfig(modules=("norm",)),
    "norm and mlp": RecomputeConfig(modules=("norm", "mlp")),
    "norm and attention": RecomputeConfig(modules=("norm", "attention")),
    "layers": RecomputeConfig(granularity="full"),
    "pairs of layers": RecomputeConfig(granularity="full", num_layers=2),
    "the first layers": RecomputeConfig(granularity="full", method="block", num_layers=2),
}


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that operators make, as long as something refers to them."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._known = [tensor.untyped_storage() for tensor in known]
        self._sizes.update(dict.fromkeys(self._known, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._sizes:
                self._sizes[storage] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


def workload(config: TransformerConfig, dtype: torch.dtype, microbatches: int = 1) -> Workload:
    return Workload(model=ModelSizes(config=config), sequence=S, global_batch=B * microbatches, micro_batch=B, dtype=dtype)


def kept_bytes(config: TransformerConfig, dtype: torch.dtype, recompute: RecomputeConfig | None, kernels: bool) -> tuple[int, int]:
    """Estimates: of layers, tables and token ids, and of the final norm and its result."""
    work, layout = workload(config, dtype), Layout(plan=ParallelPlan(), recompute=recompute)
    found = stage_activations(work, layout, stage_parts(config, 1, 1, 0), 1, kernels=kernels)
    s = sizes(work, layout, kernels=kernels)
    return found.kept, s.norm + s.hidden


@pytest.fixture(params=[False, True], ids=["operators", "kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernels of a GPU are in place: all of their memory, and none of their arithmetic."""
    if request.param:
        names = ("nn._triton_layers", "nn._triton_activations", "tensor_parallel._triton_rows", "tensor_parallel._triton_embedding")
        for module in [pytest.importorskip(f"mcore_parallel.{name}") for name in names]:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, Unlaunched())
        for name in ("_fused", "_rope", "_attention", "_activations", "_mlp", "_norm"):
            monkeypatch.setattr(importlib.import_module(f"mcore_parallel.nn.{name}"), "has_kernel", lambda x: True, raising=False)
        for name in ("_rows", "_picked_rows"):
            monkeypatch.setattr(importlib.import_module(f"mcore_parallel.tensor_parallel.{name}"), "use_triton", lambda x: True)
        for name in ("_fused_linear", "_weight_gradient"):
            module = importlib.import_module(f"mcore_parallel.tensor_parallel.{name}")
            monkeypatch.setattr(module, "add_product_", lambda total, grad, x: None)
    return request.param


class Unlaunched:
    """A kernel that is called as one and does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


@pytest.mark.parametrize("config", [GROUPED, NARROW], ids=["grouped", "narrow"])
@pytest.mark.parametrize("name", ["nothing", "core", "mlp"])
def test_kept_activations_are_the_saved_tensors(name: str, config: TransformerConfig, kernels: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = GPTModel(config, ProcessGroups.single(), dtype=dtype, recompute=RECOMPUTE[name])
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found: dict[int, Any] = {}

        def pack(tensor: Tensor, own: set[int] = own, found: dict[int, Any] = found) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output, _ = model(torch.zeros(B * S, dtype=torch.int64), Step.causal(B, S))
        assert isinstance(output, ModelOutput)
        kept, ends = kept_bytes(config, dtype, RECOMPUTE[name], kernels)
        # The result of the final norm is not saved before a loss is made of it.
        result = output.hidden.untyped_storage().nbytes()
        assert kept + ends - result == pytest.approx(sum(storage.nbytes() for storage in found.values()), rel=0.002)


def test_kept_activations_are_what_is_alive_after_the_forward(kernels: bool) -> None:
    for name, recompute in RECOMPUTE.items():
        for dtype in (torch.bfloat16, torch.float32):
            model = GPTModel(GROUPED, ProcessGroups.single(), dtype=dtype, recompute=recompute)
            tokens, step = torch.zeros(B * S, dtype=torch.int64), Step.causal(B, S)
            with Alive(model.parameters()) as alive:
                output, _ = model(tokens, step)
            estimated = sum(kept_bytes(GROUPED, dtype, recompute, kernels))
            assert estimated == pytest.approx(alive.now + tokens.nbytes, rel=0.005), (name, dtype)
            del output


@pytest.mark.parametrize("fusion", [True, False])
def test_the_loss_keeps_what_is_estimated(fusion: bool) -> None:
    model = GPTModel(GROUPED, ProcessGroups.single(), dtype=torch.bfloat16)
    sync = DistributedDataParallel(DistributedDataParallelConfig(gradient_accumulation_fusion=fusion), model, ProcessGroups.single())
    labels, mask = torch.zeros(B * S, dtype=torch.int64), torch.ones(B * S)
    output, _ = sync(labels, Step.causal(B, S))
    with Alive([output.hidden, *model.parameters(), *(buffer.data for buffer in sync.grad_buffers)]) as alive:
        loss = output.loss_sum(labels, mask)
    s = sizes(workload(GROUPED, torch.bfloat16), Layout(plan=ParallelPlan()), kernels=False)
    assert head_bytes(s, fusion=fusion).kept - s.norm - s.hidden == pytest.approx(alive.now, rel=0.02)
    del loss


@pytest.mark.parametrize("vocab_size", [32, pytest.param(1024, marks=pytest.mark.journey)])
def test_the_peak_of_a_step_is_estimated(vocab_size: int, kernels: bool) -> None:
    config = TransformerConfig(**{**SIZES, "vocab_size": vocab_size}, num_query_groups=2)
    for name in ("nothing", "norm", "norm and mlp", "layers"):
        recompute = RECOMPUTE[name]
        # In every other run weight gradients go straight into the main gradients.
        for dtype, fusion in ((torch.bfloat16, len(name) % 2 == 0), (torch.float32, len(name) % 2 == 1)):
            sync = DistributedDataParallelConfig(gradient_accumulation_fusion=fusion)
            layout = Layout(plan=ParallelPlan(), recompute=recompute, sync=sync)
            measured, _ = peak(ProcessGroups.single(), config, layout, dtype, 1)
            memory = estimate(workload(config, dtype), layout, kernels=kernels)
            workspace = 2 * (32 << 20) if kernels else 0
            assert memory.allocated - workspace == pytest.approx(measured, rel=0.03), (name, dtype, fusion, memory)


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.journey),
        pytest.param({"tp": 2, "sequence_parallel": False}, marks=pytest.mark.journey),
        {"dp": 2},
        pytest.param({"pp": 2}, marks=pytest.mark.journey),
        pytest.param({"pp": 2, "vpp": 2}, marks=pytest.mark.journey),
    ],
    ids=str,
)
@pytest.mark.world(2, shared=True)
def test_the_peak_of_every_rank_is_estimated(world: Any, degrees: dict[str, Any]) -> None:
    world(check_peak, degrees=degrees, config=GROUPED)


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_table_at_both_ends_is_estimated(world: Any) -> None:
    world(check_peak, degrees={"pp": 2}, config=dataclasses.replace(GROUPED, share_embeddings_and_output_weights=True))


def check_peak(degrees: dict[str, Any], config: TransformerConfig) -> None:
    torch.set_num_threads(1)
    plan = ParallelPlan(**degrees)
    groups = ProcessGroups.build(plan)
    # As many as are in flight at most, and one more, or two that add up.
    microbatches = 2 if plan.pp == 1 else 3 if plan.vpp == 1 else 4
    # Gloo copies a bucket to sum it, which shows where there are few activations.
    choices = {torch.bfloat16: ("nothing", "norm and mlp"), torch.float32: ("layers",)}
    for dtype, names in choices.items():
        for name in names if plan.dp == 1 else ("nothing",):
            layout = Layout(plan=plan, recompute=RECOMPUTE[name], sync=DistributedDataParallelConfig(use_distributed_optimizer=plan.dp > 1))
            measured, static = peak(groups, config, layout, dtype, microbatches)
            work = workload(config, dtype, microbatches * plan.dp)
            memory = estimate(work, layout, stage=groups.pp.rank, kernels=False)
            assert memory.params + memory.grads + memory.optimizer == pytest.approx(static, rel=0.01)
            assert memory.allocated == pytest.approx(measured, rel=0.06), (name, dtype, measured, memory)


@pytest.mark.world(2)
def test_a_ring_keeps_what_is_estimated(world: Any) -> None:
    world(check_ring)


def check_ring() -> None:
    torch.set_num_threads(1)
    plan = ParallelPlan(cp=2)
    groups = ProcessGroups.build(plan)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    share = Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(B, S)).context_share(groups.cp)
    step, mine = share.step(), share.tokens.flatten()
    for dtype in (torch.bfloat16, torch.float32):
        model = GPTModel(GROUPED, groups, dtype=dtype)
        with Alive([*model.parameters(), mine, step.positions]) as alive:
            output, _ = model(mine, step)
        work, layout = workload(GROUPED, dtype), Layout(plan=plan)
        s = sizes(work, layout, kernels=False)
        found = stage_activations(work, layout, stage_parts(GROUPED, 1, 1, 0), 1, kernels=False)
        assert found.kept + s.norm + s.hidden == pytest.approx(alive.now + mine.nbytes, rel=0.02)
        del output


def peak(groups: ProcessGroups, config: TransformerConfig, layout: Layout, dtype: torch.dtype, microbatches: int) -> tuple[int, int]:
    """Most bytes alive during a step, and those of parameters, gradients and states."""
    plan = layout.plan
    pipeline = place_layers(config, PipelineConfig(), num_stages=plan.pp, num_chunks=plan.vpp)
    chunks = [GPTModel(config, groups, layers=part, recompute=layout.recompute, dtype=dtype) for part in pipeline.of_rank(groups.pp.rank)]
    model = chunks[0] if len(chunks) == 1 else ModelChunks(chunks)
    sync = DistributedDataParallel(layout.sync, model, groups)
    options = OptimizerConfig(lr=1e-3, use_distributed_optimizer=layout.sync.use_distributed_optimizer)
    optimizer = MegatronOptimizer(options, sync, groups)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    batches = [Batch(tokens=tokens.clone(), labels=tokens.clone(), loss_mask=torch.ones(B, S)) for _ in range(microbatches)]
    fixed = [*model.parameters(), *(buffer.data for buffer in sync.grad_buffers)]
    static = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in fixed}
    total = sum(static.values()) + optimizer.state_bytes["device"]
    inputs = [tensor for batch in batches for tensor in (batch.tokens, batch.labels, batch.loss_mask)]
    states = [holder.data for unit in optimizer._units for _, holder in unit.storages()]
    with Alive([*fixed, *inputs, *states]) as alive:
        train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=1e-3, groups=groups)
    return total + sum(tensor.nbytes for tensor in inputs) + alive.peak, total


OTHERS = {
    "latent attention": TransformerConfig(
        **SIZES,
        latent_attention=LatentAttentionConfig(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    ),
    "no gate": TransformerConfig(**SIZES, activation="squared_relu"),
    "further tokens": TransformerConfig(**SIZES, mtp_num_layers=2),
    "pattern": hybrid_config("*-*-|*--", **{name: SIZES[name] for name in SIZES if name != "num_layers"}, position_embedding_type="rope"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_peak_of_other_families_is_estimated_roughly(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        layout = Layout(plan=ParallelPlan())
        measured, static = peak(ProcessGroups.single(), OTHERS[name], layout, dtype, 1)
        memory = estimate(workload(OTHERS[name], dtype), layout, kernels=False)
        assert memory.params + memory.grads + memory.optimizer == pytest.approx(static, rel=0.01)
        assert memory.allocated - static == pytest.approx(measured - static, rel=0.25), (dtype, memory)
