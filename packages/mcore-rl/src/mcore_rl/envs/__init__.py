# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Small environments without dependencies."""

from mcore_rl.envs._calculator import Calculator
from mcore_rl.envs._character_share import CharacterShare
from mcore_rl.envs._code import Code, CodeConfig
from mcore_rl.envs._countdown import Countdown, CountdownConfig
from mcore_rl.envs._maths import Maths, MathsConfig
from mcore_rl.envs._sums import Arithmetic, ArithmeticConfig

__all__ = [
    "Arithmetic",
    "ArithmeticConfig",
    "Calculator",
    "CharacterShare",
    "Code",
    "CodeConfig",
    "Countdown",
    "CountdownConfig",
    "Maths",
    "MathsConfig",
]
