# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A chat at a terminal: turns, commands, several lines, and answers that Ctrl-C stops; by an engine here and over HTTP."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_inference import DynamicInferenceEngine, chat_tokens
from mcore_inference.server import InferenceServer, serve
from mcore_tools import converse
from mcore_tools.serving import open_engine
from mcore_tools.terminal import AnswerError, AnswerSettings, Conversation, EngineAnswers, ServerAnswers
from tests.support.published import write_published

CUT = "cut at --max-tokens or the model's length; ask to go on, or start with more"
GREEDY = AnswerSettings(max_tokens=12, temperature=0.0)


@pytest.fixture(autouse=True)
def _usual_control_c() -> Iterator[None]:
    """A program that ran in this process before may have left a handler of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


class FakeTerminal:
    """Lines to read, of which an exception is raised, and what was written; ``on_write`` sees each text before."""

    def __init__(self, *lines: str | type[BaseException], on_write: Callable[[str], None] = lambda text: None) -> None:
        self._lines, self._on_write = iter(lines), on_write
        self.prompts: list[str] = []
        self.written = ""

    def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def write(self, text: str) -> None:
        self._on_write(text)
        self.written += text


class Echo:
    """Answers with the words of the last message, one at a time; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.closed = 0
        self.is_cut = False

    def stream(self, messages) -> Iterator[str]:
        self.asked.append([f"{message['role']}: {message['content']}" for message in messages])
        try:
            for word in messages[-1]["content"].split():
                if word == "broken":
                    raise AnswerError("the model is tired")
                yield word + " "
            self.is_cut = word == "long"
        finally:
            self.closed += 1


class Silent:
    """Has nothing to say."""

    is_cut = False

    def stream(self, messages) -> Iterator[str]:
        return iter(())


def talk(
    *lines: str | type[BaseException], system: str = "", on_write: Callable[[str], None] = lambda text: None
) -> tuple[Echo, FakeTerminal]:
    echo, terminal = Echo(), FakeTerminal(*lines, on_write=on_write)
    Conversation(echo, terminal, system).run()
    return echo, terminal


def test_each_turn_has_those_before_it_and_reset_forgets_all_but_the_system() -> None:
    echo, terminal = talk("one", "", "two", "/reset", "three", "/exit", "four", system="be brief")
    assert echo.asked == [
        ["system: be brief", "user: one"],
        ["system: be brief", "user: one", "assistant: one ", "user: two"],
        ["system: be brief", "user: three"],
    ]
    assert terminal.written == "one \ntwo \nforgotten\nthree \n"


def test_a_message_of_several_lines_stands_between_quotation_marks() -> None:
    echo, terminal = talk('"""first', "/second", 'third"""', '"""/all in one"""')
    assert [asked[-1] for asked in echo.asked] == ["user: first\n/second\nthird", "user: /all in one"]
    assert terminal.prompts == ["> ", ". ", ". ", "> ", "> "]


def test_control_c_stops_the_answer_and_keeps_what_came() -> None:
    def interrupt(text: str) -> None:
        if text == "three ":
            signal.raise_signal(signal.SIGINT)

    echo, terminal = talk("one two three four", "go on", on_write=interrupt)
    assert echo.asked[1] == ["user: one two three four", "assistant: one two three ", "user: go on"]
    assert echo.closed == 2 and "stopped\n" in terminal.written and "four" not in terminal.written


def test_control_c_between_messages_says_how_to_end() -> None:
    echo, terminal = talk(KeyboardInterrupt, '"""half', KeyboardInterrupt, "whole")
    assert terminal.written == "\nCtrl-D or /exit ends\n" * 2 + "whole \n\n"
    assert len(echo.asked) == 1


def test_an_answer_that_fails_is_one_line_and_its_question_goes() -> None:
    echo, terminal = talk("broken", "half broken", "again", "/exit")
    assert terminal.written.startswith("error: the model is tired\nhalf \nerror: the model is tired\n")
    assert echo.asked[2] == ["user: half broken", "assistant: half ", "user: again"]


def test_an_answer_that_was_cut_says_so_and_goes_on() -> None:
    echo, terminal = talk("this is long", "go on")
    assert terminal.written == f"this is long \n{CUT}\ngo on \n\n"
    assert echo.asked[1] == ["user: this is long", "assistant: this is long ", "user: go on"]


def test_an_empty_answer_is_said_and_its_question_goes() -> None:
    conversation = Conversation(Silent(), terminal := FakeTerminal("anyone?"))
    conversation.run()
    assert terminal.written == "the answer is empty\n\n" and conversation.messages == []


def test_an_unknown_command_is_no_message() -> None:
    echo, terminal = talk("/rest now", "/help")
    assert echo.asked == [] and terminal.written.startswith("/rest is no command; put") and terminal.written.count("/reset   forget") == 2


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("published") / "llama", initializer_range=0.2)


@pytest.fixture(scope="module")
def engine(published: Path) -> DynamicInferenceEngine:
    return open_engine(published, "cpu", cache_gb=0.01)


def whole_answer(engine: DynamicInferenceEngine, question: str) -> str:
    """In one piece."""
    tokens = engine.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    return engine.generate([tokens], EngineAnswers(engine, GREEDY)._params)[0].generated_text


def test_an_engine_answers_piece_by_piece_and_a_stopped_answer_leaves_nothing(engine: DynamicInferenceEngine) -> None:
    expected = whole_answer(engine, "which fruit is red?")
    answers = EngineAnswers(engine, GREEDY)
    question = [{"role": "user", "content": "which fruit is red?"}]
    pieces = list(answers.stream(question))
    assert "".join(pieces) == expected and len(pieces) > 3 and answers.is_cut
    stream = answers.stream(question)
    assert next(stream) == pieces[0] and engine.has_unfinished_requests()
    stream.close()
    assert not engine.has_unfinished_requests()
    assert list(answers.stream(question)) == pieces
    # A stop of its own is no cut.
    token = engine.generate([chat_tokens(engine.tokenizer, question)], answers._params)[0].generated_tokens[2]
    answers._params = dataclasses.replace(answers._params, stop_token_ids=(token,))
    assert len(list(answers.stream(question))) < len(pieces) and not answers.is_cut
    with pytest.raises(AnswerError, match="the conversation does not fit 256 tokens; /reset forgets it"):
        list(answers.stream([{"role": "user", "content": "red " * 400}]))


def test_control_c_within_a_step_waits_for_its_end(engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, original = [], engine.step

    def step():
        os.kill(os.getpid(), signal.SIGINT)
        done = original()
        steps.append(len(done))
        return done

    monkeypatch.setattr(engine, "step", step)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(EngineAnswers(engine, GREEDY).stream([{"role": "user", "content": "red"}]))
    assert steps == [0] and not engine.has_unfinished_requests() and signal.getsignal(signal.SIGINT) is before


@pytest.fixture(scope="module")
def server(published: Path) -> Iterator[InferenceServer]:
    with serve(open_engine(published, "cpu", cache_gb=0.01), model_name="tiny", token="secret") as running:
        yield running


def test_a_server_answers_as_the_engine_does(engine: DynamicInferenceEngine, server: InferenceServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    terminal = FakeTerminal("which fruit is red?")
    words = [server.url, "--token-file", str(tmp_path / "token"), "--temperature", "0", "--max-tokens", "12"]
    assert converse.main(words, terminal) == 0
    assert terminal.written == f"/help lists commands\n{whole_answer(engine, 'which fruit is red?')}\n{CUT}\n\n"


def test_a_server_refuses_in_one_line(server: InferenceServer) -> None:
    with pytest.raises(AnswerError, match="serves tiny; name one of them with --model"):
        ServerAnswers(server.url, GREEDY, token="secret", model="large")
    with pytest.raises(AnswerError, match=r"/v1: "):
        ServerAnswers(server.url, GREEDY, token="wrong")
    answers = ServerAnswers(server.url + "/v1/", GREEDY, token="secret")
    with pytest.raises(AnswerError, match="max_sequence_length=256"):
        list(answers.stream([{"role": "user", "content": "red " * 400}]))
    stream = answers.stream([{"role": "user", "content": "red"}])
    assert next(stream)
    stream.close()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["http://127.0.0.1:9"], "does not answer: "),
        (["nowhere"], "nowhere"),
        (["http://127.0.0.1:9", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype is for an engine of this process"),
        (["{published}", "--model", "tiny"], "--model and --token-file are for a server"),
    ],
)
def test_what_cannot_answer_is_one_line(words: list[str], reason: str, published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert converse.main([word.format(published=published) for word in words], FakeTerminal()) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and reason in message
