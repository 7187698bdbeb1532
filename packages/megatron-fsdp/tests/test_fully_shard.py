# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Behaviour of the wrapper: what it refuses, survives and frees."""

import copy
import dataclasses
import functools
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import megatron_fsdp
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp._options import ShardOptions
from tests.support.towers import Headed, Layer, Tower, tower, train


def test_the_public_names_are_sorted_and_there():
    assert megatron_fsdp.__all__ == sorted(megatron_fsdp.__all__)
    assert all(hasattr(megatron_fsdp, name) for name in megatron_fsdp.__all__)


def test_one_rank_without_a_process_group_trains_as_the_plain_module_does():
    torch.manual_seed(0)
    plain = Tower()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        plain(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for strategy in range(4):
        model, sharded_optimizer = tower(zero_dp_strategy=strategy)
        train(model, sharded_optimizer, 3)
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.full_state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_dp_strategy": "zero9"}, "zero_dp_strategy='zero9'.*optim_grads_params"),
        ({"zero_dp_strategy": 4}, "zero_dp_strategy=4"),
        ({"zero_dp_strategy": True}, "zero_dp_strategy=True"),
        ({"gradient_reduce": "max"}, "gradient_reduce='max'"),
        ({"num_prefetch_units": -1}, "num_prefetch_units=-1"),
        ({"fsdp_unit_modules": ["Layr"]}, "Layr.*matches no module"),
        ({"fsdp_unit_modules": nn.ModuleList}, "never called"),
        ({"fsdp_unit_modules": [3]}, "has 3; use classes"),
        ({"fsdp_unit_modules": [nn.Linear(2, 3)]}, r"has Linear\(.*; use classes"),
        ({"mixed_precision": MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)}, "main_grads_dtype"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(options, message):
    with pytest.raises(ValueError, match=message):
        fully_shard(Tower(), **options)


def test_modules_and_optimizers_that_cannot_be_sharded_are_refused():
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        fully_shard(nn.ReLU())
    model, _ = tower()
    for sharded in (model, model.module, nn.Sequential(model.module, nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="sharded already"):
            fully_shard(sharded)
    with pytest.raises(ValueError, match="none of the module's parameters"):
        fully_shard_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), model)
    stepped = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(stepped.parameters())
    stepped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="before the first step"):
        fully_shard(stepped, optimizer)
    net = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="LBFGS is not elementwise"):
        fully_shard(net, torch.optim.LBFGS(net.parameters()))
    half, wide = nn.Linear(2, 2).to(torch.bfloat16), MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.float32)
    with pytest.raises(ValueError, match="want one dtype"):
        fully_shard(half, torch.optim.SGD(half.parameters()), mixed_precision=wide)
    with pytest.raises(ValueError, match="param_dtype"):
        MixedPrecisionPolicy(param_dtype=torch.int32)


def test_parameter_groups_keep_their_options():
    net = Tower()
    groups = [{"params": net.entry.parameters(), "lr": 0.5}, {"params": net.layers.parameters(), "lr": 0.1, "weight_decay": 0.3}]
    _, optimizer = fully_shard(net, torch.optim.AdamW(groups, betas=(0.8, 0.9)))
    assert optimizer is not None
    assert [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups] == [
        (0.5, 0.01, (0.8, 0.9)),
        (0.1, 0.3, (0.8, 0.9)),
    ]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 6]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in net.parameters()}


def test_moving_a_sharded_module_is_refused_unless_nothing_moves():
    model, _ = tower()
    assert model.to("cpu") is model and model.float() is model
    with pytest.raises(RuntimeError, match="before fully_shard"):
        model.double()
    with pytest.raises(RuntimeError, match="before fully_shard"):
        model.to("meta")


def test_a_sharded_module_is_not_copied():
    with pytest.raises(TypeError, match="copy the module before fully_shard"):
        copy.deepcopy(tower()[0])


def test_a_sparse_gradient_is_refused_by_name():
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    model, _ = fully_shard(net, torch.optim.SGD(net.parameters()))
    with pytest.raises(RuntimeError, match=r"gradient of '0\.weight' is sparse.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def check_failures() -> None:
    expected = train(*tower(), 3)
    model, optimizer = tower()
    layers = list(model.module.layers)
    for layer in (layers[0], layers[3], layers[5]):
        layer.fail = True
        with pytest.raises(RuntimeError, match="layer failed"):
            model(torch.ones(2, 8))
        layer.fail = False
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert live_units(model) == 0
    # A backward that fails half way leaves no gradient behind.
    x = model(torch.ones(2, 8))
    handle = layers[2].register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)
    x = model(torch.ones(2, 8))
    handle.remove()
    with pytest.raises(RuntimeError, match="backward failed"):
        x.square().mean().backward()
    assert torch.equal(train(model, optimizer, 3), expected)


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("backward failed")


def live_units(model: MegatronFSDP) -> int:
    return sum(any(group.buffer.allocated for group in unit.groups) for unit in model.runtime.units)


@pytest.mark.journey
@pytest.mark.world(2)
def test_the_model_stays_usable_after_a_forward_or_backward_that_failed(world):
    world(check_failures)


def check_memory() -> None:
    for num_prefetch_units in (0, 1, 2):
        model, optimizer = tower(num_prefetch_units=num_prefetch_units)
        most = [0]
        count = functools.partial(note_live_units, model, most)
        for layer in model.module.layers:
            layer.register_forward_hook(count)
            layer.register_full_backward_hook(count)
        train(model, optimizer, 3)
        # The root, the running unit, and those gathered ahead.
        assert most[0] <= 2 + num_prefetch_units
        assert live_units(model) == 0
        with torch.no_grad():
            model(torch.ones(2, 8))
        # The root's parameters may be wanted after it returned.
        assert live_units(model) == 1
        model.reshard()
        assert live_units(model) == 0
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def note_live_units(model: MegatronFSDP, most: list[int], *_: Any) -> None:
    most[0] = max(most[0], live_units(model))


@pytest.mark.journey
@pytest.mark.world(2)
def test_only_the_running_and_the_next_units_are_gathered(world):
    world(check_memory)


def check_evaluation() -> None:
    model, optimizer = tower()
    train(model, optimizer, 1)
    # A graph that is never used must not leave old weights gathered.
    before = model(torch.ones(2, 8))
    train(model, optimizer, 1)
    with torch.no_grad():
        after = model(torch.ones(2, 8))
    assert not torch.equal(before, after)
    model(torch.ones(2, 8))
    for parameter in model.sharded_parameters().values():
        parameter.data.zero_()
    assert model(torch.ones(2, 8)).abs().sum() == 0


@pytest.mark.world(2)
def test_a_forward_sees_the_newest_weights(world):
    world(check_evaluation)


def check_adapters() -> None:
    torch.manual_seed(0)
    net = Tower()
    net.requires_grad_(False)
    net.layers[2].weight.requires_grad_(True)
    model, optimizer = fully_shard(net, torch.optim.SGD([net.layers[2].weight], lr=0.1), fsdp_unit_modules=Layer)
    assert optimizer is not None
    before = dict(model.full_state_dict())
    train(model, optimizer, 2)
    after = dict(model.full_state_dict())
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["layers.2.weight"]
    # Freezing and thawing afterwards is followed.
    model.sharded_parameters()["layers.2.weight"].requires_grad_(False)
    model.sharded_parameters()["layers.4.weight"].requires_grad_(True)
    model(torch.ones(2, 8)).square().mean().backward()
    assert list(model.gradients()) == ["layers.4.weight"]
    # Inputs that need a gradient get one.
    x = torch.ones(2, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.world(2)
def test_frozen_parameters_stay_and_may_be_thawed(world):
    world(check_adapters)


def check_meta() -> None:
    torch.manual_seed(0)
    plain = Tower()
    with torch.device("meta"):
        net = Tower()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(0)
    model, optimizer = fully_shard(net, optimizer, fsdp_unit_modules=Layer)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.full_state_dict())
    train(model, optimizer, 1)
    assert not torch.equal(dict(model.full_state_dict())["layers.0.weight"], plain.layers[0].weight)


@pytest.mark.world(2)
def test_initialising_after_sharding_equals_sharding_after_initialising(world):
    world(check_meta)


def test_a_meta_module_that_does_not_initialise_itself_is_refused():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    class Forgetful(Bare):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight[:2])

    with torch.device("meta"):
        bare, forgetful, helped = Bare(), Forgetful(), Bare()
    with pytest.raises(ValueError, match="has no reset_parameters"):
        fully_shard_model(bare)
    with pytest.raises(ValueError, match=r"Forgetful\.weight .* uninitialised"):
        fully_shard_model(forgetful)
    model = fully_shard_model(helped, reset_parameters=lambda module: module.weight.fill_(2.0))
    assert torch.equal(dict(model.full_state_dict())["weight"], torch.full((3,), 2.0))


def check_agreement() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="different parameters"):
        fully_shard(nn.Linear(3, 3 + rank))
    # Every rank starts from the first one's values and buffers.
    torch.manual_seed(rank)
    net = nn.BatchNorm1d(3)
    nn.init.constant_(net.weight, rank + 1.0)
    net.running_mean.fill_(rank)
    model, _ = fully_shard(net)
    assert all(torch.equal(value, torch.ones_like(value)) for name, value in model.full_state_dict() if name == "weight")
    assert torch.equal(net.running_mean, torch.zeros(3))
    with pytest.raises(ValueError, match="pass one of them"):
        fully_shard(nn.Linear(2, 2), device_mesh=dist.device_mesh.init_device_mesh("cpu", (2,)), process_group=dist.group.WORLD)
    # Two models over different groups side by side.
    alone = dist.new_group([rank], use_local_synchronization=True)
    model, _ = fully_shard(nn.Linear(2, 2), process_group=alone)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.gradients()["weight"].full_tensor()[0, 0] == rank + 1


@pytest.mark.world(2)
def test_ranks_start_equal_and_must_hold_the_same_module(world):
    world(check_agreement)


def check_wide_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
    weight = net.weight.detach().clone()
    policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.float32)
    model, _ = fully_shard(net, mixed_precision=policy, gradient_reduce="sum")
    # Each addend has a bit that a sum in bfloat16 would lose.
    for value in (256.0, 1.0):
        model(torch.full((1, 4), value, dtype=torch.bfloat16)).sum().backward()
    gradient = model.gradients()["weight"].full_tensor()
    assert gradient.dtype == torch.float32 and torch.equal(gradient, torch.full((3, 4), 514.0))
    shard = model.flat_shards().get("weight")
    if shard is not None:
        assert shard.parameter.dtype == torch.bfloat16 and torch.equal(shard.parameter, weight.view(-1)[shard.start : shard.end])
        assert shard.gradient is not None and shard.gradient.dtype == torch.float32
    assert model.clip_grad_norm_(1.0) > 1.0


@pytest.mark.world(2)
def test_gradients_may_be_wider_than_main_parameters(world):
    world(check_wide_gradients)


def headed_losses(model: Any, optimizer: torch.optim.Optimizer, module: Headed) -> list[float]:
    actual = []
    for _ in range(3):
        for grad in (False, True, False):
            with torch.set_grad_enabled(grad):
                loss = module.head(model(torch.ones(2, 8))).square().sum()
            actual.append(loss.item())
            if grad:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return actual


def check_root_after_forward() -> None:
    torch.manual_seed(0)
    plain = Headed()
    expected = headed_losses(plain, torch.optim.SGD(plain.parameters(), lr=0.01), plain)
    assert len(set(expected)) == 3
    for strategy in range(4):
        for units in (Layer, ()):
            torch.manual_seed(0)
            net = Headed()
            model, optimizer = fully_shard(
                net, torch.optim.SGD(net.parameters(), lr=0.01), fsdp_unit_modules=units, zero_dp_strategy=strategy
            )
            assert optimizer is not None
            actual = headed_losses(model, optimizer, net)
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected))
            # The last forward built no graph: once an optimizer has stepped, its weights are old and registered no more.
            assert {id(p) for p in model.parameters()} == {id(p) for p in model.sharded_parameters().values()}


@pytest.mark.journey
@pytest.mark.world(2)
def test_the_roots_parameters_can_be_used_after_its_forward(world):
    world(check_root_after_forward)


def test_both_entries_take_the_keywords_of_one_specification():
    fields = {field.name: (field.type, field.default) for field in dataclasses.fields(ShardOptions)}
    for entry in (fully_shard, fully_shard_model):
        keywords = [each for each in inspect.signature(entry).parameters.values() if each.kind is inspect.Parameter.KEYWORD_ONLY]
        assert {each.name: (each.annotation, each.default) for each in keywords} == fields
