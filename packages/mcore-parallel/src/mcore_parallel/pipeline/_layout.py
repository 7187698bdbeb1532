# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each virtual stage of a pipeline holds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_parallel.pipeline._partition import partition_layers

_SYMBOLS = {"E": "E", "t": "t", "m": "m", "L": "L", "embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """What one virtual stage holds."""

    layers: range
    """Global numbers; may be empty."""
    embedding: bool = False
    loss: bool = False
    """Final norm, output layer and loss."""
    mtp_layers: range = range(0)
    """Global numbers of the layers that predict further tokens, counted by themselves."""


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """All virtual stages in the order in which a token passes them; number i is chunk i // p of stage i % p.

    Example:
        >>> layout = PipelineLayout.parse("Et|tt|tt|tL", num_stages=2)
        >>> layout.num_chunks, layout.stage(1, chunk=1)
        (2, StageLayout(layers=range(5, 6), embedding=False, loss=True, mtp_layers=range(0, 0)))
    """

    num_stages: int
    stages: tuple[StageLayout, ...]

    @property
    def num_chunks(self) -> int:
        return len(self.stages) // self.num_stages

    @property
    def num_layers(self) -> int:
        return sum(len(stage.layers) for stage in self.stages)

    def stage(self, stage: int, chunk: int = 0) -> StageLayout:
        """What a chunk of a stage holds.

        Raises:
            ValueError: no such stage or chunk.
        """
        if not (0 <= stage < self.num_stages and 0 <= chunk < self.num_chunks):
            raise ValueError(f"stage={stage} chunk={chunk} must lie within {self.num_stages} stages of {self.num_chunks} chunks")
        return self.stages[chunk * self.num_stages + stage]

    def of_rank(self, stage: int) -> list[StageLayout]:
        """All chunks of a stage, in order."""
        return [self.stage(stage, chunk) for chunk in range(self.num_chunks)]

    @classmethod
    def even(
        cls,
        num_layers: int,
        *,
        num_stages: int,
        num_chunks: int = 1,
        account_for_embedding: bool = False,
        account_for_loss: bool = False,
        num_layers_in_first_stage: int | None = None,
        num_layers_in_last_stage: int | None = None,
        mtp_num_layers: int = 0,
    ) -> "PipelineLayout":
        """As many layers on each virtual stage as can be; what is left over goes as ``partition_layers`` says.

        Args:
            num_layers: all layers.
            num_stages: p.
            num_chunks: V.
            account_for_embedding: the embedding counts as a layer.
            account_for_loss: output layer and loss count as a layer.
            num_layers_in_first_stage: layers of stage 0 over all its chunks, in equal parts; the others share the rest.
            num_layers_in_last_stage: the same for stage p - 1.
            mtp_num_layers: depths that predict further tokens; they lie with the loss and count as nothing.

        Raises:
            ValueError: a stage between would be empty, a number that its chunks do not divide, one end both counted and given.
        """
        first, last = num_layers_in_first_stage, num_layers_in_last_stage
        for name, end_layers, counted in (("first", first, account_for_embedding), ("last", last, account_for_loss)):
            if end_layers is None:
                continue
            if counted:
                other = "account_for_embedding" if name == "first" else "account_for_loss"
                raise ValueError(f"num_layers_in_{name}_stage={end_layers} and {other}=True exclude one another; set one of them")
            if end_layers < 0 or end_layers % num_chunks:
                raise ValueError(f"num_layers_in_{name}_stage={end_layers} must be a multiple of num_chunks={num_chunks}, or 0")
            if num_stages == 1:
                raise ValueError(f"num_layers_in_{name}_stage={end_layers} needs more than one stage; leave it out")
        fixed = {stage: count for stage, count in ((0, first), (num_stages - 1, last)) if count is not None}
        free = [place for place in range(num_stages * num_chunks) if place % num_stages not in fixed]
        counted = num_layers - sum(fixed.values()) + account_for_embedding + account_for_loss
        if not free and counted:
            raise ValueError(f"the first and last stages hold {sum(fixed.values())} of num_layers={num_layers}; give them all layers")
        sizes = [fixed.get(place % num_stages, 0) // num_chunks for place in range(num_stages * num_chunks)]
        for number, place in enumerate(free):
            sizes[place] = len(partition_layers(counted, len(free), number))
        sizes[0] -= account_for_embedding
        sizes[-1] -= account_for_loss
        stages = [[*"E"] * (place == 0) + [*"t"] * size for place, size in enumerate(sizes)]
        stages[-1] += [*"m"] * mtp_num_layers
        return cls._build(stages, num_stages, close=True)

    @classmethod
    def parse(cls, layout: str | Sequence[str | Sequence[str]], *, num_stages: int, num_layers: int | None = None) -> "PipelineLayout":
        """Read a layout.

        Args:
            layout: text such as ``"Et*3|(tt|)*29,m|L"``: E embedding, t layer, m layer that predicts further tokens, L loss, ``|`` between
                virtual stages, ``x*k`` and ``(...)*k`` repeat, commas and blanks may stand anywhere. Or a list with an entry a virtual
                stage: such a text, or a list of E, t, m, L (or embedding, decoder, mtp, loss).
            num_stages: p; must divide the number of virtual stages.
            num_layers: how many t there must be; None for any number.

        Raises:
            ValueError: an unknown symbol, brackets that do not match, not one E at the very beginning and one L at the very end,
                an m before a t, a number of virtual stages or layers that does not fit.
        """
        if isinstance(layout, str):
            stages = [list(stage) for stage in _expand(layout).split("|")]
        else:
            stages = [list(_expand(stage)) if isinstance(stage, str) else [_symbol(name) for name in stage] for stage in layout]
        parsed = cls._build(stages, num_stages)
        if num_layers is not None and parsed.num_layers != num_layers:
            raise ValueError(f"layout={layout!r} places {parsed.num_layers} layers, but num_layers={num_layers}; make them equal")
        return parsed

    @classmethod
    def _build(cls, stages: list[list[str]], num_stages: int, close: bool = False) -> "PipelineLayout":
        if close:
            stages = [*stages[:-1], [*stages[-1], "L"]]
        text = "|".join(map("".join, stages))
        order = text.replace("|", "")
        if num_stages < 1 or len(stages) % num_stages:
            raise ValueError(f"layout {text!r} has {len(stages)} virtual stages, no multiple of num_stages={num_stages}; add or join some")
        if not re.fullmatch(r"E[^EL]*L", order) or not text.startswith("E") or not text.endswith("L"):
            raise ValueError(f"layout {text!r} must hold one E, first in its first stage, and one L, last in its last")
        if "mt" in order:
            raise ValueError(f"layout {text!r} has an m before a t; put the layers that predict further tokens behind all others")
        layouts: list[StageLayout] = []
        layers = mtp = 0
        for symbols in stages:
            here, further = symbols.count("t"), symbols.count("m")
            layouts.append(
                StageLayout(
                    layers=range(layers, layers + here),
                    embedding="E" in symbols,
                    loss="L" in symbols,
                    mtp_layers=range(mtp, mtp + further) if further else range(0),
                )
            )
            layers, mtp = layers + here, mtp + further
        return cls(num_stages=num_stages, stages=tuple(layouts))


def _expand(text: str) -> str:
    """Carry out the repeats."""
    short = re.sub(r"[\s,]", "", text)
    while "*" in short or "(" in short:
        # The innermost brackets first; without a factor they stand for themselves.
        replaced = re.sub(r"(?:([EtmL|])|\(([EtmL|]*)\))\*(\d+)", lambda m: (m[1] or m[2] or "") * int(m[3]), short)
        if replaced == short:
            replaced = re.sub(r"\(([EtmL|]*)\)(?!\*)", r"\1", short)
        if replaced == short:
            break
        short = replaced
    if unknown := sorted(set(short) - set("EtmL|")):
        raise ValueError(f"layout={text!r} leaves {''.join(unknown)!r} unread; write E, t, m, L and |, each x*k or (...)*k with a number k")
    return short


def _symbol(name: str) -> str:
    if name not in _SYMBOLS:
        raise ValueError(f"layout names {name!r}; write one of {', '.join(_SYMBOLS)}")
    return _SYMBOLS[name]
