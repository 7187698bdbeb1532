# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Distillation as nvidia-modelopt's plugin describes it."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel.training.distill import LossParts, ModeloptBalancer, ModeloptMissingError, modelopt_distillation

HAS_MODELOPT = importlib.util.find_spec("modelopt") is not None


def parts(intermediate: float | None = 0.5) -> LossParts:
    values = [None if value is None else torch.tensor(value, dtype=torch.float64) for value in (3.0, 2.0, intermediate)]
    return LossParts(language=values[0], logits=values[1], intermediate=values[2])  # type: ignore[arg-type]


def total(balancer: Any, losses: LossParts) -> float:
    weights = balancer.weights(losses)
    products = [
        getattr(weights, name) * value for name in ("language", "logits", "intermediate") if (value := getattr(losses, name)) is not None
    ]
    return float(sum(products))


def plugin_total(losses: LossParts, scale: float, skip: bool) -> float:
    """By the plugin's formula."""
    language, logits, inner = float(losses.language), float(losses.logits), losses.intermediate
    kd = logits + (0.0 if inner is None else float(inner) * logits / float(inner))
    return kd if skip else language + scale * kd * language / kd


@pytest.mark.parametrize("inner", [None, 0.5])
@pytest.mark.parametrize("skip", [True, False])
def test_the_weights_are_those_of_the_plugin(inner: float | None, skip: bool) -> None:
    pairs = [] if inner is None else [("decoder.layers.0", "decoder.layers.2")]
    _, balancer = modelopt_distillation({"intermediate_layer_pairs": pairs, "skip_lm_loss": skip, "kd_loss_scale": 0.7})
    assert balancer.trains_language != skip
    assert total(balancer, parts(inner)) == pytest.approx(plugin_total(parts(inner), 0.7, skip))


def test_names_and_losses_of_the_pairs() -> None:
    entries = [
        ["decoder.layers.3.input_layernorm", "decoder.layers.7.pre_mlp_layernorm", "mse"],
        ["decoder.final_layernorm", "final_norm"],
        ["layers.0.attention", "decoder.layers.1.self_attention"],
    ]
    config, _ = modelopt_distillation(
        {"intermediate_layer_pairs": entries, "logit_kl_temperature": 2, "logit_layers": ["output_layer"] * 2}
    )
    assert config.temperature == 2.0
    assert [(pair.student, pair.teacher, pair.loss) for pair in config.pairs] == [
        ("layers.3.input_norm", "layers.7.ffn_norm", "mse"),
        ("final_norm", "final_norm", "cosine"),
        ("layers.0.attention", "layers.1.attention", "cosine"),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 2.0}, "'temperature' is no field of the plugin's configuration; use criterion, .*logit_kl_temperature"),
        ({"logit_layers": ("lm_head", "output_layer")}, r"logit_layers=\('lm_head', 'output_layer'\) must be"),
        ({"logit_kl_topk": 8}, "logit_kl_topk=8 keeps the largest logits only; leave it out, or use a LogProbStore"),
        ({"criterion": nn.MSELoss()}, "criterion is a choice of code"),
        ({"intermediate_layer_pairs": [("layers.0",)]}, r"holds \('layers.0',\); give"),
        ({"intermediate_layer_pairs": [("a", "b", "l1")]}, "loss='l1' must be one of cosine, mse"),
        ({"logit_kl_temperature": 0.0}, "temperature=0.0 must be above 0"),
    ],
)
def test_what_cannot_be_said_here(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        modelopt_distillation(fields)


class Balancer(nn.Module):
    """As nvidia-modelopt has them: losses by name, the student's own one among them."""

    def forward(self, losses: dict[str, Tensor]) -> Tensor:
        own = losses.pop("student_loss")
        (logits, *rest) = losses.values()
        return 0.25 * own + logits.detach() * logits + sum(rest)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("modelopt.torch.distill")
    module.DistillationLossBalancer = Balancer  # type: ignore[attr-defined]
    for name in ("modelopt", "modelopt.torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "modelopt.torch.distill", module)


@pytest.mark.usefixtures("library")
def test_a_balancer_of_the_library_chooses_the_weights() -> None:
    _, balancer = modelopt_distillation({"loss_balancer": Balancer()})
    with torch.no_grad():
        weights = balancer.weights(parts())
    assert (float(weights.language), float(weights.logits), float(weights.intermediate or 0)) == (0.25, 2.0, 1.0)
    assert not weights.logits.requires_grad and balancer.weights(parts(None)).intermediate is None
    with pytest.raises(ValueError, match="balancer is a Linear; give a DistillationLossBalancer"):
        ModeloptBalancer(nn.Linear(1, 1))


@pytest.mark.skipif(HAS_MODELOPT, reason="nvidia-modelopt is installed")
def test_without_the_library_the_extra_is_named() -> None:
    with pytest.raises(ModeloptMissingError, match=r"pip install 'mcore-parallel\[modelopt\]'"):
        ModeloptBalancer(nn.Linear(1, 1))


@pytest.mark.skipif(not HAS_MODELOPT, reason="needs nvidia-modelopt")
@pytest.mark.filterwarnings("ignore")
def test_the_library_s_own_balancer() -> None:
    from modelopt.torch.distill import StaticLossBalancer

    weights = ModeloptBalancer(StaticLossBalancer([0.3, 0.5])).weights(parts())
    assert [float(weights.language), float(weights.logits), float(weights.intermediate or 0)] == pytest.approx([0.2, 0.3, 0.5])
