# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Command ``mcore-compare``: where two runs first differ."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

import torch

from mcore_parallel._command_line import CommandParser, exit_code
from mcore_parallel._quiet_pipe import quiet_pipe
from mcore_parallel.numerics._first_difference import DumpReport, compare_dumps

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@quiet_pipe
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when the runs agree, 1 when they differ, 2 for what cannot be compared."""
    arguments = _parser().parse_args(argv)
    dtype = None if arguments.dtype is None else _DTYPES[arguments.dtype]
    try:
        report = compare_dumps(
            arguments.test, arguments.reference, exact=arguments.exact, dtype=dtype, growth=arguments.growth, factor=arguments.factor
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    print(json.dumps(_as_json(report), indent=1) if arguments.json else report.table(everything=arguments.all))
    return 0 if report.ok else 1


def _as_json(report: DumpReport) -> dict[str, object]:
    rows = [{**dataclasses.asdict(one), "ok": one.ok} for one in report.differences]
    first = None if report.first is None else dataclasses.asdict(report.first)
    missing = {"only_in_test": report.only_in_test, "only_in_reference": report.only_in_reference}
    return {"ok": report.ok, "first": first, **missing, "tensors": rows}


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mcore-compare", description="Says which layer and tensor first differs between two runs that TensorRecorder wrote down."
    )
    parser.add_argument("test", help="folder of one run")
    parser.add_argument("reference", help="folder of the other")
    parser.add_argument("--exact", action="store_true", help="nothing may differ, not a bit that rounding could explain")
    parser.add_argument("--dtype", choices=_DTYPES, help="what the runs computed in (default: the coarser dtype of each pair)")
    parser.add_argument("--factor", type=float, default=4.0, help="epsilons that the tightest layer may differ by (default: %(default)s)")
    parser.add_argument("--growth", type=float, default=1.03, help="of the error from layer to layer (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="show all tensors, not those around the first difference")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
