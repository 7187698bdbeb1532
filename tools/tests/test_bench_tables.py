# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What benches make of what they measured."""

from typing import Any

import pytest

from tools.bench.dense_step import Run
from tools.bench.loss_curve import compared, over_draws
from tools.bench.picture import bars, svg
from tools.bench.train import _best, with_ratios


def run(speed: int, **more: Any) -> dict[str, Any]:
    return {"tokens_per_s_per_gpu": speed, "peak_gib": 3.0, **more}


def test_the_best_micro_batch_of_each_side_counts() -> None:
    found = {
        ("mcore", 2): [run(10, startup_s=60.0), run(14, startup_s=20.0)],
        ("mcore", 4): [run(15, startup_s=21.0), run(17, startup_s=19.0)],
        ("plain", 2): [run(8), run(9)],
        ("plain", 4): [{"error": "out of memory"}, {"error": "out of memory"}],
        ("other", 2): [{"error": "not here"}],
    }
    rows = with_ratios([_best("dense", who, 1, found) for who in ("mcore", "plain", "other")])
    ours, plain, other = rows
    assert (ours["micro_batch"], ours["tokens_per_s"], ours["spread"], ours["ratio"]) == (4, 16, [15, 17], round(16 / 8, 3))
    assert (ours["startup_cold_s"], ours["startup_warm_s"]) == (60.0, 19.0)
    assert plain["micro_batch"] == 2 and plain["ratio"] is None and other["error"] == "not here"


def test_curves_are_compared_by_their_running_means() -> None:
    plain, other = compared(
        [
            {"run": "bfloat16", "validation_loss": 2.0, "losses": [4.0, 4.0, 2.0, 2.0]},
            {"run": "fp8", "validation_loss": 2.1, "losses": [4.0, 4.4, 2.0, 2.2]},
        ],
        window=2,
    )
    assert plain["difference_at_end"] == plain["largest_difference"] == 0.0
    assert other["difference_at_end"] == pytest.approx(0.05) and other["validation_difference"] == pytest.approx(0.05)
    assert other["largest_difference"] == pytest.approx(0.2 / 3)


def test_differences_of_several_draws_are_averaged_and_stand_beside_those_of_the_plain_runs() -> None:
    def runs(plain: float, other: float) -> list[dict[str, Any]]:
        return [{"run": name, "validation_loss": loss, "losses": [loss]} for name, loss in (("bfloat16", plain), ("fp8", other))]

    plain, other = over_draws([runs(2.0, 2.02), runs(2.1, 2.1)], window=1)
    assert other["difference_at_end"] == pytest.approx(0.005) and other["draws"]["validation_difference"] == pytest.approx([0.01, 0.0])
    assert plain["difference_at_end"] == 0.0 and plain["draws"]["difference_at_end"] == pytest.approx([0.05])
    assert "draws" not in over_draws([runs(2.0, 2.02)], window=1)[1]


def test_the_picture_has_the_works_that_both_sides_did() -> None:
    ours = {"model": "a", "gpus": 2, "flags": ["fp8=none"], "tokens_per_s_per_gpu": 30}
    files = [
        {
            "machine": {"num_gpus": 2},
            "rows": [ours, {**ours, "flags": ["fp8=tensorwise"]}],
            "peers": [{"model": "a", "peer": "x", "tok_s_gpu": 20}],
        },
        {
            "machine": {"num_gpus": 0},
            "rows": [{"model": "b", "gpus": 0, "by": who, "tokens_per_s": n} for who, n in (("mcore", 5), ("y", 4))],
        },
    ]
    works = bars(files)
    assert works == {"a, 2 GPUs": {"mcore": 30, "x": 20}, "b, CPU": {"mcore": 5, "y": 4}}
    assert "20 (1.50x)" in svg(works, "GPU")


def test_runs_name_the_output_layer() -> None:
    fp8 = Run.parse("tiny:fp8=tensorwise,head").fp8
    assert fp8 is not None and fp8.output_layer
    plain = Run.parse("tiny:fp8=tensorwise").fp8
    assert plain is not None and not plain.output_layer
