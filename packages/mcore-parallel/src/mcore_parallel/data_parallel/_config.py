# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Choices of data parallelism."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

_NEED_SLICES = ("overlap_param_gather", "separate_all_gather_group", "pad_buckets_for_high_nccl_busbw")


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """How gradients are stored and summed.

    Raises:
        ValueError: a size below one, or choices that exclude one another.

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
    num_buckets: int | None = None
    """Instead of ``bucket_size``: about how many buckets a buffer is cut into."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad every bucket to a multiple of 65536 elements, so that slices on many ranks stay multiples of a large power of two."""
    gradient_accumulation_fusion: bool = True
    """Layers that can add their weight gradients to the main gradients in the GEMM that computes them. Autograd never sees those
    gradients, so hooks on such parameters do not run; False gives them to autograd."""
    use_distributed_optimizer: bool = False
    """Each replica completes and updates one slice of every bucket and gathers the others' parameters (ZeRO stage 1).
    The optimizer's config must say the same."""
    num_distributed_optimizer_instances: int = 1
    """Slices are cut over replicas / instances neighbours; the instances hold the same slices and add them up."""
    overlap_param_gather: bool = False
    """Gather parameters while the next forward runs; each module waits for its own. The result has the same bits as without.
    Off unless asked for, as who reads parameters outside a forward must call ``finish_param_sync`` first."""
    separate_all_gather_group: bool = False
    """A communicator of its own for the parameter gathers, so that they need not queue behind sums of gradients."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Send 16-bit gradients and add them in float32 with one rounding (with several optimizer instances, one within each and one
    between them); concerns buffers of 16 bits (grad_reduce_in_fp32=False)."""
    average_in_collective: bool = False
    """Divide by the replicas before summing, so that 16-bit sums do not overflow. ``gradients()`` then are means over the
    replicas; the optimizer multiplies them up again, so that nothing else changes."""
    check_for_nan_in_grad: bool = False
    """Look at the local gradients of each bucket before its sum (a host synchronisation a bucket)."""
    check_for_large_grads: bool = False
    """The same for finite gradients above ``large_grad_limit``."""
    large_grad_limit: float = 1e10
    """Largest magnitude of one local gradient element that ``check_for_large_grads`` lets pass."""
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    """Parameters (fnmatch patterns of names) whose 16-bit gradients add up in a private float32 tensor until the sum; ("all",) for all."""
    layerwise_param_patterns: tuple[str, ...] = ()
    """With the distributed optimizer: parameters (fnmatch patterns) that an optimizer updates as whole tensors; their gradients are
    summed whole on every replica."""
    nccl_ub: bool = False
    """Allocate the flat buffers in memory registered with the data group's NCCL communicator; no effect elsewhere."""
    disable_symmetric_registration: bool = False
    """With nccl_ub: register the memory plainly, not as a symmetric window."""

    def __post_init__(self) -> None:
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size={self.bucket_size} must be at least 1 element, or None")
        if self.num_buckets is not None and (self.num_buckets < 1 or self.bucket_size is not None):
            raise ValueError(
                f"num_buckets={self.num_buckets} must be at least 1 and come without bucket_size={self.bucket_size}; set one of them"
            )
        if self.num_distributed_optimizer_instances < 1:
            raise ValueError(f"num_distributed_optimizer_instances={self.num_distributed_optimizer_instances} must be at least 1")
        if not self.use_distributed_optimizer:
            for name in _NEED_SLICES:
                if getattr(self, name):
                    raise ValueError(f"{name}=True needs use_distributed_optimizer=True")
            if self.num_distributed_optimizer_instances > 1:
                count = self.num_distributed_optimizer_instances
                raise ValueError(f"num_distributed_optimizer_instances={count} needs use_distributed_optimizer=True")
        if self.reduce_scatter_with_fp32_accumulation and self.grad_reduce_in_fp32:
            raise ValueError(
                "reduce_scatter_with_fp32_accumulation=True needs grad_reduce_in_fp32=False: float32 gradients are sent as they are"
            )
        if self.param_name_patterns_for_fp32_local_accumulation and self.grad_reduce_in_fp32:
            raise ValueError(
                "param_name_patterns_for_fp32_local_accumulation needs grad_reduce_in_fp32=False: all gradients are float32 already"
            )
        if not (self.large_grad_limit > 0 and math.isfinite(self.large_grad_limit)):
            raise ValueError(f"large_grad_limit={self.large_grad_limit} must be a positive finite number")

    def bucket_elements(self, num_replicas: int, total: int = 0) -> int:
        """Elements after which a bucket closes, for this many replicas and a buffer of ``total`` elements."""
        if self.num_buckets is not None:
            return max(1, math.ceil(total / self.num_buckets))
        return self.bucket_size or max(40_000_000, 1_000_000 * num_replicas)

    def accumulates_in_fp32(self, name: str) -> bool:
        """Whether a parameter's gradient has a private float32 accumulator."""
        patterns = self.param_name_patterns_for_fp32_local_accumulation
        return any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns)

    def keeps_whole(self, name: str) -> bool:
        """Whether a parameter's gradient is summed whole on every replica."""
        return not self.use_distributed_optimizer or any(fnmatchcase(name, pattern) for pattern in self.layerwise_param_patterns)
