# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the launcher of the ranks is told when one of them ends."""

import json
import os
import time
from pathlib import Path


def tell_launcher(reason: str) -> None:
    """Let torchrun show ``reason`` for this rank, where it would say that there is no traceback; nothing without torchrun.

    The format is that of ``torch.distributed.elastic``'s error files, one a rank.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        entry = {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": entry}), encoding="utf-8")
