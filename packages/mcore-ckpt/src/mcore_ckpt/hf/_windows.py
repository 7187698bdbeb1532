# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sliding windows in config.json: one for all layers, or a kind for each."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mcore_ckpt.hf._fields import Codec, Config, refuse

__all__ = ["layer_flags", "one_window", "window_by_layer"]

_FIELDS = ("window_size", "window_attn_skip_freq")
_NAMES = ("full_attention", "sliding_attention")


def one_window() -> Codec:
    """``sliding_window`` for all layers, None for no window."""

    def write(full: Config) -> dict[str, Any]:
        flags = layer_flags(full)
        if len(set(flags)) > 1:
            refuse(
                "window_attn_skip_freq", full["window_attn_skip_freq"], "has layers without the window; this family has it in all or none"
            )
        return {"sliding_window": _width(full) if flags[0] else None}

    return Codec(ours=_FIELDS, theirs=("sliding_window",), write=write, read=lambda config: _window(_stated_width(config), [1]))


def window_by_layer(kinds: Callable[[Config], Sequence[str]], *, switch: bool = False) -> Codec:
    """``sliding_window`` for the layers that ``layer_types`` names "sliding_attention".

    Args:
        kinds: the types where the config leaves them out.
        switch: ``use_sliding_window`` and ``max_window_layers`` stand beside it, as in Qwen.
    """

    def write(full: Config) -> dict[str, Any]:
        flags = layer_flags(full)
        entries: dict[str, Any] = {"layer_types": [_NAMES[flag] for flag in flags]}
        if full["window_size"] is not None:
            entries["sliding_window"] = _width(full)
        if switch:
            first = flags.index(1) if 1 in flags else len(flags)
            entries |= {"sliding_window": None} | entries | {"use_sliding_window": bool(sum(flags)), "max_window_layers": first}
        return entries

    def read(config: Config) -> dict[str, Any]:
        if switch and not config.get("use_sliding_window"):
            return {}
        types = config.get("layer_types") or kinds(config)
        for kind in types:
            if kind not in _NAMES:
                refuse("layer_types", kind, f"is not supported; only {' and '.join(_NAMES)} are")
        return _window(_stated_width(config), [_NAMES.index(kind) for kind in types])

    more = ("use_sliding_window", "max_window_layers") if switch else ("sliding_window_pattern", "_sliding_window_pattern")
    return Codec(ours=_FIELDS, theirs=("sliding_window", "layer_types", *more), write=write, read=read)


def _stated_width(config: Config) -> int | None:
    """Null is no window, silence this one in all of these families."""
    return config.get("sliding_window", 4096)


def _window(width: int | None, flags: Sequence[int]) -> dict[str, Any]:
    if width is None or 1 not in flags:
        return {}
    if type(width) is not int or width < 1:
        refuse("sliding_window", width, "must be an int of at least 1")
    # Theirs counts the token itself, ours those before it.
    return {"window_size": (width - 1, 0), "window_attn_skip_freq": None if 0 not in flags else tuple(flags)}


def _width(full: Config) -> int:
    left, right = full["window_size"]
    if right not in (0, -1) or left < 0:
        refuse("window_size", full["window_size"], "has no name there; only (n, 0) with n of at least 0 has")
    return left + 1


def layer_flags(full: Config) -> list[int]:
    """1 for each layer with the window, 0 for each without.

    Raises:
        ValueError: a pattern that is none, or of another length than the layers.
    """
    count, frequency = full["num_layers"], full["window_attn_skip_freq"]
    if full["window_size"] is None:
        return [0] * count
    if frequency is None:
        return [1] * count
    if isinstance(frequency, str):
        frequency = _WindowPattern(frequency).value()
    if isinstance(frequency, int):
        if frequency < 1:
            refuse("window_attn_skip_freq", frequency, "must be at least 1")
        return [0 if (layer + 1) % frequency == 0 else 1 for layer in range(count)]
    flags = list(frequency)
    if len(flags) != count or not set(flags) <= {0, 1}:
        refuse("window_attn_skip_freq", frequency, f"must give 0 or 1 for each of num_layers={count}")
    return flags


class _WindowPattern:
    """Sums of products of numbers, lists and parentheses, as "([1]*3+[0]*1)*6"."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = re.findall(r"[0-9]+|\S", text)

    def value(self) -> int | list[int]:
        value = self._sum()
        if self._tokens:
            self._refuse(f"{self._tokens[0]!r} is too much")
        return value

    def _sum(self) -> int | list[int]:
        value = self._product()
        while self._took("+"):
            other = self._product()
            if isinstance(value, list) and isinstance(other, list):
                value = [*value, *other]
            elif isinstance(value, int) and isinstance(other, int):
                value += other
            else:
                self._refuse("a list and a number cannot be joined")
        return value

    def _product(self) -> int | list[int]:
        value = self._atom()
        while self._took("*"):
            other = self._atom()
            sizes = [one if isinstance(one, int) else len(one) for one in (value, other)]
            if sizes[0] * sizes[1] > 100_000:
                self._refuse("it stands for more layers than any model has")
            if isinstance(other, int):
                value = value * other
            elif isinstance(value, int):
                value = other * value
            else:
                self._refuse("two lists cannot be multiplied")
        return value

    def _atom(self) -> int | list[int]:
        if self._took("("):
            value = self._sum()
            self._close(")")
            return value
        if not self._took("["):
            return self._number()
        entries = [self._number()]
        while self._took(","):
            entries.append(self._number())
        self._close("]")
        return entries

    def _number(self) -> int:
        if not self._tokens or not self._tokens[0].isdecimal() or len(self._tokens[0]) > 9:
            self._refuse(f"a number of at most nine digits is missing before {''.join(self._tokens[:1])!r}")
        return int(self._tokens.pop(0))

    def _took(self, token: str) -> bool:
        if self._tokens[:1] != [token]:
            return False
        self._tokens.pop(0)
        return True

    def _close(self, bracket: str) -> None:
        if not self._took(bracket):
            self._refuse("a bracket is not closed")

    def _refuse(self, why: str) -> NoReturn:
        refuse("window_attn_skip_freq", self._text, f"is no pattern such as '([1]*3+[0]*1)*6': {why}")
