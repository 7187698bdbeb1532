# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Messages between two ranks of a group, and the signs of life that tell when one is lost."""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LOG = logging.getLogger("mcore_inference.engine")
_SLOT_BYTES = 2048
"""Of what every message sends; a longer one sends the rest of it behind."""
_LENGTH_BYTES = 8
_MAX_BYTES = 2**30


class RankLink:
    """One end of a connection: messages arrive in order, and a rank that is silent or gone is reported once.

    A message is a JSON object; what ``sign`` gives is a sign of life and ``{"end": ...}`` the last one of its direction.

    Args:
        pg: a gloo group of the two and maybe others, which nothing else sends over.
        peer: position of the other rank in the group.
        silence_s: seconds without any message after which the other is lost.
        on_message: called in a thread of the link with each message, signs of life too.
        on_lost: called in a thread of the link, at most once, with ``peer`` and what became of it.
        sign: what to send where nothing was sent for a while.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        peer: int,
        *,
        silence_s: float,
        on_message: Callable[[int, dict[str, Any]], None],
        on_lost: Callable[[int, str], None],
        sign: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._pg, self.peer, self._silence_s = pg, peer, silence_s
        self._on_message, self._on_lost, self._sign = on_message, on_lost, sign
        self._lock = threading.Lock()
        self._is_over = self._has_ended = False
        self._sent: queue.SimpleQueue[list[tuple[Any, Tensor]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, name=f"mcore-rank-{peer}", daemon=True) for run in (self._receive, self._watch_sends)]
        for thread in self._threads:
            thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Begin to send, from any thread; a failure is reported as a lost rank."""
        body = json.dumps(message).encode()
        if len(body) > _MAX_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is longer than {_MAX_BYTES}")
        slot = bytearray(_SLOT_BYTES)
        slot[:_LENGTH_BYTES] = len(body).to_bytes(_LENGTH_BYTES, "little")
        room = _SLOT_BYTES - _LENGTH_BYTES
        slot[_LENGTH_BYTES : _LENGTH_BYTES + len(body)] = body[:room]
        parts = [slot[:_SLOT_BYTES]] + ([bytearray(body[room:])] if len(body) > room else [])
        with self._lock:
            if self._is_over or self._has_ended:
                return
            try:
                tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
                # The tensors live until they are sent.
                self._sent.put([(dist.isend(tensor, group=self._pg, group_dst=self.peer), tensor) for tensor in tensors])
            except RuntimeError as error:
                failure: RuntimeError | None = error
            else:
                failure = None
            if "end" in message:
                self._has_ended = True
                self._sent.put(None)
        if failure is not None:
            self._lose(failure)

    def end(self, reason: str | None = None) -> None:
        """Send the last message, to which the other answers with its own; may be called again."""
        self.send({"end": reason})

    def join(self, timeout_s: float) -> None:
        """Wait for the last message of both directions, or the loss of the other."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- threads -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while True:
                message = self._next_message()
                self._on_message(self.peer, message)
                if "end" in message:
                    return
        except RuntimeError as error:
            self._lose(error)

    def _next_message(self) -> dict[str, Any]:
        slot = self._take(_SLOT_BYTES)
        num_bytes = int.from_bytes(slot[:_LENGTH_BYTES], "little")
        if num_bytes > _MAX_BYTES:
            raise RuntimeError(f"a message of {num_bytes} bytes came")
        body = slot[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes]
        if num_bytes > len(body):
            body += self._take(num_bytes - len(body))
        return json.loads(body)

    def _take(self, num_bytes: int) -> bytes:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        work: Any = dist.irecv(tensor, group=self._pg, group_src=self.peer)
        work.wait(timedelta(seconds=self._silence_s))
        return tensor.numpy().tobytes()

    def _watch_sends(self) -> None:
        """See that what was sent is taken, and send a sign of life where nothing was."""
        try:
            while True:
                try:
                    parts = self._sent.get(timeout=self._silence_s / 4)
                except queue.Empty:
                    self.send(self._sign())
                    continue
                if parts is None:
                    return
                for work, _ in parts:
                    work.wait(timedelta(seconds=self._silence_s))
        except RuntimeError as error:
            self._lose(error)

    def _lose(self, error: RuntimeError) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._sent.put(None)
        _LOG.debug("the connection to rank %d of the engine ended: %s", self.peer, error)
        text = str(error).lower()
        late = "timed out" in text or "timeout" in text
        self._on_lost(self.peer, f"was silent for {self._silence_s:g} s" if late else "is gone: its connection broke")
