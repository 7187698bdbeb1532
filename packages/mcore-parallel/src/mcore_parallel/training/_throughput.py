# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Speed of a step against what the hardware can do."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Operations a second, and their share of the peak (model flops utilisation, PaLM, Chowdhery et al. 2022, appendix B).

    Recomputed operations do not count.

    Raises:
        ValueError: a number that is not positive.

    Example:
        >>> Throughput(flops_per_token=6e9, peak_flops=1e15).values(tokens_per_s=1e6, num_ranks=8)
        {'tflops_per_rank': 750.0, 'mfu': 0.75}
    """

    flops_per_token: float
    """Operations of forward and backward (``models.flops_per_token``)."""
    peak_flops: float | None = None
    """Operations a second of one rank's device; None leaves the share out."""

    def __post_init__(self) -> None:
        for name in ("flops_per_token", "peak_flops"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive")

    def values(self, *, tokens_per_s: float, num_ranks: int) -> dict[str, float]:
        """``tflops_per_rank`` (10^12 operations a second) and, if the peak is known, ``mfu`` (0 to 1)."""
        rate = self.flops_per_token * tokens_per_s / num_ranks
        metrics = {"tflops_per_rank": rate / 1e12}
        return metrics if self.peak_flops is None else {**metrics, "mfu": rate / self.peak_flops}
