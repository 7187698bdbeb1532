# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The runner of documentation examples runs what stands in the page and says where it failed."""

from pathlib import Path

import pytest

from tools.checks.codeblocks import SKIP, blocks, check_page, script

FENCE = "```"


def page(folder: Path, *parts: str) -> Path:
    path = folder / "page.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def block(code: str, language: str = "python") -> str:
    return f"{FENCE}{language}\n{code}\n{FENCE}"


def test_only_python_blocks_are_taken_with_their_lines():
    text = "\n".join(["# T", block("ls", "bash"), block("x = 1\ny = 2"), block("{}", "json")])
    (found,) = blocks(text)
    assert (found.line, found.lines) == (6, ("x = 1", "y = 2"))


def test_a_block_that_is_never_closed_is_refused():
    with pytest.raises(ValueError, match="opened in line 1"):
        blocks(f"{FENCE}python\nx = 1\n")


def test_a_longer_fence_shows_a_shorter_one():
    assert blocks(f"{FENCE}`text\n{block('x')}\n{FENCE}`\n") == []


def test_blocks_keep_their_place_in_the_program():
    text = "\n".join(["# T", block("x = 1"), "words", block("y = x")])
    program = script(blocks(text)).splitlines()
    assert program[2] == "x = 1" and program[6] == "y = x"


def test_blocks_of_a_page_share_an_interpreter_and_an_empty_folder(tmp_path):
    path = page(tmp_path, block("import os\nx = len(os.listdir())"), block("assert x == 0"))
    assert check_page(path)[1] == []


def test_a_failure_names_page_and_line(tmp_path):
    path = page(tmp_path, "# T", block("x = 1"), block("assert x == 2"))
    (problem,) = check_page(path)[1]
    assert f'"{path}", line 8' in problem and "AssertionError" in problem


def test_a_warning_is_a_failure(tmp_path):
    path = page(tmp_path, block("import warnings\nwarnings.warn('going away', DeprecationWarning)"))
    assert len(check_page(path)[1]) == 1


def test_skipped_blocks_are_compiled_only(tmp_path):
    assert check_page(page(tmp_path, SKIP, block("raise SystemExit(1)")))[1] == []
    (problem,) = check_page(page(tmp_path, SKIP, block("def")))[1]
    assert "page.md:4" in problem


def test_the_mark_skips_the_next_block_only(tmp_path):
    path = page(tmp_path, SKIP, block("raise SystemExit(1)"), block("raise SystemExit(1)"))
    assert len(check_page(path)[1]) == 1


def test_first_runs_one_block_and_wants_one(tmp_path):
    assert check_page(page(tmp_path, block("x = 1"), block("raise SystemExit(1)")), first_only=True)[1] == []
    assert len(check_page(page(tmp_path, "words"), first_only=True)[1]) == 1
