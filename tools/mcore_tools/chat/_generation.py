# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The generation_config.json of a published model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_parallel.data import DataError


def read_generation(folder: Path) -> dict[str, Any]:
    """The generation_config.json of a folder; empty for none."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is no JSON: {error}; repair it, or move it away") from None
    return values if isinstance(values, dict) else {}


def end_tokens(generation: Mapping[str, Any]) -> Sequence[int]:
    """The ids that end a text, of a generation_config.json."""
    ends = generation.get("eos_token_id")
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
