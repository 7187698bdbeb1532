# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Learning-rate tables."""

import math

import pytest

from mcore_parallel.optim import ConstantSchedule, CosineSchedule, LinearSchedule, WSDSchedule


def test_tables() -> None:
    constant = ConstantSchedule(max_lr=2.0, warmup_steps=4, init_lr=1.0)
    assert [constant.lr(step) for step in (0, 1, 2, 4, 100)] == [1.0, 1.25, 1.5, 2.0, 2.0]
    linear = LinearSchedule(max_lr=2.0, min_lr=1.0, warmup_steps=2, decay_steps=10)
    assert [linear.lr(step) for step in (0, 1, 2, 4, 10, 11)] == [0.0, 1.0, 2.0, 1.75, 1.0, 1.0]
    cosine = CosineSchedule(max_lr=3.0, min_lr=1.0, warmup_steps=2, decay_steps=10)
    assert [cosine.lr(step) for step in (0, 2, 4, 6, 10, 99)] == pytest.approx([0.0, 3.0, 2.0 + math.sqrt(0.5), 2.0, 1.0, 1.0])
    expected = {"linear": 0.5, "cosine": 0.5, "exponential": 2 * math.sqrt(0.5) - 1, "minus_sqrt": 1 - math.sqrt(0.5)}
    for style, middle in expected.items():
        wsd = WSDSchedule(max_lr=1.0, warmup_steps=2, decay_steps=20, wsd_decay_steps=8, decay_style=style)
        assert [wsd.lr(step) for step in (1, 2, 12, 16, 20, 30)] == pytest.approx([0.5, 1.0, 1.0, middle, 0.0, 0.0])


def test_schedules_stay_in_range_and_never_rise_after_the_warm_up() -> None:
    for schedule in (
        ConstantSchedule(max_lr=1.0, warmup_steps=5),
        LinearSchedule(max_lr=1.0, min_lr=0.1, warmup_steps=5, decay_steps=50),
        CosineSchedule(max_lr=1.0, min_lr=0.1, warmup_steps=5, decay_steps=50),
        *(
            WSDSchedule(max_lr=1.0, min_lr=0.1, warmup_steps=5, decay_steps=50, wsd_decay_steps=45, decay_style=style)
            for style in ("linear", "cosine", "exponential", "minus_sqrt")
        ),
    ):
        rates = [schedule.lr(step) for step in range(60)]
        assert rates[:6] == sorted(rates[:6]) and rates[5] == 1.0
        assert rates[5:] == sorted(rates[5:], reverse=True)


def test_impossible_schedules_are_named() -> None:
    with pytest.raises(ValueError, match=r"min_lr=2\.0 must lie between 0 and max_lr=1\.0"):
        CosineSchedule(max_lr=1.0, min_lr=2.0, decay_steps=5)
    with pytest.raises(ValueError, match="decay_steps=5 must exceed warmup_steps=5"):
        LinearSchedule(max_lr=1.0, decay_steps=5, warmup_steps=5)
    with pytest.raises(ValueError, match="wsd_decay_steps=9 must lie between 1 and decay_steps - warmup_steps = 8"):
        WSDSchedule(max_lr=1.0, decay_steps=10, warmup_steps=2, wsd_decay_steps=9)
    with pytest.raises(ValueError, match="decay_style='step'"):
        WSDSchedule(max_lr=1.0, decay_steps=10, wsd_decay_steps=2, decay_style="step")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        ConstantSchedule(max_lr=1.0, warmup_steps=-1)
