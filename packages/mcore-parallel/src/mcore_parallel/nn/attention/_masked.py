# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention under a mask that comes with the step."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import AttentionCore, AttentionSpec
from mcore_parallel.nn.attention._registry import choose_attention


class MaskedAttention:
    """Builds cores that follow ``Step.attention`` where it is a mask, and are those of ``choose_attention`` where it is None.

    A mask is bool and True where a query does not see a key: [B, 1, 1, S] for padding, [B, 1, S, S] for anything else. Padding at the
    ends of sequences is faster as packed sequences (``Step.cu_seqlens``), which every kernel takes.

    Args:
        backend: as of ``choose_attention``.
    """

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend

    def build_core(self, spec: AttentionSpec, groups: ProcessGroups, layer: int) -> AttentionCore:
        """The core of a layer.

        Raises:
            ValueError: windows or sinks, which a mask would hide, capped scores, and what ``choose_attention`` raises.
        """
        if spec.window is not None or spec.softmax_type != "vanilla":
            raise ValueError(
                f"window_size={spec.window} and softmax_type={spec.softmax_type!r} do not go with masks; leave them out, or mask the window"
            )
        if spec.softcap is not None:
            raise ValueError(f"attn_logit_softcapping={spec.softcap} does not go with masks, whose kernels cap no scores; leave it at None")
        plain = choose_attention(spec, groups, self.backend)
        scale = spec.softmax_scale

        def core(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
            if step.attention is None:
                return plain(q, k, v, layer, step)
            return _masked(q, k, v, step, causal=spec.causal, scale=scale)

        return core


# A heads, K key-value heads, d width of a head, B sequences, S tokens a sequence.
def _masked(q: Tensor, k: Tensor, v: Tensor, step: Step, *, causal: bool, scale: float | None) -> Tensor:
    mask, B, S = step.attention, step.batch_size, step.seq_len
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape not in ((B, 1, 1, S), (B, 1, S, S)):
        received = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask is {received}; give bool [{B}, 1, 1, {S}] or [{B}, 1, {S}, {S}], True where a key is hidden")
    seen = ~mask
    if causal:
        seen = seen & torch.ones(S, S, dtype=torch.bool, device=q.device).tril()
    q, k, v = (x.view(B, S, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)
