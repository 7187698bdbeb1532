# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints with a flipped bit, cut short, swapped, or with manifests and headers that lie: noticed and named, at no great cost.

python -m tests.campaigns.checkpoint_damage --flips 10000 --swaps 1000 --lies 100000 --output docs/benchmarks/checkpoint_damage.json
"""

import argparse
import copy
import hashlib
import json
import random
import resource
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt import CheckpointingException, ShardedTensor, load, read_tensor, save
from mcore_ckpt.assets import read_asset
from mcore_ckpt.manifest import Manifest
from mcore_ckpt.storage import MemoryFolder
from tools.bench._record import record

__all__ = ["flips", "lies", "main", "swaps"]

_MANIFEST = "manifest.json"
_HOSTILE: list[Any] = [
    *(0, 1, -1, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 10**4000, 0.5, -0.0, float("nan"), float("inf"), 1e308, True, False, None),
    *(
        "",
        "x",
        "../x.safetensors",
        "/etc/passwd",
        "a" * 10_000,
        "\ud800",
        "\x00",
        "F32",
        "F64",
        "F4",
        "manifest.json",
        [],
        {},
        [[]],
        [0],
        [-1],
    ),
    *([2**40, 2**40], [2**20] * 100, {"a": 1}, [0, 0], [None], [[0], [6]], "0", "1e9"),
]


def _state(value: float) -> dict[str, Any]:
    return {
        "w": torch.arange(60.0).reshape(6, 10) + value,
        "half": [
            ShardedTensor(torch.full((3, 4), value, dtype=torch.bfloat16), (6, 4), (0, 0)),
            ShardedTensor(torch.full((3, 4), value + 1, dtype=torch.bfloat16), (6, 4), (3, 0)),
        ],
        "step": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }


def _sound(value: float) -> dict[str, bytes]:
    folder = MemoryFolder()
    assets = {"tokenizer/vocab.json": json.dumps([value + number for number in range(60)]).encode()}
    save(_state(value), folder, extra={"step": 3, "name": "caf\u00e9"}, max_file_bytes=200, assets=assets)
    return _contents(folder)


def _contents(folder: MemoryFolder) -> dict[str, bytes]:
    return {name: bytes(folder.read(name, 0, folder.size(name) or 0)) for name in folder.names()}


def _folder(contents: dict[str, bytes]) -> MemoryFolder:
    folder = MemoryFolder()
    for name, content in contents.items():
        folder.publish(name, content)
    return folder


def _verdict(contents: dict[str, bytes], names: Sequence[str]) -> str:
    """ "named" where loading raises the typed error with one of ``names`` in it."""
    try:
        folder = _folder(contents)
        load(_state(0.0), folder)
        read_asset(folder, "tokenizer/vocab.json")
    except CheckpointingException as error:
        return "named" if any(name in str(error) for name in names) else f"not named: {error}"
    return "not noticed"


def flips(number: int, seed: int = 0) -> Counter[str]:
    """Load ``number`` copies of a checkpoint with one bit flipped somewhere in its files, the manifest included."""
    rng, sound, results = random.Random(seed), _sound(1.0), Counter()
    places = [(name, place) for name, content in sound.items() for place in range(len(content))]
    want = Manifest.decode(sound[_MANIFEST])
    for _ in range(number):
        name, place = rng.choice(places)
        bad = bytearray(sound[name])
        bad[place] ^= 1 << rng.randrange(8)
        verdict = _verdict({**sound, name: bytes(bad)}, [name])
        # The case of a digit in a JSON escape carries nothing.
        if verdict == "not noticed" and name == _MANIFEST and Manifest.decode(bytes(bad)) == want:
            verdict = "same meaning"
        results[verdict] += 1
    return results


def swaps(number: int, seed: int = 0) -> Counter[str]:
    """Load ``number`` copies of a checkpoint with a file cut short, lengthened, removed, exchanged for another, or pieces exchanged."""
    rng, sound, other, results = random.Random(seed), _sound(1.0), _sound(2.0), Counter()
    shards = [name for name in sound if name != _MANIFEST]
    for number_now in range(number):
        bad, name = dict(sound), rng.choice(list(sound))
        names, content = [name], sound[name]
        kind = number_now % 6
        if kind == 0:
            bad[name] = content[: rng.randrange(len(content))]
        elif kind == 1:
            bad[name] = content + bytes(rng.randrange(1, 9)) + b"x"
        elif kind == 2 and name != _MANIFEST:
            del bad[name]
        elif kind == 3:
            one, two = rng.sample(shards, 2)
            bad[one], bad[two], names = sound[two], sound[one], [one, two]
        elif kind == 4:
            # The manifest of another save beside these files, or the other way round.
            bad[_MANIFEST], names = other[_MANIFEST], list(other)
        else:
            name = rng.choice(shards)
            one, two = sorted(rng.sample(range(len(sound[name]) - 8), 2))
            block, names = bytearray(sound[name]), [name]
            block[one : one + 8], block[two : two + 8] = block[two : two + 8], block[one : one + 8]
            if bytes(block) == sound[name]:
                continue
            bad[name] = bytes(block)
        results[_verdict(bad, names)] += 1
    return results


def lies(number: int, seed: int = 0) -> dict[str, Any]:
    """Read ``number`` checkpoints whose manifest or shard header was changed in meaning, with digests that fit the lie.

    Returns:
        How many were refused and read, the longest time of one, and what went another way than the typed error.
    """
    rng, sound = random.Random(seed), _sound(1.0)
    shards = [name for name in sound if name.endswith(".safetensors")]
    outcome: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    slowest = 0.0
    for _ in range(number):
        bad = dict(sound)
        manifest = json.loads(sound[_MANIFEST])
        if rng.random() < 0.5:
            _change(rng, manifest, rng.randint(1, 3))
        else:
            name = rng.choice(shards)
            bad[name] = _lying_shard(rng, sound[name])
            manifest["files"][name] = {"bytes": len(bad[name]), "sha256": hashlib.sha256(bad[name]).hexdigest()}
        bad[_MANIFEST] = _seal(manifest)
        if rng.random() < 0.1:
            bad[_MANIFEST] = _scratch(rng, bad[_MANIFEST])
        start = time.monotonic()
        for action in (_load, _read_each):
            try:
                action(_folder(bad))
                outcome["read"] += 1
            except CheckpointingException:
                outcome["refused"] += 1
            except Exception as error:
                wrong[f"{type(error).__name__}: {str(error)[:100]}"] += 1
        slowest = max(slowest, time.monotonic() - start)
    return {**outcome, "slowest_s": round(slowest, 3), "other_errors": dict(wrong)}


def _load(folder: MemoryFolder) -> None:
    load(_state(0.0), folder, strict=False)


def _read_each(folder: MemoryFolder) -> None:
    for name in ("w", "half", "step", "none"):
        read_tensor(folder, name)
    read_asset(folder, "tokenizer/vocab.json")


def _seal(manifest: Any) -> bytes:
    if isinstance(manifest, dict):
        manifest.pop("sha256", None)
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return _dump(manifest)


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def _change(rng: random.Random, tree: Any, times: int) -> None:
    for _ in range(times):
        spots: list[tuple[Any, Any]] = []
        _collect(tree, spots)
        if not spots:
            return
        node, key = rng.choice(spots)
        kind = rng.randrange(5)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        elif kind == 2 and isinstance(node, dict):
            node[rng.choice(["w", "../x", "", "dtype", "x.safetensors"])] = copy.deepcopy(node[key])
        elif kind == 3 and type(node[key]) is int:
            node[key] += rng.choice((-1, 1, 8, -8, 2**32))
        else:
            node[key] = copy.deepcopy(rng.choice(_PLAUSIBLE))


# Numbers too long for Python's own parser are refused before anything of ours sees them; one case in the tests is enough.
_PLAUSIBLE = [value for value in _HOSTILE if not (type(value) is int and value > 10**40)]


def _collect(node: Any, spots: list[tuple[Any, Any]]) -> None:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        spots.append((node, key))
        _collect(value, spots)


def _lying_shard(rng: random.Random, content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if rng.random() < 0.2:
        return _scratch(rng, content)
    _change(rng, header, rng.randint(1, 3))
    text = _dump(header)
    said = len(text) if rng.random() < 0.9 else rng.choice((0, 1, 2**63, 2**64 - 1, len(text) + len(data) + 1, len(text) - 1))
    return struct.pack("<Q", said) + text + data


def _scratch(rng: random.Random, content: bytes) -> bytes:
    bad = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        if bad:
            bad[rng.randrange(len(bad))] = rng.randrange(256)
    return bytes(bad[: rng.choice((len(bad), len(bad), rng.randrange(len(bad) + 1)))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, write its figures, return 1 where anything went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("flips", 10_000), ("swaps", 1_000), ("lies", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    _limit_memory(256 * 2**20)
    start = time.monotonic()
    trials: dict[str, Callable[[int, int], Any]] = {"flips": flips, "swaps": swaps, "lies": lies}
    results = {name: trial(getattr(options, name), options.seed) for name, trial in trials.items()}
    bad = sum(count for name in ("flips", "swaps") for verdict, count in results[name].items() if verdict not in ("named", "same meaning"))
    bad += sum(results["lies"]["other_errors"].values()) + (results["lies"]["slowest_s"] > 10)
    figures = {**{name: dict(result) for name, result in results.items()}, "bad": bad, "seconds": round(time.monotonic() - start, 1)}
    print(json.dumps(figures, indent=1))
    if options.output:
        record(options.output, figures)
    return 1 if bad else 0


def _limit_memory(more: int) -> None:
    """Let this process grow by ``more`` bytes and no further: an allocation that a lie asks for fails, and is reported."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


if __name__ == "__main__":
    raise SystemExit(main())
