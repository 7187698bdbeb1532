# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Commands in processes of their own, forked from the worlds' server: they have torch loaded and begin at once."""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.support.world import start_server

_server = multiprocessing.get_context("forkserver")


class Command:
    """A context manager around one process that runs ``main(words)`` and exits with what it returns.

    Args:
        main: module-level function of the command.
        words: its arguments.
        environment: variables that it has besides those of the test.
    """

    def __init__(self, main: Callable[[list[str]], int], words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        start_server()
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("out", "err")]
        for path in self._files:
            path.touch()
        place = {**os.environ, **(environment or {})}
        arguments = (main, list(words), place, os.getcwd(), *map(str, self._files))
        self._process = _server.Process(target=_command_main, args=arguments, daemon=False)
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def output(self) -> str:
        """What it, and all that it started, wrote to stdout."""
        return self._files[0].read_text()

    @property
    def errors(self) -> str:
        """As ``output``, of stderr."""
        return self._files[1].read_text()

    def until(self, words: str, timeout_s: float = 60.0) -> str:
        """Wait for words in a whole line of its output; the line."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = not self.is_running()
            for line in self.output.splitlines(keepends=True):
                if words in line and line.endswith("\n"):
                    return line
            assert not ended and time.monotonic() < deadline, f"no {words!r} in {self.output!r}; errors:\n{self.errors}"
            time.sleep(0.02)

    def is_running(self) -> bool:
        return self._process.is_alive()

    def children(self) -> list[int]:
        """Processes that it started, of any of its threads."""
        return [int(pid) for thread in Path(f"/proc/{self.pid}/task").iterdir() for pid in (thread / "children").read_text().split()]

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"{self._process} did not end; errors:\n{self.errors}"
        return self._process.exitcode

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def run_command(
    main: Callable[[list[str]], int], words: Sequence[str], environment: Mapping[str, str] | None = None, *, timeout_s: float = 60.0
) -> tuple[int, str, str]:
    """Run one command to its end; exit code, output and errors. What it starts itself finds the modules that the test finds."""
    place = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})}
    with Command(main, words, place) as command:
        return command.wait(timeout_s), command.output, command.errors


def run_script(code: str, *words: str, timeout_s: float = 100.0) -> tuple[int, str, str]:
    """Run Python code to its end as ``python -c`` does, with words as its arguments; exit code, output and errors."""
    return run_command(_script_main, [code, *words], timeout_s=timeout_s)


def run_ranks(
    main: Callable[[list[str]], int], words: Sequence[str], num_ranks: int, *, timeout_s: float = 60.0
) -> list[tuple[int, str, str]]:
    """Run one command on every rank of a world as torchrun does; exit codes, outputs and errors in rank order."""
    # Kept here, the store outlives every rank.
    store, environment = torchrun_environment(num_ranks)
    ranks: list[Command] = []
    try:
        ranks.extend(Command(main, words, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks))
        codes = [rank.wait(timeout_s) for rank in ranks]
        return [(code, rank.output, rank.errors) for code, rank in zip(codes, ranks, strict=True)]
    finally:
        for rank in ranks:
            rank.__exit__()
        del store


def torchrun_environment(num_ranks: int) -> tuple[TCPStore, dict[str, str]]:
    """The store of a world, and what torchrun tells its ranks besides their numbers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    return store, {**world, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _command_main(
    main: Callable[[list[str]], int], words: list[str], environment: Mapping[str, str], folder: str, output: str, errors: str
) -> Any:
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    # As a rank does: commands look through what they have loaded when they begin.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    raise SystemExit(main(words))


def _script_main(words: list[str]) -> int:
    sys.argv = ["-c", *words[1:]]
    exec(words[0], {"__name__": "__main__"})
    return 0
