# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layouts for a model and a number of GPUs, with the memory of a rank."""

from mcore_parallel.planner._cost import Cluster, StepCost, step_cost
from mcore_parallel.planner._errors import PlannerError
from mcore_parallel.planner._estimate import RankMemory, estimate
from mcore_parallel.planner._model import ExpertSizes, ModelSizes
from mcore_parallel.planner._presets import find_model
from mcore_parallel.planner._scale import ScalePoint, scale
from mcore_parallel.planner._search import Limits, Proposal, propose
from mcore_parallel.planner._workload import Layout, Workload

__all__ = [
    "Cluster",
    "ExpertSizes",
    "Layout",
    "Limits",
    "ModelSizes",
    "PlannerError",
    "Proposal",
    "RankMemory",
    "ScalePoint",
    "StepCost",
    "Workload",
    "estimate",
    "find_model",
    "propose",
    "scale",
    "step_cost",
]
