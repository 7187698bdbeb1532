# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention of plain torch modules to sequences that lie split over ranks, in the two ways that torch offers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.bench._llama import Attend

Share = Callable[..., AbstractContextManager[tuple[Tensor, ...]]]
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


# B sequences, A heads, s tokens of a rank, D width of a head.
def whole_sequences(mesh: dist.device_mesh.DeviceMesh) -> tuple[Attend, Share]:
    """By all-to-all: each rank computes a share of the heads of whole sequences (Ulysses)."""
    group, size = mesh.get_group(), mesh.size()

    def to_heads(x: Tensor) -> Tensor:
        sent = x.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
        return _exchanged(sent, group).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with _kernels(q):
            y = F.scaled_dot_product_attention(to_heads(q), to_heads(k), to_heads(v), is_causal=True, enable_gqa=True)
        sent = y.unflatten(2, (size, -1)).movedim(2, 0).contiguous()
        return _exchanged(sent, group).movedim(0, 1).flatten(1, 2)

    @contextmanager
    def share(*tensors: Tensor, dims: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        yield tuple(x.chunk(size, dim)[mesh.get_local_rank()] for x, dim in zip(tensors, dims, strict=True))

    return attend, share


def ring(mesh: dist.device_mesh.DeviceMesh) -> tuple[Attend, Share]:
    """By torch's own context parallelism, whose keys and values travel."""
    from torch.distributed.tensor.experimental import context_parallel

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with _kernels(q):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @contextmanager
    def share(*tensors: Tensor, dims: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        cut = [x.clone() for x in tensors]
        with context_parallel(mesh, buffers=cut, buffer_seq_dims=list(dims), no_restore_buffers=set(cut)):
            yield tuple(cut)

    outside: Any = torch.compiler.disable(attend)
    return outside, share


def _kernels(q: Tensor) -> AbstractContextManager[Any]:
    return sdpa_kernel(_KERNELS, set_priority=True) if q.is_cuda else nullcontext()


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...], one part for each rank -> one part from each."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(x, None, None, group)
