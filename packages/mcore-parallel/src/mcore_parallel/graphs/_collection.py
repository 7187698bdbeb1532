# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Python's garbage collector during a capture."""

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No automatic collection inside: one that frees a tensor, an event or a graph in the middle of a capture breaks it.

    Where torch itself collects at every capture (``torch.compiler.config.force_cudagraph_gc``), what exists already is frozen, so that
    each of these collections looks at the new objects only. Afterwards everything is as before.
    """
    was_enabled, freeze = gc.isenabled(), bool(torch.compiler.config.force_cudagraph_gc) and not gc.get_freeze_count()
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
