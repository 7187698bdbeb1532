# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Stability markers. The six wheels carry this file byte for byte, so that none depends on another for it."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["deprecated", "experimental_api", "internal_api"]

T = TypeVar("T", bound=Callable[..., Any])


def internal_api(obj: T) -> T:
    """Mark a public name as internal: it may change or go in any release."""
    obj.__mcore_stability__ = "internal"  # type: ignore[attr-defined]
    return obj


def experimental_api(obj: T) -> T:
    """Mark a public name as experimental: it may change in a minor release."""
    obj.__mcore_stability__ = "experimental"  # type: ignore[attr-defined]
    return obj


def deprecated(version: str, removal_version: str, alternative: str | None = None) -> Callable[[T], T]:
    """Mark a function, method or class as deprecated; calling or constructing it warns.

    The mark is also PEP 702 metadata (``__deprecated__``).

    Args:
        version: release that deprecates it.
        removal_version: release that removes it, two minor versions later at the earliest.
        alternative: what to use instead.
    """

    def mark(obj: T) -> T:
        text = f"{obj.__qualname__} is deprecated since {version} and goes in {removal_version}"
        if alternative:
            text += f"; use {alternative}"
        if inspect.isclass(obj):
            # The class stays a class: only its construction warns.
            original = obj.__init__

            @functools.wraps(original)
            def construct(self: Any, *args: Any, **kwargs: Any) -> None:
                if type(self) is obj:
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                original(self, *args, **kwargs)

            obj.__init__ = construct  # type: ignore[misc]
            marked: Any = obj
        elif inspect.iscoroutinefunction(obj):

            @functools.wraps(obj)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return await obj(*args, **kwargs)

            marked = call_async
        else:

            @functools.wraps(obj)
            def call(*args: Any, **kwargs: Any) -> Any:
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return obj(*args, **kwargs)

            marked = call
        marked.__deprecated__ = text
        marked.__mcore_deprecated__ = (version, removal_version, alternative)
        return marked

    return mark
