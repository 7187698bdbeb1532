# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether backends that are made in a block of code are batch-invariant where nothing is said."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from mcore_parallel._stability import experimental_api

# Set and put back by one block; a thread begins with the default, a task with what holds where it is made.
_ENABLED: ContextVar[bool] = ContextVar("mcore_batch_invariant_mode", default=False)


@experimental_api
@contextlib.contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """A block in which ``choose_backend``, ``TorchBackend`` and models without a backend of their own are batch-invariant.

    It is the default of an argument: ``batch_invariant=True`` or ``False`` outweighs it. A backend keeps what it was made with, so models
    that exist when the block begins do not change, and those that are made in it stay batch-invariant behind its end.

    Args:
        enabled: False for a block inside another one that is not.

    Raises:
        ValueError: ``enabled`` is no bool.

    Example:
        >>> from mcore_parallel.backends import choose_backend
        >>> with set_batch_invariant_mode(True):
        ...     backend = choose_backend("torch")
        >>> backend.batch_invariant, choose_backend("torch").batch_invariant
        (True, False)
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"enabled={enabled!r} must be True or False")
    token = _ENABLED.set(enabled)
    try:
        yield
    finally:
        _ENABLED.reset(token)


@experimental_api
def is_batch_invariant_mode_enabled() -> bool:
    """Whether this is a block of ``set_batch_invariant_mode(True)``.

    A backend that was made elsewhere may be batch-invariant all the same: its ``batch_invariant`` says so.
    """
    return _ENABLED.get()
