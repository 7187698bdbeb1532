# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Nothing is left of a run that was refused."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def removed_if_refused(folder: str | Path) -> Iterator[None]:
    """Removes a folder that was not there before, when what should fill it refuses its input."""
    path = Path(os.path.abspath(folder))
    missing = [part for part in (path, *path.parents) if not part.exists()]
    try:
        yield
    except ValueError:
        if missing:
            shutil.rmtree(missing[-1], ignore_errors=True)
        raise
