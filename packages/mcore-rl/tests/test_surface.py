# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What users of the wheel import."""

import subprocess
import sys

import mcore_rl
import mcore_rl.agent
import mcore_rl.envs
import mcore_rl.inference


def test_public_names_are_sorted_and_exist() -> None:
    for module in (mcore_rl, mcore_rl.agent, mcore_rl.envs, mcore_rl.inference):
        assert list(module.__all__) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_the_import_loads_no_engine() -> None:
    check = "import sys, mcore_rl; sys.exit('mcore_inference' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
