# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Moving tokens to the ranks that hold their experts, and back."""

from mcore_moe.dispatch._allgather import GatheredPicks, MoEAllGatherTokenDispatcher
from mcore_moe.dispatch._alltoall import Dispatched, MoEAlltoAllTokenDispatcher
from mcore_moe.dispatch._choice import choose_exchange
from mcore_moe.dispatch._flex import FlexPicks, MoEFlexTokenDispatcher, TokenExchange
from mcore_moe.dispatch._local import LocalPicks, LocalTokenDispatcher, PlacedPicks
from mcore_moe.dispatch._replicated import ReplicatedTokenDispatcher
from mcore_moe.dispatch._symmetric import SymmetricExchange

__all__ = [
    "Dispatched",
    "FlexPicks",
    "GatheredPicks",
    "LocalPicks",
    "LocalTokenDispatcher",
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoEFlexTokenDispatcher",
    "PlacedPicks",
    "ReplicatedTokenDispatcher",
    "SymmetricExchange",
    "TokenExchange",
    "choose_exchange",
]
