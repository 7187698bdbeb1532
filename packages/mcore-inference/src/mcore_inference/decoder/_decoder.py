# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model's decode step with the residual sums inside the linear layers, and head norms, rotation and the cache's write in one kernel."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_inference.attention import PagedAttention, PagedStep
from mcore_parallel.models import GPTModel, OutputLayer, TransformerLayer
from mcore_parallel.nn import MLP, RMSNorm, SelfAttention, Step
from mcore_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear

_DTYPES = (torch.bfloat16, torch.float16)


# T tokens (one a request), D model.
class FusedDecoder:
    """Computes what the model's forward does for one token of each request, by ten kernels a layer.

    It reads the weights where the model has them. Linear layers that end in the residual stream, and the output layer, stream their
    weights where tokens are few (``streamed_linear``); the others are torch's.

    Args:
        model: one that ``fits``.
    """

    def __init__(self, model: GPTModel) -> None:
        self._model = model
        self._layers = [cast(TransformerLayer, layer) for layer in model.layers.values()]

    @staticmethod
    def fits(model: GPTModel) -> bool:
        """Whether every part of the model is one that the kernels compute; the model's own forward serves the others."""
        config = model.config
        plain = config.activation == "swiglu" and not config.glu_linear_offset and config.activation_func_clamp_value is None
        turns = config.position_embedding_type != "rope" or (config.rotary_percent == 1.0 and not config.rotary_interleaved)
        parameter = next(model.parameters())
        sound = parameter.is_cuda and parameter.dtype in _DTYPES and model.groups.tp.size == 1 and model.is_first and model.is_last
        whole = plain and turns and config.mrope_section is None and config.output_multiplier == 1.0
        whole = whole and isinstance(model.output, OutputLayer) and model.output.products is None and type(model.final_norm) is RMSNorm
        return sound and whole and all(_layer_fits(layer) for layer in model.layers.values())

    def logits(self, tokens_T: Tensor, step: Step) -> Tensor:
        """[T, V] of a step whose rows are one token each."""
        from mcore_inference.decoder._triton import rotate_and_append

        model = self._model
        tables = model.rotary(step.positions), model.rotary(step.positions, window=True)
        paged = cast(PagedStep, step.attention)
        x = model.embed(tokens_T, step)
        for layer in self._layers:
            assert layer.input_norm is not None and layer.ffn_norm is not None
            attention, mlp = cast(SelfAttention, layer.mixer), cast(MLP, layer.mlp)
            qkv = F.linear(layer.input_norm(x), _rows(attention.qkv))
            turned = None if attention.rotary is None else tables[0]
            if attention.rotary == "window" and tables[1] is not None:
                turned = tables[1]
            core = cast(PagedAttention, attention.core)
            keys, values = paged.cache.slots(attention.layer)
            packed = qkv.view(len(qkv), attention.local_kv_heads, -1, attention.head_dim)
            q = rotate_and_append(packed, turned, _head_norms(attention), keys, values, paged.slots_T)
            y = core.attend(q, keys, values, paged, sink=attention.softmax_offset)
            x = _project(y.flatten(1), _rows(attention.out), x)
            y = F.linear(layer.ffn_norm(x), _rows(mlp.up))
            x = _project(mlp.activation(y), _rows(mlp.down), x)
        output = cast(OutputLayer, model.output)
        weight = output.weight if output.weight is not None else cast(Any, model.embedding).weight
        return _project(cast(nn.Module, model.final_norm)(x), weight)


def _rows(linear: nn.Module) -> Tensor:
    """The weight as one matrix."""
    return cast(Tensor, linear.weight).flatten(0, -2)


def _project(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    from mcore_inference.decoder._triton import MAX_ROWS, streamed_linear

    if len(x) <= MAX_ROWS:
        return streamed_linear(x, weight, residual)
    # In place: nobody reads the residual stream as it was.
    return F.linear(x, weight) if residual is None else residual.addmm_(x, weight.t())


def _head_norms(attention: SelfAttention) -> tuple[Tensor, Tensor, float, float] | None:
    query, key = attention.q_norm, attention.k_norm
    if not isinstance(query, RMSNorm) or not isinstance(key, RMSNorm):
        return None
    return query.weight, key.weight, query.epsilon, float(query.zero_centered)


def _layer_fits(layer: nn.Module) -> bool:
    if not isinstance(layer, TransformerLayer) or layer.attention_post_norm is not None or layer.mlp_post_norm is not None:
        return False
    attention, mlp = layer.mixer, layer.mlp
    if type(attention) is not SelfAttention or type(mlp) is not MLP or type(attention.core) is not PagedAttention:
        return False
    head_norms = {type(attention.q_norm), type(attention.k_norm)} <= {RMSNorm, type(None)}
    linears = _plain(attention.qkv, ColumnParallelLinear) and _plain(mlp.up, ColumnParallelLinear)
    linears = linears and _plain(attention.out, RowParallelLinear) and _plain(mlp.down, RowParallelLinear)
    norms = type(layer.input_norm) is RMSNorm and type(layer.ffn_norm) is RMSNorm
    return linears and norms and head_norms and attention.gate is None and attention.head_dim % 2 == 0


def _plain(linear: nn.Module, kind: type[nn.Module]) -> bool:
    """A linear layer without a bias, whose matmul is torch's."""
    return type(linear) is kind and getattr(linear, "bias", None) is None and getattr(linear, "products", None) is None
