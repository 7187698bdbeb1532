# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Kernels of single tokens of linear mixers against torch: small sizes in the interpreter, real ones on a GPU."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import GatedDeltaNet, GatedDeltaNetConfig, LinearMixer, MambaConfig, MambaMixer, RecurrentRows, RecurrentState, Step
from mcore_parallel.nn.kernels import SlotStates, fits_decode
from tests.support.interpreter import run_interpreted

Config = MambaConfig | GatedDeltaNetConfig

# One head a group and several, sides that are no power of two, two taps and more, more channels than one program takes.
SMALL: tuple[Config, ...] = (
    MambaConfig(num_groups=2, num_heads=6, head_dim=10, state_dim=12),
    MambaConfig(num_groups=1, num_heads=2, head_dim=40, state_dim=200, conv_kernel=2, use_conv_bias=False, dt_limits=(0.2, 1.0)),
    MambaConfig(num_groups=3, num_heads=3, head_dim=8, state_dim=16, conv_kernel=5),
    GatedDeltaNetConfig(num_key_heads=2, num_value_heads=6, key_head_dim=12, value_head_dim=10),
    GatedDeltaNetConfig(num_key_heads=1, num_value_heads=2, key_head_dim=200, value_head_dim=40, conv_kernel=2),
    GatedDeltaNetConfig(num_key_heads=3, num_value_heads=3, key_head_dim=16, value_head_dim=8, conv_kernel=5),
)
LARGE: tuple[Config, ...] = (
    MambaConfig(num_groups=8, num_heads=128, head_dim=64, state_dim=128),
    MambaConfig(num_groups=1, num_heads=80, head_dim=64, state_dim=128),
    GatedDeltaNetConfig(num_key_heads=16, num_value_heads=32),
    GatedDeltaNetConfig(num_key_heads=4, num_value_heads=4, key_head_dim=256, value_head_dim=512),
)
SLOTS = [5, -1, 0, 3, 6]


def build(config: Config, dtype: torch.dtype, device: str) -> LinearMixer:
    kinds = {"norm_epsilon": 1e-5, "layer": 4, "dtype": dtype}
    mixer: LinearMixer
    if isinstance(config, MambaConfig):
        mixer = MambaMixer(48, config, ProcessGroups.single(), **kinds)
    else:
        mixer = GatedDeltaNet(48, config, ProcessGroups.single(), **kinds)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.normal_(0.0, 0.2)
    return mixer.to(device)


def check(config: Config, dtype: torch.dtype, tolerance: float, device: str, *, narrow: bool) -> None:
    """Two tokens of rows in slots of any order, beside slots of others and rows of padding, against double precision."""
    mixer = build(config, dtype, device)
    assert mixer.has_decode_kernel
    wide = copy.deepcopy(mixer).cpu().double()
    empty = mixer.empty_state(8)
    conv, memory = (torch.randn(part.shape, generator=torch.Generator().manual_seed(1)) for part in (empty.conv, empty.memory))
    kept = RecurrentState(conv=conv.to(empty.conv), memory=memory.to(empty.memory))
    state = RecurrentState(conv=kept.conv.cpu().double(), memory=kept.memory.cpu().double())
    others, real = [1, 2, 4, 7], [row for row, slot in enumerate(SLOTS) if slot >= 0]
    before = kept.rows(torch.tensor(others, device=device))
    finished = torch.zeros(len(SLOTS) * mixer.local_groups, dtype=torch.int32, device=device)
    slots = torch.tensor(SLOTS, device=device)
    rows = RecurrentRows(layers={4: kept}, slots=slots.int() if narrow else slots, num_decode=len(SLOTS), lengths=(), finished=finished)
    step = dataclasses.replace(Step.causal(len(SLOTS), 1, device), states=rows)
    inner = torch.tensor([SLOTS[row] for row in real])
    for token in range(2):
        x = torch.randn(len(SLOTS), 48, generator=torch.Generator().manual_seed(2 + token)).to(dtype)
        y = mixer(x.to(device), step).cpu()
        wanted, behind = wide.step(x.double()[real], state.rows(inner))
        state.write(inner, behind)
        torch.testing.assert_close(y[real].double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())
        assert (y[[row for row in range(len(SLOTS)) if row not in real]] == 0).all() and not finished.any()
    for found, exact in ((kept.conv, state.conv), (kept.memory, state.memory)):
        torch.testing.assert_close(found.cpu().double(), exact, rtol=tolerance, atol=tolerance * exact.abs().max().item())
    after = kept.rows(torch.tensor(others, device=device))
    assert torch.equal(after.conv, before.conv) and torch.equal(after.memory, before.memory)


@pytest.mark.journey
def test_kernels_equal_torch_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.journey
@pytest.mark.parametrize(("config", "dtype"), [(LARGE[0], torch.bfloat16), (SMALL[2], torch.float32), (LARGE[2], torch.bfloat16)])
def test_kernels_compile_for_hopper(config: Config, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.nn.kernels import _triton_recurrent
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = {name: CompiledLaunches(getattr(_triton_recurrent, name)) for name in ("_ssd_kernel", "_delta_kernel")}
    for name, launch in launches.items():
        monkeypatch.setattr(_triton_recurrent, name, launch)
    mixer = build(config, dtype, "cpu")
    channels = torch.zeros(1, mixer.local_groups, mixer.rows.channels, dtype=dtype)
    numbers = torch.zeros(1, mixer.local_groups, mixer.rows.numbers * mixer.rows.heads, dtype=dtype)
    state = mixer.empty_state(1)
    mixer._decode_in_slots(channels, numbers, SlotStates(conv=state.conv, memory=state.memory, slots=torch.zeros(1, dtype=torch.int64)))
    counts = [len(launch.shared_bytes) for launch in launches.values()]
    assert counts == ([1, 0] if isinstance(mixer, MambaMixer) else [0, 1])
    # A step size that is no number is none after its limits, too.
    assert all("max.NaN.f32" in text and "min.NaN.f32" in text for text in launches["_ssd_kernel"].ptx)


def test_states_that_no_kernel_holds_are_left_to_torch() -> None:
    assert fits_decode((8, 64, 128), 4) and fits_decode((8, 4096, 1), 2)
    assert not fits_decode((8, 64, 8192), 4) and not fits_decode((8, 64, 128), 1)
    assert not build(SMALL[0], torch.float64, "cpu").has_decode_kernel


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("config", [*SMALL, *LARGE])
def test_kernels_equal_torch_on_a_gpu(config: Config, dtype: torch.dtype, tolerance: float) -> None:
    check(config, dtype, tolerance, "cuda", narrow=dtype == torch.float16)


@pytest.mark.gpu
def test_float64_has_no_kernel_on_a_gpu() -> None:
    assert not build(SMALL[0], torch.float64, "cuda").has_decode_kernel


if __name__ == "__main__":
    from mcore_parallel.nn.mixers import _linear_mixer

    # The other parts of a mixer stay with torch.
    _linear_mixer.has_kernel = lambda x: x.dtype != torch.float64
    for number, each in enumerate(SMALL):
        check(each, torch.float32, 1e-5, "cpu", narrow=number % 2 == 0)
    check(SMALL[0], torch.bfloat16, 5e-2, "cpu", narrow=False)
    print("same")
