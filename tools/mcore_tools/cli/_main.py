# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Choose the verb, run it, and end with its exit code."""

import sys
from collections.abc import Sequence

from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.cli._verbs import VERBS

_USAGE = "usage: mcore VERB [ARGUMENT ...]      mcore VERB --help      mcore --version"
_EXIT_CODES = """exit codes:
  0    done
  1    failed while it worked, and says why; or what was looked at is not as it must be
  2    the command line, or an input, cannot be used: nothing was done
  16   a result that these machines cannot judge: start it again on others
  17   a result that others confirm, and that is no number
  75   a rank or an engine was stuck: start it again
  130  interrupted (Ctrl-C)
  141  nobody reads the output any more
  143  asked to stop (SIGTERM, SIGINT, time limit), and saved: start it again to go on"""


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb that ``arguments`` (None for the process's own) begin with; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    if not words:
        print(f"{_USAGE}\nerror: there is no verb; one of: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    name, *rest = words
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        print(_versions())
        return 0
    if (verb := VERBS.get(name)) is None:
        print(f"error: there is no verb {name!r}; {_nearest(name)}", file=sys.stderr)
        return 2
    return verb.load()(rest)


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join([_USAGE, "", "verbs:", *lines, "", _EXIT_CODES])


def _versions() -> str:
    """Of the application and of the wheels that it brings."""
    from importlib.metadata import version

    wheels = ("mcore-ckpt", "mcore-inference", "mcore-moe", "mcore-parallel", "mcore-rl", "megatron-fsdp")
    return "\n".join(f"{name} {version(name)}" for name in ("mcore-tools", *wheels))


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, VERBS, n=1)
    return f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(VERBS)}"
