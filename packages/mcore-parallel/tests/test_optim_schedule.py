# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Learning-rate tables."""

import copy
import json
import math

import pytest

from mcore_parallel.optim import (
    ConstantSchedule,
    CosineSchedule,
    InverseSquareRootSchedule,
    LinearSchedule,
    RateAndDecaySchedule,
    WeightDecaySchedule,
    WSDSchedule,
)


def test_tables() -> None:
    constant = ConstantSchedule(max_lr=2.0, warmup_steps=4, init_lr=1.0)
    assert [constant.lr(step) for step in (0, 1, 2, 4, 100)] == [1.0, 1.25, 1.5, 2.0, 2.0]
    linear = LinearSchedule(max_lr=2.0, min_lr=1.0, warmup_steps=2, decay_steps=10)
    assert [linear.lr(step) for step in (0, 1, 2, 4, 10, 11)] == [0.0, 1.0, 2.0, 1.75, 1.0, 1.0]
    cosine = CosineSchedule(max_lr=3.0, min_lr=1.0, warmup_steps=2, decay_steps=10)
    assert [cosine.lr(step) for step in (0, 2, 4, 6, 10, 99)] == pytest.approx([0.0, 3.0, 2.0 + math.sqrt(0.5), 2.0, 1.0, 1.0])
    root = InverseSquareRootSchedule(max_lr=2.0, min_lr=0.5, warmup_steps=4, decay_steps=50, init_lr=1.0)
    assert [root.lr(step) for step in (0, 2, 4, 16, 36, 50, 51)] == pytest.approx([1.0, 1.5, 2.0, 1.0, 2 / 3, 2 * math.sqrt(4 / 50), 0.5])
    assert InverseSquareRootSchedule(max_lr=2.0, min_lr=0.5).lr(10**6) == 0.5
    assert [InverseSquareRootSchedule(max_lr=2.0).lr(step) for step in (0, 1, 4)] == [2.0, 2.0, 1.0]
    expected = {"linear": 0.5, "cosine": 0.5, "exponential": 2 * math.sqrt(0.5) - 1, "minus_sqrt": 1 - math.sqrt(0.5)}
    for style, middle in expected.items():
        wsd = WSDSchedule(max_lr=1.0, warmup_steps=2, decay_steps=20, wsd_decay_steps=8, decay_style=style)
        assert [wsd.lr(step) for step in (1, 2, 12, 16, 20, 30)] == pytest.approx([0.5, 1.0, 1.0, middle, 0.0, 0.0])


def test_tables_of_the_weight_decay() -> None:
    expected = {"linear": [0.1, 0.2, 0.3, 0.5, 0.5], "cosine": [0.1, 0.1 + 0.2 * (1 - math.sqrt(0.5)), 0.3, 0.5, 0.5]}
    for style, values in expected.items():
        schedule = WeightDecaySchedule(start=0.1, end=0.5, steps=8, style=style)  # type: ignore[arg-type]
        assert [schedule.weight_decay(step) for step in (0, 2, 4, 8, 100)] == pytest.approx(values)
    assert WeightDecaySchedule(start=0.1, end=0.1, style="constant").weight_decay(7) == 0.1
    both = RateAndDecaySchedule(rate=LinearSchedule(max_lr=1.0, decay_steps=10), decay=WeightDecaySchedule(start=0.0, end=1.0, steps=10))
    rate = both.lr(4)
    assert (rate, rate.weight_decay, rate.between(2.0, 1.0)) == pytest.approx((0.6, 0.4, 1.6))
    again = copy.deepcopy(rate)
    assert (again, again.weight_decay, again.between(2.0, 1.0), json.dumps(again)) == (rate, 0.4, rate.between(2.0, 1.0), "0.6")
    with pytest.raises(ValueError, match=r"style='constant' needs start=0\.1 and end=0\.2 to be equal"):
        WeightDecaySchedule(start=0.1, end=0.2, style="constant")
    with pytest.raises(ValueError, match="style='exponential' must be constant, linear or cosine"):
        WeightDecaySchedule(start=0.1, end=0.2, style="exponential")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"start=-1\.0"):
        WeightDecaySchedule(start=-1.0, end=0.2)
    with pytest.raises(ValueError, match="steps=0"):
        WeightDecaySchedule(start=0.1, end=0.2, steps=0)


def test_schedules_between_other_limits_keep_their_shape() -> None:
    for schedule in (
        LinearSchedule(max_lr=1.0, min_lr=0.1, warmup_steps=5, decay_steps=50),
        CosineSchedule(max_lr=1.0, min_lr=0.1, warmup_steps=5, decay_steps=50),
        WSDSchedule(max_lr=1.0, min_lr=0.1, warmup_steps=5, decay_steps=50, wsd_decay_steps=10),
    ):
        for step in range(60):
            rate = schedule.lr(step)
            assert rate.between(None, None) == rate
            if step >= 5:
                assert (rate.between(5.0, 2.0) - 2.0) / 3.0 == pytest.approx((rate - 0.1) / 0.9, abs=1e-12)
            else:
                assert rate.between(5.0, 2.0) == pytest.approx(5 * rate)
        with pytest.raises(ValueError, match=r"min_lr=2\.0 must lie between 0 and max_lr=1\.0"):
            schedule.lr(7).between(None, 2.0)
    assert ConstantSchedule(max_lr=1.0, warmup_steps=4).lr(2).between(3.0, 1.0) == 1.5


def test_schedules_stay_in_range_and_never_rise_after_the_warm_up() -> None:
    for schedule in (
        ConstantSchedule(max_lr=1.0, warmup_steps=5),
        InverseSquareRootSchedule(max_lr=1.0, min_lr=0.1, warmup_steps=5, decay_steps=50),
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
