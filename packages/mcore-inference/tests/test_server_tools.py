# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tools in chats over HTTP, by OpenAI's own client: over a scripted output, and over an engine whose calls are held to a form."""

import asyncio
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import openai
import pytest
import torch

from mcore_inference import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EngineHealth,
    FinishReason,
    Increment,
    RequestStream,
    SamplingParams,
    Status,
)
from mcore_inference.server import InferenceServer, serve, serve_runner
from mcore_parallel.data import ByteTokenizer

Make = Callable[..., Any]


class ToolTokenizer(ByteTokenizer):
    """Writes tools and conversations as JSON."""

    def apply_tool_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[int]:
        return self.tokenize(json.dumps([list(tools), list(messages), add_generation_prompt]))


class ForgetfulTokenizer(ByteTokenizer):
    """Has a template that leaves tools out."""

    def apply_tool_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[int]:
        return self.apply_chat_template([*messages], add_generation_prompt)


TOKENIZER = ToolTokenizer()


class ScriptedRunner:
    """Answers each request with a text, three characters at a time."""

    max_sequence_length = 4096
    failure = None

    def __init__(self) -> None:
        self.text, self.reason, self.prompt, self.params = "", FinishReason.STOP, "", SamplingParams()

    async def submit(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = True,
        lora: str | None = None,
    ) -> RequestStream:
        assert sampling_params is not None
        self.prompt, self.params = TOKENIZER.detokenize(list(prompt)), sampling_params
        answer = RequestStream(lambda _: None, asyncio.get_running_loop())
        request = DynamicInferenceRequest(request_id=0, prompt_tokens=list(prompt), sampling_params=sampling_params)
        request.generated_tokens, request.status, request.finish_reason = TOKENIZER.tokenize(self.text), Status.COMPLETED, self.reason
        record = DynamicInferenceRequestRecord(requests=[request], generated_text=self.text)
        for at in range(0, len(self.text) if stream else 0, 3):
            answer.deliver(Increment(text=self.text[at : at + 3]))
        answer.deliver(Increment(record=record))
        return answer

    def room(self, num_prompt_tokens: int) -> int:
        return 100

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, last_step_age_s=None, unfinished_requests=0, failure=None)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters, **more}}


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}
TOOLS: Any = [tool("weather", CITY), tool("now")]
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture(scope="module")
def scripted(runner: ScriptedRunner) -> Iterator[openai.OpenAI]:
    with serve_runner(lambda: runner, TOKENIZER, tool_call_parser="hermes") as server, client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def random_client(make_model: Make, make_engine: Make) -> Iterator[Callable[[str], openai.OpenAI]]:
    """Servers of one random engine a parser."""
    servers: dict[str, InferenceServer] = {}

    @functools.cache
    def client(parser: str) -> openai.OpenAI:
        model = make_model(vocab_size=272, dtype=torch.float32, layers=1)
        engine = make_engine(model, TOKENIZER, max_sequence_length=1024, num_blocks=512, max_tokens=512)
        servers[parser] = serve(engine, tool_call_parser=parser)
        return client_of(servers[parser])

    yield client
    for parser, server in servers.items():
        client(parser).close()
        server.close()


def client_of(server: InferenceServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def chat(client: openai.OpenAI, stream: bool, **more: Any) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Content, calls and reason of an answer, whole or joined from its pieces."""
    setting: dict[str, Any] = {"model": "mcore", "messages": MESSAGES, "tools": TOOLS, **more}
    if not stream:
        choice = client.chat.completions.create(**setting).choices[0]
        calls = choice.message.tool_calls or []
        assert all(call.id and call.type == "function" for call in calls)
        return choice.message.content, [(call.function.name, call.function.arguments) for call in calls], choice.finish_reason
    text, names, reason = "", {}, None
    for chunk in client.chat.completions.create(**setting, stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        text += delta.content or ""
        for call in delta.tool_calls or []:
            assert call.id and call.type == "function" and call.index == len(names)
            names[call.index] = (call.function.name, call.function.arguments)
    return text or (None if names else ""), list(names.values()), reason


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_told_from_content(scripted: openai.OpenAI, runner: ScriptedRunner, stream: bool) -> None:
    runner.reason = FinishReason.STOP
    weather = ("weather", '{"city": "Oslo"}')
    now = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    runner.text = CALL
    assert chat(scripted, stream) == (None, [weather], "tool_calls")
    runner.text = f"I look.\n{CALL}\n{now}"
    assert chat(scripted, stream) == ("I look.", [weather, ("now", "{}")], "tool_calls")
    assert chat(scripted, stream, parallel_tool_calls=False) == (f"I look.{now}", [weather], "tool_calls")
    assert chat(scripted, stream, tool_choice="none") == (runner.text, [], "stop")
    for text in ("It rains.", CALL.replace("}}", "}"), CALL.replace("weather", "rm"), CALL[:-3], ""):
        runner.text = text
        assert chat(scripted, stream, tool_choice="auto") == (text, [], "stop")
    runner.text, runner.reason = f"{CALL}\nAnd so on", FinishReason.LENGTH
    assert chat(scripted, stream) == ("And so on", [weather], "length")


def test_tools_calls_and_their_results_reach_the_template(scripted: openai.OpenAI, runner: ScriptedRunner) -> None:
    runner.text, runner.reason = CALL, FinishReason.STOP
    message = scripted.chat.completions.create(model="mcore", messages=MESSAGES, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    scripted.chat.completions.create(model="mcore", messages=[*MESSAGES, message, result], tools=TOOLS)
    tools, messages, is_open = json.loads(runner.prompt)
    assert [one["function"]["name"] for one in tools] == ["weather", "now"] and is_open
    assert tools[0]["function"]["parameters"] == CITY and tools[1]["function"]["parameters"]["type"] == "object"
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert messages == [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        result,
    ]
    # Without tools the calls of before are still written, and with tool_choice='none' no tools are.
    scripted.chat.completions.create(model="mcore", messages=[*MESSAGES, message, result], tools=TOOLS, tool_choice="none")
    assert json.loads(runner.prompt)[0] == [] and json.loads(runner.prompt)[1] == messages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
def test_required_and_named_calls_are_valid_whatever_the_model_draws(
    random_client: Callable[[str], openai.OpenAI], parser: str, stream: bool
) -> None:
    client = random_client(parser)
    common: dict[str, Any] = {"seed": 3, "max_tokens": 300}
    for more in ({"parallel_tool_calls": False}, {"seed": 4, "parallel_tool_calls": False}):
        content, ((name, arguments),), reason = chat(client, stream, tool_choice="required", **common | more)
        assert name in ("weather", "now") and content is None and reason == "tool_calls"
        assert json.loads(arguments) in ({"city": "Oslo"}, {"city": "Rome"}) if name == "weather" else json.loads(arguments) == {}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    content, ((name, arguments),), reason = chat(client, stream, tool_choice=named, **common)
    assert (content, name, reason) == (None, "weather", "tool_calls") and json.loads(arguments)["city"] in ("Oslo", "Rome")


@pytest.mark.journey
def test_several_required_calls_and_choices(random_client: Callable[[str], openai.OpenAI]) -> None:
    ask = random_client("mistral").chat.completions.create
    # The bracket that would end the list is not liked.
    setting: dict[str, Any] = {"logit_bias": {str(TOKENIZER.tokenize("]")[0]): -20.0}, "max_tokens": 120, "n": 2, "seed": 1}
    answer = ask(model="mcore", messages=MESSAGES, tools=[tool("now")], tool_choice="required", **setting)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    setting["max_tokens"], setting["logit_bias"] = 300, {str(TOKENIZER.tokenize("]")[0]): 20.0}
    answer = ask(model="mcore", messages=MESSAGES, tools=[tool("now")], tool_choice="required", **setting)
    assert all(choice.message.tool_calls for choice in answer.choices)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    # The templates of these models want ids of this length.
    assert len(set(ids)) == len(ids) and all(len(one) == 9 for one in ids)


def test_what_cannot_be_honoured_is_refused_by_name(scripted: openai.OpenAI, random_client: Callable[[str], openai.OpenAI]) -> None:
    unnamed: Any = {"type": "function", "function": {"name": "rm"}}
    strict: Any = [tool("weather", CITY, strict=True)]
    unknown = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    cases: list[tuple[openai.OpenAI, dict[str, Any], str, str]] = [
        (scripted, {"tools": openai.NOT_GIVEN, "tool_choice": "auto"}, "tool_choice needs tools", "tool_choice"),
        (scripted, {"tool_choice": unnamed}, "names 'rm'.*'now', 'weather'", "tool_choice"),
        (scripted, {"response_format": {"type": "json_object"}}, "response_format.*leave no room", "tools"),
        (random_client("mistral"), {"tools": strict}, "strict=true.*'mistral'.*tool_choice='required'", "tools"),
        (random_client("hermes"), {"tools": [tool("a", unknown)], "tool_choice": "required"}, "uniqueItems", "tools"),
    ]
    for client, more, words, param in cases:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            chat(client, False, **more)
        assert caught.value.param == param
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "'weather'"),
        ({"tools": []}, "tools"),
        ({"tools": [tool("a b")]}, "name"),
        ({"tools": [tool("a", {"type": "array"})]}, "must describe an object"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [called("{}")]}]}, "tool_calls are of the assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("[]")]}]}, "text of a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("{")]}]}, "text of a JSON object"),
    ]
    for more, words in bodies:
        with pytest.raises(openai.UnprocessableEntityError, match=words):
            chat(scripted, False, **more)


def called(arguments: str) -> Any:
    return {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}


def test_only_strict_tools_hold_free_outputs_to_a_form(scripted: openai.OpenAI, runner: ScriptedRunner) -> None:
    runner.text, runner.reason = "x", FinishReason.STOP
    chat(scripted, False)
    assert runner.params.structured_output is None
    chat(scripted, False, tools=[tool("weather", CITY, strict=True), tool("now", CITY)])
    form = runner.params.structured_output
    assert form is not None and form.grammar is not None
    # The other tool's arguments are free, its name is not.
    assert form.grammar.count("Oslo") == 1 and "now" in form.grammar and "lazy" in form.grammar


def test_a_server_without_parser_refuses_tools_and_says_how_to_start_it(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer())
    with serve(engine) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser hermes, llama3_json or mistral") as caught:
            chat(client, False)
        assert caught.value.param == "tools"
        assert chat(client, False, tool_choice="none", max_tokens=1, extra_body={"ignore_eos": True})[2] == "length"
        message: Any = {"role": "assistant", "tool_calls": [called("{}")]}
        with pytest.raises(openai.BadRequestError, match="ByteTokenizer has no chat template that writes tools"):
            chat(client, False, tools=openai.NOT_GIVEN, messages=[*MESSAGES, message])
    for parser, tokenizer, words in (
        ("xml", TOKENIZER, "tool_call_parser='xml' is unknown"),
        ("hermes", ByteTokenizer(), "ByteTokenizer has no chat template that writes tools"),
        ("hermes", ForgetfulTokenizer(), "the chat template of ForgetfulTokenizer leaves tools out"),
    ):
        with pytest.raises(ValueError, match=words):
            serve(engine, tokenizer, tool_call_parser=parser)


class NamingTokenizer(ByteTokenizer):
    """Its template writes names of tools, which must have one, and of users, and no others."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> list[int]:
        lines = []
        for message in messages:
            role = message["role"]
            name = message["name"] if role == "tool" else message.get("name", "") if role == "user" else ""
            if role == "tool" and name != "now":
                raise ValueError(f"there is no tool {name!r}")
            lines.append(f"{role}({name}): {message['content']}\n")
        return self.tokenize("".join(lines))


def test_a_name_goes_to_the_chat_template_and_is_refused_where_that_writes_none(runner: ScriptedRunner) -> None:
    messages: Any = [
        {"role": "user", "name": "ada", "content": "x"},
        {"role": "user", "content": "y"},
        {"role": "tool", "name": "now", "content": "12"},
    ]
    runner.text, runner.reason = "x", FinishReason.STOP
    with serve_runner(lambda: runner, NamingTokenizer()) as server, client_of(server) as client:
        client.chat.completions.create(model="mcore", messages=messages)
        assert runner.prompt == "user(ada): x\nuser(): y\ntool(now): 12\n"
        named: Any = [*messages, {"role": "assistant", "name": "bot", "content": "z"}]
        for ask in (
            lambda: client.chat.completions.create(model="mcore", messages=named),
            lambda: client.post("../tokenize", body={"messages": named}, cast_to=object),
        ):
            with pytest.raises(openai.BadRequestError, match="writes no name of role 'assistant'; leave name out") as caught:
                ask()
            assert caught.value.param == "messages.name"


def test_tokenize_counts_tools_as_the_chat_does(scripted: openai.OpenAI, runner: ScriptedRunner) -> None:
    runner.text = "x"
    chat(scripted, False)
    answer = scripted.post("../tokenize", body={"messages": MESSAGES, "tools": TOOLS}, cast_to=object)
    assert isinstance(answer, dict) and TOKENIZER.detokenize(answer["tokens"]) == runner.prompt
    with pytest.raises(openai.UnprocessableEntityError, match="tools go with messages"):
        scripted.post("../tokenize", body={"prompt": "x", "tools": TOOLS}, cast_to=object)
