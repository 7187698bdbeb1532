# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files written and hashed piece by piece; and, run as a program, the process that does so for another.

It imports the standard library only: so the process starts in milliseconds and holds no copy of torch.

A process that writes takes requests on a socket: a JSON object {"path", "bytes"} with two handles, a socket for this file and the shared
memory. On the file's socket come pieces: two integers of 8 bytes, begin and length in the shared memory, or begin -1, the length and
the bytes themselves; a length of -1 ends the file. Back go the length of each piece that was taken, then -1, the length of a JSON object
and that object: {"bytes", "sha256"} or {"errno", "error", "file"}. When the other side closes a socket before, the file is removed.
"""

import contextlib
import errno
import hashlib
import json
import mmap
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["CHUNK_BYTES", "PIECE", "WRITER_PROGRAM", "cut", "hash_pieces", "receive", "write_stream"]

CHUNK_BYTES = 16 * 2**20
"""Hashed and handed on at a time."""
PIECE = struct.Struct("<qq")
"""Begin and length of a piece."""

WRITER_PROGRAM = __file__
"""Started with the number of an open socket as its argument."""

_BLOCK_BYTES = 4 * 2**20
_NUM_BLOCKS = 4
"""Being filled or written at a time."""
_ALIGNMENT = 4096
_WORTH_A_THREAD = 2**20
_LOOK_S = 1.0


def cut(parts: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
    """``parts`` in pieces of at most ``CHUNK_BYTES``."""
    for part in parts:
        view = memoryview(part).cast("B")
        for begin in range(0, len(view), CHUNK_BYTES):
            yield view[begin : begin + CHUNK_BYTES]


def hash_pieces(parts: Iterable[bytes | bytearray | memoryview], digest: Any) -> Iterator[memoryview]:
    """``parts`` as by `cut`, each piece hashed while whoever asked for it writes it."""
    with ThreadPoolExecutor(1, "hash") as pool:
        for piece in cut(parts):
            if len(piece) < _WORTH_A_THREAD:
                digest.update(piece)
                yield piece
            else:
                done = pool.submit(digest.update, piece)
                yield piece
                done.result()


def write_stream(path: str, parts: Iterable[memoryview]) -> None:
    """Write a new file and wait until its content is on the disk; where that fails there is no file.

    What does not fit into one block goes to a disk of this machine past the page cache: the copy into the cache and the kernel's way out of
    it cost a core more than the disk takes. Parts are copied into aligned blocks, which a thread writes. Elsewhere, in memory or over a
    network, long parts are written from where they lie.

    Raises:
        FileExistsError: there is such a file.
        OSError: what the disk says.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        write = _write_blocks if _is_on_disk(handle) else _write_parts
        write(_Blocks(handle, path), parts)
        os.fsync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(handle)


def _is_on_disk(handle: int) -> bool:
    """Whether a file lies on a block device of this machine. Other file systems know better when to write."""
    return os.major(os.fstat(handle).st_dev) != 0


def _write_parts(blocks: "_Blocks", parts: Iterable[memoryview]) -> None:
    """Long parts as they come, while somebody else hashes them; short neighbours together."""
    held = bytearray()
    for part in parts:
        if len(part) < _WORTH_A_THREAD:
            held += part
        if held and (len(part) >= _WORTH_A_THREAD or len(held) >= _BLOCK_BYTES):
            blocks.write_last(memoryview(held))
            held = bytearray()
        if len(part) >= _WORTH_A_THREAD:
            blocks.write_last(part)
    blocks.write_last(memoryview(held))


def _write_blocks(blocks: "_Blocks", parts: Iterable[memoryview]) -> None:
    with ThreadPoolExecutor(1, "write") as pool:
        writing: deque[tuple[memoryview, Future[None]]] = deque()
        block, filled = _new_block(), 0
        for part in parts:
            while part:
                taken = min(len(part), _BLOCK_BYTES - filled)
                block[filled : filled + taken] = part[:taken]
                part, filled = part[taken:], filled + taken
                if filled == _BLOCK_BYTES:
                    writing.append((block, pool.submit(blocks.write, block)))
                    block, filled = _next_block(writing), 0
        while writing:
            writing.popleft()[1].result()
        blocks.write_last(block[:filled])


def _next_block(writing: deque[tuple[memoryview, "Future[None]"]]) -> memoryview:
    if len(writing) < _NUM_BLOCKS:
        return _new_block()
    block, done = writing.popleft()
    done.result()
    return block


def _new_block() -> memoryview:
    # Anonymous memory begins at a page.
    return memoryview(mmap.mmap(-1, _BLOCK_BYTES))


class _Blocks:
    """An open file that is written in order."""

    def __init__(self, handle: int, path: str) -> None:
        self._handle, self._path = handle, path
        self._tried = self._direct = False

    def write(self, block: memoryview) -> None:
        """Append a whole block."""
        if not self._tried:
            self._tried = True
            self._set_direct(True)
        self._append(block)

    def write_last(self, rest: memoryview) -> None:
        """Append bytes of any number, past which no block is written directly."""
        self._set_direct(False)
        self._append(rest)

    def _append(self, view: memoryview) -> None:
        while view:
            try:
                written = os.write(self._handle, view)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                # It is allowed here but not for such blocks.
                self._set_direct(False)
                continue
            if not written:
                raise OSError(f"{self._path}: the disk takes no more bytes")
            view = view[written:]
            if written % _ALIGNMENT:
                self._set_direct(False)

    def _set_direct(self, wanted: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        if wanted == self._direct or not flag:
            return
        import fcntl

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
            self._direct = wanted
        except OSError:
            if not wanted:
                raise


def receive(connection: socket.socket, length: int) -> bytes:
    """Exactly ``length`` bytes.

    Raises:
        ConnectionError: the other side has gone.
    """
    content = bytearray()
    while len(content) < length:
        part = connection.recv(min(length - len(content), 2**20))
        if not part:
            raise ConnectionError("the other side has gone")
        content += part
    return bytes(content)


def _read_blocks(connection: socket.socket, shared: memoryview) -> Iterator[memoryview]:
    while True:
        begin, length = PIECE.unpack(receive(connection, PIECE.size))
        if length < 0:
            return
        yield memoryview(receive(connection, length)) if begin < 0 else shared[begin : begin + length]
        connection.sendall(struct.pack("<q", length))


def _serve_file(request: dict[str, Any], connection: socket.socket, memory: int) -> None:
    with connection:
        path, digest = request["path"], hashlib.sha256()
        try:
            shared = memoryview(mmap.mmap(memory, request["bytes"], access=mmap.ACCESS_READ))
            os.close(memory)
            write_stream(path, hash_pieces(_read_blocks(connection, shared), digest))
            answer = {"bytes": os.stat(path).st_size, "sha256": digest.hexdigest()}
        except ConnectionError:
            return
        except OSError as error:
            answer = {"errno": error.errno, "error": error.strerror or str(error), "file": error.filename}
        except Exception as error:
            answer = {"errno": None, "error": f"{type(error).__name__}: {error}", "file": None}
        text = json.dumps(answer).encode()
        try:
            connection.sendall(struct.pack("<qq", -1, len(text)) + text)
        except ConnectionError:
            # A file that nobody hears of goes.
            with contextlib.suppress(OSError):
                os.unlink(path)


def _serve(control: socket.socket) -> None:
    """Take requests until the process that started this one closes the socket or ends."""
    parent = os.getppid()
    control.settimeout(_LOOK_S)
    while os.getppid() == parent:
        try:
            message, handles, _, _ = socket.recv_fds(control, 2**16, 2)
        except TimeoutError:
            continue
        if not message:
            break
        connection = socket.socket(fileno=handles[0])
        connection.setblocking(True)
        threading.Thread(target=_serve_file, args=(json.loads(message), connection, handles[1]), daemon=True).start()
    # What is still being written belongs to nobody.
    os._exit(0)


if __name__ == "__main__":
    # Training comes first where both want a core.
    os.nice(5)
    _serve(socket.socket(fileno=int(sys.argv[1])))
