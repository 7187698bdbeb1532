# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Messages read from a terminal, and answers written to it as they come."""

import importlib
import importlib.util
import sys
from typing import Protocol

from mcore_tools.terminal._answers import AnswerError, Answers

_QUOTES = '"""'
HELP = """/reset   forget the conversation
/exit    end; Ctrl-D does so, too
/help    this
Ctrl-C stops an answer. \"\"\" begins a message of several lines, and \"\"\" ends it."""


class Terminal(Protocol):
    """Where messages come from and answers go."""

    def read(self, prompt: str) -> str:
        """One line, without its end.

        Raises:
            EOFError: there are no more.
            KeyboardInterrupt: Ctrl-C.
        """
        ...

    def write(self, text: str) -> None:
        """Show a text at once."""
        ...


class StandardTerminal:
    """Standard input and output, with line editing where there is a terminal; conforms to ``Terminal``."""

    def __init__(self) -> None:
        self._shows = sys.stdin.isatty()
        if self._shows and importlib.util.find_spec("readline") is not None:
            # Imported, it edits the lines of input().
            importlib.import_module("readline")

    def read(self, prompt: str) -> str:
        return input(prompt if self._shows else "")

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Conversation:
    """Questions and answers in turns, each with all those before it.

    Args:
        answers: who answers.
        terminal: where.
        system: what the model is told first; empty for nothing.
    """

    def __init__(self, answers: Answers, terminal: Terminal, system: str = "") -> None:
        self._answers, self._terminal = answers, terminal
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)
        """The conversation so far."""

    def run(self) -> None:
        """Until the end of the input, or /exit."""
        while True:
            try:
                text = self._read()
            except EOFError:
                self._terminal.write("\n")
                return
            except KeyboardInterrupt:
                self._terminal.write("\nCtrl-D or /exit ends\n")
                continue
            if text.startswith("/"):
                if text.strip() == "/exit":
                    return
                self._terminal.write(self._command(text.strip()) + "\n")
            elif text.strip():
                self._ask(text.strip())

    def _read(self) -> str:
        """One message."""
        line = self._terminal.read("> ")
        if not line.strip().startswith(_QUOTES):
            return line
        lines = [line.strip().removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._terminal.read(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        # Quotation marks make it a message, whatever it begins with.
        return " " + "\n".join(lines)

    def _command(self, word: str) -> str:
        if word == "/reset":
            self.messages = list(self._opening)
            return "forgotten"
        return HELP if word == "/help" else f'{word.split()[0]} is no command; put {_QUOTES} around a message that begins with "/"\n{HELP}'

    def _ask(self, text: str) -> None:
        """What was answered stays, stopped or not; a message without any answer goes."""
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        stream = self._answers.stream([*self.messages, question])
        end = "\n"
        try:
            for piece in stream:
                pieces.append(piece)
                self._terminal.write(piece)
            if self._answers.is_cut:
                end = "\ncut at --max-tokens or the model's length; ask to go on, or start with more\n"
        except KeyboardInterrupt:
            end = "\nstopped\n"
        except AnswerError as error:
            end = f"{chr(10) if pieces else ''}error: {error}\n"
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        self._terminal.write(end if pieces or end != "\n" else "the answer is empty\n")
        if pieces:
            self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]
