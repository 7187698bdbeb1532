# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What ``mcore-doctor`` says, here and of machines that are described to it."""

import json

import pytest
import torch

from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.backends._doctor import Machine, diagnose, main

HERE = Machine.here()
BARE = Machine(capability=None, triton=None, transformer_engine=None)


def paths(machine: Machine) -> dict[str, str]:
    return {row.operation: row.path for row in diagnose(machine)}


def test_table_and_json_name_the_same_operations_and_succeed(capsys) -> None:
    assert main([]) == 0
    table = capsys.readouterr().out.splitlines()
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["torch"] == torch.__version__ and torch.__version__ in table[0]
    assert [row["operation"] for row in found["operations"]] == list(paths(HERE))
    for row, line in zip(found["operations"], table[1:], strict=True):
        assert line.startswith(row["operation"]) and row["path"] in line and line.endswith(row["reason"]) and row["reason"]


def test_unknown_arguments_are_refused(capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--gpus"])
    assert error.value.code == 2 and "--gpus" in capsys.readouterr().err


def test_kernels_need_a_device_and_triton() -> None:
    hopper = Machine(capability=(9, 0), triton="3.6", transformer_engine=None)
    no_triton = Machine(capability=(9, 0), triton=None, transformer_engine=None)
    for operation in ("norm", "rotary embedding", "gated activation", "fp8 casts"):
        assert [paths(machine)[operation] for machine in (BARE, no_triton, hopper)] == ["torch code", "torch code", "Triton kernel"]
    assert paths(BARE)["grouped linear"] == "one product an expert" and paths(hopper)["grouped linear"] == "grouped_mm"
    assert paths(BARE)["attention, causal"] == "sdpa"
    assert [paths(machine)["symmetric buffer"] for machine in (BARE, no_triton, hopper)] == ["refused", "copies", "Triton kernels"]


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [
        ((8, 0), {"tensorwise": "refused", "blockwise": "refused", "mxfp8": "refused"}),
        ((8, 9), {"tensorwise": "torch or te", "rowwise": "refused", "delayed": "te"}),
        (
            (9, 0),
            {"tensorwise": "torch or te", "rowwise": "torch", "delayed": "te", "blockwise": "te", "mxfp8": "refused", "nvfp4": "refused"},
        ),
        ((10, 0), {"mxfp8": "te", "nvfp4": "te"}),
    ],
)
def test_recipes_follow_the_units_of_a_gpu(capability, wanted) -> None:
    found = paths(Machine(capability=capability, triton="3.6", transformer_engine="2.20"))
    assert {recipe: found[f"fp8, {recipe}"] for recipe in wanted} == wanted
    without = paths(Machine(capability=capability, triton="3.6", transformer_engine=None))
    assert without["fp8, delayed"] == "refused" and without['backend "te"'] == "refused"


def test_refusals_are_those_of_the_backends() -> None:
    refused = {
        row.operation.removeprefix("fp8, "): row.reason for row in diagnose(HERE) if row.path == "refused" and "fp8" in row.operation
    }
    for recipe, reason in refused.items():
        with pytest.raises(ValueError, match=r"recipe=") as error:
            choose_backend("torch", fp8=Fp8Config(recipe=recipe))
        assert str(error.value) == reason or "backend" in reason
