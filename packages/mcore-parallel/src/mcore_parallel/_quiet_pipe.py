# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How a command ends when nobody reads what it prints. Each wheel with commands has this file, so that it can stand alone."""

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def quiet_pipe(main: Callable[P, int]) -> Callable[P, int]:
    """A command whose reader may leave, as ``head`` does: it ends without a word, with exit code 141."""

    @functools.wraps(main)
    def run(*args: P.args, **options: P.kwargs) -> int:
        try:
            try:
                return main(*args, **options)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # What is still buffered has no reader either; the interpreter must not try to write it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141

    return run
