# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tables of the guides: which published models have a layout for how many GPUs, with the memory that the planner says.

python -m tools.docs.layouts --write
"""

import argparse
import sys
from pathlib import Path

from mcore_tools.recipes import KINDS, LAYOUTS, Kind, layouts_of, leanest, run_memory, sized_run

ROOT = Path(__file__).parents[2]
PAGES: dict[str, tuple[Kind, ...]] = {"docs/training.md": ("pretrain",), "docs/fine-tuning.md": ("sft", "lora", "rl")}
"""Page -> the kinds of layouts in its tables, each between two marks."""
NUMBERS = (1, 2, 8, 64)
"""Of GPUs, that each model is asked for."""


def table(kind: Kind) -> str:
    """GiB a GPU of each layout; in brackets of the leanest one, where none fits."""
    heads = [f"{gpus} GPUs" if gpus > 1 else "1 GPU" for gpus in NUMBERS]
    lines = [f"| {KINDS[kind]} | {' | '.join(heads)} | others |"]
    lines.append("|---" * (len(NUMBERS) + 2) + "|")
    for name in LAYOUTS:
        layouts = layouts_of(kind, name)
        others = ", ".join(f"{gpus}: {_gib(kind, name, gpus)}" for gpus in sorted(layouts) if gpus not in NUMBERS)
        lines.append(f"| `{name}` | {' | '.join(_cell(kind, name, gpus) for gpus in NUMBERS)} | {others} |")
    return "\n".join(lines)


def page(path: Path, kinds: tuple[Kind, ...]) -> str:
    """The text of a page with its tables as they are now."""
    text = path.read_text(encoding="utf-8")
    for kind in kinds:
        before, _, rest = text.partition(f"<!-- layouts: {kind} -->\n")
        _, end, after = rest.partition("<!-- end of layouts -->")
        if not end:
            raise ValueError(
                f"{path} has no marks around the layouts of {kind}; write <!-- layouts: {kind} --> and <!-- end of layouts -->"
            )
        text = f"{before}<!-- layouts: {kind} -->\n{table(kind)}\n{end}{after}"
    return text


def _gib(kind: Kind, name: str, gpus: int) -> str:
    return f"{run_memory(sized_run(name, kind, layouts_of(kind, name)[gpus])).gib:.0f}"


def _cell(kind: Kind, name: str, gpus: int) -> str:
    if gpus in layouts_of(kind, name):
        return _gib(kind, name, gpus)
    lean = leanest(name, kind, gpus)
    return "" if lean is None else f"({lean[1].gib:.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages; without it, name those that are old")
    write = parser.parse_args().write
    old = [path for path, kinds in PAGES.items() if page(ROOT / path, kinds) != (ROOT / path).read_text(encoding="utf-8")]
    for path in old:
        if write:
            (ROOT / path).write_text(page(ROOT / path, PAGES[path]), encoding="utf-8")
        print(f"{path}: {'written' if write else 'its tables of layouts are old; run python -m tools.docs.layouts --write'}")
    return 1 if old and not write else 0


if __name__ == "__main__":
    sys.exit(main())
