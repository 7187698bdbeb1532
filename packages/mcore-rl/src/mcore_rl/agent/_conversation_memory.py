# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What is remembered of conversations between two turns, by what was said in them."""

import hashlib
import json
import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from mcore_rl.agent._conversation import Conversation
from mcore_rl.agent._environment_messages import conversation_fields

T = TypeVar("T")


class ConversationMemory(Generic[T]):
    """Values of conversations, of which two with the same words are the same: whoever asks first takes one, and nobody has it then.

    Threads may call at a time. A copy, as of an environment that goes to other processes, remembers nothing.

    Args:
        most: values at a time; the oldest are forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[str, list[T]] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self._most,)

    def put(self, conversation: Conversation, value: T) -> None:
        """Remember a value until it is taken."""
        key = _key(conversation)
        with self._lock:
            self._values.setdefault(key, []).append(value)
            self._values.move_to_end(key)
            self._count += 1
            if self._count > self._most:
                self._pop(next(iter(self._values)))

    def take(self, conversation: Conversation) -> T | None:
        """One that was put; None where there is none, or no more."""
        key = _key(conversation)
        with self._lock:
            return self._pop(key) if key in self._values else None

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()
            self._count = 0

    def _pop(self, key: str) -> T:
        values = self._values[key]
        value = values.pop(0)
        self._count -= 1
        if not values:
            del self._values[key]
        return value


def _key(conversation: Conversation) -> str:
    return hashlib.sha256(json.dumps(conversation_fields(conversation), sort_keys=True).encode()).hexdigest()
