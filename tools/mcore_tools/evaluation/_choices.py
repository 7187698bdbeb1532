# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which of several answers a model finds likeliest."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_tools.evaluation._scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A question with several answers.

    Raises:
        ValueError: fewer than two answers, an empty one, or a number that is none of them.
    """

    question: str
    """What stands before each answer, with the blank or newline between them."""
    choices: tuple[str, ...]
    answer: int
    """Number of the right one, from 0."""

    def __post_init__(self) -> None:
        if len(self.choices) < 2 or not all(self.choices):
            raise ValueError(f"choices={list(self.choices)} must be at least two texts, none of them empty")
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer={self.answer} must be the number of one of {len(self.choices)} choices, from 0")


@dataclass(frozen=True, kw_only=True)
class ChoiceScores:
    """Shares of the questions that are answered right."""

    num_questions: int
    accuracy: float
    """By the sum of the answer's log-probabilities."""
    accuracy_by_bytes: float
    """By that sum over the bytes of the answer, which favours no short ones."""
    by_chance: float
    """What drawing an answer gives on average."""


def read_choices(path: Path) -> list[Choice]:
    """Of a .jsonl whose objects have ``question``, ``choices`` and ``answer``.

    Raises:
        ValueError: a line that is no such object; names file and line.
        OSError: the file cannot be read.
    """
    questions = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                question, choices, answer = value["question"], value["choices"], value["answer"]
                if not isinstance(question, str) or type(answer) is not int or not all(isinstance(choice, str) for choice in choices):
                    raise TypeError("question must be a string, choices strings, answer an integer")
                questions.append(Choice(question=question, choices=tuple(choices), answer=answer))
            except KeyError as error:
                raise ValueError(f"{path}:{number} has no {error}; give question, choices and answer") from None
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {error}; correct the line") from None
    if not questions:
        raise ValueError(f"{path} holds no question; give each a line with question, choices and answer")
    return questions


def score_choices(scorer: Scorer, questions: Sequence[Choice]) -> ChoiceScores:
    """Score every answer of every question.

    Raises:
        ValueError: as of ``Scorer.log_probs``.
    """
    pairs = []
    for question in questions:
        for choice in question.choices:
            pairs.append(split(scorer, question.question, choice))
    sums = iter([sum(values) for values in scorer.log_probs(pairs)])
    right = right_by_bytes = chance = 0.0
    for question in questions:
        values = [next(sums) for _ in question.choices]
        by_bytes = [value / len(choice.encode()) for value, choice in zip(values, question.choices, strict=True)]
        right += values.index(max(values)) == question.answer
        right_by_bytes += by_bytes.index(max(by_bytes)) == question.answer
        chance += 1 / len(question.choices)
    count = len(questions)
    return ChoiceScores(num_questions=count, accuracy=right / count, accuracy_by_bytes=right_by_bytes / count, by_chance=chance / count)


def split(scorer: Scorer, context: str, text: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and of its continuation, read as one text: blanks at their border belong to the continuation, as most
    tokenizers join a blank with the word behind it."""
    stripped = context.rstrip()
    text = context[len(stripped) :] + text
    length = 1 + (len(scorer.tokenizer.tokenize(stripped)) if stripped else 0)
    whole = [scorer.first, *scorer.tokenizer.tokenize(stripped + text)]
    # Where the tokenizer joins the end of the context with what follows, the continuation has that token.
    border = min(length, len(whole) - 1)
    return whole[:border], whole[border:]
