# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The writer process: it writes files out of shared memory."""

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt._core._staging import SharedMemory
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import PIECE, WRITER_PROGRAM, FileRecord, LocalFolder, cut, receive

__all__ = ["Worker", "WorkerFolder"]

_AHEAD = 3
"""Pieces in flight that the process has not acknowledged."""
_END_S = 5.0


class Worker:
    """The process; it starts when it is first needed, serves from one save to the next, and ends with this object or with this process.

    One that has ended is replaced by `start`.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        self.close = lambda: None

    @property
    def pid(self) -> int | None:
        """Of the process; None before it starts."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            OSError: none can be started.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self.close()
            ours, theirs = socket.socketpair()
            with theirs:
                # A session of its own: what interrupts training from the keyboard leaves it to be closed by training.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", WRITER_PROGRAM, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._control = ours
            self.close = weakref.finalize(self, _end, self._process, ours)

    def kill(self) -> None:
        """End the process whatever it does; whoever waits for it hears so."""
        if self._process is not None:
            self._process.kill()

    def request(self, path: Path, memory: SharedMemory) -> socket.socket:
        """A connection over which pieces of a new file go; see the program.

        Raises:
            ConnectionError: the process has ended.
        """
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            message = json.dumps({"path": str(path.absolute()), "bytes": memory.num_bytes}).encode()
            try:
                socket.send_fds(self._control, [message], [theirs.fileno(), memory.handle])
            except OSError:
                ours.close()
                raise
        return ours

    def obituary(self) -> str:
        """How the process ended."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        if code is None:
            return f"the writer process {self.pid} closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"the writer process {self.pid} {how}"


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


class WorkerFolder(LocalFolder):
    """A folder on a disk whose shards a `Worker` writes, from ``memory`` where they lie in it."""

    def __init__(self, path: Path, worker: Worker, memory: SharedMemory) -> None:
        super().__init__(path)
        self._worker, self._memory = worker, memory
        self._open: set[socket.socket] = set()
        self._cancelled = False

    def cancel(self) -> None:
        """Files that are being written go."""
        self._cancelled = True
        for connection in list(self._open):
            # The process then removes its file, and closes its side when that is done.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def write_hashed(self, name: str, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
        try:
            with self._worker.request(self.path / name, self._memory) as connection:
                self._open.add(connection)
                try:
                    return self._send(connection, parts)
                finally:
                    self._open.discard(connection)
        except ConnectionError as error:
            if self._cancelled:
                raise CheckpointingException("the save was cancelled") from error
            cause = self._worker.obituary()
            raise CheckpointingException(f"{cause} while it wrote {name}; this save is lost, the next starts another writer") from error

    def _send(self, connection: socket.socket, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
        pending, failed = 0, False
        try:
            for piece in cut(parts):
                begin = self._memory.find(piece)
                connection.sendall(PIECE.pack(-1 if begin is None else begin, len(piece)))
                if begin is None:
                    connection.sendall(piece)
                pending += 1
                if pending > _AHEAD:
                    failed = self._answer(connection) < 0
                    if failed:
                        break
                    pending -= 1
            else:
                connection.sendall(PIECE.pack(0, -1))
        except BrokenPipeError:
            # The process takes no more, and has said why, unless it has ended.
            pass
        while not failed and self._answer(connection) >= 0:
            pass
        (length,) = struct.unpack("<q", receive(connection, 8))
        answer = json.loads(receive(connection, length))
        if "sha256" in answer:
            return FileRecord(answer["bytes"], answer["sha256"])
        if answer["errno"] is None:
            raise OSError(answer["error"])
        raise OSError(answer["errno"], answer["error"], answer["file"])

    def _answer(self, connection: socket.socket) -> int:
        """Bytes of the oldest piece that is now taken; -1 where the file is done or failed."""
        return struct.unpack("<q", receive(connection, 8))[0]
