# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pieces of a corpus under way, each finished or not there, until all are joined."""

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

from mcore_parallel.data._atomic import atomic_file
from mcore_parallel.data._errors import DataError
from mcore_parallel.data.corpus import merge_indexed

Counts = dict[str, int]


class PieceFolder:
    """The folder ``<output_prefix>.pieces``, where pieces numbered from 0 lie until they are joined.

    A piece is finished when its counts are there, which are written last. Any process may make any piece; the folder says
    what all of them are made from, and pieces made from something else are never joined.

    Args:
        output_prefix: of the whole corpus.
        job: what the pieces are made from and how; JSON.

    Raises:
        DataError: the folder cannot be written, or holds pieces of another job.
    """

    def __init__(self, output_prefix: str, job: Mapping[str, Any]) -> None:
        self._prefix, self._folder = output_prefix, output_prefix + ".pieces"
        path = os.path.join(self._folder, "job.json")
        try:
            os.makedirs(self._folder, exist_ok=True)
            if not os.path.exists(path):
                with atomic_file(path) as file:
                    file.write(json.dumps(job, indent=1).encode())
            with open(path, encoding="utf-8") as file:
                stored = dict(json.load(file))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"cannot use {self._folder}: {error}; name a writable folder, or remove this one") from error
        wanted = json.loads(json.dumps(job))
        differing = [name for name in wanted if stored.get(name) != wanted[name]]
        if differing:
            raise DataError(
                f"{self._folder} holds pieces made with another {', '.join(differing)}; "
                "repeat the command that began them, or remove the folder"
            )

    def prefix(self, number: int) -> str:
        """Path prefix of a piece."""
        return os.path.join(self._folder, str(number))

    def counts(self, number: int) -> Counts | None:
        """What a finished piece holds, None for one that is not finished."""
        try:
            with open(self.prefix(number) + ".json", encoding="utf-8") as file:
                return {str(name): int(count) for name, count in json.load(file).items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, TypeError):
            return None  # damaged: making the piece again repairs it

    def begin(self, number: int) -> None:
        """Remove what an attempt that was killed has left of a piece."""
        for path in glob.glob(glob.escape(self.prefix(number)) + ".*.partial"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def finish(self, number: int, counts: Counts) -> None:
        """Mark a piece whose corpus is in place."""
        with atomic_file(self.prefix(number) + ".json") as file:
            file.write(json.dumps(counts).encode())

    def join(self, count: int) -> None:
        """Write the corpus of all pieces and remove them."""
        merge_indexed([self.prefix(number) for number in range(count)], self._prefix)
        self.remove()

    def remove(self) -> None:
        """Remove all pieces."""
        shutil.rmtree(self._folder, ignore_errors=True)
