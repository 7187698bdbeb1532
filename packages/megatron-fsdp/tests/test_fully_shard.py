# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Behaviour of the wrapper: what it refuses, survives and frees."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import megatron_fsdp
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model, fully_shard_optimizer


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.fail = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("layer failed")
        return torch.tanh(x @ self.weight)


class Tower(nn.Module):
    def __init__(self, width: int = 8, depth: int = 6) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return x


def tower(**options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Tower()
    model, optimizer = fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.1), **{"fsdp_unit_modules": Layer, **options})
    assert optimizer is not None
    return model, optimizer


def train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


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


class Headed(nn.Module):
    """Returns hidden states; the caller applies the head, as one does whose loss needs no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x)


def headed_losses(model: Any, optimizer: torch.optim.Optimizer, module: Headed) -> list[float]:
    found = []
    for _ in range(3):
        for grad in (False, True, False):
            with torch.set_grad_enabled(grad):
                loss = module.head(model(torch.ones(2, 8))).square().sum()
            found.append(loss.item())
            if grad:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


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
            found = headed_losses(model, optimizer, net)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
            # The last forward built no graph: once an optimizer has stepped, its weights are old and registered no more.
            assert {id(p) for p in model.parameters()} == {id(p) for p in model.sharded_parameters().values()}


@pytest.mark.world(2)
def test_the_roots_parameters_can_be_used_after_its_forward(world):
    world(check_root_after_forward)


def check_flat_shards() -> list[tuple[str, int, int, int]]:
    torch.manual_seed(0)
    net = Headed()
    net.head.bias.requires_grad_(False)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    model, _ = fully_shard(net, fsdp_unit_modules=Layer, gradient_reduce="sum", **_hybrid())
    shards = model.flat_shards()
    for name, shard in shards.items():
        assert shard.shape == expected[name].shape
        assert torch.equal(shard.parameter, expected[name].view(-1)[shard.start : shard.end])
        for offset, view in shard.blocks(shard.parameter):
            index = tuple(slice(begin, begin + size) for begin, size in zip(offset, view.shape, strict=True))
            assert torch.equal(view, expected[name][index])
        assert sum(view.numel() for _, view in shard.blocks(shard.parameter)) == shard.end - shard.start
    assert all((shard.gradient is None) is (name == "head.bias") for name, shard in shards.items())
    for step in range(2):
        model.zero_grad_buffer()
        net.head(model(torch.ones(2, 8))).sum().backward()
        whole = {name: gradient.full_tensor() for name, gradient in model.gradients().items()}
        for name, shard in shards.items():
            if shard.gradient is not None:
                assert torch.equal(shard.gradient, whole[name].reshape(-1)[shard.start : shard.end])
                assert step or shard.gradient.abs().sum() > 0
                shard.parameter.sub_(shard.gradient, alpha=0.01)
        for name, gradient in whole.items():
            expected[name] -= 0.01 * gradient
        model.install_optimized_model_weights()
    for name, value in model.full_state_dict():
        torch.testing.assert_close(value, expected[name])
    return [(name, shard.start, shard.end, shard.replica) for name, shard in shards.items()]


def _hybrid() -> dict[str, Any]:
    if dist.get_world_size() == 2:
        return {}
    return {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def assert_covered(rows: list[tuple[str, int, int, int]], replicas: int) -> None:
    sizes = {name: value.numel() for name, value in Headed().state_dict().items()}
    for name, size in sizes.items():
        for replica in range(replicas):
            ranges = sorted((start, end) for found, start, end, copy in rows if (found, copy) == (name, replica))
            assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
            assert ranges[-1][1] == size


@pytest.mark.world(2)
def test_flat_shards_cover_every_parameter_once(world):
    assert_covered([row for rows in world(check_flat_shards) for row in rows], 1)


@pytest.mark.world(4)
def test_flat_shards_of_replicas_cover_every_parameter_once_a_replica(world):
    assert_covered([row for rows in world(check_flat_shards) for row in rows], 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"zero_dp_stratgy": 1}, TypeError, "no keyword 'zero_dp_stratgy'; did you mean 'zero_dp_strategy'"),
        ({"overlap_grad_reduce": False}, ValueError, "overlap_grad_reduce=False does not exist here: .*no_sync"),
        ({"fsdp_db_use_persist_buf_on_alloc_fail": True}, ValueError, "fail=True does not exist here: .*before the first step"),
        ({"hybrid_fsdp_group": object()}, ValueError, "dp_shard_dim"),
        ({"init_model_with_meta_device": True}, ValueError, "not on the meta device"),
        ({"mixed_precision_policy": 3}, ValueError, "must be a MixedPrecisionPolicy of this package"),
    ],
)
def test_a_foreign_keyword_without_effect_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        fully_shard(Tower(), **options)


def check_every_foreign_name() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_outer", "dp_shard"))
    layout = {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer", "tp_dim": None, "expt_device_mesh": None}
    groups = dict.fromkeys(("hybrid_fsdp_group", "hybrid_fsdp_expt_group", "fsdp_group_ag", "expt_fsdp_group_ag"))
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=None, grad_comm_dtype=None)
    always = ("overlap_grad_reduce", "overlap_param_gather", "sync_model_each_microbatch", "preproc_state_dict_for_dcp_ckpt")
    never = (
        "average_in_collective",
        "calculate_per_token_loss",
        "disable_bucketing",
        "disable_symmetric_registration",
        "enable_fine_grained_param_gather",
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "fsdp_double_buffer",
        "init_model_with_meta_device",
        "keep_fp8_transpose_cache",
        "maxpool_double_buffer",
        "nccl_ub",
        "report_nan_in_param_grad",
        "use_decoupled_grad",
    )
    theirs = {
        **layout,
        **groups,
        **dict.fromkeys(always, True),
        **dict.fromkeys(never, False),
        "fsdp_unit_modules": [f"{Layer.__module__}.{Layer.__qualname__}", "torch.nn.Linear"],
        "zero_dp_strategy": 3,
        "outer_dp_sharding_strategy": 0,
        "device": None,
        "mixed_precision_policy": policy,
        "cuda_graph_mode": None,
    }
    model, _ = tower(fsdp_unit_modules=None)
    assert len(model.runtime.units) == 1
    older = {
        "dp_mesh": mesh["dp_shard"],
        "grad_reduce_in_fp32": True,
        "preserve_fp32_weights": True,
        "zero_dp_strategy": "optim_grads_params",
    }
    for options in (theirs, {**older, "fsdp_unit_modules": [Layer, nn.Linear]}):
        model, optimizer = tower(**options)
        assert len(model.runtime.units) == 8 and train(model, optimizer, 1) == train(*tower(), 1)
    # Each of them says what to do instead when it is set otherwise.
    for name in (*always, *never, *groups, "cuda_graph_mode", "grad_reduce_in_fp32", "preserve_fp32_weights"):
        if name not in ("calculate_per_token_loss", "nccl_ub", "disable_symmetric_registration", "fsdp_double_buffer"):
            with pytest.raises(ValueError, match=rf"^{name}="):
                fully_shard(Tower(), **{name: not {**theirs, **older}[name]})


@pytest.mark.world(2)
def test_every_keyword_of_megatron_fsdp_is_taken_or_answered(world):
    world(check_every_foreign_name)


def check_foreign() -> None:
    theirs = {
        "mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=torch.float64),
        "calculate_per_token_loss": True,
        "overlap_param_gather": True,
        "fsdp_double_buffer": False,
    }
    model, _ = tower(**theirs)
    other, _ = tower(mixed_precision=MixedPrecisionPolicy(main_params_dtype=torch.float64), gradient_reduce="sum")
    for each in (model, other):
        each(torch.ones(2, 8)).square().mean().backward()
    for name, gradient in model.gradients().items():
        assert gradient.dtype == torch.float64 and torch.equal(gradient.full_tensor(), other.gradients()[name].full_tensor())


@pytest.mark.world(2)
def test_a_foreign_keyword_with_a_counterpart_stands_for_it(world):
    world(check_foreign)


class PlainSgd(torch.optim.Optimizer):
    """Has kernels of its own: nothing but plain tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert type(parameter) is nn.Parameter, "a DTensor has no memory of its own"
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["momentum"] = state.get("momentum", torch.zeros_like(parameter)) * group["momentum"] + parameter.grad
                    parameter -= group["lr"] * state["momentum"]


# What is known of an optimizer with such kernels is where it comes from.
FusedSgd = type("FusedSGD", (PlainSgd,), {"__module__": "transformer_engine.pytorch.optimizers.fused_sgd"})


def check_plain_shards(rule: type[PlainSgd], plain_shards: bool | None) -> None:
    torch.manual_seed(0)
    net = Tower()
    model = fully_shard_model(net, fsdp_unit_modules=Layer)
    optimizer = fully_shard_optimizer(rule(net.parameters()), model, plain_shards=plain_shards)
    reference, momentum = tower()
    momentum.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, 3)
    train(reference, momentum, 3)
    expected = dict(reference.full_state_dict())
    assert all(torch.allclose(value, expected[name], rtol=1e-6) for name, value in model.full_state_dict())
    saved = model.optimizer_state_dict(optimizer)
    assert all(isinstance(entries["momentum"], DTensor) for entries in saved["state"].values())
    whole = {name: {"momentum": entries["momentum"].full_tensor()} for name, entries in saved["state"].items()}
    model.load_optimizer_state_dict(optimizer, {"state": whole, "param_groups": saved["param_groups"]})
    train(model, optimizer, 1), train(reference, momentum, 1)
    expected = dict(reference.full_state_dict())
    assert all(torch.allclose(value, expected[name], rtol=1e-6) for name, value in model.full_state_dict())


@pytest.mark.world(2)
def test_an_optimizer_may_step_plain_shards(world):
    world(check_plain_shards, rule=PlainSgd, plain_shards=True)


@pytest.mark.world(2)
def test_optimizers_of_transformer_engine_step_plain_shards(world):
    world(check_transformer_engine)


def check_transformer_engine() -> None:
    check_plain_shards(FusedSgd, None)


def check_sync_methods() -> None:
    model, optimizer = tower()
    reference, other = tower()
    x = torch.ones(2, 8) * (1 + dist.get_rank())
    for step in range(2):
        model.set_model_auto_sync(False)
        model(x).square().mean().backward()
        assert not model.gradients() or step
        model.start_grad_sync()
        model.synchronize_gradient_reduce()
        with model.sync():
            model(2 * x).square().mean().backward()
        model.scale_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.start_param_sync()
        model.synchronize_param_gather()
        for scale in (1, 2):
            (reference(scale * x).square().mean() / 2).backward()
        other.step()
        other.zero_grad()
    model.broadcast_params()
    expected = dict(reference.full_state_dict())
    assert all(torch.allclose(value, expected[name], rtol=1e-6) for name, value in model.full_state_dict())
    with pytest.raises(ValueError, match="scope='inner'"), model.no_sync("inner"):
        pass


@pytest.mark.world(2)
def test_gradients_are_reduced_when_they_are_asked_for(world):
    world(check_sync_methods)
