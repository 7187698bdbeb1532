# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Distillation as nvidia-modelopt's plugin for Megatron describes it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.training.distill._balance import LossBalancer, LossParts, RatioBalancer
from mcore_parallel.training.distill._hidden import HiddenPair
from mcore_parallel.training.distill._modelopt import import_modelopt
from mcore_parallel.training.distill._objective import DistillationConfig

_FIELDS = (
    "criterion", "intermediate_layer_pairs", "kd_loss_scale", "logit_kl_temperature", "logit_kl_topk", "logit_layers", "loss_balancer",
    "skip_lm_loss",
)  # fmt: skip
_OUTPUT = "output_layer"
_PARTS = {
    "final_layernorm": "final_norm",
    "input_layernorm": "input_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "self_attention": "attention",
    "linear_qkv": "qkv",
    "linear_proj": "out",
}


def modelopt_distillation(fields: Mapping[str, Any]) -> tuple[DistillationConfig, LossBalancer]:
    """The configuration and the balancer that say what the fields of the plugin's ``DistillationConfig`` say there.

    Losses, their weights and gradients are the plugin's; what computes them is this package, so they work in every layout. Modules may
    have the names of Megatron-core ("decoder.layers.3", "decoder.final_layernorm") or the ones here. Without a ``loss_balancer``
    nvidia-modelopt need not be installed.

    Args:
        fields: as its YAML file holds them: ``intermediate_layer_pairs`` (student, teacher, and "cosine" or "mse"), ``logit_layers``,
            ``skip_lm_loss``, ``kd_loss_scale``, ``logit_kl_temperature``, and ``loss_balancer``, an object of nvidia-modelopt (extra
            ``modelopt``).

    Raises:
        ModeloptMissingError: a ``loss_balancer`` without nvidia-modelopt.
        ValueError: an unknown field, logits of another layer than the output, a criterion of one's own, the largest logits alone.

    Example:
        >>> config, balancer = modelopt_distillation({"intermediate_layer_pairs": [["decoder.layers.1", "decoder.layers.3", "mse"]]})
        >>> config.pairs[0].student, config.pairs[0].loss, balancer.trains_language
        ('layers.1', 'mse', False)
    """
    if unknown := sorted(set(fields) - set(_FIELDS)):
        raise ValueError(f"{unknown[0]!r} is no field of the plugin's configuration; use {', '.join(_FIELDS)}")
    layers = tuple(fields.get("logit_layers", (_OUTPUT, _OUTPUT)))
    if layers != (_OUTPUT, _OUTPUT):
        raise ValueError(f"logit_layers={layers} must be {(_OUTPUT, _OUTPUT)}; name other layers in intermediate_layer_pairs")
    if fields.get("criterion") is not None:
        raise ValueError("criterion is a choice of code; leave it out, and name layers in intermediate_layer_pairs")
    if fields.get("logit_kl_topk") is not None:
        raise ValueError(f"logit_kl_topk={fields['logit_kl_topk']} keeps the largest logits only; leave it out, or use a LogProbStore")
    pairs = tuple(_pair(tuple(entry)) for entry in fields.get("intermediate_layer_pairs", ()))
    config = DistillationConfig(temperature=float(fields.get("logit_kl_temperature", 1.0)), pairs=pairs)
    if (balancer := fields.get("loss_balancer")) is not None:
        return config, ModeloptBalancer(balancer)
    # Here the scale is that of each of two kinds of losses, there of their sum.
    scale = float(fields.get("kd_loss_scale", 1.0)) * (2 if pairs else 1)
    return config, RatioBalancer(skip_lm_loss=bool(fields.get("skip_lm_loss", True)), kd_loss_scale=scale)


@dataclass(frozen=True)
class ModeloptBalancer:
    """Weighs losses as a ``DistillationLossBalancer`` of nvidia-modelopt does; conforms to ``LossBalancer``. Needs the extra ``modelopt``.

    It is given the cross entropy, the divergence and, with pairs, the mean of the intermediate losses, as one loss each. A weight is the
    derivative of its total by that loss.

    Args:
        balancer: for instance ``modelopt.torch.distill.StaticLossBalancer(0.7)``.
        trains_language: whether the cross entropy may have a weight.

    Raises:
        ModeloptMissingError: it is not installed.
        ValueError: an object of another kind.
    """

    balancer: nn.Module
    trains_language: bool = True

    def __post_init__(self) -> None:
        kind = import_modelopt("modelopt.torch.distill").DistillationLossBalancer
        if not isinstance(self.balancer, kind):
            raise ValueError(
                f"balancer is a {type(self.balancer).__name__}; give a DistillationLossBalancer, or the objective a LossBalancer"
            )

    def weights(self, totals: LossParts) -> LossParts:
        """As ``LossBalancer``."""
        names = {"language": "student_loss", "logits": "LogitsDistillationLoss_0", "intermediate": "HiddenStateLoss_1"}
        with torch.enable_grad():
            present = {name: value.detach().clone().requires_grad_() for name in names if (value := getattr(totals, name)) is not None}
            balanced: Any = self.balancer({names[name]: value for name, value in present.items()})
            total: Tensor = balanced["kd_loss"] if isinstance(balanced, Mapping) else balanced
            grads = torch.autograd.grad(total, list(present.values()), allow_unused=True)
        weights = {
            name: torch.zeros_like(value) if grad is None else grad for (name, value), grad in zip(present.items(), grads, strict=True)
        }
        return dataclasses.replace(totals, **weights)


def _pair(entry: tuple[str, ...]) -> HiddenPair:
    if len(entry) not in (2, 3):
        raise ValueError(f"intermediate_layer_pairs holds {entry}; give (student, teacher) or (student, teacher, loss)")
    student, teacher, *loss = entry
    return HiddenPair(student=_name(student), teacher=_name(teacher), loss=loss[0] if loss else "cosine")


def _name(module: str) -> str:
    """Of a module here."""
    return ".".join(_PARTS.get(part, part) for part in module.removeprefix("decoder.").split("."))
