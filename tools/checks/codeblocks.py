# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Python code blocks of the documentation run as they stand: one interpreter a file, as many as there are cores, in an empty folder.

A block after the comment `<!-- skip -->` is compiled only. Uses the standard library only, so that it runs beside an installed wheel.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE_BUDGET_S = 60.0
SKIP = "<!-- skip -->"
_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A Python block: `line` is the number of its first line in the page."""

    line: int
    lines: tuple[str, ...]
    skip: bool


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in order.

    Raises:
        ValueError: a block that is not closed.
    """
    closed: list[Block] = []
    opened: re.Match[str] | None = None
    start, comment, inside = 0, "", []
    for number, line in enumerate(text.splitlines(), 1):
        if opened is None:
            if match := _FENCE.match(line):
                opened, start, inside = match, number + 1, []
            elif line.strip():
                comment = line.strip()
            continue
        if line.strip() == opened["fence"]:
            if opened["language"] in {"python", "py"}:
                closed.append(Block(line=start, lines=tuple(inside), skip=comment == SKIP))
            opened, comment = None, ""
        else:
            inside.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise ValueError(f"the block opened in line {start - 1} is never closed; end it with {opened['fence']}")
    return closed


def script(parts: list[Block]) -> str:
    """One program of several blocks, each in the line where it stands in the page, so that a traceback points there."""
    lines: list[str] = []
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.lines
    return "\n".join(lines) + "\n"


def check_page(path: Path, *, first_only: bool = False) -> tuple[float, list[str]]:
    """Compile every block of a page and run those that are not skipped; (seconds, problems)."""
    try:
        written = blocks(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return 0.0, [f"{path}: {error}"]
    problems = []
    if first_only and not written:
        return 0.0, [f"{path}: there is no python block; show how the wheel is used"]
    for block in written:
        try:
            compile(script([block]), str(path), "exec")
        except SyntaxError as error:
            problems.append(f"{path}:{error.lineno}: {error.msg}")
    wanted = [block for block in written if not block.skip]
    if first_only:
        wanted = wanted[:1]
    if problems or not wanted:
        return 0.0, problems
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program" / f"{path.stem.lower()}.py"
        outside = Path(folder) / "outside"
        program.parent.mkdir()
        outside.mkdir()
        program.write_text(script(wanted), encoding="utf-8")
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        # An example that warns teaches something that is going away. A torch without numpy says so, which is no fault of the example.
        warnings = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
        command = [sys.executable, "-I", *warnings, str(program)]
        try:
            done = subprocess.run(
                command, cwd=outside, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FILE_BUDGET_S
            )
        except subprocess.TimeoutExpired:
            return FILE_BUDGET_S, [f"{path}: took longer than its {FILE_BUDGET_S:.0f} s"]
        if done.returncode:
            output = (done.stdout[-2000:] + done.stderr[-4000:]).replace(str(program), str(path))
            problems.append(f"{path}: a block failed (exit {done.returncode})\n{output}")
    return time.perf_counter() - start, problems


def pages(root: Path = ROOT) -> list[Path]:
    """Every page that users read: the root's, the wheels', the site's."""
    return [
        *sorted(root.glob("*.md")),
        *sorted(root.glob("packages/*/README.md")),
        root / "tools" / "README.md",
        *sorted(root.glob("docs/**/*.md")),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pages", nargs="*", type=Path, help="pages to check (default: all)")
    parser.add_argument("--first", action="store_true", help="run the first block only, and fail where there is none")
    arguments = parser.parse_args()
    failed, start = [], time.perf_counter()
    chosen = [page.resolve() for page in arguments.pages] or pages()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, (seconds, problems) in zip(chosen, pool.map(partial(check_page, first_only=arguments.first), chosen), strict=True):
            failed += problems
            if seconds or problems:
                name = path.relative_to(ROOT) if ROOT in path.parents else path
                print(f"{'failed' if problems else 'ok':>6} {seconds:5.1f} s  {name}", flush=True)
    print("\n".join(failed) if failed else f"codeblocks: all ran, {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
