# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Prompts of a file, continued in any order, by a command that can be ended and goes on where it was."""

import asyncio
import dataclasses
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_inference import DynamicInferenceRequestRecord, EngineRunner, RequestError, SamplingParams
from mcore_inference.coordinator import CoordinatedRunner
from mcore_inference.sampling import request_seed
from mcore_inference.text import BosTokenizer, Tokenizer, chat_tokens
from mcore_tools.whole_file import write_whole

_MAX_OPEN = 512
"""Requests that wait or run."""
_PROGRESS_S = 5.0

AnyRunner = EngineRunner | CoordinatedRunner
Messages = list[dict[str, Any]]
"""A conversation that the model goes on with."""
Encode = Callable[[str | Messages], str | list[int]]
Outcome = Sequence[DynamicInferenceRequestRecord] | RequestError
"""The records of all continuations of a prompt, or why one of them was refused."""
End = Callable[[int, Outcome], None]


def chat_encoder(tokenizer: Tokenizer) -> Encode:
    """What makes a prompt of a text, as it is, or of a conversation, by the chat template.

    Returns:
        A function that raises ``RequestError`` for a conversation that the template refuses.
    """

    def encode(prompt: str | Messages) -> str | list[int]:
        if isinstance(prompt, str):
            return prompt
        try:
            tokens = chat_tokens(tokenizer, prompt)
        except Exception as error:
            # Templates refuse conversations in their own ways.
            raise RequestError(None, f"the chat template refused the messages: {error}") from error
        # It may write the begin-of-text token before a tokenizer that adds it.
        bos = tokenizer.bos if isinstance(tokenizer, BosTokenizer) else None
        return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens

    return encode


def continue_prompts(
    runner: AnyRunner,
    prompts: Mapping[int, str | Messages],
    params: SamplingParams,
    on_end: End,
    encode: Encode | None = None,
    *,
    lora: str | None = None,
) -> None:
    """Continue many prompts at once.

    Args:
        runner: an engine, or the engines of a coordinator.
        prompts: by number.
        params: of all, with the seed that ``params_of`` makes theirs of; each prompt has ``n`` continuations.
        on_end: gets each prompt's number, and its records or why it was refused, as they end.
        encode: of ``chat_encoder``; None where all prompts are texts.
        lora: adapter that they go through; None for the model alone.

    Raises:
        EngineLostError: an engine was lost with tokens of a prompt.
        EngineDeadError: the engine is given up.
        ValueError: the engine cannot take these settings.
    """
    asyncio.run(_continue(runner, prompts, params, on_end, encode, lora))


def params_of(params: SamplingParams, number: int) -> SamplingParams:
    """Settings of one prompt of many: its seed is a function of the seed of all and its number, whatever was continued before."""
    return params if params.seed is None else dataclasses.replace(params, seed=request_seed(params.seed, number))


async def _continue(
    runner: AnyRunner,
    prompts: Mapping[int, str | Messages],
    params: SamplingParams,
    on_end: End,
    encode: Encode | None,
    lora: str | None,
) -> None:
    waiting = iter(prompts.items())

    async def work() -> None:
        for number, prompt in waiting:
            try:
                text = prompt if encode is None else encode(prompt)
                assert isinstance(text, str) or encode is not None, "conversations are encoded"
                records = await _records(runner, text, params_of(params, number), lora)
            except RequestError as error:
                on_end(number, error)
            else:
                errors = [_request_error(record.error) for record in records if record.error is not None]
                # One that stays outweighs those that may pass.
                on_end(number, min(errors, key=lambda error: error.is_transient) if errors else records)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(max(1, _MAX_OPEN // params.n), len(prompts))):
                workers.create_task(work())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _request_error(error: Exception) -> RequestError:
    return error if isinstance(error, RequestError) else RequestError(None, str(error))


async def _records(runner: AnyRunner, prompt: Any, params: SamplingParams, lora: str | None) -> list[DynamicInferenceRequestRecord]:
    """Of all continuations of a prompt; where one is refused, no other goes on."""
    streams = []
    try:
        for choice in params.choices():
            streams.append(await runner.submit(prompt, choice, stream=False, lora=lora))
        return [await stream.record() for stream in streams]
    except RequestError:
        for stream in streams:
            stream.abort()
        raise


class PromptFile:
    """Prompts and what became of them; a context, in which no other command writes the target.

    Args:
        source: ``.jsonl``, an object with a ``prompt``, or with ``messages`` of a role and a content each, a line; any other file has a
            prompt a line.
        target: gets an object a line: ``number`` of the prompt (from 0), ``prompt`` or ``messages``, and ``text``, ``finish_reason``,
            ``tokens``, or ``error``. Several continuations are objects of such fields in ``choices``. Settings that ask for
            log-probabilities add ``token_ids``, ``log_probs`` and ``top_log_probs`` (pairs of an id and its log-probability). Prompts
            that it has already are not continued again. It gets no line for an error that may pass, so that its prompt is.
        settings: what texts depend on, by flag. They are kept beside the target, so that all of its texts have the same.
        writes: whether this process is the one that will ``run``; False for other ranks of its command, which only read.

    Raises:
        ValueError: a line of the source has no prompt, one of the target is not of this source or was made with other settings, another
            command writes it, or its folder is not there or takes no files.
        OSError: a file cannot be read.
    """

    def __init__(self, source: Path, target: Path, settings: Mapping[str, Any], *, writes: bool = True) -> None:
        if not target.absolute().parent.is_dir():
            raise ValueError(f"--output {target}: its folder is not there; make it first")
        self._target = target
        # Other line ends than this one may stand within a prompt.
        lines = source.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        self._prompts = [_prompt(source, number, line) for number, line in enumerate(lines) if line]
        self.num_refused = 0
        """Prompts with an ``error``, those of earlier calls included."""
        self.num_postponed = 0
        """Prompts of this call without a line, by errors that may pass."""
        self._size = 0
        """Bytes of the target that were read."""
        self._settings, self._settings_file = settings, target.with_name(f"{target.name}.settings.json")
        self._keeps_settings, self._writes = _is_file_or_none(target), writes
        self._lock: int | None = None
        """Descriptor of the target, which is locked by it from before its first line is read; None where there are no locks."""
        try:
            if self._keeps_settings and writes:
                self._lock_target()
            done = self._read_done()
            self.left = {number: prompt for number, prompt in enumerate(self._prompts) if number not in done}
            """Prompts that are to be continued, by number."""
            if self._keeps_settings and len(self.left) < len(self._prompts):
                self._compare_settings()
            if self._keeps_settings and self.left:
                self._check_folder()
        except BaseException:
            self.close()
            raise
        if not self.left:
            print(f"{target} has all {len(self._prompts)} prompts", file=sys.stderr)

    def __enter__(self) -> "PromptFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write the target, which goes while it is empty. May be called again."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        # A link, such as /dev/stdout, is nobody's to remove.
        if not os.fstat(lock).st_size and not self._target.is_symlink() and self._is_at_target(lock):
            # Whoever opened it meanwhile finds that it is no longer there, and makes another one.
            self._target.unlink(missing_ok=True)
        os.close(lock)

    def _is_at_target(self, descriptor: int) -> bool:
        """Whether the target is this file, and no other that took its name."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._target.stat())
        except FileNotFoundError:
            return False

    def _lock_target(self) -> None:
        """Open the target, which is made where it is not there, for this command alone."""
        while True:
            is_new = not self._target.exists()
            if is_new:
                self._check_folder()
            # Some file systems lock what can be written alone.
            can_write = is_new or os.access(self._target, os.W_OK)
            lock = os.open(self._target, (os.O_RDWR if can_write else os.O_RDONLY) | os.O_CREAT, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise ValueError(
                    f"--output {self._target} is written by another command; wait for its end, or give another --output"
                ) from None
            except OSError:
                # Some have no locks, and others may write it.
                os.close(lock)
                return
            if self._is_at_target(lock):
                self._lock = lock
                return
            os.close(lock)

    def _check_folder(self) -> None:
        if not os.access(self._target.absolute().parent, os.W_OK):
            raise ValueError(
                f"--output {self._target}: {self._settings_file.name} cannot be written beside it; choose a folder that takes files"
            )

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
        if not self._target.exists() or _is_stream(self._target):
            return set()
        whole, newline, half = self._target.read_bytes().rpartition(b"\n")
        if half and self._writes:
            os.truncate(self._target, len(whole) + len(newline))
        self._size = len(whole) + len(newline)
        done: set[int] = set()
        for place, line in enumerate(whole.splitlines(), start=1):
            entry = _object(line)
            number = entry.get("number")
            if type(number) is not int or not 0 <= number < len(self._prompts) or not self._named_prompt(number).items() <= entry.items():
                raise ValueError(f"line {place} of {self._target} is no continuation of this --input; give another --output")
            done.add(number)
            self.num_refused += "error" in entry
        return done

    def _named_prompt(self, number: int) -> dict[str, Any]:
        """What a prompt is called in a line of the target, and it."""
        prompt = self._prompts[number]
        return {"prompt" if isinstance(prompt, str) else "messages": prompt}

    @property
    def has_all_texts(self) -> bool:
        """Whether no prompt was refused or postponed, once none is left to ``run``."""
        return not self.num_refused and not self.num_postponed

    def run(self, runner: AnyRunner, params: SamplingParams, encode: Encode, lora: str | None = None) -> None:
        """Continue what is left, a line of the target each, and tell the progress on standard error. Raises as ``continue_prompts``.

        Prompts that an error ended that may pass, such as a step that ran out of memory, are left to the next call.

        Raises:
            ValueError: another command wrote the target since this one read it, on a file system without locks.
        """
        begin = last = time.monotonic()
        num_done, num_tokens, why = len(self._prompts) - len(self.left), 0, ""
        with self._target.open("a", encoding="utf-8") as target:
            if self._keeps_settings:
                if os.fstat(target.fileno()).st_size != self._size:
                    raise ValueError(f"--output {self._target} got texts of another command meanwhile; give this command again")
                write_whole(self._settings_file, json.dumps(self._settings, ensure_ascii=False, indent=1) + "\n")

            def end(number: int, result: Outcome) -> None:
                nonlocal last, num_done, num_tokens, why
                if isinstance(result, RequestError) and result.is_transient:
                    self.num_postponed += 1
                    why = why or result.message
                    return
                entry: dict[str, Any] = {"number": number, **self._named_prompt(number)}
                if isinstance(result, RequestError):
                    entry["error"] = result.message
                    self.num_refused += 1
                else:
                    texts = [_text(record) for record in result]
                    entry |= texts[0] if params.n == 1 else {"choices": texts}
                    num_tokens += sum(record.num_generated for record in result)
                target.write(json.dumps(entry, ensure_ascii=False) + "\n")
                target.flush()
                num_done += 1
                now = time.monotonic()
                if now - last > _PROGRESS_S or num_done == len(self._prompts):
                    last = now
                    rate = num_tokens / max(now - begin, 1e-9)
                    print(f"{num_done} of {len(self._prompts)} prompts, {rate:,.0f} tokens/s", file=sys.stderr, flush=True)

            continue_prompts(runner, self.left, params, end, encode, lora=lora)
        if self.num_postponed:
            print(
                f"{num_done} of {len(self._prompts)} prompts; {self.num_postponed} ended with errors that may pass, such as: {why}; "
                "the same command goes on with them",
                file=sys.stderr,
                flush=True,
            )


def _is_file_or_none(path: Path) -> bool:
    """Whether it is a file, or not there yet; asked once, since another command may make or remove it between two questions."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe or a terminal, such as /dev/stdout may be: who reads it waits for what it will write itself."""
    mode = path.stat().st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _object(line: str | bytes) -> dict[str, Any]:
    """A line of JSON that is an object; an empty one for anything else."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _text(record: DynamicInferenceRequestRecord) -> dict[str, Any]:
    """What a line of the target says of a continuation."""
    params = record.sampling_params
    assert record.finish_reason is not None, "it has ended"
    text: dict[str, Any] = {"text": record.generated_text, "finish_reason": record.finish_reason.value, "tokens": record.num_generated}
    if params.return_log_probs or params.top_n_logprobs:
        text["token_ids"] = record.generated_tokens
    if params.return_log_probs:
        text["log_probs"] = record.generated_log_probs
    if params.top_n_logprobs:
        text["top_log_probs"] = [list(best.items()) for best in record.generated_top_n_logprobs]
    return text


def _prompt(source: Path, number: int, line: str) -> str | Messages:
    if source.suffix != ".jsonl":
        return line
    entry = _object(line)
    given = [name for name in ("prompt", "messages") if name in entry]
    if (given == ["prompt"] and isinstance(entry["prompt"], str)) or (given == ["messages"] and _is_conversation(entry["messages"])):
        prompt = entry[given[0]]
        try:
            # As the target gets it. An escape of JSON can be half a surrogate pair, which no file of text holds and no tokenizer takes.
            json.dumps(prompt, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise ValueError(
                f"line {number + 1} of {source} has {half}, half of a surrogate pair, which is no character; correct it"
            ) from error
        return prompt
    raise ValueError(
        f'line {number + 1} of {source} is no object with a "prompt", or with "messages" of a role and a content each; correct it, or give '
        "prompts as plain lines of a .txt"
    )


def _is_conversation(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content")) for message in messages
        )
    )
