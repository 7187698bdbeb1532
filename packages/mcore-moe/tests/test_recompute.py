# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parts of experts that are recomputed give the bits of a plain run and keep less."""

import dataclasses
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_moe import GroupedMLP, MoEConfig, MoELayer, SequentialMLP, moe_feed_forward
from mcore_moe.dispatch import MoEAlltoAllTokenDispatcher
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import BertModel, GPTModel, Site, TransformerConfig
from mcore_parallel.nn import Activation, LayerMemory, OffloadConfig, RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import PipelineConfig
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from tests.support.held_memory import held_and_results

CONFIG = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=12, init_method_std=0.3)
MIXTURE = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01)
SHARED = dataclasses.replace(MIXTURE, moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True)
OVERLAPPED = dataclasses.replace(SHARED, moe_shared_expert_overlap=True)
BIASED = dataclasses.replace(CONFIG, activation="quick_geglu", activation_func_clamp_value=0.5, glu_linear_offset=1.0, add_bias_linear=True)
ALONE = ProcessGroups.single()
TOKENS, ROWS, BYTES = 12, 24, 8


def model_of(modules: tuple[str, ...], groups: ProcessGroups, config: TransformerConfig, mixture: MoEConfig) -> GPTModel:
    recompute = RecomputeConfig(modules=modules) if modules else None
    return GPTModel(config, groups, feed_forward=moe_feed_forward(mixture), recompute=recompute, dtype=torch.float64, seed=3)


def gradients(model: GPTModel) -> tuple[list[Tensor | None], list[Tensor]]:
    """Loss and gradients of a step, and what is saved for its backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    tokens = torch.randint(0, 16, (TOKENS,), generator=torch.Generator().manual_seed(2))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output, aux = model(tokens, Step.causal(2, 6))
    loss = output.token_losses(tokens).sum()
    assert aux is not None
    (loss + aux.total()).backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())], saved


def num_bytes(saved: list[Tensor], model: GPTModel) -> int:
    """Of the storages, each once, without the weights'."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(size for address, size in storages.items() if address not in weights)


@pytest.mark.parametrize("modules", [("moe_act",), ("shared_experts",), ("norm", "moe_act", "shared_experts"), ("moe_act", "attention")])
@pytest.mark.parametrize("config", [CONFIG, BIASED, dataclasses.replace(CONFIG, activation="squared_relu")], ids=lambda c: c.activation)
def test_gradients_have_the_bits_of_a_plain_run(config: TransformerConfig, modules: tuple[str, ...]) -> None:
    models = [model_of(part, ALONE, config, SHARED) for part in ((), modules)]
    (plain, much), (recomputed, little) = (gradients(model) for model in models)
    assert all(grad is not None and torch.equal(grad, other) for grad, other in zip(recomputed, plain, strict=True))
    assert num_bytes(little, models[1]) < num_bytes(much, models[0])


def test_results_of_the_experts_activation_are_not_kept() -> None:
    sizes = []
    for modules in ((), ("moe_act",)):
        model = model_of(modules, ALONE, CONFIG, MIXTURE)
        saved = gradients(model)[1]
        shapes = [tuple(tensor.shape) for tensor in saved]
        assert shapes.count((ROWS, CONFIG.ffn_size)) == (0 if modules else CONFIG.num_layers)
        assert shapes.count((ROWS, 2 * CONFIG.ffn_size)) == CONFIG.num_layers
        sizes.append(num_bytes(saved, model))
    # The weights of the rows are a part of what the activation saves, and live on in what runs it again.
    assert 0 <= sizes[0] - sizes[1] - CONFIG.num_layers * ROWS * CONFIG.ffn_size * BYTES <= CONFIG.num_layers * ROWS * BYTES


def test_nothing_holds_the_results_of_the_activation_until_the_backward() -> None:
    for modules in ((), ("moe_act",)):
        model, results = model_of(modules, ALONE, CONFIG, MIXTURE), []
        for layer in model.layers.values():
            experts, plain = layer.mlp.experts, layer.mlp.experts.activation

            def activation(*inputs: Any, plain: Any = plain, results: list[Any] = results, **options: Any) -> Tensor:
                y_RF = plain(*inputs, **options)
                results.append(weakref.ref(y_RF.untyped_storage()))
                return y_RF

            experts.activation = activation
        output, _ = model(torch.arange(TOKENS), Step.causal(2, 6))
        assert len(results) == CONFIG.num_layers and all((storage() is None) == bool(modules) for storage in results)
        output.token_losses(torch.arange(TOKENS)).sum().backward()
        assert len(results) == CONFIG.num_layers * (2 if modules else 1)


def test_shared_experts_keep_their_input_only() -> None:
    for modules in ((), ("shared_experts",)):
        saved = gradients(model_of(modules, ALONE, CONFIG, SHARED))[1]
        wide = [tensor for tensor in saved if tensor.shape[-1] in (20, 40) and tensor.shape[0] == TOKENS]
        assert bool(wide) == (not modules)


@pytest.mark.parametrize("kind", [GroupedMLP, SequentialMLP])
@pytest.mark.parametrize("weighted", [False, True])
def test_stacks_by_themselves_and_their_adapters(kind: type[GroupedMLP | SequentialMLP], weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((9, 8), (9,)))
    ends = torch.tensor([3, 3, 7], dtype=torch.int32)  # an expert without rows, and two rows of none
    results = []
    for recomputed in ((), ("moe_act",)):
        experts = kind(3, 8, 6, ALONE, bias=True, memory=LayerMemory(recomputed=recomputed), dtype=torch.float64)
        experts.add_lora(LoraConfig(rank=2, targets=("experts",)), seed=1)
        generator.manual_seed(1)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        y = experts(x, ends, w if weighted else None)[:7]
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *([w.grad] if weighted else []), *(parameter.grad for parameter in experts.parameters())])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert found is not None and wanted is not None and torch.equal(found, wanted)


def trained(modules: tuple[str, ...], groups: ProcessGroups, mixture: MoEConfig, **options: Any) -> list[Tensor]:
    """Losses and gradient norms of two steps into main gradients, and the weights behind them."""
    model = model_of(modules, groups, CONFIG, mixture)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0), sync, groups)
    numbers = []
    for step in range(2):
        tokens = torch.randint(0, 16, (2, 2, 7), generator=torch.Generator().manual_seed(10 * step + groups.dp.rank))
        batches = [Batch(tokens=part[:, :-1], labels=part[:, 1:], loss_mask=torch.ones(2, 6)) for part in tokens]
        report = train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=0.02, groups=groups, **options)
        numbers += [report.loss, report.grad_norm]
    return [torch.tensor(numbers, dtype=torch.float64), *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_main_gradients_and_delayed_ones_have_these_bits_too(schedule: Any) -> None:
    options = {"pipeline": PipelineConfig(schedule=schedule).build(1)}
    plain, recomputed = (trained(modules, ALONE, SHARED, **options) for modules in ((), ("moe_act", "shared_experts")))
    assert all(torch.equal(one, other) for one, other in zip(recomputed, plain, strict=True))


def check_exchange(plan: ParallelPlan) -> None:
    groups, counts = ProcessGroups.build(plan), Counter[tuple[str, ...]]()
    for mixture in (SHARED, OVERLAPPED):
        results = []
        for modules in ((), ("moe_act", "shared_experts"), ("mlp",)):

            def dispatch(self: Any, *inputs: Any, modules: tuple[str, ...] = modules) -> Any:
                counts[modules] += 1
                return self.dispatch_plain(*inputs)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MoEAlltoAllTokenDispatcher, "dispatch_plain", MoEAlltoAllTokenDispatcher.dispatch, raising=False)
                patch.setattr(MoEAlltoAllTokenDispatcher, "dispatch", dispatch)
                results.append(trained(modules, groups, mixture))
        for found in results[1:]:
            assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))
    assert counts[()] == counts["moe_act", "shared_experts"] == counts[("mlp",)] / 2


@pytest.mark.journey
@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(dp=2, ep=2), ParallelPlan(tp=2, ep=2)], ids=["dp2 ep2", "tp2 ep2"])
def test_nothing_is_sent_again(world: Any, plan: ParallelPlan) -> None:
    world(check_exchange, plan=plan)


def test_adapters_beside_shared_experts_have_the_bits_of_a_plain_run() -> None:
    results = []
    for modules in ((), ("moe_act", "shared_experts")):
        model = model_of(modules, ALONE, CONFIG, SHARED)
        add_lora(model, LoraConfig(rank=2, targets=("experts", "shared_experts.*")), ALONE, seed=5)
        results.append([grad for grad in gradients(model)[0] if grad is not None])
    assert len(results[0]) > 8 and all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_what_cannot_be_recomputed_is_refused_by_name() -> None:
    experts, act = moe_feed_forward(MIXTURE), RecomputeConfig(modules=("moe_act",))
    with pytest.raises(ValueError, match=r"modules holds 'mlp' and \['moe_act', 'shared_experts'\] inside it; drop one"):
        RecomputeConfig(modules=("mlp", "shared_experts", "moe_act"))
    with pytest.raises(ValueError, match=r"recompute.modules holds \['moe_act'\], which lie inside experts; this model has none"):
        GPTModel(CONFIG, ALONE, recompute=act)
    with pytest.raises(ValueError, match=r"recompute.modules holds \['moe_act'\], which lie inside experts; this model has none"):
        BertModel(CONFIG, ALONE, recompute=act)
    with pytest.raises(ValueError, match=r"offload.modules holds \['expert_fc1'\], which lie inside experts; this model has none"):
        BertModel(CONFIG, ALONE, offload=OffloadConfig(modules=("expert_fc1",)))
    with pytest.raises(ValueError, match=r"\['moe_act'\] is recomputed and offloaded"):
        GPTModel(CONFIG, ALONE, feed_forward=experts, recompute=act, offload=OffloadConfig(modules=("moe_act",)))
    with pytest.raises(ValueError, match="'shared_experts', and moe_shared_expert_intermediate_size=None; leave it out, or set a width"):
        model_of(("shared_experts",), ALONE, CONFIG, MIXTURE)
    memory, layers = LayerMemory(recomputed=("moe_act",)), choose_backend("torch", fp8=Fp8Config(recipe="rowwise")).layers(0, 1)
    with pytest.raises(ValueError, match="'moe_act', and TorchBackendLayers multiply experts in a form of their own"):
        GroupedMLP(2, 16, 32, ALONE, layers=layers, memory=memory)
    with pytest.raises(ValueError, match="'moe_act', which keeps the input that fp8_input_store=True narrows"):
        GroupedMLP(4, 8, 12, ALONE, activation=Activation(name="swiglu", fp8_input_store=True), memory=memory)


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["swiglu", "quick_geglu"])
def test_inputs_of_the_experts_activation_are_kept_in_fp8(config: TransformerConfig) -> None:
    """Of routed and shared experts, and of the dense layer between mixtures; the output is the same, gradients are off by the rounding."""
    mixture = dataclasses.replace(SHARED, moe_layer_freq=(1, 0))

    def run(narrow: bool) -> tuple[list[Tensor | None], Counter[tuple[int, ...]]]:
        experts = moe_feed_forward(mixture, fp8_input_store=narrow)
        results, saved = gradients(GPTModel(config, ALONE, feed_forward=experts, dtype=torch.float64, seed=3))
        return results, Counter(tuple(tensor.shape) for tensor in saved if tensor.dtype == torch.float8_e4m3fn)

    (exact, none), (found, kept) = run(False), run(True)
    # Rows of 2 experts a token, twice as wide as an expert with its gate; of the shared experts and of the dense layer, a row a token.
    assert not none and kept == {(ROWS, 24): 1, (TOKENS, 40): 1, (TOKENS, 24): 1}
    assert exact[0] is not None and found[0] is not None and torch.equal(exact[0], found[0])
    off = [
        (one - other).norm() / one.norm() for one, other in zip(exact[1:], found[1:], strict=True) if one is not None and other is not None
    ]
    assert 1e-4 < max(off) < 0.2


def test_what_keeps_inputs_in_fp8_is_refused_beside_what_has_no_path_for_it() -> None:
    experts = moe_feed_forward(MIXTURE, fp8_input_store=True)
    with pytest.raises(ValueError, match="'moe_act', which keeps the input that fp8_input_store=True narrows; leave one out"):
        GPTModel(CONFIG, ALONE, feed_forward=experts, recompute=RecomputeConfig(modules=("moe_act",)))
    site = Site(layer=0, local_layer=0, config=CONFIG, groups=ALONE, batch_invariant=True)
    with pytest.raises(ValueError, match="fp8_input_store=True has no path beside batch_invariant=True of the backend; leave one out"):
        MoELayer(MIXTURE, site, fp8_input_store=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_experts_on_a_gpu_keep_their_bits_and_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Experts that gather their rows keep less, too.
    monkeypatch.setattr(GroupedMLP, "gathers", lambda *_: False)
    config = dataclasses.replace(CONFIG, hidden_size=256, num_attention_heads=4, vocab_size=128, ffn_hidden_size=512)
    results, held = [], []
    for recompute in (None, RecomputeConfig(modules=("moe_act",))):
        experts = moe_feed_forward(MIXTURE)
        model = GPTModel(config, ALONE, feed_forward=experts, recompute=recompute, dtype=torch.bfloat16, device="cuda")
        size, values = held_and_results(model)
        held.append(size)
        results.append(values)
        del model
    # The results of the activations of two layers: 2 picks of 2048 tokens of width 512, two bytes each.
    assert held[0] - held[1] >= 2 * 2 * 2048 * 512 * 2
    assert torch.equal(results[0][0], results[1][0])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
