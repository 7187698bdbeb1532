# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs on a command line: a model and what is special about it, as MODEL:WORD,WORD."""

import re
from collections.abc import Collection


def parse_run(
    text: str, *, models: Collection[str], numbers: Collection[str], flags: Collection[str]
) -> tuple[str, dict[str, int], tuple[str, ...]]:
    """The model, its numbers (dp4) and its flags.

    Args:
        text: of one run.
        models: names that there are.
        numbers: words that a number follows.
        flags: words as they are; one that ends in = has a value behind it.

    Raises:
        SystemExit: a model or a word that there is not.
    """
    model, _, rest = text.partition(":")
    if model not in models:
        raise SystemExit(f"model {model!r} in run {text!r} is unknown; there are {', '.join(models)}")
    valued = tuple(flag for flag in flags if flag.endswith("="))
    counts: dict[str, int] = {}
    flag_words: list[str] = []
    for word in filter(None, rest.split(",")):
        if number := re.fullmatch(f"({'|'.join(numbers)})(\\d+)", word):
            counts[number[1]] = int(number[2])
        elif word.startswith(valued) or word in flags:
            flag_words.append(word)
        else:
            raise SystemExit(f"{word!r} in run {text!r} is no choice; see --help")
    return model, counts, tuple(flag_words)
