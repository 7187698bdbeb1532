# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Command ``mcore-doctor``: which path each operation takes on this machine, and why; whether it reaches the others of a run."""

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mcore_parallel._command_line import CommandParser
from mcore_parallel._quiet_pipe import quiet_pipe
from mcore_parallel.backends._factory import missing_units
from mcore_parallel.backends._fp8_config import RECIPES, Fp8Config
from mcore_parallel.backends._torch import RECIPES_OF_TORCH
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.guard import inspect_network
from mcore_parallel.nn import AttentionSpec, attention_capabilities, select_attention


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What decides the paths.

    Example:
        >>> [row.path for row in diagnose(Machine(capability=None, triton=None, transformer_engine=None)) if row.operation == "norm"]
        ['torch code']
    """

    capability: tuple[int, int] | None
    """Compute capability of the GPU; None without one."""
    triton: str | None
    """Version of Triton; None where it is not installed."""
    transformer_engine: str | None
    """Version of Transformer Engine; None where it is not installed."""

    @classmethod
    def here(cls) -> "Machine":
        """This machine; nothing optional is imported."""
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return cls(capability=capability, triton=_version("triton"), transformer_engine=_version("transformer_engine"))


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The path of one operation."""

    operation: str
    path: str
    reason: str


def diagnose(machine: Machine) -> list[Diagnosis]:
    """One line an operation, in bfloat16 on a GPU and in float32 on a CPU, outside ``torch.compile``.

    Args:
        machine: attention's cores are looked up by what is installed here, everything else by what stands in ``machine``.
    """
    rows = [*_kernels(machine), *_products(machine), *_attention(machine), *_recipes(machine), *_communication(machine)]
    return [Diagnosis(operation=operation, path=path, reason=reason) for operation, path, reason in rows]


Row = tuple[str, str, str]


def _kernels(machine: Machine) -> Iterator[Row]:
    """Operations between the products: one Triton kernel each way, or torch code."""
    if machine.capability is None:
        path, reason = "torch code", "no CUDA device"
    elif machine.triton is None:
        path, reason = "torch code", 'Triton is not installed; pip install "mcore-parallel[triton]" gives one kernel each way'
    else:
        path, reason = "Triton kernel", "one kernel forward and one backward; graphs under torch.compile fuse the torch code instead"
    for operation in ("norm", "rotary embedding", "gated activation", "linear cross-entropy, rows", "fp8 casts"):
        yield operation, path, reason


def _products(machine: Machine) -> Iterator[Row]:
    on_gpu = machine.capability is not None
    yield "linear", "torch", 'cuBLAS by torch; layers with backend "te" go through Transformer Engine' if on_gpu else "no CUDA device"
    if on_gpu:
        yield "weight gradient", "added in the product", "torch.addmm with a float32 sum, when data parallelism accumulates in layers"
        yield "grouped linear", "grouped_mm", "torch.nn.functional.grouped_mm for bfloat16; other dtypes take one product an expert"
    else:
        yield "weight gradient", "product and sum", "no CUDA device"
        yield "grouped linear", "one product an expert", "no CUDA device"
    if machine.transformer_engine is None:
        yield 'backend "te"', "refused", 'transformer_engine is not installed; pip install "mcore-parallel[te]"'
    elif not on_gpu:
        yield 'backend "te"', "refused", "no CUDA device"
    else:
        yield 'backend "te"', f"transformer_engine {machine.transformer_engine}", "imported when a model asks for it"
        yield (
            'grouped linear, backend "te"',
            "te.GroupedLinear",
            "takes the rows of each expert on the host, so every call waits for the device",
        )


def _attention(machine: Machine) -> Iterator[Row]:
    device, dtype = ("cpu", torch.float32) if machine.capability is None else ("cuda", torch.bfloat16)
    kinds: dict[str, dict[str, Any]] = {
        "causal": {},
        "bidirectional": {"causal": False},
        "window of 4096": {"window": (4095, 0)},
        "learnable sinks": {"softmax_type": "learnable"},
        "packed sequences": {"packed": True},
        "values of another width": {"value_dim": 64},
    }
    for kind, options in kinds.items():
        spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype, device=device, **options)
        row, reason = select_attention(spec, ProcessGroups.single())
        yield f"attention, {kind}", row.backend, reason
    able = [row.backend for row in attention_capabilities() if row.cp]
    yield "attention, cp > 1", " or ".join(able), "splits sequences over ranks"


def _recipes(machine: Machine) -> Iterator[Row]:
    for recipe in RECIPES:
        fp8, operation = Fp8Config(recipe=recipe), f"fp8, {recipe}"
        if reason := missing_units(fp8, machine.capability):
            yield operation, "refused", reason
            continue
        usable = ["torch"] if recipe in RECIPES_OF_TORCH else []
        if machine.transformer_engine is not None and machine.capability is not None and recipe != "rowwise":
            usable.append("te")
        if not usable:
            yield operation, "refused", 'needs backend "te", which is refused here'
        elif machine.capability is None:
            yield operation, "torch, emulated", "no CUDA device: exact fp8 values, multiplied in float32"
        else:
            yield operation, " or ".join(usable), "this GPU has the units"


def _communication(machine: Machine) -> Iterator[Row]:
    operation = "symmetric buffer"
    if machine.capability is None:
        yield operation, "refused", "no CUDA device; collectives move what kernels would store in the memory of other GPUs"
    elif machine.triton is None:
        yield operation, "copies", 'Triton is not installed; pip install "mcore-parallel[triton]" lets kernels store in other GPUs'
    else:
        yield operation, "Triton kernels", "they store in the memory of the other GPUs of this host that are peers, over NVLink or PCIe"


@quiet_pipe
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 when a setting of the network in the environment cannot work."""
    parser = CommandParser(prog="mcore-doctor", description="Which path each operation takes on this machine, and why.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    machine = Machine.here()
    about = {"python": platform.python_version(), "torch": torch.__version__, **_device(), **asdict(machine)}
    rows, network = diagnose(machine), inspect_network(os.environ)
    status = int(any(row.is_problem for row in network))
    if arguments.json:
        report = {"machine": about, "operations": [asdict(row) for row in rows], "network": [asdict(row) for row in network]}
        print(json.dumps(report, indent=1))
        return status
    print(", ".join(f"{name} {_words(value)}" for name, value in about.items()))
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("operation", "path")]
    for row in rows:
        print(f"{row.operation:<{widths[0]}}  {row.path:<{widths[1]}}  {row.reason}")
    for row in network:
        print(f"{'network, problem' if row.is_problem else 'network':<{widths[0]}}  {row.setting} {row.detail}")
    return status


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"device": None, "cuda": torch.version.cuda}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _words(value: Any) -> str:
    return "none" if value is None else ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _version(name: str) -> str | None:
    """Of an installed library, without importing it."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
