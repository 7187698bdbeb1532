# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Stability markers. The six wheels carry this file byte for byte, so that none depends on another for it."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["deprecated", "experimental_api", "internal_api"]

T = TypeVar("T")


def internal_api(obj: T) -> T:
    """Mark a public name (function, method, property or class) as internal: it may change or go in any release."""
    return _label(obj, "internal")


def experimental_api(obj: T) -> T:
    """Mark a public name (function, method, property or class) as experimental: it may change in any release."""
    return _label(obj, "experimental")


def deprecated(version: str, removal_version: str, alternative: str | None = None) -> Callable[[T], T]:
    """Mark a function, method, property or class as deprecated: using it warns, ``__deprecated__`` (PEP 702) says what to do instead.

    A call of a function or method warns, a read of a property warns, construction of a class warns (of its subclasses it does not).
    An enumeration has made its members by the time it is decorated, so it carries the metadata only.

    Args:
        version: release that deprecates it, ``major.minor.patch``.
        removal_version: release that removes it: two minor versions after ``version`` at the earliest, or a later major version.
        alternative: public name or phrase that says what to use instead.

    Raises:
        ValueError: a version that is not ``major.minor.patch``, or a removal that comes too early.
    """
    first, last = _release("version", version), _release("removal_version", removal_version)
    if last[0] < first[0] or (last[0] == first[0] and last[1] < first[1] + 2):
        earliest = f"{first[0]}.{first[1] + 2}.0"
        raise ValueError(f"removal_version={removal_version!r} is too early for version={version!r}; promise {earliest} or later")

    def mark(obj: Any) -> Any:
        if isinstance(obj, property):
            accessors = (mark(accessor) if accessor is not None else None for accessor in (obj.fget, obj.fset, obj.fdel))
            return type(obj)(*accessors, doc=obj.__doc__)
        if isinstance(obj, classmethod | staticmethod):
            return type(obj)(mark(obj.__func__))
        text = f"{obj.__qualname__} is deprecated since {version} and goes in {removal_version}"
        if alternative:
            text += f"; use {alternative}"
        marked: Any = _warn_on_construction(obj, text) if inspect.isclass(obj) else _warn_on_call(obj, text)
        marked.__deprecated__ = text
        marked.__mcore_deprecated__ = (version, removal_version, alternative)
        return marked

    return mark


def _label(obj: T, level: str) -> T:
    target: Any = obj.fget if isinstance(obj, property) else obj
    target.__mcore_stability__ = level
    return obj


def _release(field: str, text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{field}={text!r} is no release; write major.minor.patch, for instance '0.3.0'")
    major, minor, patch = (int(part) for part in match.groups())
    return major, minor, patch


def _warn_on_call(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return await function(*args, **kwargs)

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return call


def _warn_on_construction(cls: type, text: str) -> type:
    """The class stays the same class; its ``__init__`` gets a warning in front."""
    own = vars(cls).get("__init__")
    inherited = cls.__init__

    @functools.wraps(own or inherited)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        if own is not None:
            own(self, *args, **kwargs)
        elif inherited is not object.__init__:
            # Looked up late, so that cooperative inheritance reaches a sibling that only a subclass brings in.
            super(cls, self).__init__(*args, **kwargs)
        elif (args or kwargs) and type(self).__new__ is object.__new__:
            # object.__init__ would have refused these; where __new__ takes them they are used already.
            raise TypeError(f"{type(self).__name__}() takes no arguments")

    cls.__init__ = construct
    return cls
