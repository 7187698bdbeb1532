# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who exchanges for the flex dispatcher: chosen by all ranks of a group together, before the first exchange."""

import functools
import importlib.util
import os
import warnings
from pathlib import Path

import torch

from mcore_moe._config import MoEConfig
from mcore_moe._stability import experimental_api
from mcore_moe.dispatch._arrival import gather_numbers
from mcore_moe.dispatch._flex import TokenExchange
from mcore_moe.dispatch._symmetric import SymmetricExchange
from mcore_parallel import Group, ProcessGroups
from mcore_parallel.comm import SymmetricBuffer
from mcore_parallel.groups import uses_nccl

# backend -> its modules, and what installs them; no index has these versions, so no extra does.
_LIBRARIES = {
    "deepep": (("deep_ep", "deep_ep_cpp"), "DeepEP 1.2.1", "v1.2.1"),
    "hybridep": (("deep_ep", "hybrid_ep_cpp"), "DeepEP's branch hybrid-ep", "hybrid-ep"),
}
_ROW_BYTES = 16
_STORED = (torch.bfloat16, torch.float16, torch.float32)
_TRIAL_BYTES = 4096
# Of DeepEP's kernels within a host, which end the process's use of the device where these do not hold.
_DEEPEP_STEP, _DEEPEP_WIDTH, _DEEPEP_EXPERTS, _DEEPEP_PICKS = 16, 8176, 128, 32
# Of HybridEP's, which end the process; bytes are those of a multiprocessor's shared memory.
_HYBRIDEP_STEP, _HYBRIDEP_EXPERTS, _HYBRIDEP_BYTES, _HYBRIDEP_HOST = 16, 4, 232_000, 8
_HYBRIDEP_STAGES = "NUM_OF_STAGES_DISPATCH_API"


@experimental_api
def choose_exchange(
    config: MoEConfig, groups: ProcessGroups, *, width: int, dtype: torch.dtype, device: torch.device | str
) -> TokenExchange | None:
    """The exchange of ``moe_token_dispatcher_type="flex"``; every rank of ``groups.tp_ep`` calls this at the same point.

    All ranks have the same one, or none: where one of them cannot use the backend, all fall back or all refuse.

    Args:
        config: names the backend, its SMs, the bound of waits and the fallback.
        groups: the layout.
        width: of the tokens that travel.
        dtype: of the tokens.
        device: of the tokens; "meta" counts as the GPU where there is one.

    Returns:
        None for ``moe_flex_dispatcher_fallback="alltoall"``, with a warning that says why.

    Raises:
        ValueError: no fallback, and the backend cannot be used here, or by another rank, which is named.
        TimeoutError: a rank that does not come, after ``moe_flex_timeout_s``.
    """
    backend, group = config.moe_flex_dispatcher_backend, groups.tp_ep
    place = torch.device("cuda", torch.cuda.current_device()) if uses_nccl(group.pg) else torch.device("cpu")
    reason = _of_all(_obstacle(config, groups, width, dtype, device), config, group, place)
    if reason is None and backend == "symmetric":
        # Whether GPUs can address each other is seen when they try.
        reason = _of_all(_trial(group, place, config.moe_flex_timeout_s), config, group, place)
    if reason is None:
        return _make(config, groups, width, place)
    message = f"moe_flex_dispatcher_backend={backend!r}: {reason}"
    if config.moe_flex_dispatcher_fallback is None:
        raise ValueError(f"{message}; or set moe_flex_dispatcher_fallback='alltoall'")
    warnings.warn(f"{message}; tokens travel by all-to-all (moe_flex_dispatcher_fallback)", stacklevel=2)
    return None


def _of_all(reason: str | None, config: MoEConfig, group: Group, place: torch.device) -> str | None:
    """Why this rank, or another, cannot use a backend; None where all can."""
    purpose = f"the choice of moe_flex_dispatcher_backend={config.moe_flex_dispatcher_backend!r}"
    answers = gather_numbers([reason is None], group, device=place, timeout_s=config.moe_flex_timeout_s, purpose=purpose)
    unable = [rank for rank, (able,) in zip(group.ranks, answers, strict=True) if not able]
    return f"ranks {unable} cannot use it, as they say themselves" if unable and reason is None else reason


def _obstacle(config: MoEConfig, groups: ProcessGroups, width: int, dtype: torch.dtype, device: torch.device | str) -> str | None:
    """Why this rank cannot use a backend, and the remedy; None where it can."""
    backend = config.moe_flex_dispatcher_backend
    if backend == "symmetric":
        return _obstacle_to_stores(groups.tp_ep, width, dtype, device)
    modules, library, version = _LIBRARIES[backend]
    if any(importlib.util.find_spec(name) is None for name in modules):
        return f'{library} is not installed: pip install "deep_ep @ git+https://github.com/deepseek-ai/DeepEP.git@{version}"'
    kind = torch.device(device).type
    if kind != "cuda" and not (kind == "meta" and torch.cuda.is_available()):
        return f"{library} needs CUDA tensors, found device={str(device)!r}; use a GPU"
    if dtype != torch.bfloat16:
        return f"{library} sends bfloat16, found {dtype}; build the model in bfloat16"
    if width * dtype.itemsize % _ROW_BYTES:
        return f"{library} sends rows of {_ROW_BYTES} bytes, found {width} elements; use a multiple of {_ROW_BYTES // dtype.itemsize}"
    return (_obstacle_to_deepep if backend == "deepep" else _obstacle_to_hybridep)(config, groups, width)


def _obstacle_to_deepep(config: MoEConfig, groups: ProcessGroups, width: int) -> str | None:
    if width % _DEEPEP_STEP or width > _DEEPEP_WIDTH:
        return f"its kernels send a multiple of {_DEEPEP_STEP} elements, at most {_DEEPEP_WIDTH}, found {width}; change the width"
    if (experts := config.num_moe_experts // groups.ep.size) > _DEEPEP_EXPERTS:
        return f"its kernels count at most {_DEEPEP_EXPERTS} experts a rank, found {experts}; raise ep={groups.ep.size}"
    # Each rank that holds a part of an expert is an expert of its own there.
    if (picks := config.moe_router_topk * groups.expt_tp.size) > _DEEPEP_PICKS:
        return f"its kernels take at most {_DEEPEP_PICKS} picks a token, found moe_router_topk * etp = {picks}; lower one"
    return None


def _obstacle_to_hybridep(config: MoEConfig, groups: ProcessGroups, width: int) -> str | None:
    ranks, etp = groups.tp_ep.size, groups.expt_tp.size
    if width % _HYBRIDEP_STEP:
        return f"its kernels send a multiple of {_HYBRIDEP_STEP} elements, found {width}; change the width"
    if ranks % 2 or config.num_moe_experts * etp % _HYBRIDEP_EXPERTS:
        return (
            f"its kernels are for an even number of ranks and a multiple of {_HYBRIDEP_EXPERTS} experts, found ep * etp = {ranks} and "
            f"num_moe_experts * etp = {config.num_moe_experts * etp}; change ep={groups.ep.size}"
        )
    near, stages = min(ranks, _HYBRIDEP_HOST), int(os.environ.get(_HYBRIDEP_STAGES, "12"))
    size = 2 * stages * width + 48 * (config.num_moe_experts * etp * near // ranks) + 1024 * near
    if size > _HYBRIDEP_BYTES:
        return (
            f"its kernels have {_HYBRIDEP_BYTES} bytes of shared memory, and {width} elements in {stages} stages with "
            f"{config.num_moe_experts} experts over {ranks} ranks take {size}; lower {_HYBRIDEP_STAGES}, the library's own variable"
        )
    if not Path(os.environ.get("CUDA_HOME", ""), "bin", "nvcc").is_file():
        return f"it compiles its kernels by CUDA_HOME/bin/nvcc, found CUDA_HOME={os.environ.get('CUDA_HOME')!r}; set it to a CUDA toolkit"
    from mcore_moe.dispatch._hybridep import obstacle

    return obstacle(ranks)


def _obstacle_to_stores(group: Group, width: int, dtype: torch.dtype, device: torch.device | str) -> str | None:
    place = torch.device(device)
    if reason := SymmetricBuffer.obstacle(group, torch.device("cuda") if place.type == "meta" and torch.cuda.is_available() else place):
        return reason
    if importlib.util.find_spec("triton") is None:
        return 'its kernels need Triton, which is not installed; pip install "mcore-parallel[triton]"'
    if dtype not in _STORED:
        return f"its kernels store bfloat16, float16 and float32, found {dtype}; build the model in one of them"
    if width * dtype.itemsize % _ROW_BYTES:
        return f"its kernels store {_ROW_BYTES} bytes at once, found {width} elements; use a multiple of {_ROW_BYTES // dtype.itemsize}"
    return None


def _trial(group: Group, device: torch.device, timeout_s: float) -> str | None:
    """Why no buffer can be had; None where one can."""
    try:
        SymmetricBuffer(group, _TRIAL_BYTES, device, timeout_s=timeout_s)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _make(config: MoEConfig, groups: ProcessGroups, width: int, device: torch.device) -> TokenExchange:
    num_local_experts, timeout_s = config.num_moe_experts // groups.ep.size, config.moe_flex_timeout_s
    if config.moe_flex_dispatcher_backend == "symmetric":
        return SymmetricExchange(
            groups.tp_ep,
            num_local_experts,
            width,
            connect=functools.partial(SymmetricBuffer, groups.tp_ep, device=device, timeout_s=timeout_s),
            timeout_s=timeout_s,
            max_tokens=config.moe_symmetric_max_tokens,
            exact_rows=config.moe_symmetric_exact_rows,
        )
    if config.moe_flex_dispatcher_backend == "deepep":
        from mcore_moe.dispatch._deepep import DeepEPExchange

        return DeepEPExchange(groups.tp_ep, num_local_experts, width, num_sms=config.moe_deepep_num_sms, timeout_s=timeout_s)
    from mcore_moe.dispatch._hybridep import HybridEPExchange

    return HybridEPExchange(groups.tp_ep, num_local_experts, width, num_sms=config.moe_hybridep_num_sms, timeout_s=timeout_s)
