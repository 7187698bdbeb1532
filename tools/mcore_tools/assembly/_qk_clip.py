# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention logits of a run are bounded."""

from collections.abc import Callable

from mcore_parallel.data_parallel import DistributedDataParallel
from mcore_parallel.nn import clip_qk, track_max_logits
from mcore_parallel.optim import MegatronOptimizer
from mcore_tools.assembly._assemble import Parts
from mcore_tools.recipes import RunConfig


def clip_after_steps(config: RunConfig, parts: Parts) -> Callable[[], dict[str, float]] | None:
    """What to call on every rank after each step; it returns the greatest logit and how many heads were clipped. None for no bound.

    Raises:
        ValueError: the model has no attention whose logits can be tracked.
    """
    if config.qk_clip is None:
        return None
    model, sync, optimizer, bound = parts.model, parts.sync, parts.optimizer, config.qk_clip
    assert isinstance(sync, DistributedDataParallel) and isinstance(optimizer, MegatronOptimizer), "RunConfig refuses what has others"
    track_max_logits(model)

    def clip() -> dict[str, float]:
        report = clip_qk(model, parts.groups, threshold=bound.threshold, alpha=bound.alpha, optimizer=optimizer, sync=sync)
        greatest = max(float(logits.max()) for logits in report.max_logits.values())
        return {"qk_clip/max_logit": greatest, "qk_clip/heads": float(report.clipped)}

    return clip
