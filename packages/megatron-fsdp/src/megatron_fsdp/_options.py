# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The keywords of ``fully_shard``, and those of Megatron-FSDP that are spelled otherwise here: none is taken without effect."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp._eight_bit import EightBitFormat
from megatron_fsdp._materialize import ResetParameters
from megatron_fsdp._parameter_grouping import ParameterMatcher, Placements, UnitMatcher
from megatron_fsdp._policy import MixedPrecisionPolicy, ShardPlacement, Strategy

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


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The keywords of ``fully_shard``, which documents them, checked one by one."""

    zero_dp_strategy: str | int | Strategy = "optim_grads_params"
    fsdp_unit_modules: Sequence[UnitMatcher] | UnitMatcher | None = ()
    device_mesh: DeviceMesh | None = None
    process_group: dist.ProcessGroup | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    outer_dp_sharding_strategy: str | int | Strategy = "no_shard"
    tp_dim: str | None = None
    placements: Placements | None = None
    expt_device_mesh: DeviceMesh | None = None
    expert_parameters: Sequence[ParameterMatcher] | ParameterMatcher = ()
    parameter_strategies: Mapping[str, str | int | Strategy] | None = None
    separate_parameters: Sequence[ParameterMatcher] | ParameterMatcher = ()
    eight_bit_parameters: Sequence[ParameterMatcher] | ParameterMatcher = ()
    eight_bit_format: EightBitFormat | None = None
    shard_placements: Mapping[str, ShardPlacement] | None = None
    mixed_precision: MixedPrecisionPolicy | None = None
    gradient_reduce: Literal["mean", "sum"] | None = None
    num_prefetch_units: int = 1
    prefetch_bytes: int | None = None
    fsdp_double_buffer: bool = False
    maxpool_double_buffer: bool = False
    cpu_offload: bool = False
    nccl_ub: bool = False
    disable_symmetric_registration: bool = False
    device: torch.device | str | None = None
    reset_parameters: ResetParameters | None = None

    def __post_init__(self) -> None:
        Strategy.parse(self.zero_dp_strategy)
        if self.gradient_reduce not in (None, "mean", "sum"):
            raise ValueError(f"gradient_reduce={self.gradient_reduce!r} must be 'mean' or 'sum'")
        if self.num_prefetch_units < 0:
            raise ValueError(f"num_prefetch_units={self.num_prefetch_units} must not be negative; 0 gathers nothing ahead")
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise ValueError(f"prefetch_bytes={self.prefetch_bytes} must not be negative; None bounds by num_prefetch_units alone")
        if self.maxpool_double_buffer and not self.fsdp_double_buffer:
            raise ValueError("maxpool_double_buffer=True says how large the buffers of fsdp_double_buffer are; set that too")
        if self.mixed_precision is not None and not isinstance(self.mixed_precision, MixedPrecisionPolicy):
            raise ValueError(f"mixed_precision={self.mixed_precision!r} must be a MixedPrecisionPolicy of this package")

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "ShardOptions":
        """Those of a call: ``arguments`` are its local names, with ``module`` and the ``foreign`` keywords.

        Raises:
            TypeError: the module is none, or a foreign keyword is not known.
            ValueError: a value is wrong, or a foreign keyword asks for something that does not exist here.
        """
        module, defaults = arguments["module"], {field.name: field.default for field in fields(cls)}
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}; pass the torch module to shard, and the optimizer after it")
        translated = translate(arguments["foreign"], module, defaults)
        for name, value in translated.items():
            if arguments[name] != defaults[name] and arguments[name] != value:
                raise ValueError(f"{name}={arguments[name]!r}, and another keyword says {name}={value!r}; pass one of the two")
        return cls(**{name: arguments[name] for name in defaults} | translated)


def translate(foreign: Mapping[str, Any], module: nn.Module, own: Iterable[str]) -> dict[str, Any]:
    """The keywords of ``fully_shard`` (all of them are ``own``) that mean the same.

    Raises:
        TypeError: a keyword that is not known; names the nearest.
        ValueError: a value that asks for something that does not exist here; says what to do.
    """
    translated: dict[str, Any] = {}
    for name, value in foreign.items():
        if name in _RENAMED:
            translated[_RENAMED[name]] = value
        elif name == "calculate_per_token_loss":
            translated["gradient_reduce"] = "sum" if value else "mean"
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
    return translated
