# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Answers as they are generated, by an engine of this process."""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from mcore_inference import ContextOverflowError, DynamicInferenceEngine, FinishReason, SamplingParams, chat_tokens

Messages = Sequence[Mapping[str, str]]
"""``{"role", "content"}`` of each turn so far."""


class AnswerError(ValueError):
    """An answer that was refused, or that ended before its time; one line."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are drawn.

    Raises:
        ValueError: a number out of its range.
    """

    max_tokens: int = 512
    """Of an answer."""
    temperature: float = 0.7
    """0 for the likeliest token."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"--max-tokens {self.max_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"--temperature {self.temperature} must not be negative")


class Answers(Protocol):
    """Who answers."""

    @property
    def is_cut(self) -> bool:
        """Whether the last answer ended because it had ``max_tokens``."""
        ...

    def stream(self, messages: Messages) -> Iterator[str]:
        """Pieces of the text of the assistant's next turn; closing the iterator gives the rest up.

        Raises:
            AnswerError: there is none, or no more of it.
        """
        ...


class EngineAnswers:
    """Answers of an engine; conforms to ``Answers``.

    Args:
        engine: with a tokenizer; nobody else steps it.
        settings: how they are drawn.
        lora: adapter of the engine that answers; None for the model alone.
    """

    def __init__(self, engine: DynamicInferenceEngine, settings: AnswerSettings, lora: str | None = None) -> None:
        assert engine.tokenizer is not None, "open_engine gives it one"
        self._lora = lora
        self._engine, self._tokenizer = engine, engine.tokenizer
        self._params = SamplingParams(temperature=settings.temperature, num_tokens_to_generate=settings.max_tokens)
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def stream(self, messages: Messages) -> Iterator[str]:
        engine, self._is_cut = self._engine, False
        try:
            number = engine.add_request(chat_tokens(self._tokenizer, messages), self._params, lora=self._lora)
        except ContextOverflowError:
            length = engine.context.max_sequence_length
            raise AnswerError(f"the conversation does not fit {length} tokens; /reset forgets it, --max-length makes room") from None
        except ValueError as error:
            raise AnswerError(str(error)) from None
        shown, ended = 0, False
        try:
            while not ended:
                with _uninterrupted():
                    finished = {record.request_id: record for record in engine.step()}
                ended = number in finished
                record = finished[number] if ended else engine.get_request(number)
                text, error = record.generated_text, record.error
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)
                if error is not None:
                    raise AnswerError(str(error))
                self._is_cut = record.finish_reason is FinishReason.LENGTH
        finally:
            engine.abort(number)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: an engine must not stop within a step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
