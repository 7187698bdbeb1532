# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How a command ends that is interrupted, or that nobody reads. Each wheel with commands has this file, so that it can stand alone."""

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def quiet_pipe(main: Callable[P, int]) -> Callable[P, int]:
    """A command that ends with a word and 130 when it is interrupted, without one and 141 when its reader leaves, as ``head`` does."""

    @functools.wraps(main)
    def run(*args: P.args, **options: P.kwargs) -> int:
        try:
            try:
                return main(*args, **options)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                return 130
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # What is still buffered has no reader either; the interpreter must not try to write it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141

    return run
