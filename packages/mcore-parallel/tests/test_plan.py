# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Degrees of parallelism that fit together, and those that do not."""

import pytest

from mcore_parallel import ParallelPlan


def test_derived_degrees() -> None:
    plan = ParallelPlan(tp=4, cp=2, dp=8, pp=3, ep=8, etp=2)
    assert plan.world_size == 4 * 2 * 8 * 3
    assert plan.edp == 4 * 2 * 8 // (8 * 2)
    assert list(plan.dense_shape().items()) == [("tp", 4), ("cp", 2), ("ep", 1), ("dp", 8), ("pp", 3)]
    assert list(plan.expert_shape().items()) == [("tp", 2), ("cp", 1), ("ep", 8), ("dp", 4), ("pp", 3)]
    assert ParallelPlan(tp=4).expert_tp == 1


def test_dp_takes_what_is_left() -> None:
    plan = ParallelPlan.for_world(48, tp=2, cp=3, pp=4, ep=6)
    assert plan.dp == 2 and plan.world_size == 48
    with pytest.raises(ValueError, match=r"tp\*cp\*pp=2\*3\*4=24 must divide world_size=50"):
        ParallelPlan.for_world(50, tp=2, cp=3, pp=4)


def test_bad_degrees_are_named() -> None:
    for name in ("tp", "pp", "vpp", "cp", "ep", "dp", "optimizer_instances"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            ParallelPlan(**{name: 0})
    with pytest.raises(ValueError, match="etp=0"):
        ParallelPlan(etp=0)
    with pytest.raises(ValueError, match=r"etp\*ep=1\*4 must divide tp\*cp\*dp=1\*1\*6=6"):
        ParallelPlan(dp=6, ep=4)
    with pytest.raises(ValueError, match="leaves out dp=2; add dp to order"):
        ParallelPlan(dp=2, order="tp-pp")
    for order in ("tp-tp", "tp-xx"):
        with pytest.raises(ValueError, match=f"order='{order}'"):
            ParallelPlan(order=order)
    with pytest.raises(ValueError, match="does not end in pp, which needs dp=2 equal to edp=1"):
        ParallelPlan(dp=2, ep=2, pp=2, order="tp-cp-pp-ep-dp")
    assert ParallelPlan(dp=2, pp=2, order="pp-dp").world_size == 4
    for sizes in ((2, 4), (-2, -2), (4, 0)):
        with pytest.raises(ValueError, match=r"hierarchical_cp=\(.*\) must hold sizes that multiply to cp=4"):
            ParallelPlan(cp=4, hierarchical_cp=sizes)
    with pytest.raises(ValueError, match=r"optimizer_instances=2 must divide dp\*cp=3"):
        ParallelPlan(dp=3, optimizer_instances=2)
    with pytest.raises(ValueError, match=r"optimizer_instances=2 must divide edp=1"):
        ParallelPlan(dp=2, ep=2, optimizer_instances=2)
