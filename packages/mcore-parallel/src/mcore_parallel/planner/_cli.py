# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Command ``mcore-plan``: layouts for a model and a number of GPUs."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from mcore_parallel._command_line import CommandParser
from mcore_parallel._quiet_pipe import quiet_pipe
from mcore_parallel.data_parallel import DistributedDataParallelConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.planner._cost import Cluster
from mcore_parallel.planner._errors import PlannerError
from mcore_parallel.planner._presets import PRESETS, find_model, parse_overrides
from mcore_parallel.planner._scale import ScalePoint, scale
from mcore_parallel.planner._search import AXES, RECOMPUTE, Limits, Proposal, advice, propose
from mcore_parallel.planner._workload import Workload

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_COLUMNS = (
    "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "sp", "dist opt", "recompute",
    "params", "grads", "optim", "activ", "buffers", "total GiB", "fits", "bubble", "sent GB", "step s",
)  # fmt: skip


@quiet_pipe
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when a layout fits, 1 when none does, 2 for inputs that cannot be planned with."""
    arguments = _parser().parse_args(argv)
    try:
        workload, cluster, limits = _read(arguments)
        if arguments.scale:
            return _scale(scale(workload, [arguments.gpus, *arguments.scale], cluster, limits=limits), arguments.json)
        proposals = propose(workload, arguments.gpus, cluster, limits=limits, top=arguments.top)
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    fits = proposals[0].fits
    if arguments.json:
        print(json.dumps(_report(workload, arguments.gpus, cluster, proposals), indent=1))
    else:
        _show(workload, arguments.gpus, cluster, proposals)
        if fits:
            print("the first as fields of a run: " + " ".join(f"--set {change}" for change in _fields(proposals[0], workload)))
    if not fits:
        print(f"error: {advice(proposals[0], workload, limits)}", file=sys.stderr)
    return 0 if fits else 1


def _read(arguments: argparse.Namespace) -> tuple[Workload, Cluster, Limits]:
    words = list(arguments.model)
    name = words.pop(0) if "=" not in words[0] else None
    model = find_model(name, parse_overrides(words))
    narrow = arguments.precision_aware_optimizer
    moments: dict[str, Any] = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16} if narrow else {}
    workload = Workload(
        model=model,
        sequence=arguments.sequence,
        global_batch=arguments.global_batch,
        micro_batch=arguments.micro_batch,
        dtype=_DTYPES[arguments.dtype],
        optimizer=OptimizerConfig(lr=1e-4, use_precision_aware_optimizer=narrow, **moments),
    )
    cluster = Cluster(gpu_memory_gib=arguments.gpu_memory_gib, domain=arguments.nvlink_domain, headroom=arguments.headroom)
    fixed = parse_overrides(arguments.fix)
    if wrong := [axis for axis, degree in fixed.items() if not isinstance(degree, int) or isinstance(degree, bool)]:
        raise PlannerError(f"{wrong[0]}={fixed[wrong[0]]} must be an integer")
    sync = DistributedDataParallelConfig(gradient_accumulation_fusion=arguments.gradient_accumulation_fusion)
    recompute = tuple(arguments.recompute or RECOMPUTE)
    limits = Limits(
        fixed=fixed,
        recompute=recompute,
        sync=sync,
        distributed_optimizer=not arguments.no_distributed_optimizer,
        zero_dp_strategy="optim_grads_params" if arguments.data_parallel == "fsdp" else None,
    )
    return workload, cluster, limits


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mcore-plan", description="Layouts for a model and a number of GPUs, with the memory of a rank.")
    parser.add_argument(
        "--model", nargs="+", required=True, metavar="NAME|FILE|FIELD=VALUE",
        help=f"{', '.join(PRESETS)}, or the path of a config.json or of its folder; fields after it replace the model's",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, required=True, help="ranks of the world")
    parser.add_argument("--scale", type=int, nargs="+", metavar="GPUS", help="estimate the fastest layout of further numbers of GPUs, too")
    parser.add_argument("--gpu-memory-gib", type=float, default=141.0, help="memory of a GPU (default: %(default)s)")
    parser.add_argument("--sequence", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences of one optimizer step")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences a replica works on at once (default: %(default)s)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of parameters and activations (default: %(default)s)")
    parser.add_argument("--fix", nargs="+", default=[], metavar="AXIS=N", help=f"look at one degree of an axis only: {', '.join(AXES)}")
    parser.add_argument("--recompute", nargs="+", choices=list(RECOMPUTE), help="choices to look at (default: all)")
    parser.add_argument(
        "--data-parallel", choices=("ddp", "fsdp"), default="ddp",
        help="fsdp divides parameters and gradients among replicas, too (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-distributed-optimizer", action="store_true", help="every replica keeps the whole optimizer state")
    parser.add_argument("--precision-aware-optimizer", action="store_true", help="16-bit moments and master remainders")
    parser.add_argument(
        "--gradient-accumulation-fusion", action=argparse.BooleanOptionalAction, default=True,
        help="layers add their weight gradients to the buffers themselves",
    )  # fmt: skip
    parser.add_argument("--nvlink-domain", type=int, default=8, help="GPUs that reach each other over NVLink (default: %(default)s)")
    parser.add_argument("--headroom", type=float, default=0.04, help="part of the memory left for fragmentation (default: %(default)s)")
    parser.add_argument("--top", type=int, default=10, help="layouts to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _report(workload: Workload, gpus: int, cluster: Cluster, proposals: Sequence[Proposal]) -> dict[str, Any]:
    model = workload.model
    facts = {"parameters": model.num_parameters, "active_parameters": model.num_active_parameters, "gpus": gpus}
    return {
        **facts,
        "gpu_memory_gib": cluster.gpu_memory_gib,
        "sequence": workload.sequence,
        "global_batch": workload.global_batch,
        "micro_batch": workload.micro_batch,
        "layouts": [_entry(proposal) | {"fields": _fields(proposal, workload)} for proposal in proposals],
    }


def _fields(proposal: Proposal, workload: Workload) -> list[str]:
    """A layout as ``mcore train`` takes it."""
    layout, plan = proposal.layout, proposal.layout.plan
    degrees = {axis: getattr(plan, axis) for axis in ("tp", "pp", "vpp", "cp", "ep", "dp")}
    changes = [f"plan.{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    if plan.etp is not None:
        changes.append(f"plan.etp={plan.etp}")
    if layout.zero_dp_strategy is not None:
        changes.append("data_parallel=fsdp")
    elif layout.sync.use_distributed_optimizer:
        changes.append("optimizer.use_distributed_optimizer=true")
    if (recompute := layout.recompute) is not None:
        full = recompute.granularity == "full"
        changes.append("recompute.granularity=full" if full else f"recompute.modules=[{','.join(recompute.modules)}]")
    sizes = {"global_batch_size": workload.global_batch, "micro_batch_size": workload.micro_batch, "seq_len": workload.sequence}
    return [*changes, *(f"train.{name}={size}" for name, size in sizes.items())]


def _entry(proposal: Proposal) -> dict[str, Any]:
    plan, memory, cost = proposal.layout.plan, proposal.memory, proposal.cost
    return {
        **{axis: getattr(plan, axis) for axis in ("tp", "pp", "vpp", "cp", "ep")},
        "etp": plan.expert_tp,
        "dp": plan.dp,
        "sequence_parallel": proposal.layout.sequence_parallel,
        "distributed_optimizer": proposal.layout.sync.use_distributed_optimizer,
        "recompute": proposal.recompute,
        "fits": proposal.fits,
        "worst_stage": memory.stage,
        "worst_moment": memory.moment,
        "gib": {name: round(value, 3) for name, value in memory.gib().items()},
        "step_s": {name: round(getattr(cost, name), 4) for name in (*_COSTS, "total")},
        "bytes_sent_per_gpu": round(cost.bytes_sent),
    }


_COSTS = ("compute", "bubble", "tensor", "context", "expert", "pipeline", "data", "optimizer")


def _row(proposal: Proposal) -> list[str]:
    plan, cost, gib = proposal.layout.plan, proposal.cost, proposal.memory.gib()
    degrees = [plan.tp, plan.pp, plan.vpp, plan.cp, plan.ep, plan.expert_tp, plan.dp]
    choices = ["yes" if on else "-" for on in (proposal.layout.sequence_parallel, proposal.layout.sync.use_distributed_optimizer)]
    memory = [f"{gib[name]:.1f}" for name in ("params", "grads", "optimizer", "activations", "buffers", "total")]
    bubble = f"{100 * cost.bubble / cost.total:.0f}%"
    speed = [bubble, f"{cost.bytes_sent / 1e9:.0f}", f"{cost.total:.2f}"]
    return [*map(str, degrees), *choices, proposal.recompute, *memory, "yes" if proposal.fits else "no", *speed]


def _scale(points: Sequence[ScalePoint], as_json: bool) -> int:
    estimates = [
        {
            "gpus": point.gpus, "batch": point.batch, "global_batch": point.workload.global_batch,
            **{axis: getattr(point.proposal.layout.plan, axis) for axis in ("tp", "pp", "vpp", "cp", "ep", "dp")},
            "recompute": point.proposal.recompute, "step_s": round(point.proposal.cost.total, 3),
            "tokens_per_s_per_gpu": round(point.tokens_per_s_per_gpu), "tflops_per_gpu": round(point.flops_per_gpu / 1e12),
            "efficiency": round(point.efficiency, 3),
        }
        for point in points
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"points": estimates}, indent=1))
    else:
        _print_columns(tuple(estimates[0]), [[str(value) for value in row.values()] for row in estimates])
    return 0


def _show(workload: Workload, gpus: int, cluster: Cluster, proposals: Sequence[Proposal]) -> None:
    model = workload.model
    active = f", {model.num_active_parameters / 1e9:.1f} B active" if model.experts is not None else ""
    print(
        f"{model.num_parameters / 1e9:.1f} B parameters{active}; {gpus} GPUs of {cluster.gpu_memory_gib:g} GiB; "
        f"{workload.global_batch} sequences of {workload.sequence} tokens a step, {workload.micro_batch} at once"
    )
    rows = [_row(proposal) for proposal in proposals]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(*_COLUMNS)
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    _print_columns(_COLUMNS, rows)


def _print_columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
