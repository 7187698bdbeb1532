# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A decoder of plain torch modules, the same for every way of sharding it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# B sequences, S tokens of each, A heads, D width of a head, H model width.


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a decoder with gated feed-forwards and grouped queries."""

    num_layers: int
    hidden: int
    feed_forward: int
    num_heads: int
    num_groups: int
    vocab: int
    seq_len: int
    num_experts: int = 0
    """0 for a dense feed-forward, else ``num_choices`` of them compute a token, together as wide as ``feed_forward``."""
    num_choices: int = 1


class LlamaBlock(nn.Module):
    """One layer; ``cudnn`` computes attention by that library, with keys and values repeated for it, else torch chooses.

    ``attend`` computes it instead, from [B, A, S, D] each.
    """

    def __init__(self, shape: LlamaShape, *, cudnn: bool, attend: Attend | None = None) -> None:
        super().__init__()
        self.attend = attend
        self.width, self.repeats, self.cudnn = shape.hidden // shape.num_heads, shape.num_heads // shape.num_groups, cudnn
        linear = functools.partial(nn.Linear, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.q, self.o = linear(shape.hidden, shape.hidden), linear(shape.hidden, shape.hidden)
        self.k, self.v = (linear(shape.hidden, shape.num_groups * self.width) for _ in range(2))
        self.gate, self.up = linear(shape.hidden, shape.feed_forward), linear(shape.hidden, shape.feed_forward)
        self.down = linear(shape.feed_forward, shape.hidden)

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x_BSH.shape
        h = self.norm_1(x_BSH)
        q, k, v = (product(h).view(batch, length, -1, self.width).transpose(1, 2) for product in (self.q, self.k, self.v))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if self.attend is not None:
            y = self.attend(q, k, v)
        elif self.cudnn:
            k, v = (x.repeat_interleave(self.repeats, dim=1) for x in (k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BSH = x_BSH + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm_2(x_BSH)
        return x_BSH + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotated(x_BASD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_BASD.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x_BASD.dtype)


class Llama(nn.Module):
    """Tokens [B, S] -> logits [B, S, V]."""

    def __init__(self, shape: LlamaShape, *, cudnn: bool = False, attend: Attend | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(shape, cudnn=cudnn, attend=attend) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens_BS: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens_BS)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def initialise(module: nn.Module) -> None:
    """Values of one module's own parameters."""
    for parameter in module.parameters(recurse=False):
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)


def angles(shape: LlamaShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [S, D / 2]."""
    width = shape.hidden // shape.num_heads
    rates = 500000.0 ** -(torch.arange(0, width, 2, device=device).float() / width)
    turns = torch.outer(torch.arange(shape.seq_len, device=device).float(), rates)
    return turns.cos(), turns.sin()


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def compiled_loss(enabled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(token_loss) if enabled else token_loss
