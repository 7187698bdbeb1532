# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Mixtures without gradients, for engines: in few kernels, and with redundant experts."""

from mcore_moe._fp8_stack import Fp8Stack
from mcore_moe.serving._expert_slots import ExpertSlots
from mcore_moe.serving._placement import ExpertPlacement, place_experts, plan_moves
from mcore_moe.serving._streamed import StreamedExperts

__all__ = ["ExpertPlacement", "ExpertSlots", "Fp8Stack", "StreamedExperts", "place_experts", "plan_moves"]
