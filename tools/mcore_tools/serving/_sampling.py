# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sampling settings of a command line: flags by fields of ``SamplingParams``, which says their types and ranges."""

import argparse
from typing import Any

from mcore_inference import SamplingParams
from mcore_inference.sampling import StructuredOutput
from mcore_tools.arguments import add_fields, given_flags, integer, number, option_name

NUM_TOKENS = 64
"""Of a continuation, where nothing is said."""

_SETTINGS = {
    "--top-k": ("top_k", "draw among the K likeliest tokens"),
    "--top-p": ("top_p", "draw among the fewest tokens that have this probability together"),
    "--min-p": ("min_p", "draw among tokens with this share of the likeliest one's probability"),
    "--repetition-penalty": ("repetition_penalty", "of tokens in prompt or continuation; above 1 makes them less likely"),
    "--presence-penalty": ("presence_penalty", "off the score of a token that was generated"),
    "--frequency-penalty": ("frequency_penalty", "off the score of a token for each time that it was generated"),
    "--seed": ("seed", "of the draws: each prompt's of this and its number (default: 0)"),
    "--n": ("n", "continuations of each prompt (default: 1)"),
    "--min-tokens": ("min_tokens", "that a continuation has before it may end"),
    "--ignore-eos": ("ignore_eos", "go on behind the end of a text"),
    "--stop": ("stop_words", "that ends a continuation; may be given again"),
    "--stop-token-id": ("stop_token_ids", "that ends a continuation; may be given again"),
    "--include-stop-str-in-output": ("detokenize_stop_sequence", "keep what ended a continuation in its text"),
    "--bad-word": ("bad_words", "that no continuation holds; may be given again"),
    "--allowed-token-id": ("allowed_token_ids", "nothing else is drawn; may be given again"),
    "--add-bos": ("add_BOS", "put the tokenizer's begin-of-text token before each text"),
}
"""By flag: the field, and what it is for."""
_SCORES = {
    "--logprobs": ("return_log_probs", "write log_probs and token_ids of each text, one of each token"),
    "--processed-logprobs": (
        "processed_log_probs",
        "with --logprobs: of the distribution that tokens were drawn from, not of the raw logits",
    ),
    "--top-logprobs": ("top_n_logprobs", "write top_log_probs: of each token the N likeliest ids and their log-probabilities"),
}
"""Of texts that go to a file."""
_FORMS = {
    "--json-schema": ("json_schema", "file with a JSON schema that continuations have"),
    "--json-object": ("json_object", "continuations are a JSON object"),
    "--regex": ("regex", "that continuations match from end to end (Rust's regex)"),
    "--choice": ("choices", "continuations are one of these texts; may be given again"),
    "--grammar": ("grammar", "file with a grammar of continuations (Lark)"),
}
"""Of ``StructuredOutput``; one of them."""
_FILES = ("json_schema", "grammar")
_ONLY_DRAWN = ("--top-k", "--top-p", "--min-p", "--n")
"""Without effect on the likeliest token."""
_METAVARS = {"stop_words": "TEXT", "bad_words": "TEXT", "choices": "TEXT", "regex": "REGEX", "json_schema": "FILE", "grammar": "FILE"}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How a text is continued."""
    parser.add_argument("--max-tokens", type=integer(1), help=f"of a continuation (default: {NUM_TOKENS})")
    parser.add_argument("--temperature", type=number(least=0), help="of a continuation (default: 0, the likeliest token)")
    add_fields(parser, _SETTINGS, SamplingParams, metavars=_METAVARS)
    add_fields(parser, _FORMS, StructuredOutput, metavars=_METAVARS, files=_FILES)


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """What is written beside a text."""
    add_fields(parser, _SCORES, SamplingParams)


def sampling_names() -> list[str]:
    """Names of the options of ``add_sampling_arguments``."""
    return ["max_tokens", "temperature", *(option_name(flag) for flag in (*_SETTINGS, *_FORMS))]


def check_scores(options: argparse.Namespace) -> None:
    """Refuse log-probabilities of texts that go to no file.

    Raises:
        ValueError: names the flag.
    """
    for flag, _ in given_flags(options, _SCORES):
        raise ValueError(f"{flag} is of --output, whose lines have log-probabilities; give --input and --output, or leave it out")


def sampling_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a text depends on, by flag; None for what is not given."""
    flags = (*_SETTINGS, *_FORMS, *_SCORES)
    return {flag: getattr(options, option_name(flag), None) for flag in flags} | {
        "--max-tokens": options.max_tokens,
        "--temperature": options.temperature or 0.0,
        "--seed": options.seed or 0,
    }


def sampling_params(options: argparse.Namespace, longest: int) -> SamplingParams:
    """The settings that the flags say.

    Args:
        options: of ``add_sampling_arguments``, and of ``add_score_arguments`` where they are there.
        longest: tokens of a prompt and its continuation.

    Raises:
        ValueError: flags exclude each other, need another, or change nothing.
    """
    drawn = bool(options.temperature)
    if not drawn and (flag := next((flag for flag, _ in given_flags(options, _ONLY_DRAWN)), None)):
        raise ValueError(f"{flag} says what is drawn, and without --temperature the likeliest token is taken; give --temperature")
    budget = min(NUM_TOKENS, longest) if options.max_tokens is None else options.max_tokens
    if (least := options.min_tokens) is not None and least > budget:
        raise ValueError(f"--min-tokens {least} is more than the {budget} tokens of a continuation; lower it, or raise --max-tokens")
    forms = {_FORMS[flag][0]: value for flag, value in given_flags(options, _FORMS)}
    if len(forms) > 1:
        flags = " and ".join(flag for flag, _ in given_flags(options, _FORMS))
        raise ValueError(f"{flags} exclude each other: a continuation has one form; leave one")
    if getattr(options, "processed_logprobs", None) and not options.logprobs:
        raise ValueError("--processed-logprobs says which log-probabilities are written; give --logprobs too, or leave it out")
    table = _SETTINGS | _SCORES
    fields: dict[str, Any] = {"seed": 0} | {table[flag][0]: value for flag, value in given_flags(options, table)}
    return SamplingParams(
        temperature=options.temperature or 0.0,
        num_tokens_to_generate=budget,
        structured_output=StructuredOutput(**forms) if forms else None,
        **fields,
    )
