# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Calls of tools in texts: found, left alone, and enforced."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_inference import StructuredOutput
from mcore_inference.structured import GrammarCompiler, GrammarMatcher
from mcore_inference.tool_calls import ToolCall, ToolCallParser, tool_format
from mcore_parallel.data import ByteTokenizer, HuggingFaceTokenizer, train_bpe

NAMES = ["now", "weather", "weather_at"]
TOKENIZER = ByteTokenizer()
Parsed = tuple[str, list[ToolCall]]


def parse(form: str, pieces: list[str], max_calls: int | None = None) -> Parsed:
    parser = ToolCallParser(tool_format(form), NAMES, max_calls)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert parser.num_calls == len(calls)
    return "".join(part for part in parts if isinstance(part, str)), calls


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


NOW = '{"name": "now", "arguments": {}}'
OSLO = '{"city": "Oslo", "days": [1, 2.50, 1e400], "why": "a } ] \\" </tool_call> <tool_call> \\u00e9"}'
CASES: dict[str, tuple[str, str, str, list[ToolCall]]] = {
    "one": ("hermes", f"<tool_call>\n{NOW}\n</tool_call>", "", [call("now")]),
    "between text": ("hermes", f" Hm. <tool_call>{NOW}</tool_call>\n Done. ", " Hm.Done. ", [call("now")]),
    "two": (
        "hermes",
        f'<tool_call>{NOW}</tool_call>\n<tool_call>{{"arguments": {OSLO}, "name": "weather"}}</tool_call>\n',
        "",
        [call("now"), call("weather", OSLO)],
    ),
    "unknown name": (
        "hermes",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "malformed, then a call": (
        "hermes",
        f'<tool_call>{{"name": "now", "arguments": {{}}</tool_call> <tool_call>{NOW}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}</tool_call>',
        [call("now")],
    ),
    "open string": ("hermes", f'<tool_call>{{"name": "now <tool_call>{NOW}</tool_call>', '<tool_call>{"name": "now', [call("now")]),
    "unfinished": ("hermes", 'x <tool_call>{"name": "now", "argum', 'x <tool_call>{"name": "now", "argum', []),
    "unclosed": ("hermes", f"<tool_call>{NOW}", f"<tool_call>{NOW}", []),
    "part of a marker": ("hermes", "a < b <tool_cal <tool_c", "a < b <tool_cal <tool_c", []),
    "no object": ("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
        [],
    ),
    "a key twice": (
        "hermes",
        '<tool_call>{"name": "now", "name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "name": "now", "arguments": {}}</tool_call>',
        [],
    ),
    "further members": (
        "hermes",
        '<tool_call>{"name": "now", "x": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "x": 1, "arguments": {}}</tool_call>',
        [],
    ),
    "NaN": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        [],
    ),
    "deep": ("hermes", "<tool_call>" + "{" * 70, "<tool_call>" + "{" * 70, []),
    "llama": (
        "llama3_json",
        ' {"type": "function", "name": "weather", "parameters": {"city": "Rome"}}\n',
        "",
        [call("weather", '{"city": "Rome"}')],
    ),
    "llama, several": (
        "llama3_json",
        '{"name": "now", "parameters": {}}; {"name": "weather", "arguments": {"a": "\\\\"}}{"name": "now", "parameters": {}} bye',
        "bye",
        [call("now"), call("weather", '{"a": "\\\\"}'), call("now")],
    ),
    "llama, text first": ("llama3_json", 'So: {"name": "now", "parameters": {}}', 'So: {"name": "now", "parameters": {}}', []),
    "llama, other JSON": ("llama3_json", '{"name": "Ada", "parameters": {}} ', '{"name": "Ada", "parameters": {}} ', []),
    "llama, a half": ("llama3_json", '{"name": "now", "parameters": {}}; {"na', '; {"na', [call("now")]),
    "mistral": ("mistral", f"[TOOL_CALLS] [{NOW}, {NOW} ]", "", [call("now"), call("now")]),
    "mistral, no marker": ("mistral", f"[{NOW}]", "", [call("now")]),
    "mistral, text first": ("mistral", f"Hm [ [TOOL_CALLS][{NOW}] x", "Hm [x", [call("now")]),
    "mistral, by name": (
        "mistral",
        '[TOOL_CALLS]weather_at[ARGS]{"city": "["}[TOOL_CALLS]weather{"city": "Rome"}',
        "",
        [call("weather_at", '{"city": "["}'), call("weather", '{"city": "Rome"}')],
    ),
    "mistral, by name without marker": ("mistral", 'now[ARGS]{}weather{"a":1}', "", [call("now"), call("weather", '{"a":1}')]),
    "mistral, a list": ("mistral", "[1, 2] and [TOOL_CALLS][", "[1, 2] and [TOOL_CALLS][", []),
    "mistral, one of two is none": ("mistral", f'[{NOW}, {{"name": "x"}}]', f'[{NOW}, {{"name": "x"}}]', []),
    "mistral, empty": ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    "mistral, a name only": ("mistral", "weather is fine", "weather is fine", []),
    "blanks": ("hermes", " \n\t ", " \n\t ", []),
    "nothing": ("llama3_json", "", "", []),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_and_content_are_the_same_however_the_text_is_cut(case: str) -> None:
    form, text, content, calls = CASES[case]
    assert parse(form, [text]) == (content, calls)
    assert parse(form, list(text)) == (content, calls)
    for at in range(len(text)):
        assert parse(form, [text[:at], text[at:]]) == (content, calls), (text[:at], text[at:])
    assert all(isinstance(json.loads(one.arguments), dict) for one in calls)


_PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    NOW,
    '{"name": "weather", "parameters": {}}',
    *'{}[]",;: \n<\\',
    "now",
    "name",
    "x",
]


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(["hermes", "llama3_json", "mistral"]),
    words=st.lists(st.sampled_from(_PIECES), max_size=24),
    seed=st.integers(0, 99),
)
def test_every_cut_of_any_text_gives_the_same_and_loses_nothing(form: str, words: list[str], seed: int) -> None:
    text, rng = "".join(words), random.Random(seed)
    whole = parse(form, [text])
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert parse(form, pieces) == parse(form, list(text)) == whole
    content, calls = whole
    if not calls:
        assert content == text
    # Content is what stands around the calls, in order.
    rest = iter(text)
    assert all(letter in rest for letter in content)


def test_calls_beyond_the_limit_are_content() -> None:
    one = f"<tool_call>{NOW}</tool_call>"
    assert parse("hermes", list(one * 3), 1) == (one * 2, [call("now")])
    assert parse("mistral", [f"[{NOW},{NOW}]"], 1) == (f"[{NOW},{NOW}]", [])


def test_a_long_text_takes_time_with_its_length_only() -> None:
    parser = ToolCallParser(tool_format("hermes"), NAMES)
    parts = parser.push('<tool_call>{"name": "now", "arguments": {"a": "')
    for _ in range(20_000):
        parts += parser.push("word ")
    assert parts == [] and parser.push('"}}</tool_call>')[0].arguments == json.dumps({"a": "word " * 20_000})  # type: ignore[union-attr]
    text = '<tool_call>{"' + "<tool_call>" * 5_000
    assert parse("hermes", [text]) == (text, [])


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="tool_call_parser='xml' is unknown; choose one of hermes, llama3_json, mistral"):
        tool_format("xml")
    assert len(tool_format("mistral").new_id()) == 9 and tool_format("hermes").new_id().startswith("call_")


# -- grammars ----------------------------------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"], "additionalProperties": False}
SCHEMAS = {"weather": {**CITY, "$defs": {"city": {"enum": ["Oslo", "Rome"]}}}, "now": {"type": "object", "additionalProperties": False}}
WEATHER = {"hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'}
WEATHER["llama3_json"] = '{"name": "weather", "parameters": {"city": "Oslo"}}'
WEATHER["mistral"] = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
TWICE = {
    form: {"hermes": f"{one}\n{one}", "llama3_json": f"{one}; {one}", "mistral": f"{one[:-1]}, {one[1:]}"}[form]
    for form, one in WEATHER.items()
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)


def has_form(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    matcher = compiler.matcher(StructuredOutput(grammar=grammar), 0)
    for token in TOKENIZER.tokenize(text):
        if not allows(matcher, token):
            return False
        matcher.accept(token)
    return matcher.may_end


def allows(matcher: GrammarMatcher, token: int) -> bool:
    return bool(int(matcher.allowed(()).view("uint32")[token // 32]) >> token % 32 & 1)


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
def test_what_a_grammar_of_required_calls_allows_is_read_as_calls(compiler: GrammarCompiler, form: str) -> None:
    many, one = (tool_format(form).grammar(SCHEMAS, required=True, many=many) for many in (True, False))
    for text, calls in ((WEATHER[form], 1), (TWICE[form], 2)):
        assert has_form(compiler, many, text) and has_form(compiler, one, text) == (calls == 1)
        assert parse(form, [text]) == ("", [call("weather", '{"city": "Oslo"}')] * calls)
    for text in ("", "Hi", WEATHER[form].replace("Oslo", "Bonn"), WEATHER[form].replace("weather", "rm")):
        assert not has_form(compiler, many, text)


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_free_text_may_stand_beside_strict_calls(compiler: GrammarCompiler, form: str) -> None:
    many, one = (tool_format(form).grammar(SCHEMAS, required=False, many=many) for many in (True, False))
    for text in ("", "Hi <b> {x}", WEATHER[form], TWICE[form]):
        assert has_form(compiler, many, text)
        # Of hermes, what follows the one call is text.
        assert has_form(compiler, one, text) or (form == "llama3_json" and text == TWICE[form])
    assert not has_form(compiler, many, WEATHER[form].replace("Oslo", "Bonn"))
    assert form != "hermes" or has_form(compiler, many, f"Let me see. {WEATHER[form]} So it is.")


def test_the_markers_may_be_tokens_of_their_own(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    train_bpe(["one and one? two, yes. name arguments weather city Oslo " * 20], 320, tmp_path)
    inner = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_tokens([library.AddedToken(word, special=False, normalized=False) for word in ("<tool_call>", "</tool_call>")])
    inner.add_special_tokens([library.AddedToken("<never>", special=True, normalized=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    marker, end, never = (inner.token_to_id(word) for word in ("<tool_call>", "</tool_call>", "<never>"))
    ids = tokenizer.tokenize(WEATHER["hermes"])
    assert ids[0] == marker and ids[-1] == end and tokenizer.detokenize(ids) == WEATHER["hermes"]
    for required in (True, False):
        matcher = compiler.matcher(StructuredOutput(grammar=tool_format("hermes").grammar(SCHEMAS, required=required, many=True)), 0)
        for token in ids:
            assert allows(matcher, token) and not allows(matcher, never)
            matcher.accept(token)
        assert matcher.may_end


def test_strict_calls_of_mistral_in_free_text_are_refused() -> None:
    with pytest.raises(ValueError, match="strict=true.*mistral.*tool_choice='required'"):
        tool_format("mistral").grammar(SCHEMAS, required=False, many=True)
