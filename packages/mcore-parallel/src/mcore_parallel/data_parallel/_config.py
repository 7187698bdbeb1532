# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Choices of data parallelism."""

from dataclasses import dataclass

_RESERVED = ("use_distributed_optimizer", "overlap_param_gather", "reduce_scatter_with_fp32_accumulation")


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """How gradients are stored and summed.

    Raises:
        ValueError: a size below one, or a feature that is not available yet.

    Example:
        >>> DistributedDataParallelConfig(bucket_size=1000).overlap_grad_reduce
        True
    """

    grad_reduce_in_fp32: bool = True
    """Accumulate and sum gradients of 16-bit parameters in float32; otherwise in the parameter's dtype.
    Gradients of float64 parameters are float64 either way."""
    overlap_grad_reduce: bool = True
    """Start the sum of a bucket during the last backward, as soon as its gradients are complete.
    The first step only learns when that is. The result has the same bits as without."""
    bucket_size: int | None = None
    """Elements after which a bucket closes; None for max(40 million, 1 million * replicas)."""
    use_distributed_optimizer: bool = False
    """Reserved: optimizer states split over the replicas."""
    overlap_param_gather: bool = False
    """Reserved: gather parameters while the forward runs; needs use_distributed_optimizer."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Reserved: send 16-bit gradients, add them in float32; needs use_distributed_optimizer."""

    def __post_init__(self) -> None:
        for name in _RESERVED:
            if getattr(self, name):
                raise ValueError(f"{name}=True is not available yet; leave it False")
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size={self.bucket_size} must be at least 1 element, or None")

    def bucket_elements(self, num_replicas: int) -> int:
        """Elements after which a bucket closes, for this many replicas."""
        return self.bucket_size or max(40_000_000, 1_000_000 * num_replicas)
