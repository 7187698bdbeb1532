# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""With which exit code a command ends that was refused or failed."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mcore_ckpt import CheckpointingException
from mcore_parallel.training import INVALID_EXIT_CODE, SUSPECT_EXIT_CODE, InvalidResultError, SuspectResultError

FAILED = 1
"""Work had begun."""
REFUSED = 2
"""The command line or an input cannot be used, and nothing was done."""
_OWN_CODES: Mapping[type[Exception], int] = MappingProxyType({SuspectResultError: SUSPECT_EXIT_CODE, InvalidResultError: INVALID_EXIT_CODE})
# Of those that the system raises, what a path that was given can mean.
_PATHS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_UNDER_WAY = "the work had begun"


@contextlib.contextmanager
def under_way() -> Iterator[None]:
    """What goes wrong within is a failure, whatever its type: inputs were found good before."""
    try:
        yield
    except Exception as error:
        error.add_note(_UNDER_WAY)
        raise


def exit_code(error: Exception) -> int:
    """Of the command that ``error`` ends.

    Example:
        >>> exit_code(ValueError("steps=0 must be at least 1")), exit_code(OSError("no space left on device"))
        (2, 1)
    """
    if type(error) in _OWN_CODES:
        return _OWN_CODES[type(error)]
    if _UNDER_WAY in getattr(error, "__notes__", ()):
        return FAILED
    return REFUSED if isinstance(error, (ValueError, ImportError, CheckpointingException, *_PATHS)) else FAILED
