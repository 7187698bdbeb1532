# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints on the nodes themselves, for a restart that need not wait for shared storage."""

import contextlib
import copy
import hashlib
import json
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt._core import (
    VALUES,
    Background,
    Control,
    FlatState,
    ShardedTensor,
    ShardRecord,
    Staging,
    Worker,
    WorkerFolder,
    as_parts,
    check_extra,
    check_json_value,
    check_values,
    encode_layout,
    flatten_state,
    with_values,
)
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._local._partners import NodeRecord, check_present, choose_attempt, explain_none, partners, pass_bytes
from mcore_ckpt._storage import (
    Folder,
    LocalFolder,
    SafetensorsFile,
    StoredFile,
    digest_file,
    dtype_code,
    open_folder,
    write_safetensors,
)

__all__ = ["LocalCheckpoints", "PersistentSteps"]

_RECORD = re.compile(r"step_([0-9]{8,})-r([0-9]{5,})\.json")
_OURS = re.compile(r"step_[0-9]{8,}-r[0-9]{5,}(?:-[0-9a-f]{8}\.safetensors|\.json(?:\.partial)?)")
_MAX_RECORD_BYTES = 2**26


class PersistentSteps(Protocol):
    """What outlives the nodes, such as a `CheckpointManager`."""

    def latest(self) -> int | None:
        """The newest step; None when there is none. Asked on the first rank only."""
        ...

    def load(self, state: Mapping[str, Any], /) -> tuple[int, dict[str, Any]]:
        """Fill ``state`` from the newest step; returns it and its extra values. Collective."""
        ...


@dataclass(frozen=True)
class _Held:
    """What a rank keeps in one save."""

    content: Callable[[], tuple[Mapping[str, tuple[str, ShardedTensor]], Mapping[str, Any]]]
    """Parts by key, and the extra values with those of the state; or the error of taking them, on all ranks."""
    folder: Folder
    """Where the file goes; a process of its own may write it."""


class LocalCheckpoints:
    """Steps on the disks, or in the memory, of the nodes: each rank keeps its own parts, and partners on other nodes keep copies.

    For the same job in the same layout, started again after a fault; what must survive more is for a `CheckpointManager`. A step counts
    when every rank's file is somewhere. All methods are collective over ``group``.

    Args:
        directory: of this node, such as ``/dev/shm/run`` or a path on its own disk; the ranks of a node share it.
        copies: on how many nodes each file lies; so many less one may be lost.
        keep: how many of the newest steps stay.
        group: as for `mcore_ckpt.save`.
        node: name of this rank's node; None for the name of the host.
        timeout_s: how long to wait for any other rank.
        background_group: a gloo group of the same ranks that nothing else uses, for asynchronous saves; None makes one at the first of
            them, where ``group`` has all ranks.

    Raises:
        ValueError: ``copies``, ``keep`` below 1 or ``timeout_s`` not above 0.
    """

    def __init__(
        self,
        directory: str | Path | Folder,
        *,
        copies: int = 2,
        keep: int = 1,
        group: dist.ProcessGroup | None = None,
        node: str | None = None,
        timeout_s: float = 600.0,
        background_group: dist.ProcessGroup | None = None,
    ) -> None:
        if copies < 1 or keep < 1:
            raise ValueError(f"copies={copies} and keep={keep} must be at least 1")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be above 0")
        self._folder, self._copies, self._keep, self._group = open_folder(directory), copies, keep, group
        self._node = socket.gethostname() if node is None else node
        self._timeout_s = timeout_s
        self._background = Background(group, background_group, timeout_s)
        self._staging, self._worker = Staging(), Worker()
        self.skipped = ""
        """Why the last `load` took an older step than the newest on the nodes; empty where it did not."""

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any] | None = None, *, asynchronous: bool = False) -> None:
        """Keep ``state`` as ``step`` here and with the partners, then remove what is older than the newest ``keep``.

        Args:
            step: at least 0.
            state: as for `mcore_ckpt.save`; all that this rank holds is kept, replicas too.
            extra: JSON values of this rank.
            asynchronous: return once the state is copied to host memory. A thread does the rest, over a group of its own; one such save
                is under way at a time, the next call of any method waits for it and raises what it met.

        Raises:
            CheckpointingException: on every rank, when one failed; the older steps are still there. Also of the asynchronous save before,
                and this one is not begun then.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} must be an int of at least 0")
        self.wait()
        if not asynchronous:
            self._store(Control(self._group), step, _Held(partial(_content, state, extra), self._folder))
            return
        control = self._background.control()
        held, release = self._hold(state, extra)

        def work() -> None:
            try:
                self._store(control, step, held)
            finally:
                release()

        self._background.start(work)

    def wait(self) -> None:
        """Wait until the asynchronous save that is under way is kept, by this rank and its partners.

        Raises:
            CheckpointingException: on every rank, when it failed on one; the older steps are still there.
        """
        self._background.wait()

    def clear(self) -> None:
        """Remove every step from the nodes, as after the last save to shared storage. Collective.

        Raises:
            CheckpointingException: on every rank, when one failed, or an asynchronous save before failed.
        """
        self.wait()
        # A save ends with an exchange of all ranks after their last file: nothing is written any more.
        control, what = Control(self._group), "removing the steps from the nodes"
        check_present(control, what, self._timeout_s)

        def remove() -> None:
            for name in sorted(self._folder.names(), key=lambda name: not name.endswith(".json")):
                if _OURS.fullmatch(name):
                    self._folder.remove(name)

        control.run(what, remove)

    def _hold(self, state: Mapping[str, Any], extra: Mapping[str, Any] | None) -> tuple[_Held, Callable[[], None]]:
        """A copy of this rank's parts, and the function that releases it."""
        try:
            parts, values = _content(state, extra)
            values_copy = copy.deepcopy(dict(values))
            staged = self._staging.copy({key: part for key, (_, part) in parts.items()})
            copies = {key: (name, staged.shards[key]) for key, (name, _) in parts.items()}
            folder = self._folder
            if type(folder) is LocalFolder and staged.memory is not None and sys.executable:
                self._worker.start()
                folder = WorkerFolder(folder.path, self._worker, staged.memory)
            return _Held(lambda: (copies, values_copy), folder), staged.release
        except Exception as error:
            # The other ranks go on: the next exchange raises it on all of them.
            cause = error

            def fail() -> tuple[Mapping[str, tuple[str, ShardedTensor]], Mapping[str, Any]]:
                raise cause

            return _Held(fail, self._folder), lambda: None

    def _store(self, control: Control, step: int, held: _Held) -> None:
        what = f"keeping step {step} on the nodes"
        check_present(control, what, self._timeout_s)
        token = control.run(what, lambda: secrets.token_hex(4))[0]
        mine: list[NodeRecord] = []
        answers = control.run(what, lambda: self._write(control.rank, step, token, held, mine))
        keepers = partners([answer["node"] for answer in answers], self._copies)
        stored_records = [*mine, *self._copy(control, what, mine[0], keepers, [answer["record"] for answer in answers])]

        def publish() -> None:
            for record in stored_records:
                self._folder.publish(record.name + ".json", json.dumps(asdict(record)).encode())

        control.run(what, publish)
        control.run(what, lambda: self._prune({record.rank for record in stored_records}, step))

    def load(self, state: Mapping[str, Any], persistent: PersistentSteps | None = None) -> tuple[int, dict[str, Any]]:
        """Fill ``state`` from the newest step of which every rank's file is on some node; fetch what is not on the own.

        Args:
            state: as it was saved: the same parts on the same ranks.
            persistent: loaded from where its newest step is newer, or no step on the nodes is whole, as ``skipped`` then says.

        Returns:
            The step, and the extra values of this rank.

        Raises:
            CheckpointingException: on every rank: no step that is whole, or a rank did not answer.
        """
        self.wait()
        control, what = Control(self._group), "looking for steps on the nodes"
        check_present(control, what, self._timeout_s)
        layout, states = "", list[FlatState]()

        def look() -> dict[str, Any]:
            nonlocal layout
            states.append(flatten_state(state))
            layout = _layout(_parts(states[0]))
            # Only what choosing an attempt needs; the extra values stay where they are.
            held = [[record.step, record.token, record.rank, record.layout, record.bytes] for record in self._records()]
            return {"layout": layout, "held": held, "newest": persistent.latest() if persistent and control.rank == 0 else None}

        answers = control.run(what, look)
        bad: set[tuple[int, int, str, int]] = set()
        while True:
            attempt, sources = choose_attempt(answers, bad, control.size)
            if attempt is None or (answers[0]["newest"] or -1) > attempt[0]:
                if persistent is None or answers[0]["newest"] is None:
                    raise CheckpointingException(f"no step is whole on the nodes: {explain_none(answers, control)}")
                step, extra = persistent.load(state)
                self.skipped = explain_none(answers, control, after=step)
                return step, extra
            damaged_ranks = control.run(f"verifying step {attempt[0]} on the nodes", partial(self._verify, control.rank, attempt, sources))
            damaged = {(place, *attempt, rank) for place, ranks in enumerate(damaged_ranks) for rank in ranks}
            if not damaged:
                break
            bad |= damaged
        self._fetch(control, attempt, sources, answers)
        results: list[dict[str, Any]] = []
        control.run(f"reading step {attempt[0]}", lambda: results.append(self._fill(control.rank, attempt, states[0])))
        self.skipped = explain_none(answers, control, after=attempt[0])
        return attempt[0], results[0]

    def _write(self, rank: int, step: int, token: str, held: _Held, out: list[NodeRecord]) -> dict[str, Any]:
        parts, extra = held.content()
        self._folder.create()
        name = f"step_{step:08d}-r{rank:05d}-{token}.safetensors"
        entries: list[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]] = [
            (key, dtype_code(part.dtype), part.box.shape, partial(getattr, part, "data")) for key, (_, part) in parts.items()
        ]
        written = write_safetensors(StoredFile(held.folder, name), entries)
        own = dict(extra)
        values = own.pop(VALUES, {})
        out.append(NodeRecord(step, rank, token, _layout(parts), written.bytes, written.sha256, own, values))
        return {"node": self._node, "record": asdict(out[0])}

    def _copy(self, control: Control, what: str, mine: NodeRecord, keepers: list[list[int]], records: list[Any]) -> list[NodeRecord]:
        """Pass this rank's file to its partners and take theirs; returns the records of what came."""
        came = []
        for turn in range(1, self._copies):
            source = next(place for place, row in enumerate(keepers) if row[turn] == control.rank)
            record = NodeRecord(**records[source])
            content = self._folder.read(mine.file, 0, mine.bytes)
            stream = pass_bytes(control, what, (keepers[control.rank][turn], content), (source, record.bytes), self._timeout_s)
            self._take(control, what, record, stream)
            came.append(record)
        return came

    def _take(self, control: Control, what: str, record: NodeRecord, stream: Iterator[memoryview]) -> None:
        def receive() -> None:
            try:
                self._folder.remove(record.file)
                self._folder.write(record.file, stream)
            finally:
                # A disk that is full here is no reason for the sender to wait.
                for _ in stream:
                    pass
            if digest_file(StoredFile(self._folder, record.file)).sha256 != record.sha256:
                raise CheckpointingException(f"{record.file} came damaged from rank {control.ranks[record.rank]}")

        control.run(what, receive)

    def _records(self) -> list[NodeRecord]:
        """Records of this node's files; malformed ones are left out."""
        sound = []
        for name in self._folder.names():
            match, size = _RECORD.fullmatch(name), self._folder.size(name)
            if match and size is not None and size <= _MAX_RECORD_BYTES:
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    record = NodeRecord(**json.loads(bytes(self._folder.read(name, 0, size))))
                    named = (record.step, record.rank) == (int(match[1]), int(match[2]))
                    if named and record.is_sound() and self._folder.size(record.file) == record.bytes:
                        sound.append(record)
        return sound

    def _find(self, attempt: tuple[int, str], rank: int) -> NodeRecord:
        return next(record for record in self._records() if record.attempt == attempt and record.rank == rank)

    def _verify(self, place: int, attempt: tuple[int, str], sources: list[int]) -> list[int]:
        """Ranks whose file this one provides and finds damaged."""
        bad = []
        for rank, source in enumerate(sources):
            if source == place:
                record = self._find(attempt, rank)
                if digest_file(StoredFile(self._folder, record.file)).sha256 != record.sha256:
                    bad.append(rank)
        return bad

    def _fetch(self, control: Control, attempt: tuple[int, str], sources: list[int], answers: list[Any]) -> None:
        """Files that are not on the node of their rank come there from the ones that have them, one after another."""
        for rank, source in enumerate(sources):
            if source == rank:
                continue
            what = f"fetching the file of rank {control.ranks[rank]} from rank {control.ranks[source]}"
            row = control.run(what, lambda s=source, r=rank: asdict(self._find(attempt, r)) if control.rank == s else None)[source]
            record = NodeRecord(**row)
            if control.rank == source:
                content = self._folder.read(record.file, 0, record.bytes)
                for _ in pass_bytes(control, what, (rank, content), None, self._timeout_s):
                    pass

            def receive(record: NodeRecord = record, source: int = source, what: str = what) -> None:
                if control.rank == record.rank:
                    self._folder.create()
                    self._take(Control.alone(), what, record, pass_bytes(control, what, None, (source, record.bytes), self._timeout_s))
                    self._folder.publish(record.name + ".json", json.dumps(asdict(record)).encode())

            control.run(what, receive)

    def _fill(self, rank: int, attempt: tuple[int, str], state: FlatState) -> dict[str, Any]:
        record = self._find(attempt, rank)
        extra, values = dict(record.extra), record.values
        if values is None:
            # The name was free for a caller whose state had no values.
            values = extra.pop(VALUES, {}) if state.values else {}
        check_values(state, values, missing=True)
        with SafetensorsFile(StoredFile(self._folder, record.file)) as file, torch.no_grad():
            for key, (_, part) in _parts(state).items():
                part.data.copy_(file.tensor(key))
        state.restore(values)
        return extra

    def _prune(self, ranks: set[int], newest: int) -> None:
        """Remove older steps, and files without a record, of the ranks whose files this one stores."""
        records = [record for record in self._records() if record.rank in ranks]
        steps = sorted({record.step for record in records if record.step <= newest})[-self._keep :]
        for record in records:
            if record.step not in steps:
                self._folder.remove(record.name + ".json")
        kept_files = {record.file for record in records if record.step in steps}
        own = "|".join(f"{rank:05d}" for rank in sorted(ranks))
        mine = re.compile(rf"step_[0-9]+-r(?:{own})(?:-[0-9a-f]{{8}}\.safetensors|\.json\.partial)")
        for name in self._folder.names():
            if mine.fullmatch(name) and name not in kept_files:
                self._folder.remove(name)


def _content(state: Mapping[str, Any], extra: Mapping[str, Any] | None) -> tuple[dict[str, tuple[str, ShardedTensor]], Mapping[str, Any]]:
    """This rank's parts by key, and ``extra`` with the values that are no tensors."""
    own = {} if extra is None else extra
    check_extra(own)
    flat = flatten_state(state)
    values = with_values(own, flat)
    check_json_value(values)
    return _parts(flat), values


def _parts(state: FlatState) -> dict[str, tuple[str, ShardedTensor]]:
    """This rank's parts by key, with the name of their tensor."""
    parts = ((name, part) for name, value in state.tensors.items() for part in as_parts(name, value))
    return {f"{name}@{'.'.join(map(str, part.offset))}": (name, part) for name, part in parts}


def _layout(parts: Mapping[str, tuple[str, ShardedTensor]]) -> str:
    records = [ShardRecord(name, dtype_code(part.dtype), part.global_shape, part.box, 0) for name, part in parts.values()]
    return hashlib.sha256(encode_layout(records)[0].encode()).hexdigest()
