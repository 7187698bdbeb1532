# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""flashinfer over a paged cache, and its rotation of heads: the only file that imports it, and imported only by who chose it.

Written against the documented interface of flashinfer-python 0.7: ``BatchDecodeWithPagedKVCacheWrapper``,
``BatchPrefillWithPagedKVCacheWrapper`` and ``rope.apply_rope_with_cos_sin_cache_inplace``. Tested on a GPU where it is installed, else
against a stand-in that computes the same calls in torch.
"""

# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any

import flashinfer
import flashinfer.rope
import numpy as np
import torch
from torch import Tensor

from mcore_inference.attention._page_format import PageFormat
from mcore_inference.attention._step import HostRows, TableRows
from mcore_inference.cache import LayerSlots
from mcore_parallel.nn import AttentionSpec, PackedHeads

_HEAD_WIDTHS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 1024 * 1024
"""That the library recommends."""
_TENSOR_CORE_GROUP = 3
"""Query heads of a key-value head from which decode rows are computed by the kernels of prompts, on tensor cores."""


# T tokens of a step, R rows of it, A heads, K key-value heads, d width of a head.
@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What a plan depends on beside the rows of a step; layers that ask for the same share one."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int


class _Plan:
    """A wrapper of the library, and the step that it is planned for.

    Args:
        wrapper: of the library.
        device: of the cache.
    """

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._rows: TableRows | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def is_for(self, rows: TableRows) -> bool:
        return self._rows is rows

    def make(self, rows: TableRows, **arguments: Any) -> None:
        """Plan a step. The library fills one pinned buffer, which a copy of the last plan may still read."""
        if self._rows is not None and self._copied is not None:
            self._copied.synchronize()
        self.wrapper.plan(**arguments)
        if self._copied is not None:
            self._copied.record()
        self._rows = rows


class FlashInferAttention:
    """Attention by flashinfer's wrappers, rows of one token by that of decode and others by that of prompts; conforms to
    ``AttentionLibrary``.

    A step is planned on the host when its first layer runs, once for each window and scale among the layers, so graphs cannot hold it.
    Heads are 64, 128 or 256 wide; blocks are of any size. A workspace of 128 MiB on the device serves all layers.
    """

    plans_on_host = True

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Tensor] = {}
        self._plans: dict[tuple[_Problem, bool], _Plan] = {}

    def obstacle(self, spec: AttentionSpec, pages: PageFormat) -> str | None:
        if spec.head_dim not in _HEAD_WIDTHS:
            return f"has head_dim={spec.head_dim}, and flashinfer takes {', '.join(map(str, _HEAD_WIDTHS))}"
        return None

    def attend(self, q: Tensor, cached: LayerSlots, rows: TableRows, *, scale: float, window: int) -> Tensor:
        keys, values = (slots.unflatten(0, (-1, rows.block_size)) for slots in (cached.keys, cached.values))
        problem = _Problem(
            device=q.device, dtype=q.dtype, num_heads=q.shape[1], num_kv_heads=keys.shape[2], head_dim=q.shape[2],
            block_size=rows.block_size, scale=scale, window=window,
        )  # fmt: skip
        single, parts = rows.num_decode, []
        if single:
            parts.append(self._decode(problem, rows).run(q[:single].contiguous(), (keys, values)))
        if rows.has_prefill:
            parts.append(self._prefill(problem, rows).run(q[single:].contiguous(), (keys, values)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, problem: _Problem, rows: TableRows) -> Any:
        """The wrapper, planned for the rows of one token."""
        if (problem, True) not in self._plans:
            in_prompt_kernels = problem.num_heads // problem.num_kv_heads >= _TENSOR_CORE_GROUP
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace(problem.device), "NHD", use_tensor_cores=in_prompt_kernels
            )
            self._plans[problem, True] = _Plan(wrapper, problem.device)
        plan = self._plans[problem, True]
        if not plan.is_for(rows):
            indptr, indices, last = _pages(_host(rows), slice(0, rows.num_decode), problem.block_size)
            plan.make(
                rows, indptr=indptr, indices=indices, last_page_len=last, head_dim=problem.head_dim, **_shared(problem)
            )  # fmt: skip
        return plan.wrapper

    def _prefill(self, problem: _Problem, rows: TableRows) -> Any:
        """The wrapper, planned for the rows of several tokens."""
        if (problem, False) not in self._plans:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace(problem.device), "NHD")
            self._plans[problem, False] = _Plan(wrapper, problem.device)
        plan = self._plans[problem, False]
        if not plan.is_for(rows):
            host, several = _host(rows), slice(rows.num_decode, None)
            indptr, indices, last = _pages(host, several, problem.block_size)
            plan.make(
                rows, qo_indptr=_indptr(host.lengths_R[several]), paged_kv_indptr=indptr, paged_kv_indices=indices,
                paged_kv_last_page_len=last, head_dim_qk=problem.head_dim, causal=True, **_shared(problem),
            )  # fmt: skip
        return plan.wrapper

    def _workspace(self, device: torch.device) -> Tensor:
        # Launches of one stream use it one after the other.
        if device not in self._workspaces:
            self._workspaces[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[device]


class FlashInferRotation:
    """Turns heads by ``rope.apply_rope_with_cos_sin_cache_inplace``; conforms to ``HeadRotation``.

    Args:
        required: whether steps of single tokens are turned by it too, and not inside this package's attention.
    """

    def __init__(self, *, required: bool) -> None:
        self.required = required

    def rotate(self, heads: PackedHeads) -> tuple[Tensor, Tensor, Tensor]:
        qkv, tables = heads.qkv, heads.tables
        assert tables is not None and heads.norms is None, "heads without tables, or with norms, are turned by this package's kernel"
        tokens, width = qkv.shape[0], qkv.shape[-1]
        q, k = (part.reshape(tokens, -1).contiguous() for part in (qkv[:, :, :-2], qkv[:, :, -2]))
        # The tables are those of the step's tokens, so a token's position is its number.
        cos_sin = torch.cat([table[:, : width // 2] for table in tables], dim=1).float()
        numbers = torch.arange(tokens, dtype=torch.int32, device=qkv.device)
        flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(
            positions=numbers, query=q, key=k, head_size=width, cos_sin_cache=cos_sin, is_neox=True
        )
        return q.view(tokens, -1, width), k.view(tokens, -1, width), qkv[:, :, -1]


def _shared(problem: _Problem) -> dict[str, Any]:
    return {
        "num_qo_heads": problem.num_heads,
        "num_kv_heads": problem.num_kv_heads,
        "page_size": problem.block_size,
        "sm_scale": problem.scale,
        "window_left": problem.window,
        "q_data_type": problem.dtype,
        "kv_data_type": problem.dtype,
    }


def _host(rows: TableRows) -> HostRows:
    assert rows.host is not None, "steps that a graph replays are not planned on the host"
    return rows.host


def _indptr(counts_R: np.ndarray) -> Tensor:
    """int32 [R + 1], where each row's begin, and their sum."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts_R))).astype(np.int32))


def _pages(host: HostRows, chosen: slice, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32 on the host: where the blocks of each row begin, all their numbers, tokens in the last one of each row."""
    contexts_R, tables_RB = host.contexts_R[chosen], host.tables_RB[chosen]
    blocks_R = -(-contexts_R // block_size)
    held_RB = np.arange(tables_RB.shape[1])[None, :] < blocks_R[:, None]
    last_R = contexts_R - (blocks_R - 1) * block_size
    numbers, last = (torch.from_numpy(part.astype(np.int32)) for part in (tables_RB[held_RB], last_R))
    return _indptr(blocks_R), numbers, last
