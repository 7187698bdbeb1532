# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Kernels of the linear mixers against torch in float64: in the interpreter with small sizes, on a GPU with real ones."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import GatedDeltaNet, GatedDeltaNetConfig, LinearMixer, MambaConfig, MambaMixer, Step
from mcore_parallel.nn.kernels._chunks import BoundedSequences, plan_chunks
from mcore_parallel.nn.kernels._fused import has_kernel
from mcore_parallel.nn.kernels._fused_mixers import fits_ssd, fused_causal_conv, fused_gated_rms_norm, fused_ssd, kernel_plan
from mcore_parallel.nn.mixers._conv import causal_conv
from mcore_parallel.nn.mixers._gated_norm import gated_rms_norm
from mcore_parallel.nn.mixers._recurrences import delta_chunked, delta_recurrent, ssd_chunked, step_sizes
from tests.support.interpreter import run_interpreted

# G groups, h heads of each, P channels of a head, N channels of a state.
SMALL = ((2, 3, 20, 24), (1, 4, 16, 16))
# Narrow heads and states, below 64 channels, are computed by other configurations of the kernels.
LARGE = ((2, 3, 20, 24), (2, 4, 64, 128), (2, 4, 64, 64), (2, 4, 16, 24), (2, 4, 32, 48), (1, 8, 64, 16))
PACKED = (40, 1, 0, 67)


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32, margin: int = 0, seed: int = 0) -> Tensor:
    """A leaf that is a part of wider rows where there is a margin, as the parts of a projection are."""
    shape = (*shape[:-1], shape[-1] + margin)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return whole[..., margin // 2 : whole.shape[-1] - (margin - margin // 2)].detach().requires_grad_()


def compare(found, wanted, leaves: list[Tensor], wide: list[Tensor], tolerance: float) -> None:
    """Results and gradients, relative to the largest element."""
    grad = draw(*found.shape, device=str(found.device), dtype=found.dtype, seed=99).detach()
    grads = zip(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(wanted, wide, grad.double()), strict=True)
    for a, b in ((found, wanted), *grads):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=0.0, atol=tolerance * b.abs().max().item())


def doubles(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def check_conv(device: str, dtype: torch.dtype, tolerance: float, sizes: tuple[tuple[int, ...], ...]) -> None:
    for lengths, kernel, bias in ((PACKED, 4, True), ((67,), 2, False)):
        plan = plan_chunks(lengths, 16, torch.device(device))
        leaves = [draw(sum(lengths), 2, 40, device=device, dtype=dtype, margin=6), draw(2, 40, kernel, device=device, dtype=dtype, seed=1)]
        leaves += [draw(2, 40, device=device, dtype=dtype, seed=2)] if bias else []
        wide, none = doubles(leaves), [] if bias else [None]
        found = fused_causal_conv(*leaves, *none, plan.positions)
        compare(found, causal_conv(*wide, *none, plan.positions), leaves, wide, tolerance)


def check_gated_norm(device: str, dtype: torch.dtype, tolerance: float, sizes: tuple[tuple[int, ...], ...]) -> None:
    for gate_first, rows, width in ((True, 4, 24), (False, 4, 24), *([(True, 2, 1024)] if device == "cuda" else [])):
        leaves = [
            draw(37, rows, width, device=device, dtype=dtype),
            draw(37, 2, rows // 2 * width, device=device, dtype=dtype, margin=10, seed=1),
            draw(rows * width if gate_first else width, device=device, dtype=dtype, seed=2),
        ]
        wide = doubles(leaves)
        found = fused_gated_rms_norm(leaves[0], leaves[1], leaves[2], 1e-5, gate_first=gate_first)
        compare(found, gated_rms_norm(wide[0], wide[1], wide[2], 1e-5, gate_first=gate_first), leaves, wide, tolerance)


def check_scan(device: str, dtype: torch.dtype, tolerance: float, sizes: tuple[tuple[int, ...], ...]) -> None:
    for number, (groups, heads, p, n) in enumerate(sizes):
        for lengths, started, limits in ((PACKED, True, (0.0, float("inf"))), ((35,), False, (0.2, 1.0)))[min(number, 1) :]:
            check_one_scan(device, dtype, tolerance, (groups, heads, p, n), lengths, started, limits)


def check_one_scan(
    device: str, dtype: torch.dtype, tolerance: float, sizes: tuple[int, ...], lengths: tuple[int, ...], started: bool, limits
) -> None:
    groups, heads, p, n = sizes
    tokens, total = sum(lengths), groups * heads
    plan = kernel_plan(plan_chunks(lengths, 16, torch.device(device)), dtype)
    leaves = [
        draw(tokens, groups, heads * p + 2 * n, device=device, dtype=dtype),
        draw(tokens, groups, heads, device=device, dtype=dtype, margin=6, seed=1),
        draw(total, device=device, seed=2),
        draw(total, device=device, seed=3).detach().exp().neg().requires_grad_(),
        draw(total, device=device, seed=4),
    ]
    assert fits_ssd(leaves[0], (p, n))
    initial = draw(len(lengths), total, p, n, device=device, seed=5).detach() if started else None
    y, behind = fused_ssd(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], plan, (p, n), limits, initial)
    wide = doubles(leaves)
    x, b, c = wide[0].split((heads * p, n, n), dim=-1)
    dt = step_sizes(wide[1].flatten(1), wide[2], limits)
    x = x.unflatten(-1, (-1, p)).flatten(1, 2)
    wanted, last = ssd_chunked(x, dt, wide[3], b, c, wide[4], plan, None if initial is None else initial.double())
    torch.testing.assert_close(behind.double(), last, rtol=0.0, atol=tolerance * last.abs().max().item())
    compare(y, wanted, leaves, wide, tolerance)


def bounded(device: str) -> BoundedSequences:
    """Those of ``PACKED`` and one without tokens, behind three tokens of none."""
    return BoundedSequences(
        torch.tensor([3, *(3 + sum(PACKED[: i + 1]) for i in range(len(PACKED))), 3 + sum(PACKED)], device=device).int()
    )


def check_bounded_scan(device: str, dtype: torch.dtype, tolerance: float, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Sequences whose lengths the device alone knows, between tokens of none, are scanned as those that the host knows."""
    tokens = sum(PACKED)
    for groups, heads, p, n in sizes:
        total = groups * heads
        x = [
            draw(tokens + 9, groups, width, device=device, dtype=dtype, seed=i).detach()
            for i, width in enumerate((heads * p + 2 * n, heads))
        ]
        numbers = [draw(total, device=device, seed=2 + i).detach() for i in range(3)]
        numbers[1] = -numbers[1].exp()
        initial = draw(len(PACKED) + 1, total, p, n, device=device, seed=5).detach()
        options = ((p, n), (0.0, float("inf")))
        plan = bounded(device).plan(kernel_plan(plan_chunks(PACKED, 16, torch.device(device)), dtype).chunk_size, tokens + 9)
        y, behind = fused_ssd(x[0], x[1], *numbers, plan, *options, initial)
        inner = [part[3 : 3 + tokens] for part in x]
        known = kernel_plan(plan_chunks(PACKED, 16, torch.device(device)), dtype)
        wanted, last = fused_ssd(inner[0], inner[1], *numbers, known, *options, initial[:-1])
        for part, other in ((y[3 : 3 + tokens], wanted), (behind[:-1], last)):
            torch.testing.assert_close(part, other, rtol=0.0, atol=tolerance * other.abs().max().item())
        assert torch.equal(behind[-1], initial[-1])


def check_delta(device: str, dtype: torch.dtype, tolerance: float, sizes: tuple[tuple[int, ...], ...]) -> None:
    """The delta rule where its states go from chunk to chunk in a kernel, and of such sequences, against its definition."""
    tokens = sum(PACKED)
    for groups, heads, v, k in sizes:
        total = groups * heads
        shapes = ((groups, k), (groups, k), (total, v))
        x = [draw(tokens + 9, *shape, device=device, dtype=dtype, seed=i).detach() for i, shape in enumerate(shapes)]
        x += [
            -draw(tokens + 9, total, device=device, seed=3).detach().exp(),
            draw(tokens + 9, total, device=device, seed=4).detach().sigmoid(),
        ]
        initial = draw(len(PACKED) + 1, total, k, v, device=device, seed=5).detach()
        known, inner = plan_chunks(PACKED, 32, torch.device(device)), [part[3 : 3 + tokens] for part in x]
        wanted, last = delta_recurrent(*(part.double() for part in inner), known, initial[:-1].double())
        with torch.no_grad():
            one = delta_chunked(*inner, known, initial[:-1])
            y, behind = delta_chunked(*x, bounded(device).plan(32, tokens + 9), initial)
        for mixed, states in (one, (y[3 : 3 + tokens], behind[:-1])):
            torch.testing.assert_close(mixed.double(), wanted, rtol=0.0, atol=tolerance * wanted.abs().max().item())
            torch.testing.assert_close(states.double(), last, rtol=0.0, atol=tolerance * last.abs().max().item())
        assert torch.equal(behind[-1], initial[-1])


CHECKS = (check_conv, check_gated_norm, check_scan, check_bounded_scan, check_delta)


@pytest.mark.journey
def test_kernels_equal_torch_in_the_interpreter() -> None:
    run_interpreted(__file__)


def test_states_that_the_kernels_cannot_hold_are_left_to_torch() -> None:
    narrow, wide = torch.zeros(0, dtype=torch.bfloat16), torch.zeros(0)
    assert fits_ssd(narrow, (64, 256)) and fits_ssd(narrow, (128, 128)) and fits_ssd(wide, (64, 128))
    assert not fits_ssd(narrow, (128, 200)) and not fits_ssd(narrow, (16, 512)) and not fits_ssd(wide, (128, 128))


def test_narrow_heads_and_states_are_scanned_by_eight_warps() -> None:
    pytest.importorskip("triton")
    from mcore_parallel.nn.kernels import _triton_ssd

    kernels = (_triton_ssd._sweep_kernel, _triton_ssd._output_kernel, _triton_ssd._head_gradient_kernel, _triton_ssd._group_gradient_kernel)
    for kernel in kernels:
        constants = {"PRECISION": "tf32", "GROUP_HEADS": 4, "BLOCK_N": 64, "BLOCK_P": 64}
        for p, n in ((16, 24), (32, 48), (64, 16), (20, 24), (48, 64), (64, 63)):
            assert {config.num_warps for config in kernel.early_config_prune(kernel.configs, {}, P=p, N=n, **constants)} == {8}
        for p, n in ((64, 64), (64, 128), (128, 64)):
            # A block that is cut from a wide state stays free to be searched.
            wide = kernel.early_config_prune(kernel.configs, {}, P=p, N=n, **{**constants, "BLOCK_N": 32})
            assert {config.num_warps for config in wide} == {4, 8}


@pytest.mark.journey
def test_the_kernel_of_the_delta_rule_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.nn.kernels import _triton_delta
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = CompiledLaunches(_triton_delta._sweep_kernel)
    monkeypatch.setattr(_triton_delta, "_sweep_kernel", launches)
    own, read, initial = (torch.zeros(1, 2, *shape) for shape in ((64, 128), (64, 128), (128, 128)))
    _triton_delta.delta_sweep(own, read, read.transpose(2, 3), own[..., 0, 0], plan_chunks((64,), 64, torch.device("cpu")), initial)
    assert len(launches.shared_bytes) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance", "sizes"), [(torch.float32, 2e-4, SMALL), (torch.bfloat16, 3e-2, LARGE), (torch.float16, 5e-3, LARGE[1:])]
)
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_equal_torch_on_a_gpu(check, dtype: torch.dtype, tolerance: float, sizes: tuple[tuple[int, ...], ...]) -> None:
    assert has_kernel(torch.zeros(2, dtype=dtype, device="cuda"))
    check("cuda", dtype, tolerance, sizes)


@pytest.mark.gpu
def test_heads_of_a_group_in_one_program_equal_torch(monkeypatch) -> None:
    from mcore_parallel.nn.kernels import _triton_ssd

    monkeypatch.setattr(_triton_ssd, "_PROGRAMS", 1)
    check_one_scan("cuda", torch.bfloat16, 3e-2, LARGE[1], (300, 77), False, (0.0, float("inf")))


def build(kind: str) -> LinearMixer:
    mixer: LinearMixer
    if kind == "mamba":
        mixer = MambaMixer(128, MambaConfig(num_groups=2, head_dim=64, num_heads=8), ProcessGroups.single(), dtype=torch.bfloat16)
    else:
        sizes = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=32)
        mixer = GatedDeltaNet(128, sizes, ProcessGroups.single(), dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.normal_(0.0, 0.1)
    return mixer.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "delta_net"])
def test_mixers_on_a_gpu_equal_double_precision(kind: str) -> None:
    mixer = build(kind)
    wide = copy.deepcopy(mixer).double()
    lengths = (300, 1, 76)
    step = dataclasses.replace(Step.causal(1, sum(lengths), "cuda"), cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    x = draw(sum(lengths), 128, device="cuda", dtype=torch.bfloat16)
    (wide_x,) = doubles([x])
    y, wanted = mixer(x, step), wide(wide_x, step)
    grad = draw(*y.shape, device="cuda", dtype=torch.bfloat16, seed=1).detach()
    y.backward(grad)
    wanted.backward(grad.double())
    pairs = [("y", y, wanted), ("x", x.grad, wide_x.grad)]
    pairs += [(name, a.grad, b.grad) for (name, a), b in zip(mixer.named_parameters(), wide.parameters(), strict=True)]
    for name, a, b in pairs:
        assert a is not None and b is not None, name
        assert (a.double() - b).norm() <= 3e-2 * b.norm(), (name, ((a.double() - b).norm() / b.norm()).item())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "delta_net"])
def test_single_steps_on_a_gpu_go_on_from_a_prefill(kind: str) -> None:
    mixer, x = build(kind), draw(2, 90, 128, device="cuda", dtype=torch.bfloat16).detach()
    wanted = mixer(x.flatten(0, 1), Step.causal(2, 90, "cuda")).unflatten(0, (2, 90)).detach()
    y, state = mixer.prefill(x[:, :60].flatten(0, 1), Step.causal(2, 60, "cuda"))
    torch.testing.assert_close(y.unflatten(0, (2, 60)), wanted[:, :60], rtol=5e-2, atol=5e-2)
    y, state = mixer.prefill(x[:, 60:87].flatten(0, 1), Step.causal(2, 27, "cuda"), state)
    torch.testing.assert_close(y.unflatten(0, (2, 27)), wanted[:, 60:87], rtol=5e-2, atol=5e-2)
    for token in range(87, 90):
        y, state = mixer.step(x[:, token], state)
        torch.testing.assert_close(y, wanted[:, token], rtol=5e-2, atol=5e-2)


if __name__ == "__main__":
    from mcore_parallel.nn.mixers import _recurrences

    _recurrences.has_kernel = lambda x: x.dtype != torch.float64
    for check in CHECKS:
        check("cpu", torch.float32, 1e-4, SMALL)
    # The interpreter's products of bfloat16 are wrong, those of float16 are not.
    check_scan("cpu", torch.float16, 5e-3, SMALL[1:])
    from mcore_parallel.nn.kernels import _triton_ssd

    _triton_ssd._PROGRAMS = 1
    for kernel in (_triton_ssd._output_kernel, _triton_ssd._head_gradient_kernel):
        kernel.configs[0].kwargs["HEADS"] = 4
    check_one_scan("cpu", torch.float32, 1e-4, SMALL[1], (40, 3), False, (0.0, float("inf")))
    print("same")
