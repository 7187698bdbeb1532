# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The newcomer's test of CONTRIBUTING: each question is answered by a row of a README, whose link leads to the code."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contracts.readme_table import read_table

_ROOT = Path(__file__).parents[2]
_QUESTION = re.compile(
    r"^\| (?P<text>.*\*\*(?P<word>.+)\*\*.*) \| \[[\w-]+\]\((?P<readme>[^)#]+)#where-is-what\) \| `(?P<symbol>[\w.]+)` \|$"
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One row of the table in CONTRIBUTING."""

    text: str
    word: str
    """What to search the README for: the part of the question in bold."""
    readme: Path
    symbol: str


def read_questions(page: str) -> list[Question]:
    """The questions under "The newcomer's test"."""
    section = page.split("## The newcomer's test", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    matches = [_QUESTION.match(line) for line in lines]
    assert all(matches), f"not of the form | ... **word** ... | [wheel](README#where-is-what) | `symbol` |: {lines[matches.index(None)]}"
    return [
        Question(text=match["text"], word=match["word"], readme=_ROOT / match["readme"], symbol=match["symbol"])
        for match in matches
        if match
    ]


QUESTIONS = read_questions((_ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.word.replace(" ", "-"))
def test_a_word_of_the_question_finds_the_row_that_links_the_code(question: Question) -> None:
    rows = [row for row in read_table(question.readme) if question.word.lower() in row.behaviour.lower()]
    assert question.symbol in [row.symbol for row in rows], f"searching {question.readme} for {question.word!r} finds {rows}"
    assert all(row.problem() is None for row in rows)


def test_there_are_twenty_questions_about_every_wheel_and_the_application() -> None:
    assert len({question.text for question in QUESTIONS}) == 20
    assert {question.readme for question in QUESTIONS} == {*_ROOT.glob("packages/*/README.md"), _ROOT / "tools" / "README.md"}
