# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which layers have experts, written as Megatron-LM's command line writes it: ``([1]*3+[0]*1)*3``."""

import ast

_MOST_LAYERS = 4096


def read_layer_freq(text: str) -> int | tuple[int, ...]:
    """A number, or lists of numbers with ``+`` and ``*`` between them; nothing else is looked at.

    Raises:
        ValueError: something else, or more entries than models have layers.

    Example:
        >>> read_layer_freq("([1]*3+[0]*1)*2")
        (1, 1, 1, 0, 1, 1, 1, 0)
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _refusal(text) from error
    if value is None:
        raise _refusal(text)
    return value


def _refusal(text: str) -> ValueError:
    return ValueError(
        f"moe_layer_freq={text[:80]!r} must be a number, or lists of 0 and 1 with + and * between them and at most {_MOST_LAYERS} entries, "
        "such as '([1]*3+[0]*1)*3'"
    )


def _value(node: ast.expr) -> int | tuple[int, ...] | None:
    """None for what is none of these."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.List | ast.Tuple):
        entries = [_value(entry) for entry in node.elts]
        return tuple(entry for entry in entries if isinstance(entry, int)) if all(isinstance(entry, int) for entry in entries) else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, tuple) and isinstance(right, tuple):
        return left + right if len(left) + len(right) <= _MOST_LAYERS else None
    if isinstance(node.op, ast.Mult) and isinstance(left, int) and isinstance(right, tuple):
        left, right = right, left
    if isinstance(node.op, ast.Mult) and isinstance(left, tuple) and isinstance(right, int):
        return left * right if right >= 0 and len(left) * right <= _MOST_LAYERS else None
    return None
