# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Libraries that an extra brings."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def brought_by(extra: str, *libraries: str) -> Iterator[None]:
    """Imports inside the block may need libraries of an extra.

    Raises:
        ModuleNotFoundError: one of them is missing; names it and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in libraries:
            raise
        message = f'{error.name} is not installed: pip install "mcore-inference[{extra}]"'
        raise ModuleNotFoundError(message, name=error.name) from None
