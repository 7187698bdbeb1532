# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The state-space recurrence of Mamba-2, token by token and chunk by chunk (Dao and Gu, 2024)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel.nn.kernels import ChunkPlan

# T tokens, B sequences, H heads, P channels of a head, G groups, N channels of a state, C chunks, Q places of a chunk.
# A head's state is S [P, N]:  S_t = exp(dt_t A) S_{t-1} + dt_t x_t b_t^T,  y_t = S_t c_t + D x_t.


def step_sizes(dt_TH: Tensor, bias_H: Tensor, limits: tuple[float, float]) -> Tensor:
    """``softplus(dt + bias)`` cut to the limits, in float32 at least."""
    wide = torch.promote_types(dt_TH.dtype, torch.float32)
    return F.softplus(dt_TH.to(wide) + bias_H.to(wide)).clamp(*limits)


def ssd_step(
    x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, b_BGN: Tensor, c_BGN: Tensor, skip_H: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences -> (y [B, H, P], the next states)."""
    x, b, c = (value.to(state_BHPN.dtype) for value in (x_BHP, b_BGN, c_BGN))
    heads = state_BHPN.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(heads, dim=1), c.repeat_interleave(heads, dim=1)
    state = torch.exp(dt_BH * a_H)[..., None, None] * state_BHPN + (dt_BH[..., None] * x)[..., None] * b[:, :, None]
    y = (state * c[:, :, None]).sum(-1) + skip_H[:, None] * x
    return y.to(x_BHP.dtype), state


def ssd_recurrent(
    x_THP: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    skip_H: Tensor,
    plan: ChunkPlan,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``ssd_chunked``, by its definition: token after token. What the other forms are held against."""
    states = initial_states(x_THP, b_TGN.shape[-1], plan) if initial is None else initial
    outputs, behind, token = [x_THP[:0]], [], 0
    for sequence, length in enumerate(plan.lengths):
        state = states[sequence : sequence + 1]
        for _ in range(length):
            part = slice(token, token + 1)
            y, state = ssd_step(x_THP[part], dt_TH[part], a_H, b_TGN[part], c_TGN[part], skip_H, state)
            outputs.append(y)
            token += 1
        behind.append(state)
    return torch.cat(outputs), torch.cat([states[:0], *behind])


def ssd_chunked(
    x_THP: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    skip_H: Tensor,
    plan: ChunkPlan,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as matrix products: within a chunk over pairs of its tokens, between chunks through states.

    Args:
        x_THP: values.
        dt_TH: step sizes, float32 or float64; the dtype in which all is computed.
        a_H: negative rates of decay.
        b_TGN: what writes to the state; H / G heads share a group's.
        c_TGN: what reads it.
        skip_H: D.
        plan: the sequences.
        initial: [B, H, P, N] states before the sequences; None for zeros.

    Returns:
        y [T, H, P] in the dtype of x, and the states [B, H, P, N] behind the sequences.
    """
    groups, heads = b_TGN.shape[1], x_THP.shape[1]
    x = plan.cut(x_THP.to(dt_TH.dtype)).transpose(1, 2)
    b, c = (plan.cut(value.to(dt_TH.dtype)).transpose(1, 2) for value in (b_TGN, c_TGN))
    dt = plan.cut(dt_TH).transpose(1, 2)
    # l: logarithm of the decay since the chunk began.
    l_CHQ = (dt * a_H[:, None]).cumsum(-1)
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(heads // groups, dim=1)
    mixed = scores * decay_between(l_CHQ) * dt[..., None, :]
    b, c = b.repeat_interleave(heads // groups, dim=1), c.repeat_interleave(heads // groups, dim=1)
    written = (x * (dt * torch.exp(l_CHQ[..., -1:] - l_CHQ))[..., None]).transpose(-1, -2) @ b
    kept = torch.exp(l_CHQ[..., -1])[..., None, None]
    states = initial_states(x, b.shape[-1], plan) if initial is None else initial
    before, behind = plan.pass_states(states, lambda state, chunks: kept[chunks] * state + written[chunks])
    y = mixed @ x + torch.exp(l_CHQ)[..., None] * (c @ before.transpose(-1, -2)) + skip_H[:, None, None] * x
    return plan.join(y.transpose(1, 2)).to(x_THP.dtype), behind


def initial_states(x: Tensor, state_dim: int, plan: ChunkPlan) -> Tensor:
    """Zeros [B, H, P, N] for values [T, H, P] or [C, H, Q, P]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.zeros(len(plan.lengths), x.shape[1], x.shape[-1], state_dim, dtype=wide, device=x.device)


def decay_between(l_CHQ: Tensor, *, strict: bool = False) -> Tensor:
    """``exp(l_i - l_j)`` [..., Q, Q] for j up to i (``strict``: before i), else 0."""
    size = l_CHQ.shape[-1]
    allowed = torch.ones(size, size, dtype=torch.bool, device=l_CHQ.device).tril(-1 if strict else 0)
    # Masked before the exponential, which would overflow above the diagonal.
    return torch.exp((l_CHQ[..., :, None] - l_CHQ[..., None, :]).masked_fill(~allowed, -torch.inf))
