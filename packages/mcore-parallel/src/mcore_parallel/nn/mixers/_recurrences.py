# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The recurrences of linear mixers, token by token and chunk by chunk: SSD (Dao and Gu, 2024) and the gated delta rule (Yang et al.)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel.nn.kernels import ChunkPlan, fits_delta, fused_delta_sweep, has_kernel

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
    for sequence, length in enumerate(plan.tokens.diff().tolist()):
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
    decay = torch.exp(l_CHQ[..., -1])[..., None, None]
    states = initial_states(x, b.shape[-1], plan) if initial is None else initial
    before, behind = plan.pass_states(states, lambda state, chunks: decay[chunks] * state + written[chunks])
    y = mixed @ x + torch.exp(l_CHQ)[..., None] * (c @ before.transpose(-1, -2)) + skip_H[:, None, None] * x
    return plan.join(y.transpose(1, 2)).to(x_THP.dtype), behind


def initial_states(x: Tensor, state_dim: int, plan: ChunkPlan) -> Tensor:
    """Zeros [B, H, P, N] for values [T, H, P] or [C, H, Q, P]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.zeros(plan.num_sequences, x.shape[1], x.shape[-1], state_dim, dtype=wide, device=x.device)


def decay_between(l_CHQ: Tensor, *, strict: bool = False) -> Tensor:
    """``exp(l_i - l_j)`` [..., Q, Q] for j up to i (``strict``: before i), else 0."""
    size = l_CHQ.shape[-1]
    allowed = torch.ones(size, size, dtype=torch.bool, device=l_CHQ.device).tril(-1 if strict else 0)
    # Masked before the exponential, which would overflow above the diagonal.
    return torch.exp((l_CHQ[..., :, None] - l_CHQ[..., None, :]).masked_fill(~allowed, -torch.inf))


# T tokens, B sequences, H value heads, G key heads, K width of keys, V width of values, C chunks, Q places of a chunk.
# A head's state is S [K, V]:  S' = exp(g_t) S_{t-1},  S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T,  o_t = S_t^T q_t.

EPSILON = 1e-6
"""Added to the squared length of a query or key."""


def unit(x: Tensor) -> Tensor:
    """Rows of length 1, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def delta_step(q_BGK: Tensor, k_BGK: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences -> (o [B, H, V], the next states); queries and keys as of ``delta_chunked``."""
    wide, heads = state_BHKV.dtype, v_BHV.shape[1] // q_BGK.shape[1]
    q = (unit(q_BGK) * q_BGK.shape[-1] ** -0.5).to(wide).repeat_interleave(heads, dim=1)
    k = unit(k_BGK).to(wide).repeat_interleave(heads, dim=1)
    state = torch.exp(g_BH)[..., None, None] * state_BHKV
    change = beta_BH[..., None] * (v_BHV.to(wide) - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * change[..., None, :]
    return (state * q[..., None]).sum(-2).to(v_BHV.dtype), state


def delta_recurrent(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, plan: ChunkPlan, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As ``delta_chunked``, by its definition: token after token. What the other forms are held against."""
    states = _zeros(q_TGK, v_THV, g_TH, plan) if initial is None else initial
    outputs, behind, token = [v_THV[:0]], [], 0
    for sequence, length in enumerate(plan.tokens.diff().tolist()):
        state = states[sequence : sequence + 1]
        for _ in range(length):
            part = slice(token, token + 1)
            y, state = delta_step(q_TGK[part], k_TGK[part], v_THV[part], g_TH[part], beta_TH[part], state)
            outputs.append(y)
            token += 1
        behind.append(state)
    return torch.cat(outputs), torch.cat([states[:0], *behind])


def delta_chunked(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, plan: ChunkPlan, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence as matrix products. Within a chunk what the tokens write solves a triangular system:

    with l the cumulated g and L_ij = exp(l_i - l_j), ``(1 + tril(beta_i (k_i k_j) L_ij, -1)) w = beta (v - exp(l) k S)``.

    Args:
        q_TGK: queries; they are brought to length 1 / sqrt(K), and H / G value heads share a key head's.
        k_TGK: keys; they are brought to length 1.
        v_THV: values.
        g_TH: logarithms of the decay, float32 or float64; the dtype in which all is computed.
        beta_TH: strengths of writing.
        plan: the sequences.
        initial: [B, H, K, V] states before the sequences; None for zeros.

    Returns:
        o [T, H, V] in the dtype of v, and the states [B, H, K, V] behind the sequences.
    """
    wide, heads = g_TH.dtype, v_THV.shape[1] // q_TGK.shape[1]
    q, k = (plan.cut(unit(value).to(wide)).transpose(1, 2).repeat_interleave(heads, dim=1) for value in (q_TGK, k_TGK))
    q = q * q.shape[-1] ** -0.5
    v = plan.cut(v_THV.to(wide)).transpose(1, 2)
    beta = plan.cut(beta_TH.to(wide)).transpose(1, 2)[..., None]
    l_CHQ = plan.cut(g_TH).transpose(1, 2).cumsum(-1)
    grown, keys = torch.exp(l_CHQ)[..., None], k.transpose(-1, -2)
    system = beta * (k @ keys) * decay_between(l_CHQ, strict=True)
    right = torch.cat((beta * v, beta * grown * k), dim=-1)
    # unitriangular: the diagonal of ones is not read.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, read = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ keys) * decay_between(l_CHQ)
    decay_CH = torch.exp(l_CHQ[..., -1])
    writers = keys * torch.exp(l_CHQ[..., -1:] - l_CHQ)[..., None, :]
    states = _zeros(q_TGK, v_THV, g_TH, plan) if initial is None else initial

    def advance(state: Tensor, chunks: Tensor) -> Tensor:
        return decay_CH[chunks, :, None, None] * state + writers[chunks] @ (own[chunks] - read[chunks] @ state)

    if has_kernel(own) and not torch.is_grad_enabled() and fits_delta(plan.chunk_size, (k.shape[-1], v.shape[-1])):
        before, behind = fused_delta_sweep(own, read, writers, decay_CH, plan, states)
    else:
        before, behind = plan.pass_states(states, advance)
    o = grown * (q @ before) + scores @ (own - read @ before)
    return plan.join(o.transpose(1, 2)).to(v_THV.dtype), behind


def _zeros(q_TGK: Tensor, v_THV: Tensor, g_TH: Tensor, plan: ChunkPlan) -> Tensor:
    shape = (plan.num_sequences, v_THV.shape[1], q_TGK.shape[-1], v_THV.shape[-1])
    return torch.zeros(shape, dtype=g_TH.dtype, device=g_TH.device)
