# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Python's garbage collector during a capture."""

import contextlib
import gc
from collections.abc import Iterator, Mapping

import torch

FREEZE_GC_MAX_TORCH_VERSION = "2.9.0a0"
"""From this version on torch collects at a capture only if ``torch.compiler.config.force_cudagraph_gc`` asks for it."""
CUDA_GRAPH_CAPTURE_FREEZE_GC = "CUDA_GRAPH_CAPTURE_FREEZE_GC"
"""Environment variable: 0 freezes nothing. Applications read it, by ``freeze_gc_choice``."""


def freeze_gc_choice(environment: Mapping[str, str]) -> bool | None:
    """What the environment says of ``CudaGraphConfig.freeze_gc``: False for "0", else None.

    Example:
        >>> freeze_gc_choice({CUDA_GRAPH_CAPTURE_FREEZE_GC: "0"})
        False
    """
    return False if environment.get(CUDA_GRAPH_CAPTURE_FREEZE_GC) == "0" else None


def _torch_collects() -> bool:
    return torch.__version__ < FREEZE_GC_MAX_TORCH_VERSION or bool(torch.compiler.config.force_cudagraph_gc)


@contextlib.contextmanager
def collection_paused(freeze: bool | None = None) -> Iterator[None]:
    """No automatic collection inside: one that frees a tensor, an event or a graph in the middle of a capture breaks it.

    Where torch itself collects at every capture, what exists already is frozen, so that each of these collections looks at the new objects
    only. Afterwards everything is as before.

    Args:
        freeze: freeze what exists; None for where torch collects: before ``FREEZE_GC_MAX_TORCH_VERSION``, and with
            ``torch.compiler.config.force_cudagraph_gc``.
    """
    was_enabled = gc.isenabled()
    # What is frozen already was frozen by somebody else, who thaws it.
    freeze = (_torch_collects() if freeze is None else freeze) and not gc.get_freeze_count()
    gc.disable()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
