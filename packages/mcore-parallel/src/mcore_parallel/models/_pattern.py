# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Patterns of hybrid stacks: which layers there are, one symbol each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_parallel._stability import internal_api
from mcore_parallel.pipeline import PipelineLayout, StageLayout

SYMBOLS: Mapping[str, str] = {
    "M": "mamba",
    "G": "delta_net",
    "*": "attention",
    "+": "latent attention",
    "-": "feed-forward",
    "E": "the feed-forward slot that was given",
}
"""What a symbol stands for."""

_FEED_FORWARDS = "-E"


class LayerPatternError(ValueError):
    """A pattern that cannot be read, or that does not fit the model or its pipeline."""


@dataclass(frozen=True, kw_only=True)
class LayerPattern:
    """A pattern, read.

    Example:
        >>> pattern = LayerPattern.parse("MM*-|M-/*-")
        >>> pattern.num_layers, pattern.segments, pattern.mtp
        (6, ('MM*-', 'M-'), ('*-',))
    """

    segments: tuple[str, ...]
    """Layers of each virtual pipeline stage; one segment when the pattern has no "|"."""
    mtp: tuple[str, ...] = ()
    """Layers of each depth that predicts a further token."""

    @classmethod
    def parse(cls, text: str) -> "LayerPattern":
        """Read a pattern.

        Args:
            text: a symbol a layer (M Mamba-2, G gated delta net, * attention, + latent attention, - feed-forward, E the feed-forward
                slot that was given); "|" between pipeline segments, which may be empty; "/" before each multi-token prediction depth.

        Raises:
            LayerPatternError: an unknown symbol with its position, no layer at all, "*" beside "+", depths that differ or hold a "|".
        """
        for position, symbol in enumerate(text):
            if symbol not in SYMBOLS and symbol not in "|/":
                known = ", ".join(f"{key} ({meaning})" for key, meaning in SYMBOLS.items())
                raise LayerPatternError(
                    f"hybrid_layer_pattern={text!r} has {symbol!r} at position {position}; write {known}, "
                    '"|" between pipeline segments and "/" before further depths'
                )
        trunk, *depths = text.split("/")
        parsed = cls(segments=tuple(trunk.split("|")), mtp=tuple(depths))
        if not parsed.num_layers:
            raise LayerPatternError(f"hybrid_layer_pattern={text!r} has no layer before its first '/'; write a symbol a layer")
        if "*" in text and "+" in text:
            raise LayerPatternError(
                f"hybrid_layer_pattern={text!r} mixes '*' at position {text.index('*')} with '+' at position {text.index('+')}, whose "
                "rotary embeddings differ; use one kind of attention"
            )
        for depth, layers in enumerate(depths):
            if not layers or "|" in layers or layers != depths[0]:
                raise LayerPatternError(
                    f"hybrid_layer_pattern={text!r} has {layers!r} as depth {depth}; depths are equal, hold a layer at least and no '|'"
                )
        return parsed

    @property
    def layers(self) -> str:
        """The symbol of every layer, by global number."""
        return "".join(self.segments)

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.segments))

    def layout(self, num_stages: int, num_chunks: int = 1) -> PipelineLayout:
        """Where the segments lie: segment i is chunk i // p of stage i % p; a pattern without "|" is cut evenly, one whole stage holds all.

        Raises:
            LayerPatternError: over several virtual stages, a number of segments other than one, or one for each.
        """
        total, count = num_stages * num_chunks, len(self.segments)
        if count == 1 or total == 1:
            return PipelineLayout.even(self.num_layers, num_stages=num_stages, num_chunks=num_chunks, mtp_num_layers=len(self.mtp))
        if count != total:
            raise LayerPatternError(
                f"hybrid_layer_pattern={'|'.join(self.segments)!r} has {count} segments, but pp*vpp={num_stages}*{num_chunks} virtual "
                f"stages; write {total - 1} '|', or none to cut it evenly"
            )
        stages, first = [], 0
        for number, segment in enumerate(self.segments):
            last = number == count - 1
            depths = range(len(self.mtp)) if last else range(0)
            layers = range(first, first + len(segment))
            stages.append(StageLayout(layers=layers, embedding=number == 0, loss=last, mtp_layers=depths))
            first += len(segment)
        return PipelineLayout(num_stages=num_stages, stages=tuple(stages))


@internal_api
def read_pattern(text: str | None) -> LayerPattern | None:
    """A config's pattern; None for a model without one.

    Raises:
        LayerPatternError: as of ``LayerPattern.parse``.
    """
    return None if text is None else LayerPattern.parse(text)


def allocate_layers(num_layers: int, attention_ratio: float, mlp_ratio: float, override_pattern: str | None = None) -> list[str]:
    """Symbols of a stack of Mamba-2 layers with attention and feed-forward layers spread evenly over it.

    Args:
        num_layers: L.
        attention_ratio: share of attention layers, in [0, 1]; the nearest whole number of them.
        mlp_ratio: share of feed-forward layers, which take the places of Mamba-2 layers.
        override_pattern: taken instead of what the ratios say; must have L layers.

    Raises:
        LayerPatternError: shares outside [0, 1] or above 1 together, a pattern of another length or with "|" or "/".

    Example:
        >>> "".join(allocate_layers(8, 0.25, 0.0))
        'MM*MM*MM'
    """
    if num_layers < 1:
        raise LayerPatternError(f"num_layers={num_layers} must be at least 1")
    for name, ratio in (("attention_ratio", attention_ratio), ("mlp_ratio", mlp_ratio)):
        if not 0.0 <= ratio <= 1.0:
            raise LayerPatternError(f"{name}={ratio} must lie in [0, 1]")
    if override_pattern is not None:
        pattern = LayerPattern.parse(override_pattern)
        if pattern.num_layers != num_layers or len(pattern.segments) > 1 or pattern.mtp:
            raise LayerPatternError(
                f"override_pattern={override_pattern!r} must have num_layers={num_layers} symbols and no '|' or '/', "
                f"found {pattern.num_layers}"
            )
        return list(override_pattern)
    attention, mlp = round(num_layers * attention_ratio), round(num_layers * mlp_ratio)
    if attention + mlp > num_layers:
        raise LayerPatternError(
            f"attention_ratio={attention_ratio} and mlp_ratio={mlp_ratio} ask for {attention} + {mlp} of num_layers={num_layers}; lower one"
        )
    symbols = ["M"] * num_layers
    _spread(symbols, "*", attention, (num_layers - attention) / (attention + 1))
    if mlp:
        _spread(symbols, "-", mlp, (num_layers - attention - mlp) / mlp)
    return symbols


def _spread(symbols: list[str], symbol: str, count: int, gap: float) -> None:
    """Put ``count`` symbols in the places of M, ``gap`` of those apart."""
    left = gap
    for place, present in enumerate(symbols):
        if present != "M" or not count:
            continue
        if left < 0.5:
            symbols[place], count, left = symbol, count - 1, left + gap
        else:
            left -= 1


def get_layer_maps_from_layer_type_list(
    layer_type_list: Sequence[str],
) -> tuple[dict[int, int], dict[int, int], dict[int, int], dict[int, int]]:
    """For attention (``*`` and ``+``), Mamba-2, feed-forward (``-``) and E layers: from the global number to the number among its kind.

    Raises:
        LayerPatternError: a symbol without a place in these four; ``layer_maps_by_symbol`` has one for each.

    Example:
        >>> get_layer_maps_from_layer_type_list(["M", "*", "M", "-"])
        ({1: 0}, {0: 0, 2: 1}, {3: 0}, {})
    """
    kinds = ("*+", "M", "-", "E")
    maps: tuple[dict[int, int], ...] = ({}, {}, {}, {})
    for number, symbol in enumerate(layer_type_list):
        kind = next((place for place, symbols in enumerate(kinds) if symbol in symbols), None)
        if kind is None or len(symbol) != 1:
            raise LayerPatternError(f"layer {number} is {symbol!r}, which is no '*', '+', 'M', '-' or 'E'; see layer_maps_by_symbol")
        maps[kind][number] = len(maps[kind])
    return maps[0], maps[1], maps[2], maps[3]


def layer_maps_by_symbol(layer_type_list: Sequence[str]) -> dict[str, dict[int, int]]:
    """For every symbol: from the global number to the number among the layers of that symbol.

    Raises:
        LayerPatternError: an unknown symbol.

    Example:
        >>> layer_maps_by_symbol("M*M")
        {'M': {0: 0, 2: 1}, 'G': {}, '*': {1: 0}, '+': {}, '-': {}, 'E': {}}
    """
    maps: dict[str, dict[int, int]] = {symbol: {} for symbol in SYMBOLS}
    for number, symbol in enumerate(layer_type_list):
        if symbol not in maps:
            raise LayerPatternError(f"layer {number} is {symbol!r}; the symbols are {' '.join(SYMBOLS)}")
        maps[symbol][number] = len(maps[symbol])
    return maps


def is_feed_forward(symbol: str) -> bool:
    """Whether a layer of that symbol has a feed-forward and no mixer."""
    return symbol in _FEED_FORWARDS
