# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The API gate: has each wheel's version grown as much as its public surface changed?

Exit status: 0 the version grew enough, 1 it did not or a rule is broken, 2 the check could not run.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Started as a file, Python puts this folder on the path; the other checks' names must not hide installed packages.
    sys.path[0] = str(ROOT)

from tools.checks._api import (  # noqa: E402
    FORMATS,
    CheckError,
    Report,
    additions,
    check_trees,
    check_wheel,
    listing,
    load,
    record_baseline,
)
from tools.checks._tree import Wheel, wheels  # noqa: E402


def main(arguments: Sequence[str] | None = None, *, repository: Path = ROOT) -> int:
    """Run the gate; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.write_surface:
            return _write_surfaces(options.wheel, repository)
        if options.record_baseline:
            return _record_baselines(options.wheel, repository)
        reports, problems = _reports(options, repository)
    except CheckError as error:
        reports, problems = [], [str(error)]
    except Exception:
        # A failure of the gate itself must not look like its verdict, which Python's own status 1 would.
        traceback.print_exc()
        return 2
    rendered = additions(reports) if options.additions else FORMATS[options.format](reports)
    if options.output:
        Path(options.output).write_text(rendered + "\n")
        rendered = "\n".join(report.headline for report in reports)
    if rendered:
        print(rendered)
    for problem in problems:
        print(f"could not check: {problem}", file=sys.stderr)
        if options.format == "github":
            print(f"::error title=api::could not check: {problem}")
    if problems:
        return 2
    return 0 if options.additions or all(report.passed for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="api.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="append", help="wheel of this repository; may be repeated; all wheels if left out")
    parser.add_argument("--write-surface", action="store_true", help="write api/<wheel>.txt instead of checking")
    parser.add_argument("--record-baseline", action="store_true", help="write the committed state down in api/baselines.toml as released")
    parser.add_argument("--strict", action="store_true", help="with --old and --new: a stable name breaks after a deprecation only")
    parser.add_argument("--additions", action="store_true", help="list what is new, for review, instead of judging")
    parser.add_argument("--old", help="folder, wheel file or commit to compare with")
    parser.add_argument("--new", help="folder, wheel file or commit under check")
    parser.add_argument("--package", help="import name of the package in --old and --new")
    parser.add_argument("--old-version", help="version of --old, if it does not say")
    parser.add_argument("--new-version", help="version of --new, if it does not say")
    parser.add_argument("--repository", type=Path, default=Path(), help="where commits given to --old and --new are looked up")
    parser.add_argument("--format", choices=sorted(FORMATS), default="text")
    parser.add_argument("--output", help="write the report there; standard output gets the verdicts")
    return parser


def _reports(options: argparse.Namespace, repository: Path) -> tuple[list[Report], list[str]]:
    if options.old or options.new or options.package:
        if not (options.old and options.new and options.package) or options.wheel:
            raise CheckError("--old, --new and --package go together, without --wheel")
        settings = {"old_version": options.old_version, "new_version": options.new_version, "strict": options.strict}
        return [check_trees(options.old, options.new, options.package, repository=options.repository, **settings)], []
    reports, problems = [], []
    for wheel in _chosen(options.wheel, repository):
        try:
            reports.append(check_wheel(wheel, repository))
        except CheckError as error:
            problems.append(f"{wheel.name}: {error}")
    return reports, problems


def _chosen(names: Sequence[str] | None, repository: Path) -> list[Wheel]:
    tree = wheels(repository)
    unknown = set(names or ()) - set(tree)
    if unknown or not tree:
        raise CheckError(f"no wheel {', '.join(sorted(unknown)) or 'at all'} under packages/; there are {', '.join(tree) or 'none'}")
    return [tree[name] for name in names or tree]


def _write_surfaces(names: Sequence[str] | None, repository: Path) -> int:
    for wheel in _chosen(names, repository):
        file = repository / "api" / f"{wheel.name}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(listing(load(wheel.module, wheel.folder / "src"), wheel.name))
        print(f"wrote {file.relative_to(repository).as_posix()}")
    return 0


def _record_baselines(names: Sequence[str] | None, repository: Path) -> int:
    for wheel in _chosen(names, repository):
        written = record_baseline(wheel.name, wheel.version, repository)
        print(f"{wheel.name} {wheel.version}: {'recorded' if written else 'stands there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
