# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Prompts of a file, continued in any order, by a command that can be ended and goes on where it was."""

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcore_inference import DynamicInferenceRequestRecord, EngineRunner, RequestError, SamplingParams
from mcore_inference.coordinator import CoordinatedRunner
from mcore_inference.sampling import request_seed

_MAX_OPEN = 512
"""Requests that wait or run."""
_PROGRESS_S = 5.0

AnyRunner = EngineRunner | CoordinatedRunner
End = Callable[[int, DynamicInferenceRequestRecord | RequestError], None]


def continue_prompts(runner: AnyRunner, prompts: Mapping[int, str], params: SamplingParams, on_end: End) -> None:
    """Continue many prompts at once.

    Args:
        runner: an engine, or the engines of a coordinator.
        prompts: by number.
        params: of all, with the seed that ``params_of`` makes theirs of.
        on_end: gets each prompt's number, and its record or why it was refused, as they end.

    Raises:
        EngineLostError: an engine was lost with tokens of a prompt.
        EngineDeadError: the engine is given up.
    """
    asyncio.run(_continue(runner, prompts, params, on_end))


def params_of(params: SamplingParams, number: int) -> SamplingParams:
    """Settings of one prompt of many: its seed is a function of the seed of all and its number, whatever was continued before."""
    return params if params.seed is None else dataclasses.replace(params, seed=request_seed(params.seed, number))


async def _continue(runner: AnyRunner, prompts: Mapping[int, str], params: SamplingParams, on_end: End) -> None:
    waiting = iter(prompts.items())

    async def work() -> None:
        for number, prompt in waiting:
            try:
                stream = await runner.submit(prompt, params_of(params, number), stream=False)
                record = await stream.record()
            except RequestError as error:
                on_end(number, error)
            else:
                on_end(number, record if record.error is None else RequestError(None, str(record.error)))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(_MAX_OPEN, len(prompts))):
                workers.create_task(work())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


class PromptFile:
    """Prompts and what became of them.

    Args:
        source: ``.jsonl``, an object with a ``prompt`` a line; any other file has a prompt a line.
        target: gets an object a line: ``number`` of the prompt (from 0), ``prompt``, and ``text``, ``finish_reason``, ``tokens``, or
            ``error``. Prompts that it has already are not continued again.
        settings: what texts depend on, by flag. They are kept beside the target, so that all of its texts have the same.

    Raises:
        ValueError: a line of the source has no prompt, one of the target is not of this source or was made with other settings, or its
            folder is not there or takes no files.
        OSError: a file cannot be read.
    """

    def __init__(self, source: Path, target: Path, settings: Mapping[str, Any]) -> None:
        if not target.absolute().parent.is_dir():
            raise ValueError(f"--output {target}: its folder is not there; make it first")
        self._target = target
        # Other line ends than this one may stand within a prompt.
        lines = source.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        self._prompts = [_prompt(source, number, line) for number, line in enumerate(lines) if line]
        self.num_refused = 0
        """Prompts with an ``error``, those of earlier calls included."""
        done = self._read_done()
        self.left = {number: prompt for number, prompt in enumerate(self._prompts) if number not in done}
        """Prompts that are to be continued, by number."""
        self._settings, self._settings_file = settings, target.with_name(f"{target.name}.settings.json")
        self._keeps_settings = target.is_file() or not target.exists()
        if self._keeps_settings and len(self.left) < len(self._prompts):
            self._compare_settings()
        if self._keeps_settings and self.left and not os.access(target.absolute().parent, os.W_OK):
            raise ValueError(f"--output {target}: {self._settings_file.name} cannot be written beside it; choose a folder that takes files")
        if not self.left:
            print(f"{target} has all {len(self._prompts)} prompts", file=sys.stderr)

    def _compare_settings(self) -> None:
        if not self._settings_file.exists():
            raise ValueError(
                f"{self._target} has texts, and {self._settings_file.name}, which says of what settings, is not there; give another "
                "--output"
            )
        before = _object(self._settings_file.read_text(encoding="utf-8"))
        for name, value in self._settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{name} is {value}, and was {before.get(name)} for the texts that {self._target} has; give what it was, or another "
                    "--output"
                )

    def _read_done(self) -> set[int]:
        """Numbers of the prompts that the target has; half a line, of a command that was killed, is taken out of it."""
        if not self._target.exists():
            return set()
        whole, newline, half = self._target.read_bytes().rpartition(b"\n")
        done: set[int] = set()
        for place, line in enumerate(whole.splitlines(), start=1):
            entry = _object(line)
            number = entry.get("number")
            if type(number) is not int or not 0 <= number < len(self._prompts) or entry.get("prompt") != self._prompts[number]:
                raise ValueError(f"line {place} of {self._target} is no continuation of this --input; give another --output")
            done.add(number)
            self.num_refused += "error" in entry
        if half:
            os.truncate(self._target, len(whole) + len(newline))
        return done

    def run(self, runner: AnyRunner, params: SamplingParams) -> None:
        """Continue what is left, a line of the target each, and tell the progress on standard error. Raises as ``continue_prompts``."""
        if self._keeps_settings:
            half = self._settings_file.with_name(f"{self._settings_file.name}.half")
            half.write_text(json.dumps(self._settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            half.replace(self._settings_file)
        begin = last = time.monotonic()
        num_done, num_tokens = len(self._prompts) - len(self.left), 0
        with self._target.open("a", encoding="utf-8") as target:

            def end(number: int, result: DynamicInferenceRequestRecord | RequestError) -> None:
                nonlocal last, num_done, num_tokens
                entry: dict[str, Any] = {"number": number, "prompt": self._prompts[number]}
                if isinstance(result, RequestError):
                    entry["error"] = result.message
                    self.num_refused += 1
                else:
                    assert result.finish_reason is not None, "it has ended"
                    entry |= {"text": result.generated_text, "finish_reason": result.finish_reason.value, "tokens": result.num_generated}
                    num_tokens += result.num_generated
                target.write(json.dumps(entry, ensure_ascii=False) + "\n")
                target.flush()
                num_done += 1
                now = time.monotonic()
                if now - last > _PROGRESS_S or num_done == len(self._prompts):
                    last = now
                    rate = num_tokens / max(now - begin, 1e-9)
                    print(f"{num_done} of {len(self._prompts)} prompts, {rate:,.0f} tokens/s", file=sys.stderr, flush=True)

            continue_prompts(runner, self.left, params, end)


def _object(line: str | bytes) -> dict[str, Any]:
    """A line of JSON that is an object; an empty one for anything else."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _prompt(source: Path, number: int, line: str) -> str:
    if source.suffix != ".jsonl":
        return line
    prompt = _object(line).get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(
            f'line {number + 1} of {source} is no object with a "prompt"; correct it, or give prompts as plain lines of a .txt'
        )
    return prompt
