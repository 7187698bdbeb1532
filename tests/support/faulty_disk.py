# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A disk that records what is asked of it, fails when told to, and shows what a power cut at any moment may leave behind."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["FaultyDisk", "Operation", "after_power_cut"]

_CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir")


@dataclass(frozen=True)
class Operation:
    """One call that changed something under the root; paths are relative to it."""

    kind: str
    path: str
    target: str = ""
    data: bytes = b""


class FaultyDisk:
    """While it is entered, calls of ``os`` that change files under ``root`` are recorded, and one of them may fail.

    Args:
        root: what lies elsewhere is left alone.
        fail_at: number of the operation that fails, from 0; None for none.
        error: what it raises; for a write, half of the bytes are written first. None: from then on writes take no more bytes.
        persistent: whether all later writes and syncs fail too, as on a full disk.
    """

    def __init__(self, root: Path, *, fail_at: int | None = None, error: OSError | None = None, persistent: bool = False) -> None:
        self.operations: list[Operation] = []
        self._root, self._fail_at, self._error, self._persistent = os.path.realpath(root), fail_at, error, persistent
        self._handles: dict[int, str] = {}
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> "FaultyDisk":
        self._real = {name: getattr(os, name) for name in _CALLS}
        for name in _CALLS:
            setattr(os, name, getattr(self, f"_{name}"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _place(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int):
            return self._handles.get(path)
        if dir_fd is not None:
            return os.path.join(self._handles[dir_fd], path) if dir_fd in self._handles else None
        whole = os.path.abspath(path)
        return os.path.relpath(whole, self._root) if whole.startswith(self._root) else None

    def _note(self, kind: str, path: str, target: str = "", data: bytes = b"") -> None:
        number = len(self.operations)
        failing = self._fail_at is not None and (number == self._fail_at or (self._persistent and number > self._fail_at))
        if failing and self._error is not None and (number == self._fail_at or kind in ("write", "fsync")):
            self.operations.append(Operation("failed " + kind, path, target))
            raise OSError(self._error.errno, self._error.strerror)
        self.operations.append(Operation(kind, path, target, data))

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._place(path, dir_fd)
        if place is not None and flags & os.O_CREAT:
            self._note("create", place)
        handle = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        self._handles.pop(handle, None)
        if place is not None:
            self._handles[handle] = place
        return handle

    def _write(self, handle: int, data: Any) -> int:
        place = self._handles.get(handle)
        if place is None:
            return self._real["write"](handle, data)
        if self._error is None and self._fail_at is not None and len(self.operations) >= self._fail_at:
            self.operations.append(Operation("failed write", place))
            return 0
        # Never all at once: the caller must go on where a short write stopped.
        part = bytes(data[: max(1, len(data) // 2)])
        try:
            self._note("write", place, data=part)
        except OSError:
            self._real["write"](handle, part[: len(part) // 2])
            raise
        return self._real["write"](handle, part)

    def _fsync(self, handle: int) -> None:
        place = self._handles.get(handle)
        if place is None:
            return self._real["fsync"](handle)
        # What syncing is for shows in `after_power_cut`; here it would only take time.
        return self._note("fsync", place)

    def _replace(self, source: Any, target: Any) -> None:
        place = self._place(source)
        if place is not None:
            self._note("replace", place, self._place(target) or "")
        self._real["replace"](source, target)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._change("unlink", path, dir_fd)
        self._real["unlink"](path, dir_fd=dir_fd)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is None or os.path.exists(path):
            return self._real["mkdir"](path, mode, dir_fd=dir_fd)
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        return self._note("mkdir", place)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._real["rmdir"](path, dir_fd=dir_fd)
        self._change("rmdir", path, dir_fd)

    def _change(self, kind: str, path: Any, dir_fd: int | None) -> None:
        place = self._place(path, dir_fd)
        if place is not None and (kind == "rmdir" or dir_fd is not None or os.path.lexists(path)):
            self._note(kind, place)


@dataclass
class _Node:
    """A file or folder: what a reader sees now, and what the platter holds for sure."""

    is_folder: bool
    content: bytes = b""
    synced: bytes = b""
    entries: dict[str, "_Node"] = field(default_factory=dict)
    pending: list[list[tuple[str, "_Node | None"]]] = field(default_factory=list)
    """Changes of entries since the last sync; those of one inner list happen together."""
    kept: dict[str, "_Node"] = field(default_factory=dict)

    def change(self, *changes: tuple[str, "_Node | None"]) -> None:
        for name, node in changes:
            self.entries.pop(name, None)
            if node is not None:
                self.entries[name] = node
        self.pending.append(list(changes))


def after_power_cut(
    before: Path, operations: Sequence[Operation], target: Path, rng: random.Random | None = None, *, lose: bool = True
) -> None:
    """Write to ``target`` what may be found of ``before`` after ``operations`` and a power cut.

    Args:
        before: the folder as it was, all of it on the platter.
        target: folder to create.
        rng: which part of what was not synced survives, each change of a name for itself, each file up to some byte.
        lose: without ``rng``: whether all that was not synced is lost, or nothing.
    """
    root = _read(before)
    for operation in operations:
        _apply(root, operation)
    _write(root, target, rng, lose)


def _read(folder: Path) -> _Node:
    node = _Node(is_folder=True)
    for entry in folder.iterdir():
        content = b"" if entry.is_dir() else entry.read_bytes()
        node.kept[entry.name] = _read(entry) if entry.is_dir() else _Node(False, content, content)
    node.entries = dict(node.kept)
    return node


def _find(root: _Node, path: str) -> _Node:
    for name in Path(path).parts:
        root = root.entries[name]
    return root


def _apply(root: _Node, operation: Operation) -> None:
    if operation.kind.startswith("failed"):
        return
    if operation.kind == "write":
        _find(root, operation.path).content += operation.data
        return
    if operation.kind == "fsync":
        node = _find(root, operation.path)
        node.synced, node.kept, node.pending = node.content, dict(node.entries), []
        return
    path = Path(operation.path)
    folder = _find(root, str(path.parent))
    if operation.kind in ("create", "mkdir"):
        folder.change((path.name, _Node(operation.kind == "mkdir")))
    elif operation.kind in ("unlink", "rmdir"):
        folder.change((path.name, None))
    else:
        assert operation.kind == "replace" and Path(operation.target).parent == path.parent
        folder.change((path.name, None), (Path(operation.target).name, folder.entries[path.name]))


def _write(node: _Node, target: Path, rng: random.Random | None, lose: bool) -> None:
    if not node.is_folder:
        content = node.content
        if rng is None and lose:
            content = node.synced
        elif rng is not None and len(node.content) > len(node.synced):
            content = node.content[: rng.randint(len(node.synced), len(node.content))]
            # Blocks that were given to the file but never written.
            content += bytes(rng.choice((0, len(node.content) - len(content))))
        target.write_bytes(content)
        return
    target.mkdir()
    entries = dict(node.kept)
    for changes in node.pending:
        if rng.random() < 0.5 if rng is not None else not lose:
            for name, inner in changes:
                entries.pop(name, None)
                if inner is not None:
                    entries[name] = inner
    for name, inner in entries.items():
        _write(inner, target / name, rng, lose)
