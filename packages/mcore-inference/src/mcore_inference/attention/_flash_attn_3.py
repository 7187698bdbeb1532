# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""FlashAttention 3 over a paged cache: the only file that imports it, and imported only by who chose it.

Written against the documented interface of ``flash_attn_with_kvcache`` of FlashAttention 3 (``flash_attn_interface``, folder hopper of
github.com/Dao-AILab/flash-attention, 3.0.0b1), and tested on a GPU where it is installed, else against a stand-in that computes the same
call.
"""

# pyright: reportMissingImports=false

import torch
from flash_attn_interface import flash_attn_with_kvcache
from torch import Tensor

from mcore_inference.attention._page_format import PageFormat
from mcore_inference.attention._step import TableRows
from mcore_inference.cache import LayerSlots
from mcore_parallel.nn import AttentionSpec

_WIDEST_HEAD = 256


# T tokens of a step, R rows of it, A heads, d width of a head.
class FlashAttention3:
    """Attention by ``flash_attn_with_kvcache``; conforms to ``AttentionLibrary``.

    Rows and tables stay on the device, and the library schedules there: graphs can hold it. Windows and scales of layers are served, any
    size of blocks, heads whose width is a multiple of 8 up to 256. GPUs of compute capability 9.0.
    """

    plans_on_host = False

    def obstacle(self, spec: AttentionSpec, pages: PageFormat) -> str | None:
        if spec.head_dim % 8 or spec.head_dim > _WIDEST_HEAD:
            return f"has head_dim={spec.head_dim}, and FlashAttention 3 takes multiples of 8 up to {_WIDEST_HEAD}"
        if pages.device.type == "cuda" and (capability := torch.cuda.get_device_capability(pages.device)) != (9, 0):
            return f"is on {pages.device} of compute capability {capability[0]}.{capability[1]}, and FlashAttention 3 has kernels for 9.0"
        return None

    def attend(self, q: Tensor, cached: LayerSlots, rows: TableRows, *, scale: float, window: int) -> Tensor:
        keys, values = (slots.unflatten(0, (-1, rows.block_size)) for slots in (cached.keys, cached.values))
        shared = {
            "cache_seqlens": rows.contexts_R,
            "page_table": rows.tables_RB,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window < 0 else (window, 0),
        }
        if not rows.has_prefill:
            return flash_attn_with_kvcache(q[:, None], keys, values, **shared)[:, 0]
        return flash_attn_with_kvcache(q, keys, values, **shared, cu_seqlens_q=rows.starts_R, max_seqlen_q=rows.longest_query)
