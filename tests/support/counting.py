# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder of checkpoints that counts what is read of it."""

from pathlib import Path
from typing import Any

from mcore_ckpt.storage import LocalFolder


class Counting(LocalFolder):
    """Notes the bytes that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_bytes = 0

    def read_into(self, name: str, begin: int, target: Any) -> None:
        self.num_bytes += len(target)
        super().read_into(name, begin, target)

    def read(self, name: str, begin: int, end: int) -> Any:
        self.num_bytes += end - begin
        return super().read(name, begin, end)
