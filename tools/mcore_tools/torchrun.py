# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the ranks of torchrun say when they end."""

import json
import os
import sys
import time
from pathlib import Path

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_FIRST_SPEAKS_S = 4.0
"""Time that the first rank has to refuse what all of them do; less than the watchdog waits for a rank that is gone."""


def report_error(message: str, *, waits: bool = True) -> None:
    """Print an error as one line, and tell the launcher.

    A mistake of the command is one on every rank. Under torchrun the first rank says it alone: its end ends the others, which wait for
    that, and say what they have to say when it does not come.

    Args:
        message: one line.
        waits: the first rank may say it; False for what only this one knows, such as that another is gone.

    Raises:
        BrokenPipeError: it is what is handled: whoever reads the output left, and there is nothing to say.
    """
    if isinstance(error := sys.exception(), BrokenPipeError):
        raise error
    tell_launcher(message)
    if waits and _ERROR_FILE in os.environ and os.environ.get("RANK", "0") != "0":
        time.sleep(_FIRST_SPEAKS_S)
    print(f"error: {message}", file=sys.stderr, flush=True)


def tell_launcher(reason: str) -> None:
    """Let torchrun show ``reason`` for this rank, where it would say that there is no traceback; nothing without torchrun.

    The format is that of ``torch.distributed.elastic``'s error files, one a rank.
    """
    path = os.environ.get(_ERROR_FILE)
    if path:
        entry = {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": entry}), encoding="utf-8")
