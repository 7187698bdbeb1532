# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The GEMMs of the parallel linear layers, with their communication beside them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import all_gather, all_reduce, reduce_scatter, start_all_gather, start_all_reduce, start_reduce_scatter, wait
from mcore_parallel.groups import Group, ProcessGroups, ShardSpec
from mcore_parallel.tensor_parallel._weight_gradient import DeferredWeightGrads, MainGradient, WeightGradientQueue

# T tokens, R ranks of the group, P pieces, C tokens of a rank in a piece, I input features of this rank, O output features of this rank

_PIECES = 2
_PIECE_TOKENS = 4096
"""Tokens of a rank below which a piece costs more, in shorter transfers and smaller GEMMs, than it hides."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """How one call of a layer communicates and where its weight gradient goes."""

    group: Group
    sequence_parallel: bool
    pieces: int = 1
    """The tokens of a rank are cut into as many, so that the transfer of one runs beside the GEMM of another."""
    main_grad: MainGradient | None = None
    queue: WeightGradientQueue | None = None
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear
    """Computes x W^T in the forward, where there is one piece."""
    later: DeferredWeightGrads | None = None
    """For a backward in two parts; None under compilation."""


class LinearProducts(Protocol):
    """Computes the GEMMs of one layer another way, in fp8 for instance, and communicates as the route says."""

    def column(self, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        """[T or T / tp, I] -> [T, O]: what ``ColumnParallelLinear`` gives before its bias."""
        ...

    def row(self, x_TI: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        """[T, I] -> [T or T / tp, O]: what ``RowParallelLinear`` gives before its bias."""
        ...

    def weight_changed(self) -> None:
        """As ``WeightCopyHolder.parameters_changed``."""
        ...


class GroupedProducts(Protocol):
    """Multiplies the rows of experts by their stack of weights another way than ``mcore_parallel.backends.grouped_matmul``."""

    reads_sizes: bool
    """Whether the host waits for the rows of each expert."""

    def matmul(self, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: MainGradient | None) -> Tensor:
        """[R, I] -> [R, O]; as ``grouped_matmul``, with ``ends_N`` on the device, and R a bound of the rows that the host knows."""
        ...

    def weight_changed(self) -> None:
        """As ``WeightCopyHolder.parameters_changed``."""
        ...


class LossProducts(Protocol):
    """Computes the loss of an output layer from hidden states another way than ``fused_linear_cross_entropy``."""

    def losses(self, hidden: Tensor, weight_vD: Tensor, target_T: Tensor, weights_T: Tensor, route: Route, vocab_size: int) -> Tensor:
        """``fused_linear_cross_entropy`` with ``token_weights``: [T or T / tp, D] -> [T]."""
        ...

    def weight_changed(self) -> None:
        """As ``WeightCopyHolder.parameters_changed``."""
        ...


class RecomputedInput(Protocol):
    """Computes the input of a matmul from a source that is saved in its place."""

    def forward(self, source: Tensor) -> Tensor:
        """[T, W] -> [T, I]; the same bits each time."""
        ...

    def backward(self, grad_TI: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the result -> that of the source, and the result once more; the gradient's memory may be used for it."""
        ...


@internal_api
class ProductLayer(nn.Module):
    """What the layers of one weight share: where the gradient of that goes, and who computes the GEMMs."""

    products: LinearProducts | None = None
    groups: ProcessGroups
    weight_spec: ShardSpec
    """Of the weight that the layer multiplies by, its own or another layer's."""
    _main_grad: MainGradient | None = None
    _queue: WeightGradientQueue | None = None

    def accumulate_weight_gradients_into(self, main_grads: Mapping[str, MainGradient]) -> None:
        """Add the gradient of the weight to ``main_grads["weight"]`` in the GEMM that computes it, and give autograd none.

        A graph under compilation does not: autograd gets the gradient there. Without that entry autograd gets it always.
        """
        self._main_grad = main_grads.get("weight")

    def defer_weight_gradients_to(self, queue: WeightGradientQueue | None) -> None:
        """Leave the GEMM of the weight gradient to the queue; None computes it in the backward again.

        The GEMM keeps its two factors alive until it is computed. It is deferred only while
        ``accumulate_weight_gradients_into`` says where it goes.
        """
        self._queue = queue

    def parameters_changed(self) -> None:
        """As ``WeightCopyHolder``."""
        if self.products is not None:
            self.products.weight_changed()

    def route(self, groups: ProcessGroups, pieces: int = 1) -> Route:
        """Of a call now."""
        compiling = torch.compiler.is_compiling()
        return Route(
            group=groups.tp,
            sequence_parallel=groups.sequence_parallel,
            pieces=pieces,
            main_grad=None if compiling else self._main_grad,
            queue=None if compiling else self._queue,
            later=None if compiling else DeferredWeightGrads(),
        )


def num_pieces(x: Tensor, rank_tokens: int, groups: ProcessGroups, overlap: bool | None = None) -> int:
    """Pieces for a layer whose ranks hold ``rank_tokens`` each.

    Args:
        x: the input; more than two dims, or a graph under compilation, are not cut.
        rank_tokens: tokens of one rank in the layer's sharded input or output.
        groups: the layout, whose plan chooses where the layer does not.
        overlap: the layer's choice: True to cut whenever the pieces are even, False never; None for the plan's ``tp_comm_overlap``, where
            None cuts on CUDA when every piece keeps enough tokens.
    """
    overlap = groups.plan.tp_comm_overlap if overlap is None else overlap
    if overlap is False or torch.compiler.is_compiling() or x.dim() != 2 or (overlap is None and not x.is_cuda):
        return 1
    fewest = _PIECE_TOKENS if overlap is None else 1
    return _PIECES if rank_tokens % _PIECES == 0 and rank_tokens // _PIECES >= fewest else 1


@internal_api
def column_product(x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
    """x W^T of an input that is gathered first under sequence parallelism; its gradient is summed over the group."""
    return _ColumnProduct.apply(x, weight_OI, route)


@internal_api
def row_product(
    x: Tensor, weight_OI: Tensor, route: Route, recomputed: RecomputedInput | None = None, addend_TO: Tensor | None = None
) -> Tensor:
    """Sum over the group of x W^T, scattered to this rank's tokens under sequence parallelism.

    With ``recomputed``, ``x`` is the source of the matmul's input, and what is saved for the backward. ``addend_TO`` is added to this
    rank's product before the sum.
    """
    return _RowProduct.apply(x, weight_OI, route, recomputed, addend_TO)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        _save(ctx, x, weight_OI, route)
        if not route.sequence_parallel:
            return route.linear(x, weight_OI)
        if route.pieces == 1:
            return route.linear(all_gather(x, route.group), weight_OI)
        return _gathered_product(x, weight_OI.T, route, keep=False)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad_TO,) = grads
        x, weight_OI = ctx.saved_tensors
        route: Route = ctx.route
        grad_x = grad_weight = None
        # A backward may be run for one of the two gradients only.
        wants_weight = ctx.needs_input_grad[1]
        jobs = None if route.later is None else route.later.jobs
        now = wants_weight and jobs is None and (route.queue is None or route.main_grad is None)
        # The input comes beside the GEMM of its gradient, whose sum goes out beside the GEMM of the weight gradient.
        whole_x = start_all_gather(x, route.group) if now and route.sequence_parallel else x
        if ctx.needs_input_grad[0]:
            start = start_reduce_scatter if route.sequence_parallel else start_all_reduce
            grad_x = start(grad_TO @ weight_OI, route.group)
        if now:
            grad_weight = _weight_product(route, grad_TO, wait(whole_x, route.group) if route.sequence_parallel else whole_x)
        elif wants_weight and jobs is not None:
            jobs.append((1, functools.partial(_gather_then_weight_product, route, grad_TO, x)))
        elif wants_weight:
            assert route.queue is not None
            route.queue.put(functools.partial(_gather_then_weight_product, route, grad_TO, x))
        return None if grad_x is None else wait(grad_x, route.group), grad_weight, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, route: Route, recomputed: RecomputedInput | None, addend_TO: Tensor | None
    ) -> Tensor:
        _save(ctx, x, weight_OI, route, source=recomputed is not None)
        ctx.recomputed = recomputed
        x = x if recomputed is None else recomputed.forward(x)
        if route.pieces == 1:
            reduce: Callable[[Tensor, Group], Tensor] = reduce_scatter if route.sequence_parallel else all_reduce
            return reduce(_plus(route.linear(x, weight_OI), addend_TO), route.group)
        addends: Sequence[Tensor | None] = [None] * route.pieces
        if route.sequence_parallel:
            x_RPCI = x.reshape(route.group.size, route.pieces, -1, x.shape[-1])
            weight_RIO = weight_OI.T.expand(route.group.size, -1, -1)
            if addend_TO is not None:
                addends = addend_TO.reshape(route.group.size, route.pieces, -1, addend_TO.shape[-1]).unbind(1)
            pending = [
                start_reduce_scatter(_plus(torch.bmm(x_RPCI[:, piece], weight_RIO), addend).flatten(0, 1), route.group)
                for piece, addend in enumerate(addends)
            ]
        else:
            addends = addends if addend_TO is None else addend_TO.chunk(route.pieces)
            parts = zip(x.chunk(route.pieces), addends, strict=True)
            pending = [start_all_reduce(_plus(F.linear(part, weight_OI), addend), route.group) for part, addend in parts]
        return torch.cat([wait(part, route.group) for part in pending])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight_OI = ctx.saved_tensors
        route: Route = ctx.route
        wants_weight, wants_addend = ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        grad_x = grad_weight = None
        whole_grad: Tensor | None = grad
        if route.sequence_parallel:
            if ctx.needs_input_grad[0] and route.pieces > 1:
                grad_x, whole_grad = _gathered_product(grad, weight_OI, route, keep=wants_weight or wants_addend)
            else:
                whole_grad = all_gather(grad, route.group)
        if ctx.needs_input_grad[0] and grad_x is None:
            assert whole_grad is not None
            grad_x = whole_grad @ weight_OI
        recomputed: RecomputedInput | None = ctx.recomputed
        if recomputed is not None:
            # The input comes back beside its gradient, before the GEMM that reads it.
            grad_x, x = (None, recomputed.forward(x)) if grad_x is None else recomputed.backward(grad_x, x)
        if wants_weight:
            assert whole_grad is not None
            if route.later is not None and route.later.jobs is not None:
                route.later.jobs.append((1, functools.partial(_weight_product, route, whole_grad, x)))
            elif route.queue is not None and route.main_grad is not None:
                route.queue.put(functools.partial(_weight_product, route, whole_grad, x))
            else:
                grad_weight = _weight_product(route, whole_grad, x)
        return grad_x, grad_weight, None, None, whole_grad if wants_addend else None


def _plus(product: Tensor, addend: Tensor | None) -> Tensor:
    return product if addend is None else product.add_(addend)


def _save(ctx: Any, x: Tensor, weight_OI: Tensor, route: Route, *, source: bool = False) -> None:
    """Keep what a gradient needs only: of a frozen weight no input, unless that is a source, of an input without gradient no weight."""
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if wants_weight or (source and wants_x) else None, weight_OI if wants_x else None)
    ctx.route, ctx.later = route, route.later


def _gathered_product(x_tI: Tensor, right_IO: Tensor, route: Route, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """All ranks' tokens times ``right``, [T, O], and with ``keep`` those tokens, [T, I].

    A piece holds rows of every rank, so its GEMM is a batch of R GEMMs that are written where they belong.
    """
    size, pieces = route.group.size, route.pieces
    pending = [start_all_gather(piece, route.group) for piece in x_tI.chunk(pieces)]
    y_RPCO = x_tI.new_empty(size, pieces, x_tI.shape[0] // pieces, right_IO.shape[1])
    whole_RPCI = x_tI.new_empty(size, pieces, x_tI.shape[0] // pieces, x_tI.shape[1]) if keep else None
    right_RIO = right_IO.expand(size, -1, -1)
    for index, part in enumerate(pending):
        x_RCI = wait(part, route.group).unflatten(0, (size, -1))
        torch.bmm(x_RCI, right_RIO, out=y_RPCO[:, index])
        if whole_RPCI is not None:
            whole_RPCI[:, index].copy_(x_RCI)
    return y_RPCO.flatten(0, 2), None if whole_RPCI is None else whole_RPCI.flatten(0, 2)


def _gather_then_weight_product(route: Route, grad_TO: Tensor, x: Tensor) -> Tensor | None:
    return _weight_product(route, grad_TO, all_gather(x, route.group) if route.sequence_parallel else x)


def _weight_product(route: Route, grad: Tensor, x: Tensor) -> Tensor | None:
    rows = math.prod(grad.shape[:-1])
    # A width by name, since nothing follows from no tokens.
    grad_TO, x_TI = grad.reshape(rows, grad.shape[-1]), x.reshape(rows, x.shape[-1])
    if route.main_grad is None:
        return grad_TO.T @ x_TI
    route.main_grad.add_product(grad_TO, x_TI)
    return None
