# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Print a script that completes verbs, options, recipes, files and the fields of --set in a shell.

source <(mcore completion bash)                                       # in ~/.bashrc, or save what is printed and source the file
mcore completion zsh > ~/.zfunc/_mcore                                # a folder of $fpath
mcore completion fish > ~/.config/fish/completions/mcore.fish

The script is static: completing starts no Python. Print it again after an upgrade. Needs the extra `completion`.
"""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser, file, folder, new_file, secret
from mcore_tools.cli import VERBS, Verb
from mcore_tools.exit_code import exit_code
from mcore_tools.recipes import RECIPES, config_of, list_fields
from mcore_tools.torchrun import report_error

SHELLS = ("bash", "zsh", "fish")
_PATHS = (None, str, Path, file, new_file, secret)
# A field is followed by its value, so that no blank comes behind its "="; shtab's own function cannot say so.
_BASH = """
_mcore() {
  _shtab_mcore
  if [[ ${COMPREPLY[0]-} == *= ]]; then compopt -o nospace; fi
}
complete -o bashdefault -F _mcore mcore
"""


class _BuiltError(Exception):
    """Carries the parser that a program built."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(verb: Verb) -> argparse.ArgumentParser:
    """The parser of a verb, which its program builds and asks for its options."""
    program, own = verb.load(), argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        raise _BuiltError(parser)

    # Nothing else runs in this process, and every program parses before it does anything.
    argparse.ArgumentParser.parse_args = stop  # pyright: ignore[reportAttributeAccessIssue]
    try:
        program([])
    except _BuiltError as built:
        return built.parser
    finally:
        argparse.ArgumentParser.parse_args = own
    raise AssertionError(f"{verb} parses nothing")


def completion_script(shell: str) -> str:
    """What a shell must read to complete ``mcore``.

    Raises:
        ValueError: shtab is not installed.
    """
    if importlib.util.find_spec("shtab") is None:
        raise ValueError('mcore completion needs shtab, which is not installed: pip install "mcore-tools[completion]"')
    import shtab

    root = argparse.ArgumentParser(prog="mcore")
    root.add_argument("--version", action="store_true", help="show versions and end")
    verbs = root.add_subparsers()
    for name, verb in VERBS.items():
        own = parser_of(verb)
        parser = verbs.add_parser(name, parents=[own], add_help=False, help=verb.summary, description=verb.summary)
        _describe(parser, config_of(own), shtab.FILE, shtab.DIRECTORY)
    return shtab.complete(root, shell) + (_BASH if shell == "bash" else "")


def _describe(parser: argparse.ArgumentParser, config: type | None, files: Any, folders: Any) -> None:
    """Say of each option and argument what completes it."""
    # argparse lists actions under this name alone; shtab reads it too.
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _describe(below, config_of(below) or config, files, folders)
        elif "--set" in action.option_strings and config is not None:
            action.complete = _fields(config)  # pyright: ignore[reportAttributeAccessIssue]
        elif action.dest == "recipe":
            action.choices = list(RECIPES)
        elif action.nargs != 0 and action.choices is None and action.type in (*_PATHS, folder):
            action.complete = folders if action.type is folder else files  # pyright: ignore[reportAttributeAccessIssue]


def _fields(config: type) -> dict[str, Any]:
    """How ``--set`` of a configuration is completed in each shell."""
    function = f"_mcore_{config.__name__}"
    names = " ".join(f"{field.path}=" for field in list_fields(config))
    preamble = {
        "bash": f'{function}() {{ compgen -W "{names}" -- "$1"; }}',
        "zsh": f"{function}() {{ local -a fields=({names}); compadd \"$@\" -S '' -a fields }}",
        "fish": f"function {function}; string split ' ' '{names}'; end",
    }
    return {"bash": function, "zsh": function, "fish": f"({function})", "preamble": preamble}


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore completion", __doc__)
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")
    options = parser.parse_args(arguments)
    try:
        print(completion_script(options.shell))
    except ValueError as error:
        report_error(str(error))
        return exit_code(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
