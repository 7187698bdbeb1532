# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A public folder that re-exports what the top exports too."""

from sample._shapes import Circle
from sample.deep.tools import polish

__all__ = ["Circle", "polish"]
