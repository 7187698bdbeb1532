# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The dense feed-forward layer."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel import Group, ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.nn import MLP, Activation, Step
from mcore_parallel.nn._activations import RecomputedActivation
from mcore_parallel.tensor_parallel import MainGradient, WeightGradientQueue

CHOICES = (Activation(name="swiglu"), Activation(name="quick_geglu", offset=1.0, clamp=0.7), Activation(name="squared_relu"))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_bias(activation: Activation, groups: ProcessGroups) -> MLP:
    mlp = MLP(4, 6, groups, activation=activation, bias=True, dtype=torch.float64)
    for shard in named_shards(mlp):
        if shard.name.endswith("bias"):
            shard.parameter.data.copy_(normal(*shard.spec.shape, seed=7)[shard.spec.slices(groups)])
    return mlp


def test_mlp_with_a_gate_equals_its_formula() -> None:
    mlp = MLP(4, 6, ProcessGroups.single(), dtype=torch.float64)
    x = normal(5, 4)
    gate, value = (x @ weight.T for weight in mlp.up.weight)
    y, aux = mlp(x, Step.causal(1, 5))
    torch.testing.assert_close(y, (gate * gate.sigmoid() * value) @ mlp.down.weight.T)
    assert aux is None
    assert mlp.up.weight.shape == (2, 6, 4)


def test_mlp_without_a_gate_equals_its_formula() -> None:
    mlp = with_bias(Activation(name="gelu"), ProcessGroups.single())
    x = normal(5, 4)
    assert mlp.up.weight.shape == (6, 4) and mlp.up.bias.shape == (6,)
    y, _ = mlp(x, Step.causal(1, 5))
    torch.testing.assert_close(y, F.gelu(x @ mlp.up.weight.T + mlp.up.bias) @ mlp.down.weight.T + mlp.down.bias)


def results(activation: Activation, groups: ProcessGroups, *, recomputed: bool = False, frozen: tuple[str, ...] = ()) -> list[Tensor]:
    """Output, gradient of the input, gradients of this rank's parts of the parameters."""
    mlp = with_bias(activation, groups)
    for name in frozen:
        mlp.get_parameter(name).requires_grad_(False)
    tp, parallel = groups.tp, groups.sequence_parallel
    held = slice(4 * tp.rank, 4 * tp.rank + 4) if parallel else slice(None)
    x = normal(8, 4)[held].requires_grad_()
    y = mlp.down(mlp.up(x), RecomputedActivation(activation=activation, kernels=False)) if recomputed else mlp(x, Step.causal(2, 4))[0]
    (y * normal(8, 4, seed=3)[held]).sum().backward()
    grads = []
    for shard in named_shards(mlp):
        if shard.name in frozen:
            continue
        grad = shard.parameter.grad
        assert grad is not None
        if "tp" in shard.spec.partial:
            torch.distributed.all_reduce(grad, group=tp.pg)
        grads.append(grad)
    assert x.grad is not None
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("frozen", [(), ("down.weight",), ("up.weight", "up.bias")], ids=str)
def test_an_activation_made_again_gives_the_same_gradients(frozen: tuple[str, ...]) -> None:
    for activation in CHOICES:
        kept, recomputed = (results(activation, ProcessGroups.single(), recomputed=again, frozen=frozen) for again in (False, True))
        assert len(kept) == len(recomputed) == 6 - len(frozen)
        for found, wanted in zip(recomputed, kept, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_only_the_input_of_a_recomputed_activation_is_kept() -> None:
    for deferred in (False, True):
        mlp = MLP(4, 6, ProcessGroups.single(), dtype=torch.float64)
        main, queue = MainGradient(torch.zeros_like(mlp.down.weight)), WeightGradientQueue()
        mlp.down.accumulate_weight_gradients_into({"weight": main})
        mlp.down.defer_weight_gradients_to(queue if deferred else None)
        up, kept = mlp.up(normal(5, 4)), []

        def keep(tensor: Tensor, kept: list[torch.Size] = kept) -> Tensor:
            kept.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = mlp.down(up, RecomputedActivation(activation=mlp.activation, kernels=False))
        assert kept == [up.shape, mlp.down.weight.shape]
        y.sum().backward()
        queue.drain()
        torch.testing.assert_close(main.total, torch.ones(5, 4, dtype=torch.float64).T @ mlp.activation(up.detach()))


def check_split(sequence_parallel: bool) -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    for activation in CHOICES:
        whole = results(activation, ProcessGroups.single())
        specs = [shard.spec for shard in named_shards(with_bias(activation, groups))]
        tokens = slice(4 * groups.tp.rank, 4 * groups.tp.rank + 4) if sequence_parallel else slice(None)
        cuts = [tokens, tokens, *(spec.slices(groups) for spec in specs)]
        for recomputed in (False, True):
            for found, wanted, cut in zip(results(activation, groups, recomputed=recomputed), whole, cuts, strict=True):
                torch.testing.assert_close(found, wanted[cut], rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_mlp_over_two_ranks_equals_one(world, sequence_parallel: bool) -> None:
    world(check_split, sequence_parallel=sequence_parallel)


def test_a_tp_that_does_not_divide_the_width_is_an_error() -> None:
    groups = dataclasses.replace(ProcessGroups.single(), tp=Group((0, 1), 0))
    with pytest.raises(ValueError, match="tp=2 must divide ffn_hidden_size=5"):
        MLP(4, 5, groups)
