# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The library behind the flex dispatcher: chosen by all ranks of a group together, before the first exchange."""

import importlib.util
import warnings

import torch

from mcore_moe._config import MoEConfig
from mcore_moe._stability import experimental_api
from mcore_moe.dispatch._arrival import gather_numbers
from mcore_moe.dispatch._flex import TokenExchange
from mcore_parallel import ProcessGroups
from mcore_parallel.groups import uses_nccl

# backend -> its modules, and what installs them; no index has these versions, so no extra does.
_LIBRARIES = {
    "deepep": (("deep_ep", "deep_ep_cpp"), "DeepEP 1.2.1", "v1.2.1"),
    "hybridep": (("deep_ep", "hybrid_ep_cpp"), "DeepEP's branch hybrid-ep", "hybrid-ep"),
}
_ROW_BYTES = 16


@experimental_api
def choose_exchange(
    config: MoEConfig, groups: ProcessGroups, *, width: int, dtype: torch.dtype, device: torch.device | str
) -> TokenExchange | None:
    """The exchange of ``moe_token_dispatcher_type="flex"``; every rank of ``groups.tp_ep`` calls this at the same point.

    All ranks have the same one, or none: where one of them cannot use the library, all fall back or all refuse.

    Args:
        config: names the library, its SMs, the bound of waits and the fallback.
        groups: the layout.
        width: of the tokens that travel.
        dtype: of the tokens.
        device: of the tokens; "meta" counts as the GPU where there is one.

    Returns:
        None for ``moe_flex_dispatcher_fallback="alltoall"``, with a warning that says why.

    Raises:
        RuntimeError: no fallback, and the library cannot be used here, or by another rank, which is named.
        TimeoutError: a rank that does not come, after ``moe_flex_timeout_s``.
    """
    backend, group = config.moe_flex_dispatcher_backend, groups.tp_ep
    reason = _obstacle(backend, width, dtype, device)
    place = torch.device("cuda", torch.cuda.current_device()) if uses_nccl(group.pg) else torch.device("cpu")
    purpose = f"the choice of moe_flex_dispatcher_backend={backend!r}"
    answers = gather_numbers([reason is None], group, device=place, timeout_s=config.moe_flex_timeout_s, purpose=purpose)
    unable = [rank for rank, (able,) in zip(group.ranks, answers, strict=True) if not able]
    if not unable:
        return _make(config, groups, width)
    if reason is None:
        reason = f"ranks {unable} cannot use it, as they say themselves"
    message = f"moe_flex_dispatcher_backend={backend!r}: {reason}"
    if config.moe_flex_dispatcher_fallback is None:
        raise RuntimeError(f"{message}; or set moe_flex_dispatcher_fallback='alltoall'")
    warnings.warn(f"{message}; tokens travel by all-to-all (moe_flex_dispatcher_fallback)", stacklevel=2)
    return None


def _obstacle(backend: str, width: int, dtype: torch.dtype, device: torch.device | str) -> str | None:
    """Why this rank cannot use a library, and the remedy; None where it can."""
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
    return None


def _make(config: MoEConfig, groups: ProcessGroups, width: int) -> TokenExchange:
    num_local_experts, timeout_s = config.num_moe_experts // groups.ep.size, config.moe_flex_timeout_s
    if config.moe_flex_dispatcher_backend == "deepep":
        from mcore_moe.dispatch._deepep import DeepEPExchange

        return DeepEPExchange(groups.tp_ep, num_local_experts, width, num_sms=config.moe_deepep_num_sms, timeout_s=timeout_s)
    from mcore_moe.dispatch._hybridep import HybridEPExchange

    return HybridEPExchange(groups.tp_ep, num_local_experts, width, num_sms=config.moe_hybridep_num_sms, timeout_s=timeout_s)
