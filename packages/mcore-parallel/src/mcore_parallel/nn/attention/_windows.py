# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sliding windows: which layers have one, and what it hides."""

import functools
import re
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from mcore_parallel.context_parallel import allowed

MAX_PATTERN_LAYERS = 100_000


def is_layer_window_attention(
    window_size: tuple[int, int] | None,
    window_attn_skip_freq: int | Sequence[int] | str | None,
    layer_number: int,
    *,
    num_layers: int | None = None,
) -> bool:
    """Whether a layer has the window.

    Args:
        window_size: (left, right); without one no layer has it.
        window_attn_skip_freq: None for every layer; N for all but every N-th; or 1 (window) and 0 for each layer, as a
            sequence or as a pattern like "([1]*3+[0]*1)*6" (lists, ``+``, ``*``, parentheses, numbers; a pattern that is a number is N).
        layer_number: global number of the layer, from 1.
        num_layers: length that a sequence must have; None to ask only that it names the layer. Layers behind the last one
            (those that predict further tokens) have no window then.

    Raises:
        ValueError: a layer below 1, N below 1, a sequence of another length or with other entries, a pattern that is none.

    Example:
        >>> [layer for layer in range(1, 9) if not is_layer_window_attention((128, 0), 4, layer)]
        [4, 8]
    """
    if layer_number < 1:
        raise ValueError(f"layer_number={layer_number} must be at least 1; layers are counted from 1 over the whole model")
    if window_size is None:
        return False
    choice = parse_layer_pattern(window_attn_skip_freq) if isinstance(window_attn_skip_freq, str) else window_attn_skip_freq
    if choice is None or isinstance(choice, int):
        if choice is not None and choice < 1:
            raise ValueError(f"window_attn_skip_freq={choice} must be at least 1; every N-th layer attends to everything")
        return (num_layers is None or layer_number <= num_layers) and (choice is None or layer_number % choice != 0)
    if num_layers is not None and len(choice) != num_layers:
        raise ValueError(
            f"window_attn_skip_freq={window_attn_skip_freq} names {len(choice)} layers, but num_layers={num_layers}; give one entry a layer"
        )
    if wrong := [entry for entry in choice if entry not in (0, 1)]:
        raise ValueError(f"window_attn_skip_freq={window_attn_skip_freq} holds {wrong[0]}; use 1 for a window and 0 for none")
    if layer_number > len(choice):
        if num_layers is not None:
            return False
        raise ValueError(f"window_attn_skip_freq={window_attn_skip_freq} names {len(choice)} layers, but layer_number={layer_number}")
    return bool(choice[layer_number - 1])


def parse_layer_pattern(pattern: str) -> int | tuple[int, ...]:
    """The value of a layer pattern: numbers, lists of numbers, ``+`` (joins), ``*`` (repeats) and parentheses.

    Raises:
        ValueError: anything else, with its position.

    Example:
        >>> parse_layer_pattern("([1]*3 + [0]) * 2")
        (1, 1, 1, 0, 1, 1, 1, 0)
    """
    return _Pattern(pattern).value()


Value = int | tuple[int, ...]


class _Pattern:
    """Reads sums of products of numbers, lists and parentheses, from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [(match.start(), match.group()) for match in re.finditer(r"[0-9]+|\S", text)] + [(len(text), "")]
        self.next = 0

    def value(self) -> Value:
        value = self._sum(0)
        if self._peek():
            self._fail("an operator")
        return value

    def _sum(self, depth: int) -> Value:
        total = self._product(depth)
        while self._peek() == "+":
            place, _ = self._take()
            other = self._product(depth)
            if isinstance(total, int) != isinstance(other, int):
                raise ValueError(f"layer pattern {self.text!r}, position {place}: + joins two lists or two numbers, not one of each")
            total = total + other  # type: ignore[operator]
            if not isinstance(total, int):
                self._check(place, len(total))
        return total

    def _product(self, depth: int) -> Value:
        product = self._factor(depth)
        while self._peek() == "*":
            place, _ = self._take()
            other = self._factor(depth)
            if not isinstance(product, int) and not isinstance(other, int):
                raise ValueError(f"layer pattern {self.text!r}, position {place}: * repeats a list a number of times, not by a list")
            times, entries = (product, other) if isinstance(product, int) else (other, product)
            assert isinstance(times, int)
            if not isinstance(entries, int):
                self._check(place, len(entries) * times)
            product = times * entries
        return product

    def _factor(self, depth: int) -> Value:
        place, token = self._take()
        if token.isdecimal():
            return self._number(place, token)
        if token == "(" and depth < 50:
            value = self._sum(depth + 1)
            self._expect(")")
            return value
        if token == "[":
            return self._list()
        self._fail("a number, [ or (", place)

    def _list(self) -> tuple[int, ...]:
        entries: list[int] = []
        while self._peek() != "]":
            if entries:
                self._expect(",")
            place, token = self._take()
            entries.append(self._number(place, token))
        self._take()
        return tuple(entries)

    def _number(self, place: int, token: str) -> int:
        # More digits are no number of layers.
        if not token.isdecimal() or len(token) > 9:
            self._fail("a number below 10^9", place)
        return int(token)

    def _peek(self) -> str:
        return self.tokens[self.next][1]

    def _take(self) -> tuple[int, str]:
        token = self.tokens[self.next]
        self.next = min(self.next + 1, len(self.tokens) - 1)
        return token

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            self._fail(repr(token))
        self._take()

    def _check(self, place: int, length: int) -> None:
        if length > MAX_PATTERN_LAYERS:
            raise ValueError(f"layer pattern {self.text!r}, position {place}: {length} layers are more than {MAX_PATTERN_LAYERS}")

    def _fail(self, wanted: str, place: int | None = None) -> NoReturn:
        place = self.tokens[self.next][0] if place is None else place
        found = repr(self.text[place]) if place < len(self.text) else "the end"
        raise ValueError(f"layer pattern {self.text!r}, position {place}: expected {wanted}, found {found}")


# A pure function; the bound keeps the tables of the last few lengths.
@functools.lru_cache(maxsize=4)
def get_sliding_window_causal_mask(sq: int, skv: int, window_size: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
    """[sq, skv] bool, True where a key is hidden from a query.

    Query i stands at i + skv - sq: the last one at the last key. It sees the keys from ``left`` before to ``right`` behind that;
    -1 for no limit on a side, so that a causal window is (left, 0).

    Args:
        sq: number of queries.
        skv: number of keys.
        window_size: (left, right).
        device: where the mask is made; None for torch's default.

    Returns:
        A tensor that is shared by equal calls: do not write to it.

    Raises:
        ValueError: a limit below -1.

    Example:
        >>> get_sliding_window_causal_mask(2, 3, (1, 0)).int().tolist()
        [[0, 0, 1], [1, 0, 0]]
    """
    if min(window_size) < -1:
        raise ValueError(f"window_size={window_size} must be two numbers of tokens, or -1 for no limit")
    # A mask that is made under inference mode could not be used in training.
    with torch.inference_mode(False):
        return ~allowed(sq, skv, window_size, torch.get_default_device() if device is None else torch.device(device))
