# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Keywords of Megatron-FSDP that are spelled otherwise here, are always so, or do not exist: none is taken without effect."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_RENAMED = {"mixed_precision_policy": "mixed_precision", "dp_mesh": "device_mesh"}

_MESH_AXES = "name the axes of device_mesh by dp_shard_dim and dp_outer_dim, from which groups follow"

# Keyword -> (the one value that describes what happens here, what to do for another).
_FIXED: dict[str, tuple[Any, str]] = {
    "average_in_collective": (False, "gradients are summed and divided once after"),
    "cuda_graph_mode": (
        None,
        "a unit captures itself in its forward, see CUDA graphs in docs/fsdp.md; set fsdp_double_buffer=True for one address",
    ),
    "disable_bucketing": (False, "name larger units by fsdp_unit_modules"),
    "enable_fine_grained_param_gather": (False, "name smaller units by fsdp_unit_modules"),
    "expt_fsdp_group_ag": (None, _MESH_AXES),
    "fsdp_db_use_persist_buf_on_alloc_fail": (False, "the two buffers of fsdp_double_buffer are allocated before the first step"),
    "fsdp_group_ag": (None, _MESH_AXES),
    "grad_reduce_in_fp32": (True, "set MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16) to send fewer bits; sums are float32"),
    "hybrid_fsdp_expt_group": (None, _MESH_AXES),
    "hybrid_fsdp_group": (None, _MESH_AXES),
    "keep_fp8_transpose_cache": (False, "transposes of 8-bit weights are made in the backward and dropped with the gathered bytes"),
    "overlap_grad_reduce": (True, "reductions always run beside the backward; hold them back by no_sync()"),
    "overlap_param_gather": (True, "set num_prefetch_units=0 to gather nothing ahead"),
    "preproc_state_dict_for_dcp_ckpt": (True, "state dicts always say where rows lie"),
    "preserve_fp32_weights": (True, "set MixedPrecisionPolicy(main_params_dtype=torch.bfloat16) to step fewer bits"),
    "report_nan_in_param_grad": (False, "look at gradients() after the backward"),
    "sync_model_each_microbatch": (True, "put no_sync() around all micro-batches but the last, or call set_model_auto_sync(False)"),
    "use_decoupled_grad": (False, "step flat_shards(), whose gradients may be wider than parameters"),
}


def translate(foreign: Mapping[str, Any], module: nn.Module, own: Iterable[str]) -> dict[str, Any]:
    """The keywords of ``fully_shard`` (all of them are ``own``) that mean the same.

    Raises:
        TypeError: a keyword that is not known; names the nearest.
        ValueError: a value that asks for something that does not exist here; says what to do.
    """
    found: dict[str, Any] = {}
    for name, value in foreign.items():
        if name in _RENAMED:
            found[_RENAMED[name]] = value
        elif name == "calculate_per_token_loss":
            found["gradient_reduce"] = "sum" if value else "mean"
        elif name == "init_model_with_meta_device":
            on_meta = any(parameter.is_meta for parameter in module.parameters())
            if bool(value) != on_meta:
                remedy = "leave it False" if value else "leave it out, modules on the meta device are initialised unit by unit"
                raise ValueError(
                    f"init_model_with_meta_device={value!r}, but the module is {'' if on_meta else 'not '}on the meta device; {remedy}"
                )
        elif name not in _FIXED:
            known = [*_RENAMED, *_FIXED, "calculate_per_token_loss", "init_model_with_meta_device", *own]
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"fully_shard() has no keyword {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        elif value != _FIXED[name][0]:
            raise ValueError(f"{name}={value!r} does not exist here: {_FIXED[name][1]}")
    return found
