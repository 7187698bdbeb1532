# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Kernels of linear mixers that go from token to token: right, and with the same bits wherever a sequence is cut and what is beside it."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import GatedDeltaNet, GatedDeltaNetConfig, LinearMixer, MambaConfig, MambaMixer, RecurrentState, Step
from mcore_parallel.nn.kernels import SlotSpans
from mcore_parallel.nn.mixers import _linear_mixer
from tests.support.interpreter import run_interpreted

Config = MambaConfig | GatedDeltaNetConfig

# One head a group and several, sides that are no power of two, one tap and more, states of several programs.
SMALL: tuple[Config, ...] = (
    MambaConfig(num_groups=2, num_heads=4, head_dim=10, state_dim=12),
    MambaConfig(num_groups=1, num_heads=1, head_dim=12, state_dim=70, conv_kernel=2, use_conv_bias=False, dt_limits=(0.2, 1.0)),
    MambaConfig(num_groups=2, num_heads=2, head_dim=8, state_dim=16, conv_kernel=1),
    GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=12, value_head_dim=10),
    GatedDeltaNetConfig(num_key_heads=1, num_value_heads=1, key_head_dim=70, value_head_dim=12, conv_kernel=5),
)
LARGE: tuple[Config, ...] = (
    MambaConfig(num_groups=8, num_heads=128, head_dim=64, state_dim=128),
    MambaConfig(num_groups=1, num_heads=80, head_dim=64, state_dim=128),
    GatedDeltaNetConfig(num_key_heads=16, num_value_heads=32),
    GatedDeltaNetConfig(num_key_heads=4, num_value_heads=4, key_head_dim=256, value_head_dim=512),
)


def build(config: Config, dtype: torch.dtype, device: str) -> LinearMixer:
    options = {"norm_epsilon": 1e-5, "dtype": dtype, "batch_invariant": True}
    kind = MambaMixer if isinstance(config, MambaConfig) else GatedDeltaNet
    return kind(48, config, ProcessGroups.single(), **options).to(device)  # pyright: ignore[reportArgumentType, reportCallIssue]


def inputs(mixer: LinearMixer, tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Channels and numbers, cut from rows that are wider, as a projection leaves them."""
    sizes = mixer.rows.channels, mixer.rows.numbers * mixer.rows.heads
    drawn = torch.randn(tokens, mixer.local_groups, 3 + sum(sizes), generator=torch.Generator().manual_seed(1))
    _, channels, numbers = drawn.to(device, dtype).split((3, *sizes), dim=-1)
    return channels, numbers


def spans(begins: list[int], ends: list[int], slots: list[int], device: str) -> SlotSpans:
    bounds = torch.tensor([begins, ends], dtype=torch.int32, device=device)
    return SlotSpans(begins=bounds[0], ends=bounds[1], slots=torch.tensor(slots, device=device))


def check(config: Config, dtype: torch.dtype, tolerance: float, device: str, length: int) -> None:
    mixer = build(config, dtype, device)
    channels, numbers = inputs(mixer, length, dtype, device)
    whole = mixer.empty_state(1)
    y = mixer._mix_alone(channels, numbers, spans([0], [length], [0], device), whole)

    # Double precision, by chunks.
    wide = copy.deepcopy(mixer).cpu().double()
    wide.batch_invariant = False
    plan = _linear_mixer.plan_chunks((length,), wide.chunk_size, torch.device("cpu"))
    exact, behind = wide._mix_sequences(channels.cpu().double(), numbers.cpu().double(), plan, None)
    for found, wanted in ((y, exact), (whole.memory, behind.memory), (whole.conv, behind.conv)):
        if wanted.numel():
            torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.detach().abs().max()))

    # Three parts and a single token, in a slot of others whose memory begins anywhere, beside another sequence, padding and nothing.
    held = mixer.empty_state(4)
    conv, memory = (torch.zeros(part.numel() + 1, dtype=part.dtype, device=device) for part in (held.conv, held.memory))
    state = RecurrentState(conv=conv[1:].view(held.conv.shape), memory=memory[1:].view(held.memory.shape))
    state.memory[1:3] = 7.0
    parts, other = [], (torch.randn_like(channels[:3]), torch.randn_like(numbers[:3]))
    for begin, end in itertools.pairwise((0, 1, length // 2, length - 2, length)):
        layout = spans([0, 1, 2, 1], [2, 3, 2 + end - begin, 1], [1, -1, 3, 3], device)
        beside = [torch.cat((extra[:2], own[begin:end], extra[2:])) for extra, own in zip(other, (channels, numbers), strict=True)]
        result = mixer._mix_alone(*beside, layout, state)
        parts.append(result[2 : 2 + end - begin])
        assert not result[2 + end - begin :].any()
    assert torch.equal(torch.cat(parts), y)
    assert torch.equal(state.memory[3:], whole.memory) and torch.equal(state.conv[3:], whole.conv)
    assert not state.memory[0].any() and (state.memory[2] == 7.0).all() and not (state.memory[1] == 7.0).all()


def check_cast(config: Config, device: str) -> None:
    """Parameters of heads that a cast of the whole model has narrowed are read as they are."""
    narrow = build(config, torch.bfloat16, device).bfloat16()
    wide = copy.deepcopy(narrow)
    for name in wide._head_parameters():
        wide.get_parameter(name).data = wide.get_parameter(name).data.float()
    layout, parts = spans([0], [3], [0], device), inputs(narrow, 3, torch.bfloat16, device)
    assert torch.equal(*(mixer._mix_alone(*parts, layout, mixer.empty_state(1)) for mixer in (narrow, wide)))


def check_gradients(config: Config, device: str) -> None:
    """The forward is that of the kernels, the backward that of chunks."""
    mixer, x = build(config, torch.float32, device), torch.randn(11, 48, generator=torch.Generator().manual_seed(2)).to(device)
    step = Step(batch_size=1, seq_len=11, positions=torch.arange(11, device=device), cu_seqlens=torch.tensor([0, 4, 11]))
    results = []
    for exact in (True, False):
        mixer.batch_invariant = mixer.norm.batch_invariant = exact
        own = x.clone().requires_grad_()
        y = mixer(own, step)
        results.append([y, *torch.autograd.grad(y.square().sum(), [own, *mixer.parameters()])])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.detach().abs().max()))


@pytest.mark.journey
def test_kernels_are_right_and_invariant_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.journey
@pytest.mark.parametrize(("config", "dtype"), [(LARGE[1], torch.bfloat16), (SMALL[2], torch.float32), (LARGE[3], torch.bfloat16)])
def test_single_tokens_and_long_sequences_are_one_compilation_for_hopper(
    config: Config, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.nn.kernels import _triton_fixed_scan as kernels
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_linear_mixer, "has_row_kernels", lambda _: True)
    launches = {name: CompiledLaunches(getattr(kernels, name)) for name in ("_conv_kernel", "_ssd_kernel", "_delta_kernel")}
    for name, launch in launches.items():
        monkeypatch.setattr(kernels, name, launch)
    mixer = build(config, dtype, "cpu")
    for length in (1, 2, 64):
        mixer._mix_alone(*inputs(mixer, length, dtype, "cpu"), spans([0], [length], [0], "cpu"), mixer.empty_state(1))
    texts = [launch.ptx for launch in launches.values()]
    assert [len(one) for one in texts] == ([3, 3, 0] if isinstance(mixer, MambaMixer) else [3, 0, 3])
    assert all(len(set(one)) == 1 for one in texts if one)
    # A step size that is no number is none after its limits, too; the interpreter does not tell the instructions apart.
    assert all("max.NaN.f32" in text and "min.NaN.f32" in text for text in texts[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)], ids=str)
@pytest.mark.parametrize("config", [*SMALL, *LARGE], ids=str)
def test_kernels_are_right_and_invariant_on_a_gpu(config: Config, dtype: torch.dtype, tolerance: float) -> None:
    check(config, dtype, tolerance, "cuda", 150)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SMALL[0], SMALL[3], LARGE[1], LARGE[2]], ids=str)
def test_gradients_on_a_gpu_are_those_of_chunks(config: Config) -> None:
    check_gradients(config, "cuda")


if __name__ == "__main__":
    _linear_mixer.has_row_kernels = lambda _: True
    for one in SMALL:
        check(one, torch.float32, 1e-4, "cpu", 9)
    check_cast(SMALL[0], "cpu")
    check_cast(SMALL[3], "cpu")
    check_gradients(SMALL[0], "cpu")
    check_gradients(SMALL[3], "cpu")
    print("same")
