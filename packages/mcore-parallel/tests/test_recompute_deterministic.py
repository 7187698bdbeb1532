# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Settings that let results differ from run to run are refused, and runs that pass have equal bits."""

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig, Step, check_deterministic

GOOD = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**GOOD, "NCCL_ALGO": "Tree"}, "set NCCL_ALGO=Ring .* found 'Tree'"),
        ({"NCCL_ALGO": "Ring"}, "set CUBLAS_WORKSPACE_CONFIG to one of .* found None"),
        ({}, "CUBLAS_WORKSPACE_CONFIG.*; set NCCL_ALGO=Ring"),
    ],
)
def test_settings_of_the_libraries_are_named(deterministic, environment, message) -> None:
    check_deterministic(GOOD, device="cuda")
    check_deterministic({}, device="cpu")
    with pytest.raises(ValueError, match=message):
        check_deterministic(environment, device="cuda")


def test_the_switch_of_torch_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"call torch.use_deterministic_algorithms\(True\)"):
        check_deterministic(GOOD, device="cpu")


def test_two_runs_have_equal_bits(deterministic) -> None:
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16)
    runs = []
    for _ in range(2):
        model = GPTModel(config, ProcessGroups.single(), seed=1, recompute=RecomputeConfig(modules=("norm", "core_attention")))
        tokens = torch.arange(12)
        model(tokens, Step.causal(2, 6))[0].loss_sum(tokens, torch.ones(12)).backward()
        runs.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
