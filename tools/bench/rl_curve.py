# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a policy learns from rewards: the reward of each iteration, and pass@1 on held-out problems before, meanwhile and after.

python -m tools.bench.rl_curve --recipe arithmetic_100m --output docs/benchmarks/arithmetic.json
python -m tools.bench.rl_curve --recipe arithmetic_tiny --seeds 1 7 --set train.steps=40

A run is that of ``mcore rl`` with the same options, from its beginning, in a folder that is removed.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_parallel.models import num_parameters
from mcore_tools import reinforce
from mcore_tools.recipes import recipe
from tools.bench._record import record

_SHOWN = ("reward", "answer_length", "logprob_mismatch", "rollout_s", "train_s", "refit_s", "eval/right", "eval/pass@1")


def learn(name: str, changes: Sequence[str], seed: int) -> dict[str, Any]:
    """A run of a recipe with changed fields, its problems and weights of ``seed``.

    Raises:
        RuntimeError: the run failed.
    """
    environment = getattr(recipe(name).rl, "environment", "")
    with tempfile.TemporaryDirectory() as folder:
        seeds = (f"train.seed={seed}", f"rl.{environment}.seed={seed}")
        fields = (*changes, *seeds, "log.tensorboard=false", "log.html=false", f"output={folder}/run")
        begin = time.perf_counter()
        if reinforce.main(["--recipe", name, *(word for field in fields for word in ("--set", field))]):
            raise RuntimeError(f"mcore rl --recipe {name} with seed {seed} has failed and said why")
        seconds = time.perf_counter() - begin
        lines = (Path(folder) / "run" / "train.jsonl").read_text(encoding="ascii").splitlines()
    return {"seed": seed, "seconds": round(seconds, 1), **curve([json.loads(line) for line in lines])}


def curve(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What rows of ``train.jsonl`` say.

    Args:
        rows: step 0, which is the evaluation before the first iteration, and all others.
    """
    evaluated = [row for row in rows if "eval/pass@1" in row]
    first, last = evaluated[0], evaluated[-1]
    result: dict[str, Any] = {name: round(first[name], 4) for name in ("imitation_loss", "imitation_s") if name in first}
    for name, key in (("greedy", "eval/right"), ("sampled", "eval/pass@1")):
        result[name] = {"before": round(first[key], 4), "after": round(last[key], 4), "margin": round(last[key] - first[key], 4)}
    result["max_logprob_mismatch"] = max(row["logprob_mismatch"] for row in rows if "logprob_mismatch" in row)
    elapsed, shown = 0.0, []
    for row in rows:
        elapsed += row.get("step_s", 0.0)
        shown.append({"step": row["step"], "iterations_s": round(elapsed, 1)})
        shown[-1] |= {name.replace("/", "_"): float(f"{row[name]:.4g}") for name in _SHOWN if name in row}
    return {**result, "rows": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic_tiny", help="one with rl.eval_on_start and rl.eval_samples (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of weights and problems, a run each (default: 0)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field of the run")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {
        "work": "a model of random weights imitates answers, then learns from rewards; pass@1 is of problems whose numbers are in neither",
        "parameters": num_parameters(recipe(arguments.recipe).model),
        "runs": [learn(arguments.recipe, arguments.set, seed) for seed in arguments.seeds],
    }
    for run in results["runs"]:
        print(json.dumps({name: value for name, value in run.items() if name != "rows"}))
    if arguments.output:
        record(arguments.output, results)


if __name__ == "__main__":
    main()
