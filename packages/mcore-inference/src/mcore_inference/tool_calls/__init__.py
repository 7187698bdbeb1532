# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Calls of tools in the text of a model: how they are written, found and enforced."""

from mcore_inference.tool_calls._formats import ToolFormat, tool_format
from mcore_inference.tool_calls._parser import ToolCallParser
from mcore_inference.tool_calls._scan import ToolCall

__all__ = ["ToolCall", "ToolCallParser", "ToolFormat", "tool_format"]
