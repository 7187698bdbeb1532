# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The public names, and what importing them costs."""

import subprocess
import sys

import mcore_inference
import mcore_inference.cache
import mcore_inference.sampling
import mcore_inference.server


def test_listed_names_are_sorted_and_exist() -> None:
    for module in (mcore_inference, mcore_inference.cache, mcore_inference.sampling, mcore_inference.server):
        assert list(module.__all__) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_importing_the_engine_loads_no_server_library_and_no_graphs() -> None:
    check = (
        "import sys, mcore_inference.engine; absent = ('fastapi', 'pydantic', 'starlette', 'uvicorn', 'mcore_parallel.graphs');"
        " print([name for name in absent if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
