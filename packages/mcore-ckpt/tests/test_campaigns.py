# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The campaigns in short: each in a process of its own, which forks, is killed, or has a limit on its memory."""

import importlib
import json

import pytest

from tests.support.commands import run_command

CAMPAIGNS = {
    "kill": (["checkpoint_kill", "--kills", "20"], ["checkpoint_kill", "--kills", "1000"]),
    "damage": (
        ["checkpoint_damage", "--flips", "200", "--swaps", "120", "--lies", "2000"],
        ["checkpoint_damage", "--flips", "10000", "--swaps", "1000", "--lies", "100000"],
    ),
    "layouts": (["checkpoint_layouts", "--pairs", "6"], ["checkpoint_layouts", "--pairs", "500"]),
}


def run(arguments, folder, timeout):
    module, *rest = arguments
    if module == "checkpoint_layouts":
        pytest.importorskip("mcore_parallel", reason="the layouts are those of mcore-parallel")
    main = importlib.import_module(f"tests.campaigns.{module}").main
    code, output, errors = run_command(main, rest, {"TMPDIR": str(folder)}, timeout_s=timeout)
    assert code == 0, output + errors
    return json.loads(output)


def check(figures):
    if "kills" in figures:
        assert figures["lost_or_damaged"] == 0 and figures["killed_with_a_step_half_done"] > 0
    elif "pairs" in figures:
        assert figures["unequal"] == figures["failed"] == figures["extra lost"] == 0 and figures["parts"] > 100 * figures["pairs"]
    else:
        assert figures["bad"] == 0 and figures["lies"]["refused"] > figures["lies"]["read"] > 0


@pytest.mark.journey
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_the_short_campaign_loses_nothing(name, tmp_path):
    check(run(CAMPAIGNS[name][0], tmp_path, 110))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_the_long_campaign_loses_nothing(name, tmp_path):
    check(run(CAMPAIGNS[name][1], tmp_path, 7000))
