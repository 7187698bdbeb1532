# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Random pairs of layouts: what ranks of one save, ranks of the other load, model and optimizer, bit for bit.

python -m tests.campaigns.checkpoint_layouts --pairs 500 --output docs/benchmarks/checkpoint_layouts.json

All ranks of a layout live in this process: what they hold is saved together, and loaded rank by rank. Cuts are as uneven as chance makes
them: sizes that no degree divides, ranks that hold nothing, stages of different lengths.
"""

import argparse
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt import ShardedTensor, save
from mcore_ckpt.optimizer_layouts import load_any_layout, save_in_layout
from mcore_ckpt.storage import MemoryFolder
from mcore_parallel.groups._shards import boxes
from tools.bench._record import record

__all__ = ["Layout", "main", "pair"]

_STATES = ("exp_avg", "exp_avg_sq", "master")
_ON_DISK = ("native", "fully_reshardable", "dp_reshardable")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees, and how data-parallel ranks share what they have."""

    tp: int
    pp: int
    vpp: int
    dp: int
    ep: int
    etp: int
    fsdp: bool
    """Parameters are cut over dp too, rows of the first dim; else only the optimizer's state is, as flat ranges."""
    sliced: bool
    """The optimizer's state is cut at all."""

    @classmethod
    def draw(cls, rng: random.Random) -> "Layout":
        """A random one of at most 24 ranks."""
        while True:
            tp, pp, dp = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4))
            etp, ep = rng.choice((1, 2)), rng.choice((1, 2, 3, 4))
            if tp * pp * dp <= 24 and tp * dp % (etp * ep) == 0:
                return cls(
                    tp=tp, pp=pp, vpp=rng.choice((1, 1, 2)), dp=dp, ep=ep, etp=etp, fsdp=rng.random() < 0.3, sliced=rng.random() < 0.7
                )


@dataclass(frozen=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    layer: int | None
    cuts: tuple[tuple[str, int], ...]
    """(axis, dim)"""

    @property
    def is_expert(self) -> bool:
        return any(axis == "ep" for axis, _ in self.cuts)


def _weights(rng: random.Random) -> list[_Weight]:
    """A model of random sizes, most of them odd."""
    layers, hidden, ffn = rng.randint(2, 4), rng.randint(3, 9), rng.randint(3, 11)
    groups, rows, vocab, experts = rng.randint(2, 5), rng.randint(1, 4), rng.randint(5, 17), rng.randint(3, 7)
    found = [_Weight("embedding.weight", (vocab, hidden), 0, (("tp", 0),)), _Weight("final_norm.weight", (hidden,), layers - 1, ())]
    for layer in range(layers):
        at = f"layers.{layer}."
        found += [
            _Weight(f"{at}attention.qkv.weight", (groups, rows, hidden), layer, (("tp", 0),)),
            _Weight(f"{at}attention.out.weight", (hidden, groups * rows), layer, (("tp", 1),)),
            _Weight(f"{at}input_norm.weight", (hidden,), layer, ()),
            _Weight(f"{at}mlp.up.weight", (2, ffn, hidden), layer, (("tp", 1),)),
            _Weight(f"{at}mlp.experts.up", (experts, 2, ffn, hidden), layer, (("ep", 0), ("etp", 2))),
            _Weight(f"{at}scale", (), layer, ()),
        ]
    return found


def _borders(rng: random.Random, size: int, parts: int) -> list[int]:
    """Ascending cuts of 0 .. size into ``parts``, even as ``torch.chunk`` makes them or anywhere."""
    if rng.random() < 0.5:
        each = -(-size // parts)
        return [min(size, each * part) for part in range(parts + 1)]
    return [0, *sorted(rng.randint(0, size) for _ in range(parts - 1)), size]


def _held(rng: random.Random, layout: Layout, weights: Sequence[_Weight], whole: dict[str, Tensor]) -> list[dict[str, list[ShardedTensor]]]:
    """What each rank holds: zeros to be filled, or the values, by ``whole``."""
    ranks: list[dict[str, list[ShardedTensor]]] = [{} for _ in range(layout.tp * layout.pp * layout.dp)]
    layers = 1 + max(weight.layer or 0 for weight in weights)
    stages = _borders(rng, layers, layout.pp * layout.vpp)
    for weight in weights:
        chunk = next(number for number in range(layout.pp * layout.vpp) if stages[number] <= (weight.layer or 0) < stages[number + 1])
        stage, inner = chunk % layout.pp, layout.tp * layout.dp
        degrees = {"ep": layout.ep, "etp": layout.etp} if weight.is_expert else {"tp": layout.tp}
        data = inner // (layout.ep * layout.etp) if weight.is_expert else layout.dp
        borders = {axis: _borders(rng, weight.shape[dim], degrees[axis]) for axis, dim in weight.cuts}
        for coordinates in itertools.product(*(range(degree) for degree in degrees.values())):
            place = dict(zip(degrees, coordinates, strict=True))
            offset, shape = [0] * len(weight.shape), list(weight.shape)
            for axis, dim in weight.cuts:
                begin, end = borders[axis][place[axis] : place[axis] + 2]
                offset[dim], shape[dim] = begin, end - begin
            model = 0
            for axis, degree in degrees.items():
                model = model * degree + place[axis]
            copies = 0 if weight.cuts else model
            numel = torch.Size(shape).numel()
            flat, rows = _borders(rng, numel, data), _borders(rng, shape[0] if shape else 1, data)
            for replica in range(data):
                rank = ranks[(stage * inner) + model * data + replica]
                everything = [((0,) * len(shape), tuple(shape))]
                if layout.fsdp and shape:
                    mine = [((rows[replica], *(0 for _ in shape[1:])), (rows[replica + 1] - rows[replica], *shape[1:]))]
                    _add(rank, weight, mine, offset, copies, whole, ("model", *_STATES))
                    continue
                _add(rank, weight, everything, offset, copies * data + replica, whole, ("model",))
                if layout.sliced:
                    _add(rank, weight, boxes(shape, flat[replica], flat[replica + 1]), offset, copies, whole, _STATES)
                else:
                    _add(rank, weight, everything, offset, copies * data + replica, whole, _STATES)
    return ranks


def _add(
    rank: dict[str, list[ShardedTensor]],
    weight: _Weight,
    local: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    offset: Sequence[int],
    replica: int,
    whole: dict[str, Tensor],
    kinds: Sequence[str],
) -> None:
    for kind in kinds:
        name = f"model.{weight.name}" if kind == "model" else f"optimizer.{kind}.{weight.name}"
        for begin, size in local:
            start = tuple(one + other for one, other in zip(begin, offset, strict=True))
            index = tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))
            rank.setdefault(name, []).append(ShardedTensor(whole[name][index].clone(), weight.shape, start, replica))


def pair(seed: int) -> Counter[str]:
    """Save in one random layout and load in another; counts tensors and parts, and what was not equal."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights = _weights(rng)
    whole: dict[str, Tensor] = {}
    for weight in weights:
        bits = torch.randint(-(2**15), 2**15, weight.shape, generator=generator).to(torch.int16)
        whole[f"model.{weight.name}"] = bits.view(torch.bfloat16)
        for kind in _STATES:
            bits = torch.randint(-(2**31), 2**31, weight.shape, generator=generator).to(torch.int32)
            whole[f"optimizer.{kind}.{weight.name}"] = bits.view(torch.float32)
    first, second = Layout.draw(rng), Layout.draw(rng)
    together: dict[str, list[ShardedTensor]] = {}
    for held in _held(rng, first, weights, whole):
        for name, parts in held.items():
            together.setdefault(name, []).extend(parts)
    folder, on_disk, format = MemoryFolder(), rng.choice(_ON_DISK), rng.choice(("native", "torch_dist"))
    extra = {"step": seed}
    if on_disk == "native":
        save(together, folder, extra=extra, format=format, max_file_bytes=4096)
    else:
        save_in_layout(together, folder, on_disk, extra=extra, format=format)
    found: Counter[str] = Counter({f"on disk {on_disk}": 1, f"format {format}": 1, "tensors": len(whole)})
    blank = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for rank, held in enumerate(_held(rng, second, weights, blank)):
        answer = load_any_layout(held, folder, strict=False, verify=rank == 0)
        found["extra lost"] += answer != extra
        for name, parts in held.items():
            for part in parts:
                found["parts"] += 1
                wide = torch.int16 if part.data.dtype == torch.bfloat16 else torch.int32
                index = tuple(slice(begin, begin + size) for begin, size in zip(part.offset, part.data.shape, strict=True))
                found["unequal"] += not torch.equal(part.data.view(wide), whole[name][index].view(wide))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, write its figures, return 1 where anything was unequal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, totals = time.monotonic(), Counter[str]()
    for seed in range(options.seed, options.seed + options.pairs):
        try:
            totals += pair(seed)
        except Exception as error:
            totals[f"seed {seed}: {type(error).__name__}: {str(error)[:200]}"] += 1
            totals["failed"] += 1
    figures: dict[str, Any] = {"pairs": options.pairs, "unequal": 0, "failed": 0, "extra lost": 0, **totals}
    figures["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(figures, indent=1))
    if options.output:
        record(options.output, figures)
    return 1 if figures["unequal"] or figures["failed"] or figures["extra lost"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
