# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Forward and backward of a Mamba-2 block, with its costliest kernels, beside blocks of the same weights around published Triton kernels.

python -m tools.bench.mamba --output docs/benchmarks/mamba.json

The blocks of others are measured where their packages can be imported: the scan and norm of mamba-ssm, those of flash-linear-attention
(the scan as gated linear attention, which knows no groups: b and c are repeated for every head), and the latter's convolution in both.
"""

import argparse
import importlib
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import MambaConfig, MambaMixer, Step
from tools.bench._record import record
from tools.bench._timing import in_turn

# B sequences, S tokens of each, T tokens, G groups, h heads of a group, H heads, P channels of a head, N channels of a state.
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""From x [B, S, H, P], dt [B, S, H], its bias [H], rates [H], b and c [B, S, G, N], D [H] to y [B, S, H, P]."""
Part = Callable[[], Tensor]


class OtherBlock:
    """The block of a mixer with its weights in the usual order, [z | x | b | c | dt] for all groups, around the kernels of others."""

    def __init__(self, mixer: MambaMixer, scan: Scan, norm: Any, conv: Any) -> None:
        self.scan, self.norm, self.conv, self.epsilon = scan, norm, conv, mixer.norm.epsilon
        config, rows = mixer.config, mixer.rows
        groups, self.sizes = config.num_groups, (rows.inner, config.state_dim, rows.heads)
        shared = config.state_dim
        self.groups, self.head_dim = groups, config.head_dim

        def usual(weight: Tensor, *sizes: int) -> Tensor:
            return torch.cat([part.flatten(0, 1) for part in weight.detach().split(sizes, dim=1)]).requires_grad_()

        inner, heads = rows.inner, rows.heads
        assert mixer.conv.bias is not None
        self.in_proj = usual(mixer.get_parameter("in_proj.weight"), inner, inner, shared, shared, heads)
        self.taps = usual(mixer.conv.weight, inner, shared, shared)
        self.bias = usual(mixer.conv.bias, inner, shared, shared)
        copied = (mixer.get_parameter(name) for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight"))
        self.a_log, self.skip, self.dt_bias, self.scale, self.out_proj = (weight.detach().clone().requires_grad_() for weight in copied)

    def parameters(self) -> list[Tensor]:
        return [self.in_proj, self.taps, self.bias, self.a_log, self.skip, self.dt_bias, self.scale, self.out_proj]

    def __call__(self, x: Tensor) -> Tensor:
        """[B, S, D] -> the same."""
        inner, shared, heads = (size * self.groups for size in self.sizes)
        z, channels, dt = F.linear(x, self.in_proj).split((inner, inner + 2 * shared, heads), dim=-1)
        mixed = self.convolved(channels)
        values, b, c = mixed.split((inner, shared, shared), dim=-1)
        y = self.scanned(values, b, c, dt)
        return F.linear(self.normalised(y.flatten(2), z), self.out_proj)

    def convolved(self, channels: Tensor) -> Tensor:
        return self.conv(channels, self.taps, self.bias, activation="silu")[0]

    def scanned(self, values: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> Tensor:
        parts = values.unflatten(-1, (-1, self.head_dim)), dt, self.dt_bias, -torch.exp(self.a_log.float())
        return self.scan(*parts, b.unflatten(-1, (self.groups, -1)), c.unflatten(-1, (self.groups, -1)), self.skip)

    def normalised(self, y: Tensor, z: Tensor) -> Tensor:
        return self.norm(y, self.scale, None, z=z, eps=self.epsilon, group_size=self.sizes[0], norm_before_gate=False)


def others(mixer: MambaMixer, names: Sequence[str], chunk_size: int) -> dict[str, OtherBlock]:
    """Blocks around the kernels that can be imported; what cannot is said."""
    blocks: dict[str, OtherBlock] = {}
    for name in names:
        try:
            conv = importlib.import_module("fla.modules.convolution").causal_conv1d
            blocks[name] = OtherBlock(mixer, *_PEERS[name](chunk_size), conv)
        except ImportError as error:
            print(json.dumps({"block": name, "missing": str(error)}), flush=True)
    return blocks


def _mamba_ssm(chunk_size: int) -> tuple[Scan, Any]:
    combined = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined

    def scan(x: Tensor, dt: Tensor, bias: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
        return combined(x, dt, rates, b, c, chunk_size, D=skip, dt_bias=bias, dt_softplus=True)

    return scan, importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn


def _flash_linear_attention(chunk_size: int) -> tuple[Scan, Any]:
    attend = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

    def scan(x: Tensor, dt: Tensor, bias: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
        sizes, heads = F.softplus(dt.float() + bias), x.shape[2] // b.shape[2]
        q, k = (value.repeat_interleave(heads, dim=2) for value in (c, b))
        return attend(q, k, x * sizes[..., None].to(x.dtype), g=sizes * rates, scale=1.0)[0] + x * skip[:, None].to(x.dtype)

    return scan, importlib.import_module("fla.modules.layernorm_gated").rmsnorm_fn


_PEERS = {"mamba-ssm": _mamba_ssm, "flash-linear-attention": _flash_linear_attention}


def trained(work: Part, leaves: list[Tensor]) -> Callable[[], object]:
    """Forward and backward with a gradient that was drawn before."""
    grad = torch.randn_like(work().detach())
    return lambda: torch.autograd.grad(work(), leaves, grad)


def measure(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = MambaConfig(head_dim=arguments.head_dim, state_dim=arguments.state_dim, num_groups=arguments.num_groups)
    mixer = MambaMixer(arguments.hidden_size, config, ProcessGroups.single(), dtype=dtype, device=device)
    x = torch.randn(arguments.batch_size, arguments.seq_len, arguments.hidden_size, device=device, dtype=dtype, requires_grad=True)
    flat = x.detach().flatten(0, 1).requires_grad_()
    step = Step.causal(arguments.batch_size, arguments.seq_len, device)
    peers = others(mixer, arguments.peers, arguments.peer_chunk_size) if device.type == "cuda" else {}
    blocks: dict[str, tuple[Part, list[Tensor]]] = {"mcore": (lambda: mixer(flat, step), [flat, *mixer.parameters()])}
    blocks |= {name: (lambda block=block: block(x), [x, *block.parameters()]) for name, block in peers.items()}
    with torch.no_grad():
        results = {name: work().flatten(0, -2).float() for name, (work, _) in blocks.items()}
    samples = in_turn({name: trained(*block) for name, block in blocks.items()}, device, arguments.rounds, calls=arguments.calls)
    times = {name: statistics.median(values) for name, values in samples.items()}
    rows: list[dict[str, Any]] = []
    products = 2 * flat.shape[0] * sum(mixer.get_parameter(name).numel() for name in ("in_proj.weight", "out_proj.weight"))
    for name in blocks:
        difference = ((results[name] - results["mcore"]).norm() / results["mcore"].norm()).item()
        rows.append(
            {"block": name, "ms": times[name], "ours_over_this": times["mcore"] / times[name],
             "tflops_of_products": 3 * products / times[name] / 1e9, "relative_difference": difference}
        )  # fmt: skip
    for name, block in blocks.items():
        rows += [{"block": name, **row} for row in costliest(trained(*block), device)]
    return rows


def costliest(work: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """The kernels that take most of one call; nothing without a GPU."""
    if device.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type == torch.profiler.DeviceType.CUDA]
    events = sorted(events, key=lambda event: event.self_device_time_total, reverse=True)[:16]
    return [{"kernel": event.key[:80], "calls": event.count, "ms": event.self_device_time_total / 1e3} for event in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    names = ("hidden_size", "head_dim", "state_dim", "num_groups", "seq_len", "batch_size", "calls", "rounds")
    sizes = dict(zip(names, (4096, 64, 128, 8, 4096, 4, 5, 7) if cuda else (32, 16, 16, 2, 70, 2, 1, 1), strict=True))
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--peers", nargs="*", choices=tuple(_PEERS), default=list(_PEERS))
    parser.add_argument("--peer-chunk-size", type=int, default=256, help="chunk of mamba-ssm; 256 is its layer's choice")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments, torch.device("cuda", 0) if cuda else torch.device("cpu"))
    for row in rows:
        print(json.dumps(row), flush=True)
    if arguments.output:
        settings = {name: getattr(arguments, name) for name in (*sizes, "peer_chunk_size")}
        record(arguments.output, {"work": "Mamba-2 block, forward and backward", "sizes": settings, "rows": rows})


if __name__ == "__main__":
    main()
