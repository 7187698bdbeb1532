# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How fast a run learns, and how fast it could compute."""

from collections.abc import Mapping
from typing import Any

import torch

from mcore_parallel.optim import (
    ConstantSchedule,
    CosineSchedule,
    InverseSquareRootSchedule,
    LinearSchedule,
    RateAndDecaySchedule,
    WeightDecaySchedule,
    WSDSchedule,
)
from mcore_parallel.planner import ExpertSizes, ModelSizes
from mcore_parallel.training import Schedule, Throughput
from mcore_tools.recipes import RunConfig

PEAK_FLOPS: Mapping[str, float] = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense operations a second in 16 bits, by a part of the device's name, as its vendor gives them for the SXM form."""


def schedule(config: RunConfig) -> Schedule:
    """Learning rates, and weight decays where they change, of the run's steps."""
    train, start = config.train, config.optimizer.weight_decay
    rates = _learning_rates(config)
    if train.end_weight_decay is None:
        return rates
    decay = WeightDecaySchedule(start=start, end=train.end_weight_decay, steps=train.steps, style=train.weight_decay_style)
    return RateAndDecaySchedule(rate=rates, decay=decay)


def _learning_rates(config: RunConfig) -> ConstantSchedule | CosineSchedule | InverseSquareRootSchedule | LinearSchedule | WSDSchedule:
    train = config.train
    warm_up: Any = {"max_lr": config.optimizer.lr, "warmup_steps": train.warmup_steps, "init_lr": train.warmup_init_lr}
    if train.lr_schedule == "constant":
        return ConstantSchedule(**warm_up)
    warm_up |= {"min_lr": config.optimizer.min_lr, "decay_steps": train.lr_decay_steps or train.steps}
    if train.lr_schedule == "wsd":
        return WSDSchedule(**warm_up, wsd_decay_steps=train.wsd_decay_steps, decay_style=train.wsd_decay_style)
    kinds = {"linear": LinearSchedule, "cosine": CosineSchedule, "inverse_square_root": InverseSquareRootSchedule}
    return kinds[train.lr_schedule](**warm_up)


def throughput(config: RunConfig, device: torch.device | str) -> Throughput:
    """Operations a token of the run, and those that a device can do in its dtype."""
    flops = _flops_per_token(config, config.train.seq_len)
    if config.lora is not None:
        # Frozen matrices have no gradient of their own; one token alone has next to nothing but matrices.
        flops -= _flops_per_token(config, 1) / 3
    peak = config.log.peak_tflops * 1e12
    if not peak and torch.device(device).type == "cuda" and config.train.dtype in ("bfloat16", "float16"):
        name = torch.cuda.get_device_name(device)
        peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), 0.0)
    return Throughput(flops_per_token=flops, peak_flops=peak or None)


def _flops_per_token(config: RunConfig, seq_len: int) -> float:
    """Of forward and backward, all weights trained."""
    model = config.model
    flops = ModelSizes(config=model).flops_per_token(seq_len)
    if (moe := config.moe) is not None:
        experts = ExpertSizes(
            num_experts=moe.num_moe_experts,
            topk=moe.moe_router_topk,
            ffn_hidden_size=moe.moe_ffn_hidden_size or model.ffn_size,
            shared_ffn_hidden_size=moe.moe_shared_expert_intermediate_size or 0,
            latent_size=moe.moe_latent_size or 0,
        )
        layers = range(model.num_layers)
        share = 1.0 if model.hybrid_layer_pattern else sum(moe.is_moe_layer(layer, model.num_layers) for layer in layers) / len(layers)
        flops += share * (ModelSizes(config=model, experts=experts).flops_per_token(seq_len) - flops)
    return flops
