# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The command ``mcore``: one verb for each thing that a user does; a verb is imported when it runs."""

from mcore_tools.cli._main import main
from mcore_tools.cli._verbs import VERBS, Verb

__all__ = [
    "VERBS",
    "Verb",
    "main",
]
