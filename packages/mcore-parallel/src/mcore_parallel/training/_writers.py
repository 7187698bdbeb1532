# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where the numbers of each step go."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class JsonLinesWriter:
    """Appends one JSON object a step to a file, and flushes it; a number that is not finite is written as null.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="ascii")  # noqa: SIM115 (close() closes it)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard; needs the extra ``train``.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


class RichProgress:
    """A progress bar in the terminal with loss, speed, gradient norm and the time that is left; needs the extra ``train``.

    Args:
        steps: last step of the run.
        console: a ``rich.console.Console``; None for the terminal.
    """

    def __init__(self, steps: int, console: Any = None) -> None:
        import rich.progress

        bar: ModuleType = rich.progress
        self._bar = bar.Progress(
            bar.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            bar.BarColumn(),
            bar.TextColumn("{task.fields[numbers]}"),
            bar.TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("train", total=steps, numbers="")
        self._bar.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        forms = (("loss", "loss {:.4f}"), ("tokens_per_s", "{:,.0f} tokens/s"), ("grad_norm", "norm {:.3g}"), ("eval/loss", "eval {:.4f}"))
        numbers = "  ".join(form.format(values[name]) for name, form in forms if name in values)
        self._bar.update(self._task, completed=step, numbers=numbers)

    def close(self) -> None:
        self._bar.stop()
