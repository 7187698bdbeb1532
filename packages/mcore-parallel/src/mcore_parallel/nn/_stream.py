# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The residual stream between layers that are computed without gradients in few kernels."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from mcore_parallel._stability import experimental_api


# T tokens, D model, P parts of a sum, R at least T lines (16, or the next power of two).
@experimental_api
@dataclass(frozen=True, kw_only=True)
class StreamNorm:
    """An RMS norm in front of a layer."""

    weight: Tensor
    """[D]."""
    epsilon: float
    shift: float
    """Added to the weight."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class NormedStream:
    """The residual stream of few tokens in front of a norm, and what the layer behind the norm reads.

    The norm costs no kernel: who writes the stream also writes it times the norm's weight, and sums of its squares; who reads it multiplies
    its result by the root that these sums give.
    """

    x: Tensor
    """[T, D]."""
    scaled: Tensor
    """[T, D], x times the norm's weight."""
    squares: Tensor
    """[P, R] float32, parts of the sum of squares of each token."""
    epsilon: float


@experimental_api
class StreamedFeedForward(Protocol):
    """A feed-forward that adds itself to the residual stream in few kernels, without gradients; nothing waits for the device."""

    def stream_few(self, x: NormedStream, norm: StreamNorm) -> NormedStream:
        """The stream of at most 16 tokens plus the feed-forward of its norm, in front of the next norm."""
        ...

    def stream_many(self, x_TD: Tensor, normed_TD: Tensor, norm: StreamNorm) -> Tensor:
        """Add the feed-forward of ``normed`` to ``x`` in place; returns the next norm's result [T, D]."""
        ...


@experimental_api
@runtime_checkable
class StreamsFeedForward(Protocol):
    """A feed-forward module that may have such kernels."""

    def streamed(self) -> StreamedFeedForward | None:
        """Its weights in kernels that read them where they are; None where it has none for what it computes."""
        ...
