# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which id marks padding while a sample is made."""

import warnings
from collections.abc import Mapping
from typing import Any

NO_PAD = -1
"""Stands for padding inside a sample when no token id can; never leaves a dataset."""


def pad_id(tokenizer: Any, *, allow_ambiguous: bool, pad: int | None = None, others: Mapping[str, int] | None = None) -> int:
    """The tokenizer's pad id, or `NO_PAD` when it has none or when text uses that id for something else too; warns of the latter.

    Args:
        tokenizer: its special tokens are compared; None has no pad.
        allow_ambiguous: use the id all the same; real tokens of that id then lose their loss.
        pad: stands in the place of the tokenizer's own.
        others: further special tokens by name.
    """
    pad = getattr(tokenizer, "pad", None) if pad is None else pad
    if pad is None or pad < 0:
        return NO_PAD
    specials = {name: getattr(tokenizer, name, None) for name in ("eod", "eos", "bos", "unk", "cls", "sep", "mask")}
    specials |= {**getattr(tokenizer, "special_tokens_dict", {}), **(others or {})}
    same = sorted(name for name, token in specials.items() if token == pad and name != "pad")
    if not same:
        return pad
    if allow_ambiguous:
        warnings.warn(
            f"pad id {pad} is also {', '.join(same)}: every such token loses its loss; set allow_ambiguous_pad_tokens=False to keep it",
            stacklevel=4,
        )
        return pad
    warnings.warn(f"pad id {pad} is also {', '.join(same)}; padding is marked apart, real tokens keep their loss", stacklevel=4)
    return NO_PAD
