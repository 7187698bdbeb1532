# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What benches make of what they measured."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import moe, picture
from tools.bench._record import record
from tools.bench.dense_step import DenseRun
from tools.bench.loss_curve import compared, finished, over_draws, rows_of
from tools.bench.many import busiest, experts_runs, hot_bias
from tools.bench.picture import Bar, colors, comparisons, draw
from tools.bench.train import _best, with_ratios
from tools.bench.tune import TuneRun, build, streams
from tools.bench.tune import with_ratios as with_peft_ratios


def run(speed: int, **more: Any) -> dict[str, Any]:
    return {"tokens_per_s_per_gpu": speed, "peak_gib": 3.0, **more}


def test_the_best_micro_batch_of_each_side_counts() -> None:
    runs = {
        ("mcore", 2): [run(10, startup_s=60.0), run(14, startup_s=20.0)],
        ("mcore", 4): [run(15, startup_s=21.0), run(17, startup_s=19.0)],
        ("plain", 2): [run(8), run(9)],
        ("plain", 4): [{"error": "out of memory"}, {"error": "out of memory"}],
        ("other", 2): [{"error": "not here"}],
    }
    rows = with_ratios([_best("dense", who, 1, runs) for who in ("mcore", "plain", "other")])
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


def test_runs_of_a_curve_are_compared_as_they_come_and_a_file_of_other_work_is_refused(tmp_path: Path) -> None:
    def run(draw: int, name: str, loss: float) -> dict[str, Any]:
        return {"run": name, "draw": draw, "validation_loss": loss, "losses": [loss]}

    runs = [run(0, "bfloat16", 2.0), run(0, "fp8", 2.02), run(1, "bfloat16", 2.1), run(1, "fp8", 2.1), run(0, "late", 2.1)]
    names = [[row["run"] for row in rows_of(runs[:count], window=1)] for count in range(1, 6)]
    assert names == [["bfloat16"], *[["bfloat16", "fp8"]] * 3, ["bfloat16", "fp8", "late"]]
    plain, other, late = rows_of(runs, window=1)
    assert [plain, other] == over_draws([runs[:2], runs[2:4]], window=1) and "losses" not in other
    # Of the draws that have it.
    assert late["difference_at_end"] == pytest.approx(0.05) and "draws" not in late
    path = tmp_path / "curve.json"
    facts = {"work": "curves", "steps": 3}
    assert finished(None, facts) == finished(path, facts) == []
    record(path, {**facts, "rows": rows_of(runs, 1), "runs": runs})
    assert finished(path, facts) == runs and [each.name for each in tmp_path.iterdir()] == ["curve.json"]
    with pytest.raises(SystemExit, match="is of steps=3, this call of 4; name another file, or remove it"):
        finished(path, {**facts, "steps": 4})


def test_the_picture_compares_runs_of_one_call_in_one_layout() -> None:
    ours = {"model": "a", "gpus": 4, "tp": 1, "pp": 1, "vpp": 1, "dp": 4, "mbs": 2, "flags": ["fp8=none"], "tokens_per_s_per_gpu": 30}
    peer = {"model": "a", "peer": "x", "tp": 1, "pp": 1, "world": 4, "mbs": 1, "tok_s_gpu": 20}
    other_layouts = [{**ours, "tp": 2, "dp": 2}, {**ours, "flags": ["fp8=tensorwise"]}, {**ours, "pp": 2, "dp": 2, "vpp": 2}]
    files = [
        {
            "machine": {"num_gpus": 4},
            "rows": [ours, {**ours, "mbs": 1, "tokens_per_s_per_gpu": 29}, *other_layouts],
            "peers": [peer, {**peer, "pp": 2, "tok_s_gpu": 9}, {**peer, "tp": 2, "error": "out of memory", "tok_s_gpu": None}][:2],
        },
        {
            "machine": {"num_gpus": 0},
            "rows": [
                *({"model": "b", "gpus": 0, "by": who, "tokens_per_s": n} for who, n in (("mcore", 5), ("y", 4))),
                {"model": "c", "gpus": 0, "by": "mcore", "tokens_per_s": 5, "left_out": "another call"},
                {"model": "c", "gpus": 0, "by": "y", "tokens_per_s": 3, "left_out": "another call"},
            ],
        },
    ]
    works = comparisons(files)
    assert {work: {side: (bar.tokens_per_s, bar.micro_batch) for side, bar in bars.items()} for work, bars in works.items()} == {
        "a, 4 GPUs, dp 4": {"mcore": (30, 2), "x": (20, 1)},
        "b, CPU": {"mcore": (5, None), "y": (4, None)},
    }
    with pytest.raises(ValueError, match="measured in two files"):
        comparisons([files[0], files[0]])


def test_a_picture_is_of_training_or_of_serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = {"model": "a", "n": 32, "isl": 128, "osl": 256}
    rows = [{**served, "by": who, "out_tok_s": speed} for who, speed in (("mcore", 20), ("x", 16))]
    rows.append({**served, "by": "mcore, batch-invariant", "out_tok_s": 15, "cost": 1.3})
    results, output = tmp_path / "serve.json", tmp_path / "serve.svg"
    results.write_text(json.dumps({"machine": {"gpu": "H", "num_gpus": 1}, "rows": rows}))
    monkeypatch.setattr(sys, "argv", ["picture", str(results), "--output", str(output)])
    picture.main()
    text = output.read_text(encoding="utf-8")
    assert "a, 32 x 128 / 256, 1 GPU" in text and "16 (mcore 1.25x)" in text and "batch-invariant" not in text
    assert "Serving, output tokens/s (H)" in text
    results.write_text(json.dumps({"machine": {"gpu": "H", "num_gpus": 1}, "rows": [*rows, {"model": "a", "tokens_per_s": 3}]}))
    with pytest.raises(SystemExit, match="some of serving"):
        picture.main()


def test_every_side_of_the_picture_has_a_colour_of_its_own(tmp_path: Path) -> None:
    palette = colors([f"peer{number}" for number in range(9)] + ["mcore"])
    assert len(set(palette.values())) == 10 and next(iter(palette)) == "mcore"
    with pytest.raises(ValueError, match="sides=11 must be at most 10"):
        colors([f"peer{number}" for number in range(10)])
    bars = {"mcore": Bar(tokens_per_s=30, micro_batch=2), "x": Bar(tokens_per_s=20, micro_batch=1)}
    draw({"a, 4 GPUs, dp 4": bars}, "H", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "20 (micro-batch 1, mcore 1.50x)" in text and "30 (micro-batch 2)" in text
    draw({"a, 4 GPUs, dp 4": bars}, "H", tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text(encoding="utf-8") == text


def test_runs_name_the_output_layer() -> None:
    fp8 = DenseRun.parse("tiny:fp8=tensorwise,head").fp8
    assert fp8 is not None and fp8.output_layer
    plain = DenseRun.parse("tiny:fp8=tensorwise").fp8
    assert plain is not None and not plain.output_layer


@pytest.mark.filterwarnings("ignore:moe_router_force_load_balancing")
def test_the_layer_of_experts_is_timed_beside_its_gemms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"tokens": 64, "hidden": 16, "ffn": 8, "experts": 4, "topk": 2}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    monkeypatch.setattr(sys, "argv", ["moe", "--output", str(tmp_path / "moe.json"), "--repeats", "1", *words])
    moe.main()
    results = json.loads((tmp_path / "moe.json").read_text())
    assert results["work"] == sizes and len(results["rows"]) == 12
    for row in results["rows"]:
        operations = 6 * 64 * 2 * 16 * 8 * (1 if row["part"] == "forward" else 3)
        assert row["tflops"] == pytest.approx(operations / row["ms"] / 1e9, abs=0.01)
        assert row["ratio"] == 1.0 or row["work"] != "dense GEMMs"


def test_adapters_are_compared_with_the_best_of_peft() -> None:
    rows = [
        {"work": "lora", "model": "a", "tokens_per_s": 30},
        {"work": "peft", "model": "a", "tokens_per_s": 12},
        {"work": "peft", "model": "a", "tokens_per_s": 15},
        {"work": "peft", "model": "a", "error": "out of memory"},
        {"work": "sft", "model": "a", "ratio": 0.98},
    ]
    assert [row.get("ratio") for row in with_peft_ratios(rows)] == [2.0, 0.8, 1.0, None, 0.98]


def test_a_tuning_run_names_the_dtype_of_its_frozen_weights() -> None:
    assert TuneRun.parse("tiny:mbs2,norm", "lora").lora.base_dtype is None
    run = TuneRun.parse("tiny:mbs2,norm,fp8", "lora")
    assert run.lora.base_dtype == "fp8" and run.recompute is not None
    _, trained = build(run, torch.device("cpu"), run.lora)
    assert trained == build(run, torch.device("cpu"), TuneRun.parse("tiny", "lora").lora)[1]


def test_text_and_conversations_of_a_tuning_bench_are_of_one_shape(tmp_path: Path) -> None:
    both = streams(TuneRun.parse("tiny:mbs2,gbs4", "sft"), tmp_path, torch.device("cpu"), 3)
    text, chat = (next(source) for source in both.values())
    assert len(text) == len(chat) == 2
    assert text[0].tokens.shape == chat[0].tokens.shape == (2, 32)
    assert text[0].cu_seqlens is None and chat[0].cu_seqlens is not None and len(chat[0].cu_seqlens) > 3
    assert 0 < chat[0].loss_mask.sum() < text[0].loss_mask.sum() == 64


@pytest.mark.parametrize(("text", "reason"), [("tiny:mbs3,gbs4", "must divide"), ("tiny:ckpt", "no choice"), ("huge", "unknown")])
def test_a_tuning_run_that_there_is_not_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        TuneRun.parse(text, "lora")


def test_a_skewed_router_loads_the_first_eighth_of_the_experts_four_times() -> None:
    bias = hot_bias(128, 8, 0.9)
    logits = torch.randn(8192, 128, generator=torch.Generator().manual_seed(1)) * 0.9 + bias
    counts = torch.bincount(logits.topk(8).indices.flatten(), minlength=128).float()
    assert int((bias > 0).sum()) == 16
    assert counts[:16].mean() / counts.mean() == pytest.approx(4, rel=0.05)
    # Half of the picks, and 48 of the other 112 experts' share of the other half: of two ranks.
    assert busiest(counts.tolist(), 2) == pytest.approx(1 + 3 / 7, rel=0.05) and busiest(counts.tolist(), 1) == 1


def test_layouts_of_experts_fill_the_machine() -> None:
    for gpus in (2, 3, 8):
        assert all(run.plan.world_size == gpus for run in experts_runs(gpus))
    assert [run.name for run in experts_runs(4, small=True)] == [
        "ep4", "ep4, skewed", "ep4, balanced", "ep2 edp2", "ep2 etp2", "ep2 pp2"
    ]  # fmt: skip
    direct = [run.name for run in experts_runs(4) if run.symmetric]
    assert direct == ["ep4, symmetric", "ep4, skewed, symmetric", "ep4, balanced, symmetric"] and len(experts_runs(4)) == 9
