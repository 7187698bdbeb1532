# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The small kernels with which a step begins, against torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference.decoder import _decoder
from tests.support.interpreter import run_interpreted


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("num_positions", [0, 40, 2**40])
def test_rotary_tables_are_those_of_the_model(num_positions: int, window: bool, make_model: Callable[..., Any]) -> None:
    model, positions = make_model(), torch.tensor([3, 0, 39, 7])
    tables = _decoder.RotaryTables(model, num_positions)
    ours, wanted = tables.at(positions, window=window), model.rotary(positions, window=window)
    assert (ours is None) == (wanted is None) == window
    for one, other in zip(ours or (), wanted or (), strict=True):
        assert torch.equal(one, other) and one.is_contiguous()


def check_step(device: str) -> None:
    """Tokens, positions and slots by the kernel."""
    from mcore_inference.context._step_triton import enter_step

    last = torch.arange(100, 140, device=device)
    for count in (0, 1, 3, 300):
        words = torch.arange(3 * count, dtype=torch.int32, device=device)
        words[:count:2] = -1 - words[:count:2] % 40
        wanted = words.view(3, count).long()
        wanted[0] = torch.where(wanted[0] < 0, last[(-1 - wanted[0]).clamp(min=0)], wanted[0])
        assert torch.equal(enter_step(words, last), wanted)


@pytest.mark.gpu
def test_steps_begin_by_a_kernel_as_by_torch_on_a_gpu() -> None:
    check_step("cuda")


def test_steps_begin_by_a_kernel_as_by_torch_in_the_interpreter() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    check_step("cpu")
    print("same")
