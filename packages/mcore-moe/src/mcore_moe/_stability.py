# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Stability markers. The six wheels carry this file byte for byte, so that none depends on another for it."""

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["deprecated", "experimental_api", "internal_api", "pep702_deprecated"]

T = TypeVar("T")

# Modules whose frames stand between a use and its warning: they call on behalf of the code that is to change.
_MACHINERY = frozenset({"abc", "asyncio.base_events", "asyncio.events", "asyncio.runners", "dataclasses", "enum", "functools", "typing"})
# What a filter may ask for that gives a second warning at one place no effect.
_ONCE = frozenset({"default", "ignore", "module", "once"})

if TYPE_CHECKING:
    from typing_extensions import deprecated as pep702_deprecated
else:

    def pep702_deprecated(message: str) -> Callable[[T], T]:
        """Show a deprecation to type checkers and editors, which know no other decorator (PEP 702). It does nothing at run time.

        Args:
            message: what to use instead; a literal, because type checkers read it from the source.
        """
        return lambda obj: obj


def internal_api(obj: T) -> T:
    """Mark a public name (function, method, property or class) as internal: it may change or go in any release."""
    return _label(obj, "internal")


def experimental_api(obj: T) -> T:
    """Mark a public name (function, method, property or class) as experimental: it may change in any release."""
    return _label(obj, "experimental")


def deprecated(version: str, removal_version: str, alternative: str | None = None) -> Callable[[T], T]:
    """Mark a function, method, property or class as deprecated: using it warns, ``__deprecated__`` (PEP 702) says what to do instead.

    A call of a function, method or partial warns, a read of a property warns, the first read of a cached property warns. Construction and
    subclassing of a class warn; construction of its subclasses does not. Enumerations and protocols warn when they are subclassed only.
    Put ``pep702_deprecated`` under it, for type checkers:

        @deprecated(version="0.3.0", removal_version="0.5.0", alternative="mcore_parallel.ParallelPlan")
        @pep702_deprecated("use mcore_parallel.ParallelPlan")

    Args:
        version: the release that first carries the mark, ``major.minor.patch``.
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
            fget, fset, fdel = (mark(accessor) if accessor is not None else None for accessor in (obj.fget, obj.fset, obj.fdel))
            return type(obj)(fget, fset, fdel, obj.__doc__)
        if isinstance(obj, classmethod | staticmethod):
            return type(obj)(mark(obj.__func__))
        if isinstance(obj, functools.cached_property):
            return type(obj)(mark(obj.func))
        if isinstance(obj, functools.partialmethod):
            return functools.partialmethod(mark(obj.func), *obj.args, **obj.keywords)
        text = f"{_name(obj)} is deprecated since {version} and goes in {removal_version}"
        if alternative:
            text += f"; use {alternative}"
        marked: Any = _warn_on_use(obj, _Notice(text)) if inspect.isclass(obj) else _warn_on_call(obj, _Notice(text))
        marked.__deprecated__ = text
        marked.__mcore_deprecated__ = (version, removal_version, alternative)
        return marked

    return mark


def _label(obj: T, level: str) -> T:
    target: Any = obj.fget if isinstance(obj, property) else obj
    # Before Python 3.12 whatever a protocol carries is a member that implementations must have.
    if sys.version_info >= (3, 12) or not getattr(target, "_is_protocol", False):
        target.__mcore_stability__ = level
    return obj


def _release(field: str, text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{field}={text!r} is no release; write major.minor.patch, for instance '0.3.0'")
    major, minor, patch = (int(part) for part in match.groups())
    return major, minor, patch


def _name(obj: Any) -> str:
    while isinstance(obj, functools.partial):
        obj = obj.func
    return getattr(obj, "__qualname__", None) or type(obj).__qualname__


class _Notice:
    """The warning of one deprecation, at the line of whoever uses the deprecated thing.

    ``warnings.warn`` costs more than most calls. A place that has warned once stays silent, at the cost of a look into a set, while the
    filters stay the same and ask for no repetition.
    """

    __slots__ = ("_filters", "_first", "_length", "_places", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._filters: Any = None
        self._length = 0
        self._first: Any = None
        self._places: set[tuple[CodeType, int]] = set()

    def __call__(self) -> None:
        """Warn about the caller of the function that calls this."""
        frame = sys._getframe(2)
        filters: Any = warnings.filters
        unchanged = filters is self._filters and len(filters) == self._length and filters[0] is self._first
        if not (unchanged and (frame.f_code, frame.f_lasti) in self._places):
            self._warn(frame, filters, unchanged)

    def _warn(self, frame: FrameType, filters: Any, unchanged: bool) -> None:
        place, level, caller = (frame.f_code, frame.f_lasti), 4, frame
        while caller.f_back is not None and caller.f_globals.get("__name__") in _MACHINERY:
            level, caller = level + 1, caller.f_back
        warnings.warn(self._text, DeprecationWarning, stacklevel=level)
        if not unchanged:
            self._places.clear()
            self._filters, self._length, self._first = filters, len(filters), filters[0] if filters else None
        by_context = getattr(sys.flags, "context_aware_warnings", 0)
        if filters and caller is frame and not by_context and self._action(frame, filters) in _ONCE:
            self._places.add(place)

    def _action(self, frame: FrameType, filters: Any) -> str:
        module = str(frame.f_globals.get("__name__", "<unknown>"))
        for action, message, category, module_pattern, line in filters:
            if (
                (message is None or message.match(self._text))
                and issubclass(DeprecationWarning, category)
                and (module_pattern is None or module_pattern.match(module))
                and line in (0, frame.f_lineno)
            ):
                return action
        return "default"


def _warn_on_call(function: Callable[..., Any], notice: _Notice) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function) and sys.version_info < (3, 12):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            notice()
            return await function(*args, **kwargs)

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        notice()
        return function(*args, **kwargs)

    for name in ("cache_clear", "cache_info", "cache_parameters"):  # of functools.cache
        if hasattr(function, name):
            setattr(call, name, getattr(function, name))
    if sys.version_info >= (3, 12) and inspect.iscoroutinefunction(function):
        # A plain function counts as a coroutine function, so the warning comes at the call and not at the await.
        return inspect.markcoroutinefunction(call)
    return call


def _warn_on_use(cls: Any, notice: _Notice) -> type:
    """The class stays the same class; a hook in front of its construction and one in front of its subclasses warn."""
    _hook_subclassing(cls, notice)
    # Enumerations have made their members; protocols are never constructed.
    if hasattr(cls, "__members__") or getattr(cls, "_is_protocol", False):
        return cls
    if "__init__" in vars(cls):
        own = cls.__init__

        @functools.wraps(own)
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            if "__mcore_deprecated__" in vars(type(self)):
                notice()
            own(self, *args, **kwargs)

        cls.__init__ = construct
        return cls

    # A decorator above, for instance dataclass, may still write an __init__, so __new__ warns.
    made = vars(cls).get("__new__")

    def create(kind: Any, /, *args: Any, **kwargs: Any) -> Any:
        if "__mcore_deprecated__" in vars(kind) and sys._getframe(1).f_globals.get("__name__") not in ("copy", "copyreg"):
            notice()
        new = made.__func__ if isinstance(made, staticmethod) else made
        if new is None:
            new = getattr(super(_owner(kind, "__new__", hook), kind), "__new__")  # noqa: B009
        if new is not object.__new__:
            return new(kind, *args, **kwargs)
        if (args or kwargs) and kind.__init__ is object.__init__:
            raise TypeError(f"{kind.__name__}() takes no arguments")
        return new(kind)

    hook = staticmethod(functools.wraps(made)(create) if made is not None else create)
    create.__name__, create.__qualname__ = "__new__", f"{cls.__qualname__}.__new__"
    cls.__new__ = hook
    if made is None:
        cls.__signature__ = _SignatureOfInit()
    return cls


class _SignatureOfInit:
    """What ``inspect.signature`` shows of a class whose ``__new__`` is a hook that takes anything."""

    def __get__(self, instance: Any, kind: Any) -> inspect.Signature:
        if instance is not None or kind.__init__ is object.__init__:
            raise AttributeError("__signature__")
        signature = inspect.signature(kind.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _hook_subclassing(cls: Any, notice: _Notice) -> None:
    own = vars(cls).get("__init_subclass__")

    def subclass(kind: Any, /, **kwargs: Any) -> None:
        if any("__mcore_deprecated__" in vars(base) for base in kind.__bases__):
            notice()
        if own is not None:
            own.__func__(kind, **kwargs)
        else:
            super(_owner(kind, "__init_subclass__", hook), kind).__init_subclass__(**kwargs)

    hook = classmethod(subclass)
    cls.__init_subclass__ = hook


def _owner(kind: Any, name: str, hook: Any) -> Any:
    """The class that carries a hook: not the decorated one where a decorator above, such as dataclass(slots=True), made it anew."""
    return next(base for base in kind.__mro__ if vars(base).get(name) is hook)
