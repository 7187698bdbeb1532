# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model's forward over a paged cache in few calls of torch."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_inference._stability import experimental_api
from mcore_inference.decoder._decoder import FINAL_NORM, layer_fits, layer_names, model_fits
from mcore_parallel.models import GPTModel, OutputLayer, TransformerLayer
from mcore_parallel.nn import MLP, RMSNorm, SelfAttention, Step

_DTYPES = (torch.float32, torch.float64)


# T tokens, D model, V vocabulary, R tokens whose logits are read; A query heads, K key-value heads, d width of a head.
@experimental_api
class TorchDecoder:
    """Computes what the model's forward does for the tokens of a step on a CPU, from the weights where the model has them.

    For few tokens a call of torch costs as much as what it computes there, and one of a module more. A layer has about 20 calls beside
    those of attention; a feed-forward that is no ``MLP`` is called as it is. A model that has got hooks or other modules since is not
    ``as_made``: then its own forward computes what it has become.

    Args:
        model: one that ``fits``.
        modules: of the model, whose outputs ``take_states`` gives behind each step.
    """

    def __init__(self, model: GPTModel, *, modules: Sequence[str] = ()) -> None:
        self._model, self._modules = model, frozenset(modules)
        layers = [cast(TransformerLayer, layer) for layer in model.layers.values()]
        self._layers = [(name, _Layer(layer)) for name, layer in zip(layer_names(model), layers, strict=True)]
        self._final_norm = _Norm(model.final_norm)
        self._states: dict[str, Tensor] = {}
        self._parts = list(model.modules())

    @property
    def as_made(self) -> bool:
        """Whether the model has the modules that it had, and none of them a hook."""
        parts = self._parts
        return list(self._model.modules()) == parts and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)

    @staticmethod
    def fits(model: GPTModel, modules: Sequence[str] = ()) -> bool:
        """Whether every part of the model is computed here; the model's own forward serves the others.

        Args:
            model: any.
            modules: as of ``FusedDecoder.fits``.
        """
        parameter = next(model.parameters())
        plain = parameter.device.type == "cpu" and parameter.dtype in _DTYPES and model.groups.tp.size == 1
        return plain and model_fits(model, modules) and all(layer_fits(layer) for layer in model.layers.values())

    def logits(self, tokens_T: Tensor, step: Step, rows_R: Tensor | None = None) -> Tensor:
        """[T, V] of a step, or [R, V] of those of its tokens."""
        model, positions = self._model, step.positions
        x = model.embed(tokens_T, step)
        tables = {
            "default": _signed(model.rotary(positions), x.dtype),
            "window": _signed(model.rotary(positions, window=True), x.dtype),
        }
        for name, layer in self._layers:
            # In place: nobody reads the residual stream as it was.
            layer.add_attention(x, tables, step)
            layer.add_feed_forward(x, step)
            if name in self._modules:
                self._states[name] = x.clone()
        y = self._final_norm(x)
        if FINAL_NORM in self._modules:
            self._states[FINAL_NORM] = y
        output = cast(OutputLayer, model.output)
        weight = output.weight if output.weight is not None else cast(Any, model.embedding).weight
        return F.linear(y if rows_R is None else y[rows_R], weight)

    def take_states(self) -> dict[str, Tensor]:
        """Outputs [T, D] of the modules in the last step; they are kept no longer."""
        states, self._states = self._states, {}
        return states


class _Norm:
    """An ``RMSNorm`` in five calls."""

    def __init__(self, norm: nn.Module | None) -> None:
        assert isinstance(norm, RMSNorm)
        self._norm, self._share = norm, 1 / len(norm.weight)
        self._epsilon = torch.tensor(norm.epsilon, dtype=norm.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> the same."""
        weight = self._norm.weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._epsilon, length, length, value=self._share).rsqrt_()
        return (x * scale).mul_(weight + 1.0 if self._norm.zero_centered else weight)


class _Layer:
    """A transformer layer, its modules at hand."""

    def __init__(self, layer: TransformerLayer) -> None:
        self._attention, self._mlp = cast(SelfAttention, layer.mixer), cast(nn.Module, layer.mlp)
        self._input_norm, self._ffn_norm = _Norm(layer.input_norm), _Norm(layer.ffn_norm)
        norms = self._attention.q_norm, self._attention.k_norm
        self._head_norms = None if norms[0] is None else (_Norm(norms[0]), _Norm(norms[1]))
        self._core, self._rotary = self._attention.core, self._attention.rotary
        self._qkv, self._out = cast(Any, self._attention.qkv), cast(Any, self._attention.out)
        self._is_plain = type(self._mlp) is MLP
        if self._is_plain:
            self._up, self._down = cast(Any, self._mlp).up, cast(Any, self._mlp).down

    def add_attention(self, x: Tensor, tables: dict[str, tuple[Tensor, Tensor] | None], step: Step) -> None:
        """To the residual stream [T, D]."""
        attention = self._attention
        qkv = _product(self._input_norm(x), self._qkv)
        heads = qkv.view(len(x), attention.local_kv_heads, -1, attention.head_dim)
        turning = heads[:, :, :-1]
        if self._head_norms is not None:
            query, key = self._head_norms
            turning = torch.cat((query(heads[:, :, :-2]), key(heads[:, :, -2:-1])), dim=2)
        own = None if self._rotary is None else tables[self._rotary] or tables["default"]
        if own is not None:
            # Queries and keys at once.
            cos, sin = own
            turning = (turning * cos).addcmul_(turning.roll(attention.head_dim // 2, -1), sin)
        q, k, v = turning[:, :, :-1].flatten(1, 2), turning[:, :, -1], heads[:, :, -1]
        y = cast(Any, self._core)(q, k, v, attention.layer, step, sink=attention.softmax_offset)
        _add_product(x, y.flatten(1), self._out)

    def add_feed_forward(self, x: Tensor, step: Step) -> None:
        """To the residual stream [T, D]."""
        y = self._ffn_norm(x)
        if not self._is_plain:
            x.add_(self._mlp(y, step)[0])
            return
        gate, value = _product(y, self._up).chunk(2, dim=-1)
        _add_product(x, F.silu(gate).mul_(value), self._down)


def _product(x: Tensor, linear: Any) -> Tensor:
    """[T, D] -> [T, N], with what adapters add to it."""
    y, adapters = F.linear(x, linear.weight.flatten(0, -2)), linear.lora
    return y if adapters is None else adapters.add_to(y, x)


def _add_product(x: Tensor, y: Tensor, linear: Any) -> None:
    """To x [T, N], that of y [T, D]."""
    x.addmm_(y, linear.weight.t())
    if linear.lora is not None:
        linear.lora.add_to(x, y)


def _signed(tables: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin [T, 1, 1, d], for which the channel half a head away is not negated: the sines of the first half are."""
    if tables is None:
        return None
    cos, sin = (table.to(dtype) for table in tables)
    sin[:, : sin.shape[1] // 2].neg_()
    return cos[:, None, None], sin[:, None, None]
