# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Dumps of two runs, and where they first differ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.numerics import DumpError, TensorRecorder, compare_dumps
from mcore_parallel.numerics._cli import main
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step

CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=32, vocab_size=32)


def batch(number: int) -> Batch:
    tokens = torch.randint(CONFIG.vocab_size, (2, 9), generator=torch.Generator().manual_seed(number))
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(2, 8))


def record(
    folder: str,
    *,
    plan: ParallelPlan | None = None,
    sequence_parallel: bool = False,
    spoil: Callable[[GPTModel], Any] = lambda model: None,
    statistics_only: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    """One step of a model, written down."""
    groups = ProcessGroups.single() if plan is None else ProcessGroups.build(plan)
    assert groups.sequence_parallel == sequence_parallel
    model = GPTModel(CONFIG, groups, dtype=dtype, seed=5, **options)
    spoil(model)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01), sync, groups)
    with TensorRecorder(model, folder, groups=groups, statistics_only=statistics_only) as recorder:
        train_step(model, [batch(0), batch(1)], CrossEntropyObjective(), sync, optimizer, lr=0.01)
        recorder.add("gradient", sync.gradients())
        recorder.add("parameter", dict(model.named_parameters()))


def double(name: str) -> Callable[[GPTModel], Any]:
    """A model one of whose modules gives twice what it should."""

    def spoil(model: GPTModel) -> None:
        model.get_submodule(name).register_forward_hook(lambda module, inputs, output: (2.0 * output[0], output[1]))

    return spoil


def test_equal_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    record(f"{tmp_path}/a")
    record(f"{tmp_path}/b", recompute=RecomputeConfig(granularity="full"))
    report = compare_dumps(tmp_path / "a", tmp_path / "b", exact=True)
    assert report.ok and report.first is None
    names = [(one.phase, one.call, one.name) for one in report.differences]
    assert names[0] == ("forward", 0, "embedding")
    assert ("forward", 1, "layers.1.mlp") in names and ("backward", 0, "layers.0") in names
    assert ("gradient", 0, "layers.0.attention.qkv.weight") in names and ("parameter", 0, "output.weight") in names
    assert names.index(("backward", 0, "layers.1")) < names.index(("backward", 0, "layers.0")) < names.index(names[-1])


@pytest.mark.parametrize("statistics_only", [pytest.param(False, marks=pytest.mark.journey), True])
def test_the_first_wrong_layer_is_named(tmp_path: Path, statistics_only: bool, capsys: pytest.CaptureFixture[str]) -> None:
    record(f"{tmp_path}/good")
    record(f"{tmp_path}/bad", spoil=double("layers.1.mlp"), statistics_only=statistics_only)
    report = compare_dumps(tmp_path / "bad", tmp_path / "good")
    first = report.first
    assert first is not None
    assert (first.phase, first.call, first.name, first.layer) == ("forward", 0, "layers.1.mlp", 2)
    assert ("differs" if statistics_only else "2 times the reference") in first.hint
    assert main([f"{tmp_path}/bad", f"{tmp_path}/good"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("first difference: layers.1.mlp (layer 2), forward of call 0: 1")
    assert "layers.1.ffn_norm" in told and "layers.0.mlp" not in told
    assert main([f"{tmp_path}/bad", f"{tmp_path}/good", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["name"] == "layers.1.mlp"


@pytest.mark.journey
def test_rounding_is_no_difference_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(f"{tmp_path}/fine")
    record(f"{tmp_path}/coarse", dtype=torch.float32)
    arguments = [f"{tmp_path}/coarse", f"{tmp_path}/fine"]
    assert main([*arguments, "--factor", "50"]) == 0
    assert "are the same within their bounds" in capsys.readouterr().out
    assert main([*arguments, "--exact", "--all"]) == 1
    assert main([*arguments, "--dtype", "float64"]) == 1


def check_layout(folder: str, plan: ParallelPlan, sequence_parallel: bool) -> None:
    record(folder, plan=plan, sequence_parallel=sequence_parallel)


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["tp", "sp", "pp"])
def test_layouts_have_the_same_dump(world: Callable[..., list[Any]], tmp_path: Path, layout: str) -> None:
    record(f"{tmp_path}/one")
    plan = ParallelPlan(pp=2) if layout == "pp" else ParallelPlan(tp=2, sequence_parallel=layout == "sp")
    world(check_layout, folder=f"{tmp_path}/two", plan=plan, sequence_parallel=layout == "sp")
    report = compare_dumps(tmp_path / "two", tmp_path / "one", factor=100.0)
    assert report.ok, report.table()
    assert len(list((tmp_path / "two").iterdir())) == (2 if layout == "pp" else 1)
    assert max(one.rel for one in report.differences) < 1e-11


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(f"{tmp_path}/a")
    (tmp_path / "none").mkdir()
    assert main([f"{tmp_path}/none", f"{tmp_path}/a"]) == 2
    assert "holds no .safetensors file" in capsys.readouterr().err
    save_file({"x": torch.ones(1)}, str(tmp_path / "none" / "x.safetensors"))
    with pytest.raises(DumpError, match="no dump of TensorRecorder"):
        compare_dumps(tmp_path / "none", tmp_path / "a")
    (tmp_path / "none" / "x.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{broken}")
    with pytest.raises(DumpError, match="cannot be read"):
        compare_dumps(tmp_path / "none", tmp_path / "a")
    (tmp_path / "none" / "x.safetensors").write_bytes((tmp_path / "a" / "stage0.safetensors").read_bytes()[:100])
    with pytest.raises(DumpError, match="cannot be read"):
        compare_dumps(tmp_path / "none", tmp_path / "a")


def test_a_run_that_fails_writes_nothing_and_leaves_no_hooks(tmp_path: Path) -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), seed=1)
    with pytest.raises(ZeroDivisionError), TensorRecorder(model, tmp_path / "a"):
        _ = 1 / 0
    assert not (tmp_path / "a").exists()
    assert not any(module._forward_hooks for module in model.modules())
    with TensorRecorder(model, tmp_path / "a") as recorder, pytest.raises(ValueError, match="no parameters of GPTModel"):
        recorder.add("gradient", {"nonsense": torch.ones(1)})
