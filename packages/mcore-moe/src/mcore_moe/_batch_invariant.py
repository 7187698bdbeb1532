# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which mixtures give a token bits that depend on its own sequence only."""

import torch

from mcore_moe._config import MoEConfig
from mcore_parallel import ParallelPlan

_MOST_EXPERTS = 1024
"""On a GPU: torch's softmax over more of them follows how rows are aligned."""


def check_batch_invariant(config: MoEConfig, plan: ParallelPlan, *, device: torch.device | str) -> None:
    """Whether a token's experts, weights and results can be computed as if it were alone (``TorchBackend(batch_invariant=True)``).

    Args:
        config: the mixture.
        plan: tp, ep and etp are read.
        device: of the parameters.

    Raises:
        ValueError: names the field, its value and what to change.
    """
    gpu, types = torch.device(device).type == "cuda", config.moe_router_load_balancing_type
    refused = {
        "tp": (plan.tp, plan.tp > 1, "its ranks share out tokens or picks; set tp=1"),
        "etp": (plan.expert_tp, plan.expert_tp > 1, "its ranks add up parts of a result; set etp=1"),
        # All-to-alls bring each pick back by itself, and its token adds them up as on one rank.
        "moe_token_dispatcher_type": (
            config.moe_token_dispatcher_type,
            plan.ep > 1 and config.moe_token_dispatcher_type != "alltoall",
            f"ranks add up what their experts give; with ep={plan.ep} set 'alltoall', or set ep=1",
        ),
        "moe_expert_capacity_factor": (
            config.moe_expert_capacity_factor,
            config.moe_expert_capacity_factor is not None,
            "an expert drops the picks of some tokens for those of others; leave it out",
        ),
        "moe_router_load_balancing_type": (types, types == "sinkhorn", "it balances the tokens of a batch; name a loss, or none"),
        "moe_input_jitter_eps": (config.moe_input_jitter_eps, bool(config.moe_input_jitter_eps), "it is noise; leave it out"),
        "moe_router_force_load_balancing": (True, config.moe_router_force_load_balancing, "it routes at random; leave it out"),
        "moe_dispatch_fwd_dtype": (
            config.moe_dispatch_fwd_dtype,
            config.moe_dispatch_fwd_dtype is not None,
            "rounded tokens have no such path; leave it out",
        ),
        "moe_router_dtype": (config.moe_router_dtype, gpu and config.moe_router_dtype == "fp64", f"{device} has no kernel; set 'fp32'"),
        "num_moe_experts": (config.num_moe_experts, gpu and config.num_moe_experts > _MOST_EXPERTS, f"use at most {_MOST_EXPERTS}"),
    }
    for field, (value, wrong, why) in refused.items():
        if wrong:
            raise ValueError(f"batch_invariant=True of the backend has no path for a mixture with {field}={value!r}: {why}")
