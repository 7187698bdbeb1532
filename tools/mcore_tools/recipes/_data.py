# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where the tokens of a run come from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FIMConfig:
    """Documents rearranged so that the model learns to fill in their middle (Bavarian et al., 2022).

    Raises:
        ValueError: a rate outside of [0, 1], or one of the two fields of fragments without the other.
    """

    rate: float = 0.5
    """Share of documents to rearrange."""
    spm_rate: float = 0.5
    """Of the rearranged ones, share that begins with the suffix."""
    prefix_token: str = "<fim_prefix>"
    """Begins what stands before the middle."""
    middle_token: str = "<fim_middle>"
    """Begins the middle."""
    suffix_token: str = "<fim_suffix>"
    """Each is one token of the tokenizer."""
    pad_token: str = ""
    """Fills a document that rearranging made shorter; empty for the tokenizer's own padding."""
    split_sample: str = ""
    """Token that cuts a document into fragments, such as the files of a repository, each rearranged by itself; empty for none."""
    fragment_rate: float | None = None
    """Share of fragments to rearrange, in a document that ``rate`` chose; goes with ``split_sample``."""
    no_prefix: str = ""
    """Documents that begin with this text stay as they are; empty for none."""

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate", "fragment_rate"):
            if not 0.0 <= (getattr(self, name) or 0.0) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1]")
        if bool(self.split_sample) != (self.fragment_rate is not None):
            raise ValueError(
                f"data.fim.split_sample={self.split_sample!r} and data.fim.fragment_rate={self.fragment_rate} go together; set both or none"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from.

    Raises:
        ValueError: weights and corpora that do not pair up, or choices that exclude one another.
    """

    prefix: str = ""
    """Path of the .bin/.idx pair without its ending."""
    blend: tuple[str, ...] = ()
    """Several corpora in place of ``prefix``, by their paths."""
    blend_weights: tuple[float, ...] = ()
    """Share of the samples that each corpus of ``blend`` gives, in any unit; empty to read each of them whole."""
    tokenizer: str = ""
    """``byte``, ``null:VOCAB_SIZE``, or the path of a tokenizer.json, .model or .tiktoken, or of the folder that holds one."""
    split: str = "95,5,0"
    """Shares of the documents for training, validation and test."""
    eval_prefix: str = ""
    """A corpus of its own for validation; ``split`` is not looked at then."""
    fim: FIMConfig | None = None
    """Rearrange documents of text for filling in the middle; None to leave them as they are."""
    inter_document_masking: bool = False
    """Tokens attend to those of their own document alone, and positions begin with it: the documents that share a sequence do not meet."""
    eod_mask_loss: bool = False
    """No loss for what is predicted from the end of a document, which is the beginning of another."""

    def __post_init__(self) -> None:
        if self.prefix and self.blend:
            raise ValueError(f"prefix={self.prefix!r} and blend={self.blend!r} both name the corpus; set one of them")
        if self.blend_weights and len(self.blend_weights) != len(self.blend):
            raise ValueError(f"blend_weights has {len(self.blend_weights)} entries for {len(self.blend)} corpora of blend; give one each")
        for weight in self.blend_weights:
            if not 0.0 < weight < float("inf"):
                raise ValueError(f"blend_weights holds {weight}, which must be above 0 and finite; leave that corpus out of blend")

    @property
    def corpora(self) -> tuple[str, ...]:
        """Paths of all that a run trains on."""
        return self.blend or ((self.prefix,) if self.prefix else ())
