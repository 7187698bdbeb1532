# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What every result file says beside its numbers."""

import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_WHEELS = ("mcore-parallel", "mcore-moe", "megatron-fsdp", "mcore-ckpt", "mcore-inference", "mcore-rl")
_OTHERS = ("triton", "transformer-engine", "megatron-core", "transformers", "peft")


def record(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results`` with the machine, the versions and the command that made them."""
    cuda = torch.cuda.is_available()
    facts = {
        "command": " ".join(["python -m", *_module_name(), *map(_without_folder, sys.argv[1:])]),
        "machine": {
            "gpu": torch.cuda.get_device_name(0) if cuda else None,
            "num_gpus": torch.cuda.device_count() if cuda else 0,
            "cpu": platform.processor() or platform.machine(),
            "system": platform.system(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **_installed()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps({**facts, **results}, indent=1) + "\n")
    # A call that is cut leaves the last one.
    part.replace(path)


def _module_name() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [spec.name] if spec else [Path(sys.argv[0]).name]


def _without_folder(argument: str) -> str:
    """Where a file lay on the machine is nobody's business."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _installed() -> dict[str, str]:
    versions = {}
    for wheel in (*_WHEELS, *_OTHERS):
        try:
            versions[wheel] = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return versions
