# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where a layer puts its weight gradient when it does not hand it to autograd, and when it computes it."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# T tokens, I input features, O output features


@dataclass(frozen=True, eq=False)
class MainGradient:
    """The accumulator of one parameter.

    Example:
        >>> total = torch.zeros(2, 3)
        >>> MainGradient(total).add_product(torch.ones(4, 2), torch.ones(4, 3))
        >>> total[0, 0]
        tensor(4.)
    """

    total: Tensor
    """Of the parameter's shape, in its dtype or a wider one."""
    begin: Callable[[], None] | None = None
    """Called before each addition; raises when the gradient must not grow any more. A sum that holds nothing is zero afterwards, unless it
    was claimed."""
    done: Callable[[], None] | None = None
    """Called after each addition that completes one use of the parameter."""
    claim: Callable[[], bool] | None = None
    """Whether the sum holds nothing yet, asked before ``begin`` by who will overwrite it then; it holds something from then on. None for
    sums that begin at zero."""

    @contextlib.contextmanager
    def open(self) -> Iterator[Tensor]:
        """The sum, to be added to inside the block, once for one use of the parameter."""
        if self.begin is not None:
            self.begin()
        yield self.total
        if self.done is not None:
            self.done()

    @contextlib.contextmanager
    def open_or_claim(self) -> Iterator[tuple[Tensor, bool]]:
        """As ``open``, and whether the sum holds nothing yet: then all of it is to be overwritten inside the block."""
        fresh = self.claim is not None and self.claim()
        with self.open() as total:
            yield total, fresh

    def add_product(self, grad_TO: Tensor, x_TI: Tensor) -> None:
        """``total += grad^T x``, seen as one matrix [O, I]."""
        with self.open_or_claim() as (total, fresh):
            (put_product_ if fresh else add_product_)(total.view(-1, total.shape[-1]), grad_TO, x_TI)

    def add(self, grad: Tensor) -> None:
        """``total += grad``, of any shape with as many elements."""
        with self.open_or_claim() as (total, fresh):
            (total.copy_ if fresh else total.add_)(grad.view_as(total))

    def add_scaled(self, grad: Tensor, scale: Tensor) -> None:
        """``total += grad * scale`` for a scalar ``scale``."""
        with self.open_or_claim() as (total, fresh):
            grad, scale = grad.view_as(total).to(total.dtype), scale.to(total.dtype)
            if fresh:
                torch.mul(grad, scale, out=total)
            else:
                total.addcmul_(grad, scale)


@dataclass(frozen=True, eq=False)
class BorrowedGradBuffer(MainGradient):
    """An accumulator whose memory exists only while a backward needs it, so that the first sum is written and not added.

    Example:
        >>> total = torch.full((2, 3), torch.nan)
        >>> BorrowedGradBuffer(torch.empty(2, 3, device="meta"), lend=lambda: contextlib.nullcontext((total, True))).add(torch.ones(2, 3))
        >>> total[0, 0]
        tensor(1.)
    """

    # ``total`` is on the meta device: shape and dtype of what is lent.
    lend: Callable[[], contextlib.AbstractContextManager[tuple[Tensor, bool]]] = field(kw_only=True)
    """The memory, and whether it is to be overwritten because it holds nothing yet; what is left at the end of the block counts."""

    @contextlib.contextmanager
    def open(self) -> Iterator[Tensor]:
        with self.lend() as (total, fresh):
            yield total.zero_() if fresh else total

    @contextlib.contextmanager
    def open_or_claim(self) -> Iterator[tuple[Tensor, bool]]:
        with self.lend() as (total, fresh):
            yield total, fresh


@dataclass(eq=False)
class DeferredWeightGrads:
    """What the node of a GEMM offers to a backward in two parts (``mcore_parallel.pipeline``): its weight gradient later.

    The node keeps it on its context as ``later``.
    """

    inputs: tuple[int, ...] = (1,)
    """Numbers of the inputs whose gradient can come later."""
    jobs: list[tuple[int, Callable[[], Tensor | None]]] | None = None
    """While it is a list the backward puts (number of the input, what computes its gradient) there and gives autograd none."""


@runtime_checkable
class WeightGradientSink(Protocol):
    """A layer that can add its weight gradients to main gradients itself, in the GEMM that computes them."""

    def accumulate_weight_gradients_into(self, main_grads: Mapping[str, MainGradient]) -> None:
        """Take over the accumulation for the parameters named (local names, as in ``shard_specs``).

        From then on the backward of the layer adds their gradients there and gives autograd none; names that the
        layer cannot serve are left to autograd. An empty mapping gives everything back to autograd.
        """
        ...


@runtime_checkable
class WeightCopyHolder(Protocol):
    """A layer that may keep copies of its weights in another form, in fp8 for instance."""

    def parameters_changed(self) -> None:
        """The parameters have new values, or will have before the next forward; drop the copies.

        Who calls this does so after every update that leaves the version counters of the parameters as they were, and once at the
        beginning. A layer that never hears of it must not keep copies.
        """
        ...


class WeightGradientQueue:
    """Weight gradients that are computed later: after the flush of a pipeline, or while a transfer is under way.

    Args:
        limit: GEMMs kept at most; the oldest is computed when another comes. None for no limit.

    Raises:
        ValueError: a limit below one.

    Example:
        >>> queue, total = WeightGradientQueue(), torch.zeros(1, 1)
        >>> queue.put(lambda: total.add_(1))
        >>> total.item(), len(queue)
        (0.0, 1)
        >>> queue.drain()
        >>> total.item(), len(queue)
        (1.0, 0)
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit} must be at least 1, or None for no limit")
        self.limit = limit
        self._jobs: deque[Callable[[], object]] = deque()

    def put(self, job: Callable[[], object]) -> None:
        """Keep a GEMM for later."""
        self._jobs.append(job)
        if self.limit is not None and len(self._jobs) > self.limit:
            self._run_oldest()

    def drain(self) -> None:
        """Compute all that is kept, oldest first; call before the gradients are summed over the replicas."""
        while self._jobs:
            self._run_oldest()

    def __len__(self) -> int:
        return len(self._jobs)

    def _run_oldest(self) -> None:
        with torch.no_grad():
            self._jobs.popleft()()


def add_product_(total_OI: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    """``total += grad^T x``, on CUDA inside the GEMM, elsewhere as GEMM and sum (the bits of an autograd accumulation)."""
    if not total_OI.is_cuda:
        total_OI.add_(grad_TO.T @ x_TI)
    elif total_OI.dtype == x_TI.dtype:
        total_OI.addmm_(grad_TO.T, x_TI)
    else:
        torch.addmm(total_OI, grad_TO.T, x_TI, out_dtype=total_OI.dtype, out=total_OI)


def put_product_(total_OI: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    """``total = grad^T x``; what was in it does not matter."""
    if not total_OI.is_cuda:
        total_OI.copy_(grad_TO.T @ x_TI)
    elif total_OI.dtype == x_TI.dtype:
        torch.mm(grad_TO.T, x_TI, out=total_OI)
    else:
        torch.mm(grad_TO.T, x_TI, out_dtype=total_OI.dtype, out=total_OI)


def wide_product(grad_TO: Tensor, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad^T x`` [O, I] in ``dtype``."""
    if grad_TO.is_cuda and dtype != x_TI.dtype:
        return torch.mm(grad_TO.T, x_TI, out_dtype=dtype)
    return (grad_TO.T @ x_TI).to(dtype)
