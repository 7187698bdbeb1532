# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""AdamW over main gradients, with float32 masters and clipping by the global norm."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel._shards import NamedShard, ShardSpec, named_shards
from mcore_parallel.optim._config import OptimizerConfig
from mcore_parallel.optim._norm import by_dtype, global_grad_norm

_scale_, _copy_ = torch._foreach_mul_, torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class GradientSource(Protocol):
    """What hands complete gradients to an optimizer (``DistributedDataParallel`` does)."""

    module: nn.Module

    def gradients(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class StepResult:
    """What a step did."""

    grad_norm: Tensor
    """Scalar: norm of the scaled gradients before clipping, the same on every rank."""
    skipped: bool
    """Nothing was updated, because the norm is not finite or above the threshold."""


@dataclass(frozen=True)
class StateShard:
    """One tensor of the optimizer's state, placed like its parameter."""

    name: str
    tensor: Tensor
    spec: ShardSpec


class MegatronOptimizer:
    """Updates the trained parameters of a model from the main gradients of its gradient source.

    Parameters of 16 bits have a float32 master that is updated and rounded back; float32 and float64 parameters are
    updated in place. One host synchronisation a step: whether the norm is finite.

    Args:
        config: the update rule.
        ddp: where gradients come from; its ``module`` holds the parameters.
        groups: the process groups of the model.
    """

    def __init__(self, config: OptimizerConfig, ddp: GradientSource, groups: ProcessGroups) -> None:
        self.config, self.groups = config, groups
        self._source = ddp
        self._shards = [shard for shard in named_shards(ddp.module) if shard.parameter.requires_grad]
        self._masters = {shard.name: _master(shard.parameter) for shard in self._shards}
        decayed = [shard for shard in self._shards if len(shard.spec.shape) > 1]
        plain = [shard for shard in self._shards if len(shard.spec.shape) <= 1]
        self._inner = _adam(config, [(decayed, config.weight_decay), (plain, 0.0)], self._masters)
        self._step_count = 0
        for shard in self._shards:
            master = self._masters[shard.name]
            # The fused kernel reads the count on the device, the others on the host.
            count = torch.zeros((), dtype=torch.float32, device=master.device if self._inner.defaults["fused"] else "cpu")
            self._inner.state[master] = {"step": count, "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}

    @property
    def step_count(self) -> int:
        """Updates made so far (skipped steps do not count)."""
        return self._step_count

    def load_step_count(self, count: int) -> None:
        """Continue after ``count`` updates; the tensors of ``state_shards`` are filled in place by whoever loads them."""
        self._step_count = count
        for state in self._inner.state.values():
            state["step"].fill_(count)

    def state_shards(self) -> dict[str, StateShard]:
        """The state as named tensors: ``optimizer.exp_avg.<parameter>``, ``optimizer.exp_avg_sq.<parameter>`` and, of a 16-bit
        parameter, ``optimizer.master.<parameter>``. They are the live tensors: fill them in place to load."""
        shards: list[StateShard] = []
        for shard in self._shards:
            master = self._masters[shard.name]
            for kind in ("exp_avg", "exp_avg_sq"):
                shards.append(StateShard(f"optimizer.{kind}.{shard.name}", self._inner.state[master][kind], shard.spec))
            if _has_master(shard.parameter):
                shards.append(StateShard(f"optimizer.master.{shard.name}", master, shard.spec))
        return {shard.name: shard for shard in shards}

    def reload_model_params(self) -> None:
        """Take the masters from the model's parameters; call after weights were loaded into the model without optimizer state."""
        self._copy(to_model=False)

    @torch.no_grad()
    def step(self, *, grad_scale: float | Tensor = 1.0, lr: float | None = None) -> StepResult:
        """Scale, clip and apply the gradients; the main gradients hold the scaled and clipped values afterwards.

        Args:
            grad_scale: factor of the gradients, one over the global number of tokens for a mean.
            lr: learning rate of this step; None for ``config.lr``.
        """
        gradients = self._source.gradients()
        norm = global_grad_norm(gradients, self._shards, self.groups) * grad_scale
        norm_value = float(norm)
        if not math.isfinite(norm_value) or norm_value > self.config.grad_norm_skip_threshold:
            return StepResult(norm, True)
        factor: float | Tensor = grad_scale
        if self.config.clip_grad and (shrink := self.config.clip_grad / (norm_value + 1e-6)) < 1.0:
            factor = grad_scale * shrink
        for grads in by_dtype(list(gradients.values())):
            _scale_(grads, factor.to(grads[0]) if isinstance(factor, Tensor) else factor)
        for shard in self._shards:
            master = self._masters[shard.name]
            master.grad = gradients[shard.name].to(master.dtype)
        for group in self._inner.param_groups:
            group["lr"] = self.config.lr if lr is None else lr
        self._inner.step()
        self._inner.zero_grad()
        self._step_count += 1
        self._copy(to_model=True)
        return StepResult(norm, False)

    @torch.no_grad()
    def _copy(self, *, to_model: bool) -> None:
        pairs = [(shard.parameter, self._masters[shard.name]) for shard in self._shards if _has_master(shard.parameter)]
        if pairs:
            parameters, masters = (list(side) for side in zip(*pairs, strict=True))
            _copy_(parameters, masters) if to_model else _copy_(masters, parameters)


def _adam(config: OptimizerConfig, decays: list[tuple[list[NamedShard], float]], masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    groups: list[dict[str, Any]] = [
        {"params": [masters[shard.name] for shard in shards], "weight_decay": decay} for shards, decay in decays if shards
    ]
    fused = bool(masters) and all(master.is_cuda for master in masters.values())
    return kind(
        groups or [{"params": []}], lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=fused or None
    )


def _master(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().float().clone() if _has_master(parameter) else parameter.detach()


def _has_master(parameter: nn.Parameter) -> bool:
    return parameter.dtype not in (torch.float32, torch.float64)
