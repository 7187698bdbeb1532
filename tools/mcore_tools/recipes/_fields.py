# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The fields of a configuration, as a help text: each with its type, default and meaning."""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_tools.recipes._values import dataclass_of, name_of, plain

_ALL = ""
_ARGUMENT = re.compile(r"    (\w+): (.*(?:\n {8,}.*)*)")


@dataclass(frozen=True, kw_only=True)
class FieldHelp:
    """One field."""

    path: str
    """For ``--set``."""
    kind: str
    """Its type."""
    default: str
    """As ``--set`` takes it; "required" where there is none."""
    words: str
    """What it means, and its unit."""

    def text(self, width: int) -> str:
        """The lines of a help text."""
        indent = "    "
        below = textwrap.fill(self.words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        return f"{self.path}={self.default}  ({self.kind})\n{below}"


def list_fields(config: Any, prefix: str = "") -> Iterator[FieldHelp]:
    """Every field of a configuration and of the configurations in it, in their order.

    Args:
        config: an instance, whose values are the defaults, or a dataclass.
        prefix: path of ``config`` itself.
    """
    kind = config if isinstance(config, type) else type(config)
    hints, words = typing.get_type_hints(kind), field_docs(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        value, part = _default(config, field), dataclass_of(hints[field.name])
        # A part shows its fields; one that is None says so first.
        if part is None or value is None:
            yield FieldHelp(
                path=prefix + field.name,
                kind=name_of(hints[field.name]).replace("NoneType", "None"),
                default="required" if value is dataclasses.MISSING else _shown(value),
                words=words.get(field.name, ""),
            )
        if part is not None:
            yield from list_fields(value if dataclasses.is_dataclass(value) else part, f"{prefix}{field.name}.")


@functools.cache
def field_docs(kind: type) -> Mapping[str, str]:
    """The meaning of each field of a dataclass, in one line: the text below it, or its line in the ``Args`` of the class."""
    words: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        arguments = inspect.getdoc(base) or ""
        words |= {match[1]: _one_line(match[2]) for match in _ARGUMENT.finditer(arguments)}
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(after, ast.Expr):
                words[statement.target.id] = _one_line(ast.literal_eval(after.value))
    return words


def add_fields_option(parser: argparse.ArgumentParser, config: type) -> None:
    """Give a command ``--help-fields [PREFIX]``, which lists what its ``--set`` takes and ends."""
    parser.add_argument(
        "--help-fields",
        nargs="?",
        action=_ShowFields,
        const=_ALL,
        config=config,
        metavar="PREFIX",
        help="list the fields that --set takes, with type, default, meaning and unit, and end; PREFIX, such as train.check, for some",
    )


def config_of(parser: argparse.ArgumentParser) -> type | None:
    """The configuration whose fields a command's ``--set`` takes; None for a command without ``--help-fields``."""
    configs = [action.config for action in parser._actions if isinstance(action, _ShowFields)]
    return configs[0] if configs else None


class _ShowFields(argparse.Action):
    """Prints the fields whose path begins with a prefix."""

    def __init__(self, option_strings: Sequence[str], dest: str, config: type, **options: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, **options)
        self.config = config

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        fields = list(list_fields(self.config))
        chosen = [field for field in fields if field.path.startswith(values)]
        if not chosen:
            near = difflib.get_close_matches(values, [*(field.path for field in fields), *_parts(fields)], 1)
            parser.error(f"--help-fields {values}: no field begins so" + (f"; did you mean {near[0]!r}?" if near else ""))
        width = min(120, shutil.get_terminal_size().columns)
        print("\n".join(field.text(width) for field in chosen))
        parser.exit()


def _parts(fields: Sequence[FieldHelp]) -> list[str]:
    """Paths of the configurations that the fields lie in."""
    return list(dict.fromkeys(field.path.rpartition(".")[0] for field in fields if "." in field.path))


def _default(config: Any, field: "dataclasses.Field[Any]") -> Any:
    if not isinstance(config, type):
        return getattr(config, field.name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    value = plain(value)
    return f"[{','.join(map(_shown, value))}]" if isinstance(value, list) else str(value).replace("\n", "\\n")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")
