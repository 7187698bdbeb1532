# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensors that live on a GPU."""

from pathlib import Path

import pytest
import torch

from mcore_ckpt import load, save

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("asynchronous", [False, True])
def test_device_tensors_come_back_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    state = {
        "a": torch.randn(257, 33, device="cuda"),
        "b": torch.randn(64, 8, device="cuda").bfloat16(),
        "c": torch.arange(7, device="cuda"),
    }
    before = {name: value.clone() for name, value in state.items()}
    request = save(state, tmp_path / "step", asynchronous=asynchronous)
    for value in state.values():
        value.zero_()
    if request is not None:
        request.wait()
    load(state, tmp_path / "step")
    assert all(torch.equal(state[name], before[name]) for name in state)
