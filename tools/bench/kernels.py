# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Single operations against their floors and against torch: the optimizer's step, the fp32-accumulating reduce-scatter.

python -m tools.bench.kernels --ranks 4 --output docs/benchmarks/kernels.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.comm import start_reduce_scatter_into
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_tools.launch import launch
from tools.bench._record import record
from tools.bench._timing import COPY_BYTES_PER_S, median_ms


def optimizer_step(device: torch.device, elements: int) -> list[dict[str, Any]]:
    """AdamW over bfloat16 parameters with float32 gradients, masters and moments, with clipping; and 16-bit variants."""
    variants: dict[str, tuple[dict[str, Any], bool, int]] = {
        # Read gradient twice (norm, update); read and write master and two moments; write the parameter.
        "float32 state": ({"store_param_remainders": False}, True, 4 + 4 + 8 + 16 + 2),
        # The master is the parameter and 16 bits beside it.
        "float32 moments, 16-bit master remainders": ({}, True, 4 + 4 + 16 + 8),
        "bfloat16 moments, 16-bit master remainders, bfloat16 gradients": (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
            False,
            2 + 2 + 4 + 8 + 4,
        ),
    }
    rows = []
    for name, (options, wide, moved) in variants.items():
        groups = ProcessGroups.single()
        side = 4096
        model = nn.ParameterList(
            [nn.Parameter(torch.randn(side, side, device=device).bfloat16()) for _ in range(max(1, elements // side**2))]
        )
        sync = DistributedDataParallel(DistributedDataParallelConfig(grad_reduce_in_fp32=wide), model, groups)
        optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-4, weight_decay=0.1, clip_grad=1.0, **options), sync, groups)
        for grad in sync.gradients().values():
            grad.normal_()
        count = sum(parameter.numel() for parameter in model)
        floor = count * moved / COPY_BYTES_PER_S * 1e3
        ms = median_ms(lambda optimizer=optimizer: optimizer.step(grad_scale=1e-3), device, 10)
        rows.append({"operation": "optimizer step", "variant": name, "parameters": count, "ms": ms, "floor_ms": floor, "ratio": ms / floor})
        del model, sync, optimizer
    return rows


def reduce_scatter(device: torch.device, mebibytes: int) -> list[dict[str, Any]]:
    """Bfloat16 buffers over all ranks: the collective of torch, and the one that adds in float32 and rounds once."""
    groups = ProcessGroups.build(ParallelPlan(dp=dist.get_world_size()))
    size = mebibytes * 2**20 // 2
    size -= size % groups.dp.size
    generator = torch.Generator(device=device).manual_seed(groups.dp.rank)
    # A heavy tail, as gradients have.
    source = torch.randn(size, device=device, generator=generator)
    source = (source * torch.exp(2 * torch.randn(size, device=device, generator=generator))).bfloat16()
    work, out = source.clone(), torch.empty(size // groups.dp.size, dtype=torch.bfloat16, device=device)
    parts = [torch.empty_like(out) for _ in range(groups.dp.size)]
    dist.all_to_all(parts, list(source.chunk(groups.dp.size)))
    exact = parts[0].float()
    for part in parts[1:]:
        exact += part
    rows = []
    for wide in (False, True):

        def run(wide: bool = wide) -> None:
            start_reduce_scatter_into(out, work, groups.dp, fp32_accumulation=wide).wait()

        work.copy_(source)
        run()
        rounded = bool(torch.equal(out, exact.bfloat16()))
        error = ((out.double() - exact.double()).norm() / exact.double().norm()).item()
        norms = torch.stack([out.double().square().sum(), exact.double().square().sum()])
        dist.all_reduce(norms)
        norm_error = abs((norms[0] / norms[1]).sqrt().item() - 1)
        ms = median_ms(run, device, 20)
        rows.append(
            {"operation": "reduce-scatter", "fp32_accumulation": wide, "mib": mebibytes, "ranks": groups.dp.size, "ms": ms,
             "relative_error": error, "norm_error": norm_error, "is_fp32_sum_rounded_once": rounded}
        )  # fmt: skip
    rows[1]["time_ratio"] = rows[1]["ms"] / rows[0]["ms"]
    return rows


def measure(kind: str, elements: int, sizes: list[int]) -> list[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    rows = optimizer_step(device, elements) if dist.get_rank() == 0 else []
    dist.barrier()
    if dist.get_world_size() > 1:
        for mebibytes in sizes:
            rows += reduce_scatter(device, mebibytes)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--elements", type=int, default=10**9, help="parameters of the optimizer's step")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="sizes of the reduce-scatter's input")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rows = launch(measure, arguments.ranks, device=kind, kind=kind, elements=arguments.elements, sizes=arguments.mib)[0]
    for row in rows:
        print(json.dumps(row), flush=True)
    if arguments.output:
        record(arguments.output, {"work": "single operations", "rows": rows})


if __name__ == "__main__":
    main()
