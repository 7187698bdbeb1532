# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Keywords and methods of Megatron-FSDP: taken where they mean something here, answered where they do not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.towers import Layer, Tower, tower, train


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"zero_dp_stratgy": 1}, TypeError, "no keyword 'zero_dp_stratgy'; did you mean 'zero_dp_strategy'"),
        ({"overlap_grad_reduce": False}, ValueError, "overlap_grad_reduce=False does not exist here: .*no_sync"),
        ({"fsdp_db_use_persist_buf_on_alloc_fail": True}, ValueError, "fail=True does not exist here: .*before the first step"),
        ({"hybrid_fsdp_group": object()}, ValueError, "dp_shard_dim"),
        ({"init_model_with_meta_device": True}, ValueError, "not on the meta device"),
        ({"mixed_precision_policy": 3}, ValueError, "must be a MixedPrecisionPolicy of this package"),
        (
            {"gradient_reduce": "sum", "calculate_per_token_loss": False},
            ValueError,
            "another keyword says gradient_reduce='mean'; pass one",
        ),
        (
            {"gradient_reduce": "mean", "calculate_per_token_loss": True},
            ValueError,
            "another keyword says gradient_reduce='sum'; pass one",
        ),
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "mixed_precision_policy": MixedPrecisionPolicy()},
            ValueError,
            "another keyword says mixed_precision=",
        ),
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
