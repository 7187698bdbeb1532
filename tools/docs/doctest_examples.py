# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Griffe extension for the site: an ``Example:`` of a docstring is code, not text."""

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^(\s*)Example:\s*$", re.MULTILINE)


class DoctestExamples(griffe.Extension):
    """Griffe knows ``Examples:`` as a section of doctests and takes the singular for prose, where brackets become links."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
