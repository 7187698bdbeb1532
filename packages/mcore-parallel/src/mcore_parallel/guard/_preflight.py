# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Configurations as flat fields, compared before a run: every rank learns of a difference, or of a rank that does not come."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from mcore_parallel.guard._report import rank_list
from mcore_parallel.guard._store import TimedStore

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def config_fields(configs: Mapping[str, Any]) -> dict[str, str]:
    """Dotted field name -> its value as text, the same in every process that holds an equal value.

    Dataclasses and mappings are opened, sequences where they hold such; functions and classes stand for themselves by name, other
    objects by their ``repr`` without memory addresses. A dataclass also has an entry of its own with its class.

    Example:
        >>> config_fields({"run": {"steps": 3, "lr": 0.1}})
        {'run.lr': '0.1', 'run.steps': '3'}
    """
    return dict(sorted(_flat("", dict(configs))))


def version_fields(distributions: Sequence[str]) -> dict[str, str]:
    """Versions of Python, torch and installed distributions, as fields."""
    fields = {"versions.python": platform.python_version(), "versions.torch": str(torch.__version__)}
    for name in distributions:
        try:
            fields[f"versions.{name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            fields[f"versions.{name}"] = "not installed"
    return fields


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path, type(value).__qualname__
        members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        members = {str(key): member for key, member in value.items()}
    elif isinstance(value, list | tuple) and any(_opens(member) for member in value):
        members = {str(index): member for index, member in enumerate(value)}
    else:
        yield path, _text(value)
        return
    if not members and path:
        yield path, "empty"
    for name, member in members.items():
        yield from _flat(f"{path}.{name}" if path else name, member)


def _opens(value: Any) -> bool:
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _text(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial({_text(value.func)}, {_text(list(value.args))}, {_text(sorted(value.keywords.items()))})"
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return _qualified(value)
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_text, value)) + ")"
    return _ADDRESS.sub("", repr(value))


def _qualified(value: type | Callable[..., Any]) -> str:
    return f"{value.__module__}.{value.__qualname__}"


DISTRIBUTIONS = ("mcore-ckpt", "mcore-inference", "mcore-moe", "mcore-parallel", "mcore-rl", "megatron-fsdp")
# The first rank needs at most this long to read, compare and answer after the last rank has come; limit of a request to the store, too.
_ANSWER_S = 30.0
# Different configurations that a message goes into; more mean a field that varies by rank.
_MAX_VARIANTS = 32
_POLL_S = 0.1


class ConfigMismatchError(ValueError):
    """Ranks hold different configurations; raised on every rank.

    Args:
        differences: field -> value as text -> the ranks that hold it.
    """

    def __init__(self, differences: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        lines = [
            f"  {field}: " + ", ".join(f"{value} on {rank_list(ranks)}" for value, ranks in values.items())
            for field, values in differences.items()
        ]
        super().__init__(
            "the configuration differs between ranks; start every rank with the same files and arguments, "
            "or exclude a field that may differ\n" + "\n".join(lines)
        )
        self.differences = differences


class MissingRanksError(TimeoutError):
    """Ranks that did not come to the pre-flight in time; raised on every rank that came."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        super().__init__(f"{rank_list(ranks)} did not arrive within {timeout_s:g} s; look at their logs, or raise the time-out")
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s


def preflight(
    configs: Mapping[str, Any],
    store: Store,
    *,
    rank: int,
    world_size: int,
    timeout_s: float = 60.0,
    exclude: Sequence[str] = (),
    distributions: Sequence[str] = DISTRIBUTIONS,
    key: str = "preflight",
) -> str:
    """Compare configurations and versions between all ranks; every rank calls it, before the first collective.

    Each rank puts one hash in the store, the first rank compares and answers; fields travel only when hashes differ, and only from
    one rank a hash. No process group is needed.

    Args:
        configs: name -> dataclass, mapping or value; equal on every rank.
        store: reached by all ranks.
        rank: of this process.
        world_size: ranks that must come.
        timeout_s: how long the first rank waits for the others, and they for it.
        exclude: dotted fields that may differ, each with all below it.
        distributions: whose installed versions are compared, beside those of Python and torch.
        key: prefix of what is put in the store; another one for a second comparison over the same store.

    Returns:
        The common hash.

    Raises:
        ConfigMismatchError: names each differing field, its values and who holds which.
        MissingRanksError: names the ranks that did not come, or did not answer.
        ValueError: ``exclude`` names no field.
        RuntimeError: the store is out of reach.
    """
    fields = config_fields(configs) | version_fields(distributions)
    for name in exclude:
        if not any(_below(field, name) for field in fields):
            raise ValueError(f"exclude={name!r} names no field; there are {', '.join(fields)}")
    fields = {field: value for field, value in fields.items() if not any(_below(field, name) for name in exclude)}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    room = TimedStore(store, f"mcore/{key}", _ANSWER_S)
    room.set(f"hash/{rank}", digest)
    if rank == 0:
        _judge(room, fields, world_size, timeout_s)
    verdict = _await_verdict(room, rank, fields, timeout_s)
    if verdict.get("missing"):
        raise MissingRanksError(verdict["missing"], verdict["timeout_s"])
    if verdict.get("differences"):
        raise ConfigMismatchError(verdict["differences"])
    return digest


def _below(field: str, name: str) -> bool:
    return field == name or field.startswith(name + ".")


def _judge(room: TimedStore, fields: Mapping[str, str], world_size: int, timeout_s: float) -> None:
    """On the first rank: wait for all hashes, ask for fields where they differ, answer all."""
    keys = [f"hash/{rank}" for rank in range(world_size)]
    missing = _missing(room, keys, timeout_s)
    holders: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(room.multi_get(keys) if not missing else []):
        holders.setdefault(digest, []).append(rank)
    variants = list(holders.values())[:_MAX_VARIANTS]
    representatives = [ranks[0] for ranks in variants] if len(holders) > 1 else []
    room.set("asked", json.dumps(representatives))
    verdict: dict[str, Any] = {"missing": missing, "timeout_s": timeout_s}
    if representatives:
        room.set("fields/0", json.dumps(fields))
        replies = [f"fields/{rank}" for rank in representatives]
        verdict["missing"] = [representatives[index] for index in _missing(room, replies, timeout_s)]
        if not verdict["missing"]:
            verdict["differences"] = _differences([json.loads(text) for text in room.multi_get(replies)], variants)
    room.set("verdict", json.dumps(verdict))


def _differences(reports: Sequence[Mapping[str, str]], variants: Sequence[Sequence[int]]) -> dict[str, dict[str, list[int]]]:
    """Field -> value -> ranks, for the fields that differ between the variants."""
    differences: dict[str, dict[str, list[int]]] = {}
    for name in sorted({name for fields in reports for name in fields}):
        values: dict[str, list[int]] = {}
        for fields, ranks in zip(reports, variants, strict=True):
            values.setdefault(fields.get(name, "absent"), []).extend(ranks)
        if len(values) > 1:
            differences[name] = values
    return differences


def _await_verdict(room: TimedStore, rank: int, fields: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """The first rank's answer; gives this rank's fields when it asks for them."""
    if _missing(room, ["hash/0"], timeout_s):
        raise MissingRanksError([0], timeout_s)
    # The first rank's own wait may have begun just now.
    limit_s = timeout_s + _ANSWER_S
    if not _missing(room, ["asked"], limit_s):
        if rank and rank in json.loads(room.get("asked")):
            room.set(f"fields/{rank}", json.dumps(fields))
        if not _missing(room, ["verdict"], limit_s):
            return json.loads(room.get("verdict"))
    raise MissingRanksError([0], limit_s)


def _missing(room: TimedStore, keys: Sequence[str], timeout_s: float) -> list[int]:
    """Positions of the keys that are not there after the time-out."""
    deadline = time.monotonic() + timeout_s
    while not room.check(keys):
        if time.monotonic() > deadline:
            return [index for index, key in enumerate(keys) if not room.check([key])]
        time.sleep(_POLL_S)
    return []
