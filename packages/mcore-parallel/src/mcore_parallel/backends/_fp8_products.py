# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The GEMMs of the parallel linear layers with fp8 operands, by torch alone."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.backends._fp8_config import Fp8Config
from mcore_parallel.backends._quantize import MULTIPLE, Scaled, quantize, quantize_columns, quantize_rows, scaled_product, turn
from mcore_parallel.comm import all_gather, all_reduce, reduce_scatter, start_all_gather, start_all_reduce, start_reduce_scatter, wait
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel import Route, column_product, row_product

# T tokens (t of this rank), I input features of this rank, O output features of this rank

_SUM_ELEMENTS = 1 << 26
"""Of a weight gradient that are computed before they are added to the sum: a quarter of a gibibyte."""
_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Fp8Products:
    """Products of one layer; conforms to ``LinearProducts``.

    The input, the weight and the output gradient are cast once each, with their transposes for the other products; gathered tokens
    travel in fp8. The weight's casts are kept until it changes, if somebody says when (``WeightCopyHolder``). A call whose
    tokens do not come in multiples of 16 keeps the dtype of the model.

    Args:
        config: "tensorwise" or "rowwise".
    """

    def __init__(self, config: Fp8Config) -> None:
        self.config = config
        self.by_rows = config.recipe == "rowwise"
        self.narrow_weight_gradients = config.weight_gradients and not self.by_rows
        self.gradient_dtype = _FORMATS[config.gradient_format or ("e4m3" if self.by_rows else "e5m2")]
        self._told = False
        self._copies: tuple[tuple[int, int], Scaled, Scaled] | None = None

    def column(self, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        if not fits(x, route, sharded=route.sequence_parallel):
            return column_product(x, weight_OI, route)
        y_TO = _Column.apply(x.flatten(0, -2), weight_OI, route, self)
        return y_TO.view(-1, *x.shape[1:-1], weight_OI.shape[0])

    def row(self, x_TI: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        if not fits(x_TI, route, sharded=False):
            return row_product(x_TI, weight_OI, route)
        y_TO = _Row.apply(x_TI.flatten(0, -2), weight_OI, route, self)
        return y_TO.view(-1, *x_TI.shape[1:-1], weight_OI.shape[0])

    def weight_changed(self) -> None:
        self._told, self._copies = True, None

    def weights(self, weight_OI: Tensor, group: Group) -> tuple[Scaled, Scaled]:
        """The weight [O, I] for the forward, and transposed for the gradient of the input."""
        if torch.compiler.is_compiling() or not self._told:
            return self._cast_weight(weight_OI, group)
        key = (weight_OI.data_ptr(), weight_OI._version)
        if self._copies is None or self._copies[0] != key:
            self._copies = (key, *self._cast_weight(weight_OI, group))
        return self._copies[1:]

    def cast(self, x_TK: Tensor, dtype: torch.dtype, group: Group | None, *, columns: bool) -> tuple[Scaled, Scaled | None]:
        """An input or a gradient, and with ``columns`` its transpose.

        Args:
            x_TK: [T, K].
            dtype: the format.
            group: ranks whose rows or columns are put together with these; None for none.
            columns: with one scale only.
        """
        if self.by_rows:
            return quantize_rows(x_TK, dtype), None
        rows, turned = quantize(x_TK, dtype, group=group, columns=columns)
        assert rows is not None
        return rows, turned

    def _cast_weight(self, weight_OI: Tensor, group: Group) -> tuple[Scaled, Scaled]:
        dtype, weight_OI = torch.float8_e4m3fn, weight_OI.detach()
        if self.by_rows:
            back = quantize_columns(weight_OI.unsqueeze(0), dtype)
            return quantize_rows(weight_OI, dtype), Scaled(back.data[0], back.inverse[0])
        rows, turned = quantize(weight_OI, dtype, group=self.shared(group), columns=True)
        assert rows is not None and turned is not None
        return rows, turned

    def shared(self, group: Group) -> Group | None:
        """Ranks that share the scale of a tensor of which each holds some features."""
        return group if self.config.reduce_amax else None


def fits(x: Tensor, route: Route, *, sharded: bool) -> bool:
    """Whether the tokens of a call come in multiples that the units multiply."""
    tokens = x.numel() // x.shape[-1] * (route.group.size if sharded else 1)
    # Scattered results are cut into as many parts.
    parts = route.group.size if route.sequence_parallel else 1
    return tokens > 0 and tokens % (MULTIPLE * parts) == 0


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tI: Tensor, weight_OI: Tensor, route: Route, products: Fp8Products) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        gathers = route.sequence_parallel and route.group.size > 1
        narrow = products.narrow_weight_gradients and wants_weight
        group = route.group if gathers else None
        rows, columns = products.cast(x_tI, torch.float8_e4m3fn, group, columns=narrow and not gathers)
        forth, back = products.weights(weight_OI, route.group)
        whole = gather_rows(rows, route.group) if gathers else rows
        # Of gathered tokens this rank keeps its own, and gathers again.
        saved = None if not wants_weight else (rows if gathers else columns) if narrow else x_tI
        _save(ctx, saved, back if wants_x else None, route, products)
        return scaled_product(whole, forth, x_tI.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, back, route, products = _saved(ctx)
        gathers = route.sequence_parallel and route.group.size > 1
        dtype = grads[0].dtype
        narrow = isinstance(saved, Scaled)
        rows, columns = products.cast(grads[0], products.gradient_dtype, products.shared(route.group), columns=narrow)
        weight_gradient: Callable[[], Tensor | None] | None = None
        if isinstance(saved, Scaled):
            assert columns is not None
            weight_gradient = functools.partial(narrow_weight_product, route, columns, saved, dtype, gather=gathers)
        elif saved is not None:
            weight_gradient = functools.partial(_wide_weight_product, route, grads[0], saved, gather=gathers)
        grad_x = None
        if back is not None:
            start = start_reduce_scatter if route.sequence_parallel else start_all_reduce
            grad_x = start(scaled_product(rows, back, dtype, fast=products.by_rows), route.group)
        grad_weight = _weight_gradient(ctx, route, weight_gradient)
        return None if grad_x is None else wait(grad_x, route.group), grad_weight, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, route: Route, products: Fp8Products) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        narrow = products.narrow_weight_gradients and wants_weight
        rows, columns = products.cast(x_TI, torch.float8_e4m3fn, products.shared(route.group), columns=narrow)
        forth, back = products.weights(weight_OI, route.group)
        _save(ctx, (columns if narrow else x_TI) if wants_weight else None, back if wants_x else None, route, products)
        reduce: Callable[[Tensor, Group], Tensor] = reduce_scatter if route.sequence_parallel else all_reduce
        return reduce(scaled_product(rows, forth, x_TI.dtype, fast=True), route.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, back, route, products = _saved(ctx)
        gathers = route.sequence_parallel and route.group.size > 1
        dtype = grads[0].dtype
        narrow = isinstance(saved, Scaled)
        group = route.group if gathers else None
        rows, columns = products.cast(grads[0], products.gradient_dtype, group, columns=narrow and not gathers)
        whole_grad = grads[0]
        if gathers:
            rows = gather_rows(rows, route.group)
        weight_gradient: Callable[[], Tensor | None] | None = None
        if isinstance(saved, Scaled):
            columns = turn(rows) if columns is None else columns
            weight_gradient = functools.partial(narrow_weight_product, route, columns, saved, dtype, gather=False)
        elif saved is not None:
            whole_grad = all_gather(whole_grad, route.group) if gathers else whole_grad
            weight_gradient = functools.partial(_wide_weight_product, route, whole_grad, saved, gather=False)
        grad_x = None if back is None else scaled_product(rows, back, dtype, fast=products.by_rows)
        return grad_x, _weight_gradient(ctx, route, weight_gradient), None, None


def _save(ctx: Any, saved: Scaled | Tensor | None, back: Scaled | None, route: Route, products: Fp8Products) -> None:
    saved_parts = (saved.data, saved.inverse) if isinstance(saved, Scaled) else (saved, None)
    ctx.save_for_backward(*saved_parts, *((None, None) if back is None else (back.data, back.inverse)))
    ctx.route, ctx.products, ctx.later = route, products, route.later


def _saved(ctx: Any) -> tuple[Scaled | Tensor | None, Scaled | None, Route, Fp8Products]:
    saved, saved_inverse, back, back_inverse = ctx.saved_tensors
    return (
        saved if saved_inverse is None else Scaled(saved, saved_inverse),
        None if back is None else Scaled(back, back_inverse),
        ctx.route,
        ctx.products,
    )


def _weight_gradient(ctx: Any, route: Route, compute: Callable[[], Tensor | None] | None) -> Tensor | None:
    """Now, or later where the route says so."""
    if compute is None:
        return None
    if route.later is not None and route.later.jobs is not None:
        route.later.jobs.append((1, compute))
        return None
    if route.queue is not None and route.main_grad is not None:
        route.queue.put(compute)
        return None
    return compute()


def narrow_weight_product(route: Route, grad_OT: Scaled, x: Scaled, dtype: torch.dtype, *, gather: bool = False) -> Tensor | None:
    """``grad x^T`` [O, I] into the main gradient, or returned in ``dtype`` where there is none.

    Args:
        route: says where it goes.
        grad_OT: of the output, transposed.
        x: the input [I, T], or with ``gather`` this rank's tokens [t, I].
        dtype: of a result.
        gather: gather the tokens first.
    """
    x_IT = turn(gather_rows(x, route.group)) if gather else x
    if route.main_grad is None:
        return scaled_product(grad_OT, x_IT, dtype)
    width = x_IT.data.shape[0]
    step = max(MULTIPLE, _SUM_ELEMENTS // width)
    with route.main_grad.open_or_claim() as (total, fresh):
        total_OI = total.view(-1, width)
        # The unit cannot add to what is there; a slice of the product goes through memory once more.
        for begin in range(0, total_OI.shape[0], step):
            part = Scaled(grad_OT.data[begin : begin + step], grad_OT.inverse)
            rows = total_OI[begin : begin + step]
            (rows.copy_ if fresh else rows.add_)(scaled_product(part, x_IT, total.dtype))
    return None


def _wide_weight_product(route: Route, grad_TO: Tensor, x_TI: Tensor, *, gather: bool) -> Tensor | None:
    x_TI = all_gather(x_TI, route.group) if gather else x_TI
    if route.main_grad is None:
        return grad_TO.T @ x_TI
    route.main_grad.add_product(grad_TO, x_TI)
    return None


def gather_rows(rows: Scaled, group: Group) -> Scaled:
    """All ranks' rows: their bytes, and their scales if each has one."""
    pending = start_all_gather(rows.data.view(torch.uint8), group), start_all_gather(rows.inverse, group) if rows.inverse.dim() else None
    data, inverse = pending
    return Scaled(wait(data, group).view(rows.data.dtype), rows.inverse if inverse is None else wait(inverse, group))
