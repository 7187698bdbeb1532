# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether a published model fits a number of GPUs at all, and the words for one that does not."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from mcore_tools.recipes._config import RunConfig
from mcore_tools.recipes._load import LoadConfig
from mcore_tools.recipes._memory import RunMemory, run_memory
from mcore_tools.recipes._override import override
from mcore_tools.recipes._published import LAYOUTS, PUBLISHED, TUNING, Job
from mcore_tools.recipes._rl import RLConfig
from mcore_tools.recipes._sft import SFTConfig

GPU_GIB = 141
"""Memory of the GPUs that layouts are for."""
_USABLE = 0.94
_MOST_GPUS = 4096

Kind = Literal["pretrain"] | Job
"""What a layout is for; "pretrain" is a recipe as it stands."""
KINDS: Mapping[Kind, str] = {"pretrain": "mcore train", "sft": "mcore sft", "lora": "mcore sft with adapters", "rl": "mcore rl"}
"""Kind -> the command that takes its layouts."""

_OFFLOADED = ("optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=1.0")
# Adapters have little state.
_HOSTED: Mapping[Kind, tuple[str, ...]] = {
    "pretrain": _OFFLOADED, "sft": _OFFLOADED, "lora": (), "rl": ("rl.memory.stream_optimizer=true",)
}  # fmt: skip


def usable_gib(gpu_gib: float = GPU_GIB) -> float:
    """What may be planned with of a GPU; the rest is for fragmentation."""
    return gpu_gib * _USABLE


def layouts_of(kind: Kind, name: str) -> Mapping[int, tuple[str, ...]]:
    """Number of GPUs -> fields, of a recipe; empty where there is no layout."""
    return (LAYOUTS if kind == "pretrain" else TUNING[kind]).get(name, {})


def sized_run(name: str, kind: Kind, fields: Sequence[str] = ()) -> RunConfig:
    """The run that a layout is planned for: the recipe, or rows of 4,096 tokens on conversations, of 1,024 with rewards.

    Raises:
        RecipeError: fields that the run refuses.
    """
    config = PUBLISHED[name]()
    if kind == "pretrain":
        return override(config, fields)
    rows = {"seq_len": 1024, "global_batch_size": 64} if kind == "rl" else {"seq_len": 4096, "global_batch_size": 8}
    part: dict[str, Any] = {"rl": RLConfig()} if kind == "rl" else {"sft": SFTConfig(data=("chat.jsonl",))}
    config = dataclasses.replace(config, load=LoadConfig(path="published"), train=dataclasses.replace(config.train, **rows), **part)
    return override(config, [*(["lora.rank=16"] if kind == "lora" else []), *fields])


@functools.lru_cache(maxsize=256)
def leanest(name: str, kind: Kind, gpus: int) -> tuple[tuple[str, ...], RunMemory] | None:
    """The layout that needs least memory, however slow: all is recomputed, optimizer state is in host memory, gradients are narrow.

    Args:
        name: a published recipe.
        kind: what the layout is for.
        gpus: ranks.

    Returns:
        Its fields and its memory; None where no degrees divide the GPUs, the model and the batch.
    """
    best: tuple[tuple[str, ...], RunMemory] | None = None
    for fields in _candidates(name, kind, gpus):
        try:
            memory = run_memory(sized_run(name, kind, fields), exact=False)
        except ValueError:
            # Degrees that do not divide, or choices that a run refuses together.
            continue
        if best is None or memory.total < best[1].total:
            best = fields, memory
    return best


def missing_layout(name: str, kind: Kind, gpus: int) -> str:
    """One line that says why a recipe has no layout for so many GPUs, and which number or kind has one."""
    layouts = layouts_of(kind, name)
    numbers = ", ".join(map(str, layouts)) or "no number of"
    lean = leanest(name, kind, gpus) if 0 < gpus <= _MOST_GPUS else None
    if lean is None:
        return f"{kind} {name!r} has layouts for {numbers} GPUs, found @{gpus}; leave it out and set the fields that mcore plan prints"
    fields, memory = lean
    if memory.gib < usable_gib():
        chosen = " ".join(f"--set {field}" for field in fields)
        return f"{kind} {name!r} has layouts for {numbers} GPUs, found @{gpus}; the leanest takes {memory.gib:.0f} GiB a GPU: {chosen}"
    count = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    others = [KINDS[other] for other in KINDS if other != kind and gpus in layouts_of(other, name)]
    if layouts:
        remedies = [f"{name}@{min(layouts)} is the smallest that does"]
    else:
        # Engines beside the trainer are what has no room; those of servers leave what it takes without them.
        remedies = [f"with answers of servers (rl.served.urls) the fields of {name}@{min(layouts_of('sft', name))} of mcore sft do"]
    if others:
        remedies.append(f"{count} {'are' if gpus > 1 else 'is'} enough for {', '.join(others)}")
    return (
        f"{kind} {name!r} does not fit {count} of {GPU_GIB} GiB: the leanest layout takes {memory.gib:.0f} GiB a GPU "
        f"({memory.text()}), and {usable_gib():.0f} may be planned with; {'; '.join(remedies)}"
    )


def _candidates(name: str, kind: Kind, gpus: int) -> Iterator[tuple[str, ...]]:
    """Fields of all degrees, each with what saves most memory beside it."""
    # What a layout of this kind needs whatever its degrees are.
    needed = {field for fields in layouts_of(kind, name).values() for field in fields if field.startswith(("lora.targets", "moe."))}
    rewarded = ("rl.num_groups=64", "train.global_batch_size=512") if kind == "rl" else (f"train.global_batch_size={gpus}",)
    common = ("recompute.granularity=full", *sorted(needed), *(rewarded if gpus > 8 and kind != "pretrain" else ()))
    common += _narrow_engine(name, gpus) if kind == "rl" else ()
    for degrees in _degrees(gpus, PUBLISHED[name]()):
        plan = tuple(f"plan.{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
        sliced = str(degrees["dp"] > 1).lower()
        slices = (f"ddp.use_distributed_optimizer={sliced}", f"optimizer.use_distributed_optimizer={sliced}")
        narrow = ("lora.base_dtype=fp8_weight_only",) if kind == "lora" else ("ddp.grad_reduce_in_fp32=false", *slices)
        yield (*common, *plan, *_HOSTED[kind], *narrow)
        if degrees["dp"] > 1:
            yield (*common, *plan, *_HOSTED[kind], "data_parallel=fsdp")


def _narrow_engine(name: str, gpus: int) -> tuple[str, ...]:
    """The field of engines over as many ranks as divide the GPUs and the model, at most a machine's; none for engines of one rank."""
    for tp in (8, 4, 2):
        fields = (f"plan.tp={tp}", f"rl.engine_tp={tp}")
        try:
            sized_run(name, "rl", fields)
        except ValueError:
            continue
        if gpus % tp == 0:
            return fields[1:]
    return ()


def _degrees(gpus: int, config: RunConfig) -> Iterator[dict[str, int]]:
    """Degrees by axis; where an axis has none, it is 1."""
    experts = config.moe.num_moe_experts if config.moe else 1
    for tp in (1, 2, 4, 8):
        for pp in range(1, min(gpus // tp, config.model.num_layers) + 1):
            if gpus % (tp * pp):
                continue
            dp = gpus // (tp * pp)
            for ep in range(1, min(tp * dp, experts) + 1):
                if tp * dp % ep == 0 and experts % ep == 0:
                    yield {"tp": tp, "pp": pp, "ep": ep, "dp": dp}
