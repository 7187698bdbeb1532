# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Small files that are whole or not there, whenever a run is killed."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file, and its folders, beside its name and rename it there; a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
