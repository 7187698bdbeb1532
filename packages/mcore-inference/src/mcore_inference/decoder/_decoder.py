# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model's forward over a paged cache in few kernels."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_inference._stability import experimental_api
from mcore_inference.adapters import StackedAdapters
from mcore_inference.attention import PagedAttention, fits_packed
from mcore_inference.decoder._fp8 import FEW_ROWS, Fp8Weight, WeightDtype, has_stream_kernel
from mcore_inference.decoder._partial_sums import PartialSums
from mcore_inference.decoder._rotary import RotaryTables
from mcore_inference.sampling import PlainSums
from mcore_parallel.backends import Scaled, quantize_rows
from mcore_parallel.comm import all_gather
from mcore_parallel.models import GPTModel, OutputLayer, TransformerConfig, TransformerLayer
from mcore_parallel.nn import MLP, NormedStream, RMSNorm, SelfAttention, Step, StreamedFeedForward, StreamNorm, StreamsFeedForward
from mcore_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear

_DTYPES = (torch.bfloat16, torch.float16)
# Sums before the norm's root need the range of bfloat16.
_STREAM_DTYPES = (torch.bfloat16,)
FINAL_NORM = "final_norm"
_FEW_TOKENS = 16
"""Of ``StreamedFeedForward.stream_few``."""


# T tokens, D model, V vocabulary, R tokens whose logits are read.
@experimental_api
class FusedDecoder:
    """Computes what the model's forward does for the tokens of a step, from the weights where the model has them.

    A step of few tokens, all of which are read, takes five kernels a layer, which stream the weights: the residual sum, the norm, the gate
    and, where each row is one token, the cache's write are parts of them. Other steps take torch's matmuls, and nine; where these multiply
    in fp8, norm and gate leave their result so. A feed-forward that is no ``MLP``, such as a mixture, brings kernels of its own
    (``StreamsFeedForward``), or is called as it is.

    Over tensor-parallel ranks the sums of partial results are kernels of their own, or, where ranks of a host read each other's memory,
    parts of one that adds them to the residual and prepares the norm behind; logits are gathered. All ranks make it, and call it, at the
    same points.

    A step in which linear layers have adapters (``StackedAdapters``) takes torch's matmuls, whatever its tokens: kernels that stream a
    weight, or leave their result in fp8, add none.

    Args:
        model: one that ``fits``.
        max_requests: rows of a decode step.
        num_positions: below which all tokens of steps stand, so that their rotary tables are computed once; 0 for a bound that is unknown.
        records_routing: routers report their choice to the step (``Step.routing_recorder``), which kernels of a feed-forward do not, so
            none of these are used.
        modules: of the model, whose outputs ``take_states`` gives behind each step.
    """

    def __init__(
        self,
        model: GPTModel,
        max_requests: int,
        *,
        num_positions: int = 0,
        records_routing: bool = False,
        modules: Sequence[str] = (),
    ) -> None:
        self._model, self._modules = model, frozenset(modules)
        self._names, self._rotary = layer_names(model), RotaryTables(model, num_positions)
        self._states: dict[str, Tensor] = {}
        self._layers = [cast(TransformerLayer, layer) for layer in model.layers.values()]
        self._norms = [*(_norm(layer.input_norm) for layer in self._layers), _norm(model.final_norm)]
        self._feed_forwards = [None if records_routing else _own_kernels(layer.mlp) for layer in self._layers]
        self._streams = all(type(layer.mlp) is MLP or own is not None for layer, own in zip(self._layers, self._feed_forwards, strict=True))
        parameter, tp = next(model.parameters()), model.groups.tp
        self._sums = (
            None
            if tp.size == 1
            else PartialSums(tp, max_requests, model.config.hidden_size, dtype=self._weight.dtype, device=parameter.device)
        )
        self._narrows = all(map(_narrows, self._layers))
        # Of linear layers; a launch leaves them zero.
        widths = [_linears(layer)[0].weight.flatten(0, -2).shape[0] for layer in self._layers]
        counters = max(*widths, model.config.hidden_size)
        self._finished = torch.zeros(counters, dtype=torch.int32, device=parameter.device)
        self._max_streamed = self._streamed_rows()
        self._linears = [linear for layer in self._layers for linear in _linears(layer)]

    @staticmethod
    def fits(model: GPTModel, modules: Sequence[str] = (), weight_dtype: WeightDtype | None = None) -> bool:
        """Whether every part of the model is one that the kernels compute; the model's own forward serves the others.

        Args:
            model: any.
            modules: whose outputs are read: layers, and the final norm.
            weight_dtype: that weights are rounded to before the decoder is made; None for none.
        """
        parameter = next(model.parameters())
        sound = parameter.is_cuda and parameter.dtype in _DTYPES and not model.groups.sequence_parallel
        sound = sound and (weight_dtype is None or has_stream_kernel(parameter.device, parameter.dtype))
        layers = list(model.layers.values())
        # Experts of split layers exchange tokens in the model's own forward.
        split = model.groups.tp.size == 1 or all(isinstance(layer, TransformerLayer) and type(layer.mlp) is MLP for layer in layers)
        return sound and split and model_fits(model, modules) and all(layer_fits(layer) for layer in layers)

    def sums_parts(self, num_tokens: int) -> bool:
        """Whether ``logits`` of a step of so many tokens, all of which are read, fills in ``PlainSums``; not where it has adapters."""
        if self._sums is not None or num_tokens > self._max_streamed or not self._enters_plainly:
            return False
        from mcore_inference.decoder._linear import sums_parts

        width, depth = self._weight.shape
        return sums_parts(width, depth, num_tokens)

    def logits(self, tokens_T: Tensor, step: Step, rows_R: Tensor | None = None, sums: PlainSums | None = None) -> Tensor:
        """[T, V] of a step, or [R, V] of those of its tokens.

        Args:
            tokens_T: as of the model's forward.
            step: as of the model's forward.
            rows_R: None for all.
            sums: of the logits, which the output layer fills in; only where it ``sums_parts``.
        """
        model = self._model
        rotary, window = self._rotary.at(step.positions), self._rotary.at(step.positions, window=True)
        step = dataclasses.replace(step, rotary=rotary, rotary_window=window)
        adapts = any(linear.lora is not None for linear in self._linears)
        if rows_R is None and self._enters_plainly and len(tokens_T) <= self._max_streamed and not adapts:
            return self._streamed(tokens_T, step, sums)
        assert sums is None, "this step fills in none"
        x = model.embed(tokens_T, step)
        if self._narrows and len(tokens_T) > FEW_ROWS and not adapts:
            return self._logits(self._narrowed(x, step), rows_R)
        y = self._norms[0](x)
        for name, layer, feed_forward, norm in zip(self._names, self._layers, self._feed_forwards, self._norms[1:], strict=True):
            attention = cast(SelfAttention, layer.mixer)
            y = self._attend(_product(y, attention.qkv), attention, step)
            # In place: nobody reads the residual stream as it was.
            x = self._add_product(x, y.flatten(1), attention.out)
            y = _norm(layer.ffn_norm)(x)
            if feed_forward is not None:
                y = feed_forward.stream_many(x, y, _parts(norm))
            else:
                if type(layer.mlp) is MLP:
                    x = self._add_product(x, layer.mlp.activation(_product(y, layer.mlp.up)), layer.mlp.down)
                else:
                    x = x.add_(cast(nn.Module, layer.mlp)(y, step)[0])
                y = norm(x)
            self._keep(name, x)
        return self._logits(y, rows_R)

    def take_states(self) -> dict[str, Tensor]:
        """Outputs [T, D] of the modules in the last step; they are kept no longer."""
        states, self._states = self._states, {}
        return states

    def _keep(self, name: str, x: Tensor) -> None:
        """The output of a layer, which the next one overwrites."""
        if name in self._modules:
            self._states[name] = x.clone()

    def _logits(self, y: Tensor, rows_R: Tensor | None) -> Tensor:
        if FINAL_NORM in self._modules:
            self._states[FINAL_NORM] = y
        return all_gather(F.linear(y if rows_R is None else y[rows_R], self._weight), self._model.groups.tp, dim=1)

    def _narrowed(self, x: Tensor, step: Step) -> Tensor:
        """The final norm's result [T, D], by fp8 GEMMs between kernels that round; x [T, D] is overwritten."""
        from mcore_inference.decoder import _narrow as kernels

        *norms, final = self._norms
        update: Tensor | None = None
        for name, layer, norm in zip(self._names, self._layers, norms, strict=True):
            attention, mlp = cast(SelfAttention, layer.mixer), cast(MLP, layer.mlp)
            qkv = _narrow_product(kernels.add_and_norm(x, update, _parts(norm)), attention.qkv, x.dtype)
            y = quantize_rows(self._attend(qkv, attention, step).flatten(1), torch.float8_e4m3fn)
            update = self._summed(_narrow_product(y, attention.out, x.dtype))
            up = _narrow_product(kernels.add_and_norm(x, update, _parts(_norm(layer.ffn_norm))), mlp.up, x.dtype)
            update = self._summed(_narrow_product(kernels.swiglu(up), mlp.down, x.dtype))
            if name in self._modules:
                self._states[name] = x + update
        return final(x if update is None else x.add_(update))

    def _streamed(self, tokens_T: Tensor, step: Step, sums: PlainSums | None) -> Tensor:
        from mcore_inference.decoder import _linear as kernels

        first = _parts(self._norms[0])
        if self._sums is None:
            x = kernels.embed(tokens_T, cast(Any, self._model.embedding).weight, first)
        else:
            x = kernels.enter_stream(self._model.embed(tokens_T, step).contiguous(), first)
        for name, layer, feed_forward, norm in zip(self._names, self._layers, self._feed_forwards, self._norms[1:], strict=True):
            attention = cast(SelfAttention, layer.mixer)
            qkv = kernels.streamed_linear(x, _matrix(attention.qkv), finished=self._finished)
            y = self._attend(qkv, attention, step)
            x = self._add_few(y.flatten(1), attention.out, x.x, _parts(_norm(layer.ffn_norm)))
            if feed_forward is not None:
                x = feed_forward.stream_few(x, _parts(norm))
            else:
                mlp = cast(MLP, layer.mlp)
                x = self._add_few(kernels.streamed_swiglu(x, _matrix(mlp.up)), mlp.down, x.x, _parts(norm))
            self._keep(name, x.x)
        if FINAL_NORM in self._modules:
            self._states[FINAL_NORM] = self._norms[-1](x.x)
        return all_gather(kernels.streamed_linear(x, self._weight, sums=sums), self._model.groups.tp, dim=1)

    def _add_few(self, y: Tensor, linear: nn.Module, residual: Tensor, norm: StreamNorm) -> NormedStream:
        """The residual stream [T, D] plus the linear layer of y, in front of a norm."""
        from mcore_inference.decoder import _linear as kernels

        if self._sums is None:
            return kernels.streamed_residual(y, _matrix(linear), residual, norm, finished=self._finished)
        partial = kernels.streamed_linear(y, _matrix(linear), out=self._sums.rows(len(y)), finished=self._finished)
        peers = self._sums.peers(partial)
        return kernels.enter_stream(partial if peers is not None else self._sums.sum(partial), norm, residual_TD=residual, peers=peers)

    def _add_product(self, x: Tensor, y: Tensor, linear: nn.Module) -> Tensor:
        """x [T, N] plus the product of y [T, D], in place."""
        layer = cast(RowParallelLinear, linear)
        if isinstance(layer.products, Fp8Weight):
            return x.add_(self._summed(_with_adapters(layer.products.product(y, layer.weight), y, layer)))
        if self._sums is None:
            return _with_adapters(x.addmm_(y, layer.weight.t()), y, layer)
        # Without rows of its own the product makes some.
        partial = torch.mm(y, layer.weight.t(), out=self._sums.rows(len(y)))
        return x.add_(self._sums.sum(_with_adapters(partial, y, layer)))

    def _summed(self, partial: Tensor) -> Tensor:
        """Of all tensor-parallel ranks."""
        return partial if self._sums is None else self._sums.sum(partial)

    def _streamed_rows(self) -> int:
        """Tokens of the largest decode step whose weights are streamed."""
        if not self._streams or self._weight.dtype not in _STREAM_DTYPES:
            return 0
        from mcore_inference.decoder._linear import MAX_FP8_ROWS, MAX_ROWS

        if any(self._feed_forwards):
            return _FEW_TOKENS
        in_fp8 = any(isinstance(products, Fp8Weight) for layer in self._layers for products in _products(layer))
        return MAX_FP8_ROWS if in_fp8 else MAX_ROWS

    @property
    def _enters_plainly(self) -> bool:
        """Whether the residual stream begins with rows of the embedding as they are."""
        return self._model.config.embedding_multiplier == 1.0 and self._model.position_embedding is None

    @property
    def _weight(self) -> Tensor:
        """[V, D] of the output layer."""
        output = cast(OutputLayer, self._model.output)
        return output.weight if output.weight is not None else cast(Any, self._model.embedding).weight

    def _attend(self, qkv: Tensor, attention: SelfAttention, step: Step) -> Tensor:
        """[T, rows of the projection] -> [T, A, d]."""
        heads = attention.packed_heads(qkv.view(len(qkv), attention.local_kv_heads, -1, attention.head_dim), step)
        assert heads is not None, "layers that fit have RMS norms of heads"
        return cast(PagedAttention, attention.core).attend_packed(heads, attention.layer, step, sink=attention.softmax_offset)


def layer_names(model: GPTModel) -> list[str]:
    """Of its modules."""
    return [f"layers.{number}" for number in model.layers]


def model_fits(model: GPTModel, modules: Sequence[str]) -> bool:
    """Whether what surrounds the layers is plain, some are there, and the outputs of ``modules`` are theirs or the final norm's."""
    if not {*modules} <= {*layer_names(model), FINAL_NORM}:
        return False
    config = model.config
    whole = model.is_first and model.is_last and len(model.layers) > 0
    whole = whole and _turns_by_halves(config) and config.mrope_section is None and config.output_multiplier == 1.0
    whole = whole and config.final_logit_softcapping is None
    return whole and isinstance(model.output, OutputLayer) and model.output.products is None and type(model.final_norm) is RMSNorm


def _matrix(linear: nn.Module) -> Tensor | Scaled:
    """The weight as one matrix, with its scales if it is in fp8."""
    layer = cast(ColumnParallelLinear, linear)
    weight = layer.weight.flatten(0, -2)
    return layer.products.scaled(weight) if isinstance(layer.products, Fp8Weight) else weight


def _linears(layer: TransformerLayer) -> list[ColumnParallelLinear | RowParallelLinear]:
    """Its linear layers in the order of their use, those of a plain feed-forward included."""
    attention = cast(SelfAttention, layer.mixer)
    return cast(Any, [attention.qkv, attention.out, *([layer.mlp.up, layer.mlp.down] if type(layer.mlp) is MLP else [])])


def _products(layer: TransformerLayer) -> list[object]:
    return [linear.products for linear in _linears(layer)]


def _narrows(layer: TransformerLayer) -> bool:
    """Whether all its GEMMs of many tokens are in fp8, behind rows that one program holds."""
    if type(layer.mlp) is not MLP or not all(isinstance(products, Fp8Weight) and products.multiplies for products in _products(layer)):
        return False
    from mcore_inference.decoder._narrow import MAX_WIDTH

    *_, up, down = _linears(layer)
    return max(up.weight.shape[-1], down.weight.shape[-1]) <= MAX_WIDTH


def _narrow_product(x: Scaled, linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """[T, D] -> [T, N]."""
    layer = cast(ColumnParallelLinear, linear)
    return cast(Fp8Weight, layer.products).narrow_product(x, layer.weight.flatten(0, -2), dtype)


def _product(x: Tensor, linear: nn.Module) -> Tensor:
    """[T, D] -> [T, N]."""
    layer = cast(ColumnParallelLinear, linear)
    weight = layer.weight.flatten(0, -2)
    y = layer.products.product(x, weight) if isinstance(layer.products, Fp8Weight) else F.linear(x, weight)
    return _with_adapters(y, x, layer)


def _with_adapters(y: Tensor, x: Tensor, layer: ColumnParallelLinear | RowParallelLinear) -> Tensor:
    """This rank's product y [T, N] of x [T, D], or what it was added to, plus that of the adapters of the step, in place."""
    adapters = cast(StackedAdapters | None, layer.lora)
    return y if adapters is None else adapters.add_to(y, x)


def _norm(norm: nn.Module | None) -> RMSNorm:
    assert isinstance(norm, RMSNorm)
    return norm


def _parts(norm: RMSNorm) -> StreamNorm:
    return StreamNorm(weight=norm.weight, epsilon=norm.epsilon, shift=float(norm.zero_centered))


def _own_kernels(feed_forward: nn.Module | None) -> StreamedFeedForward | None:
    """The kernels of a feed-forward that is no ``MLP``."""
    if type(feed_forward) is MLP or not isinstance(feed_forward, StreamsFeedForward):
        return None
    return feed_forward.streamed()


def _turns_by_halves(config: TransformerConfig) -> bool:
    """Whether all channels of a head turn, each with the one half a head further, or none does."""
    turns = config.position_embedding_type in ("rope", "yarn", "mrope")
    return not turns or (config.rotary_percent == 1.0 and not config.rotary_interleaved)


def layer_fits(layer: nn.Module) -> bool:
    """Whether attention and feed-forward are plain, each behind an RMS norm."""
    if not isinstance(layer, TransformerLayer) or layer.attention_post_norm is not None or layer.mlp_post_norm is not None:
        return False
    attention, mlp = layer.mixer, layer.mlp
    if type(attention) is not SelfAttention or mlp is None or type(attention.core) is not PagedAttention:
        return False
    head_norms = {type(attention.q_norm), type(attention.k_norm)} <= {RMSNorm, type(None)}
    linears = _plain(attention.qkv, ColumnParallelLinear) and _plain(attention.out, RowParallelLinear)
    norms = type(layer.input_norm) is RMSNorm and type(layer.ffn_norm) is RMSNorm
    width = attention.head_dim
    heads = head_norms and attention.gate is None and width % 2 == 0 and fits_packed(width, _DTYPES[0].itemsize)
    return linears and norms and heads and _feed_forward_fits(mlp)


def _feed_forward_fits(mlp: nn.Module) -> bool:
    """A plain SwiGLU; others compute themselves, by kernels of their own where they have some."""
    if type(mlp) is not MLP:
        return True
    activation = mlp.activation
    plain = activation.name == "swiglu" and not activation.offset and activation.clamp is None
    return plain and _plain(mlp.up, ColumnParallelLinear) and _plain(mlp.down, RowParallelLinear)


def _plain(linear: nn.Module, kind: type[nn.Module]) -> bool:
    """A linear layer without bias and adapter, whose matmul is torch's, or whose weight is in fp8 where that has a kernel."""
    products = getattr(linear, "products", None)
    served = products is None or (isinstance(products, Fp8Weight) and has_stream_kernel(products.inverse_O1.device, products.dtype))
    alone = getattr(linear, "bias", None) is None and getattr(linear, "lora", None) is None
    return type(linear) is kind and alone and served
