# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Outputs of a form: what is drawn, what is refused, and what does not change."""

import builtins
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceEngine,
    FinishReason,
    SamplingParams,
    StepFailedError,
    StructuredOutput,
    StructuredOutputError,
    TransformersTokenizer,
)
from mcore_inference.sampling import Draws, keep_allowed
from mcore_inference.structured import GrammarCompiler
from mcore_inference.structured._bounds import on_deep_stack
from mcore_inference.structured._llguidance import _Vocabulary
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data.tokenizers import train_bpe
from tests.support.sentence_pieces import sentence_pieces

Make = Callable[..., Any]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
LONG = 60


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def engine(request: pytest.FixtureRequest, make_model: Make, make_engine: Make) -> DynamicInferenceEngine:
    return make_engine(make_model(vocab_size=272), ByteTokenizer(), run_ahead=request.param, max_sequence_length=128)


def params(seed: int = 0, **form: Any) -> SamplingParams:
    return SamplingParams(seed=seed, num_tokens_to_generate=LONG, structured_output=StructuredOutput(**form))


def is_record(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "age", "ok"}
        and value["name"] in ("ada", "grace")
        and 10 <= value["age"] <= 99
        and value["ok"] in (True, False)
    )


FORMS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json_schema": SCHEMA}, is_record),
    ({"json_schema": json.dumps(SCHEMA)}, is_record),
    ({"regex": r"[a-c]{3}-[0-9]{2}"}, re.compile(r"[a-c]{3}-[0-9]{2}").fullmatch),
    ({"choices": ["red", "rose", 'a "b"\\n', "\u00e9t\u00e9"]}, lambda text: text in ("red", "rose", 'a "b"\\n', "\u00e9t\u00e9")),
    ({"grammar": 'start: pair ("," pair){2}\npair: /[xy]/ "=" /[0-9]/'}, re.compile(r"[xy]=\d,[xy]=\d,[xy]=\d").fullmatch),
]


@pytest.mark.parametrize(("form", "has_form"), FORMS, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_every_output_has_its_form_greedy_and_drawn(
    engine: DynamicInferenceEngine, form: dict[str, Any], has_form: Callable[[str], Any]
) -> None:
    settings = [params(seed, **form) for seed in range(6)] + [replace(params(**form), temperature=0.0)]
    records = engine.generate(["say"] * 7, settings)
    for record in records:
        assert record.finish_reason is FinishReason.STOP and has_form(record.generated_text), record.error or record.generated_text
        # Nothing can follow the last token, so no end-of-text token is drawn.
        assert ByteTokenizer().detokenize(record.generated_tokens) == record.generated_text
    assert len({record.generated_text for record in records}) > 1


def test_any_json_object_is_one_even_where_the_budget_cuts_it(engine: DynamicInferenceEngine) -> None:
    # The brace that closes is likely, so that a random model comes to an end.
    bias = {ord("}"): 8.0, ord('"'): 6.0, ord(":"): 6.0, ord("1"): 6.0}
    records = engine.generate(["x"] * 8, [replace(params(seed, json_object=True), logit_bias=bias) for seed in range(8)])
    whole = [record.generated_text for record in records if record.finish_reason is FinishReason.STOP]
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)
    assert all(record.generated_text.startswith("{") for record in records)


def test_tokens_are_the_most_likely_allowed_ones_and_log_probs_of_the_masked_scores(make_model: Make, make_engine: Make) -> None:
    model = make_model(vocab_size=272)
    free = SamplingParams(num_tokens_to_generate=1, temperature=0, return_log_probs=True, processed_log_probs=True)
    wanted = replace(free, structured_output=StructuredOutput(regex="[g-k]z*"), num_tokens_to_generate=3)
    drawn = replace(wanted, temperature=0.7, seed=3)
    engine = make_engine(model, ByteTokenizer())
    greedy, sampled, raw = engine.generate(["ab"] * 3, [wanted, drawn, replace(drawn, processed_log_probs=False)])
    step = model_scores(model, ByteTokenizer().tokenize("ab"))
    allowed = list(range(ord("g"), ord("k") + 1))
    assert greedy.generated_tokens[0] == allowed[int(step[allowed].argmax())]
    assert greedy.generated_log_probs[0] == 0.0
    chances = (step[allowed] / 0.7).log_softmax(-1)
    assert sampled.generated_log_probs[0] == pytest.approx(chances[allowed.index(sampled.generated_tokens[0])].item(), abs=1e-9)
    assert raw.generated_tokens == sampled.generated_tokens
    assert raw.generated_log_probs[0] == pytest.approx(step.log_softmax(-1)[raw.generated_tokens[0]].item(), abs=1e-9)


def model_scores(model: Any, tokens: list[int]) -> torch.Tensor:
    from mcore_parallel.nn import Step

    with torch.no_grad():
        output, _ = model(torch.tensor(tokens), Step.causal(1, len(tokens)))
    return output.logits().double()[-1]


def test_a_form_that_may_end_ends_by_a_stop_token_and_not_before(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272), ByteTokenizer())
    eod = ByteTokenizer().eod
    assert eod is not None
    # The model wants to end at once; the form wants three digits first.
    eager = replace(params(regex="[0-9]{3,}"), logit_bias={eod: 50.0})
    (record,) = engine.generate(["x"], eager)
    assert re.fullmatch("[0-9]{3}", record.generated_text) and record.generated_tokens[3:] == [eod]
    (endless,) = engine.generate(["x"], replace(eager, ignore_eos=True, num_tokens_to_generate=9))
    assert re.fullmatch("[0-9]{9}", endless.generated_text) and endless.finish_reason is FinishReason.LENGTH
    (own,) = engine.generate(["x"], replace(eager, logit_bias={ord("5"): 50.0}, stop_token_ids=[ord("!")], num_tokens_to_generate=6))
    assert own.generated_text == "555555"
    (cut,) = engine.generate(["x"], replace(eager, logit_bias={ord("5"): 50.0}, stop_words=["55"]))
    assert cut.generated_text == "" and cut.finish_reason is FinishReason.STOP


def test_a_form_changes_no_neighbour_and_no_neighbour_a_form(make_model: Make, make_engine: Make) -> None:
    make = functools.partial(make_engine, make_model(vocab_size=272), ByteTokenizer(), max_sequence_length=128)
    mine, plain = params(5, json_schema=SCHEMA), SamplingParams(seed=9, num_tokens_to_generate=30)
    alone, other = make().generate(["a"], mine)[0], make().generate(["bc"], plain)[0]
    for run_ahead in (False, True):
        # Few blocks, so that requests are preempted and computed again in the middle of their form.
        engine = make(run_ahead=run_ahead, num_blocks=16, max_tokens=9)
        crowd = engine.generate(["bc", "a", "bc", "a", "a"], [plain, mine, plain, mine, mine])
        assert engine.num_preemptions
        assert [record.generated_tokens for record in crowd[1::2]] == [alone.generated_tokens] * 2
        assert [record.generated_tokens for record in crowd[:3:2]] == [other.generated_tokens] * 2


def test_penalties_and_bans_apply_before_the_form(engine: DynamicInferenceEngine) -> None:
    form = params(regex="[ab]{20}")
    (record,) = engine.generate(["x"], replace(form, frequency_penalty=100.0, temperature=0.0))
    assert abs(record.generated_text.count("a") - record.generated_text.count("b")) <= 1


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({}, "sets nothing"),
        ({"regex": "a", "choices": ["b"]}, "exactly one"),
        ({"regex": ""}, "regex"),
        ({"grammar": 3}, "grammar"),
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": 3}, "json_schema is a int"),
        ({"json_schema": {"a": object()}}, "no JSON"),
        ({"json_schema": {"minimum": float("nan")}}, "no JSON"),
        ({"json_object": 1}, "json_object"),
        ({"choices": "yes"}, "choices"),
        ({"choices": []}, "choices"),
        ({"choices": [""]}, "choices"),
        ({"regex": "a" * 300_000}, "at most"),
    ],
)
def test_a_form_of_a_wrong_kind_is_refused_when_it_is_made(form: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        StructuredOutput(**form)


def test_settings_that_do_not_go_with_a_form_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="min_tokens=3 and structured_output"):
        SamplingParams(min_tokens=3, structured_output=StructuredOutput(regex="a"))
    with pytest.raises(ValueError, match="structured_output is a dict"):
        SamplingParams(structured_output={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"json_schema": {"type": "objct"}}, "objct"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"regex": "(?=a)"}, "look-ahead"),
        ({"regex": "("}, "unclosed"),
        ({"grammar": "start: missing"}, "missing"),
        ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "recursion"),
    ],
)
def test_a_form_that_the_library_refuses_is_an_error_before_admission(
    make_model: Make, make_engine: Make, form: dict[str, Any], word: str
) -> None:
    engine = make_engine(make_model(vocab_size=272), ByteTokenizer())
    with pytest.raises(StructuredOutputError, match=f"(?s){next(iter(form))} is refused.*{word}"):
        engine.add_request("x", params(**form))
    assert not engine.has_unfinished_requests()
    (record,) = engine.generate(["x"], params(**form))
    assert isinstance(record.error, StructuredOutputError)


def chain_of_references(count: int, spelling: str = "$ref") -> str:
    """A schema whose definitions lead to each other; 300 were enough to end a process with a stack of 8 MiB."""
    refs = [f'"d{number}":{{"properties":{{"a":{{"{spelling}":"#/$defs/d{number + 1}"}}}}}}' for number in range(count)]
    return f'{{"{spelling}":"#/$defs/d0","$defs":{{{",".join(refs)},"d{count}":{{"type":"integer"}}}}}}'


def chain_of_rules(count: int, name: str = "a") -> str:
    rules = [f'{name}{number}: "x" {"(" * 9}{name}{number + 1}{")+" * 9}' for number in range(count)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{count}: "z"'])


def test_forms_as_deep_as_the_bounds_allow_are_compiled_on_a_stack_that_holds_them() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 272)
    for form in (
        StructuredOutput(json_schema=chain_of_references(800)),
        StructuredOutput(grammar=chain_of_rules(318)),
        StructuredOutput(grammar=chain_of_rules(318, "A")),
        StructuredOutput(grammar=f"start: %json {chain_of_references(120)}"),
    ):
        assert compiler.matcher(form, 0).allowed(()).any()
    assert threading.stack_size() == 0


def test_engines_that_compile_at_once_each_have_a_deep_stack_and_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start, sizes = threading.Thread.start, list[int]()

    def slow_start(thread: threading.Thread) -> None:
        if thread.name == "mcore-grammar":
            time.sleep(0.002)
            sizes.append(threading.stack_size())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    engines = [threading.Thread(target=lambda: [on_deep_stack(int) for _ in range(10)]) for _ in range(4)]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join()
    assert sizes == [2**29] * 40 and threading.stack_size() == 0


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"json_schema": chain_of_references(4000)}, r"4001 different \$ref in 5 levels"),
        ({"json_schema": chain_of_references(4000, "$\\u0072ef")}, r"4001 different \$ref in 5 levels"),
        ({"json_schema": '{"items":' * 100 + chain_of_references(300)[:-1] + "}" * 101}, r"301 different \$ref in 105 levels"),
        ({"grammar": f"start: %json {chain_of_references(2000)}"}, r"2001 different \$ref"),
        ({"grammar": chain_of_rules(4000)}, "4002 rules"),
        ({"grammar": chain_of_rules(4000, "A")}, "4002 rules"),
        ({"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}, "nested"),
        ({"regex": "(" * 100_000 + "a" + ")" * 100_000}, "regex"),
    ],
)
def test_forms_that_would_overflow_the_stack_are_refused(form: dict[str, Any], word: str) -> None:
    with pytest.raises(StructuredOutputError, match=f"(?s){next(iter(form))} is refused.*{word}"):
        GrammarCompiler(ByteTokenizer(), 272).matcher(StructuredOutput(**form), 0)


DEEP_ERROR = """
import sys, threading, time, llguidance

def validate():
    begin = time.thread_time()
    assert "nowhere" in llguidance.LLMatcher.validate_grammar(sys.stdin.read())
    print(time.thread_time() - begin)

threading.stack_size(2**29)
threading.Thread(target=validate).start()
"""


def test_an_error_at_the_end_of_a_deep_grammar_is_told_at_once_without_traces() -> None:
    grammar, environment = chain_of_rules(318).replace('"z"', "nowhere"), {**os.environ, "RUST_BACKTRACE": "1", "RUST_LIB_BACKTRACE": "0"}
    command = [sys.executable, "-c", DEEP_ERROR]
    ended = subprocess.run(command, input=grammar, env=environment, check=True, capture_output=True, text=True, timeout=50)
    assert float(ended.stdout) < 2


AMBIGUOUS = 'start: e\ne: e e e | e e | "a" | \n'


@pytest.mark.journey
def test_an_ambiguous_grammar_ends_by_an_error_before_it_stalls_the_engine(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272), ByteTokenizer(), max_sequence_length=128)
    only = SamplingParams(
        seed=1, num_tokens_to_generate=120, ignore_eos=True, logit_bias={97: 1000.0}, structured_output=StructuredOutput(grammar=AMBIGUOUS)
    )
    good = SamplingParams(seed=2, num_tokens_to_generate=120, ignore_eos=True)
    (alone,) = engine.generate(["x"], good)
    beside, ended = engine.generate(["x", "y"], [good, only])
    assert isinstance(ended.error, StructuredOutputError) and ended.num_generated < 110
    assert beside.error is None and beside.generated_tokens == alone.generated_tokens
    matcher, worst = GrammarCompiler(ByteTokenizer(), 272).matcher(StructuredOutput(grammar=AMBIGUOUS), 0), 0.0
    with pytest.raises(StructuredOutputError, match="items; max is 500[^<>]*$"):
        for _ in range(400):
            begin = time.thread_time()
            matcher.accept(97)
            worst = max(worst, time.thread_time() - begin)
    assert worst < 0.1


def test_a_mask_that_takes_too_much_work_ends_its_request_at_the_same_token_each_time(make_model: Make, make_engine: Make) -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 272)
    for number in range(3):
        # What one of them has used up is not missing to the next.
        matcher = compiler.matcher(StructuredOutput(regex="x(a{900}){1000}"), number)
        with pytest.raises(StructuredOutputError, match=f"request {number}: structured_output cannot go on.*too many expressions"):
            matcher.accept(ord("x"))
    engine = make_engine(make_model(vocab_size=272), ByteTokenizer(), max_sequence_length=128)
    good = SamplingParams(seed=2, num_tokens_to_generate=20, ignore_eos=True)
    (alone,) = engine.generate(["x"], good)
    beside, ended = engine.generate(["x", "y"], [good, params(regex="x(a{900}){1000}")])
    assert isinstance(ended.error, StructuredOutputError) and ended.num_generated == 1
    assert beside.error is None and beside.generated_tokens == alone.generated_tokens


def test_no_clock_decides_whether_an_output_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with a core of their own each go on alike."""
    matcher = GrammarCompiler(ByteTokenizer(), 272).matcher(StructuredOutput(regex="a+"), 3)
    hours = itertools.count(0, 3600)
    monkeypatch.setattr(time, "thread_time", lambda: float(next(hours)))
    matcher.accept(97)
    assert matcher.may_end


def multiples(*values: float, key: str = "anyOf") -> str:
    return json.dumps({key: [{"type": "number", "multipleOf": value} for value in values]})


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"json_schema": multiples(*range(90001, 90011))}, "is at most 10000, and multipleOf=9000"),
        ({"json_schema": multiples(997, 991, key="allOf")}, "multipleOf=99"),
        ({"json_schema": multiples(1048576)}, "multipleOf=1048576"),
        ({"json_schema": multiples(300.007)}, r"multipleOf=300\.007"),
        ({"json_schema": multiples(90001).replace("multipleOf", "multiple\\u004ff")}, "multipleOf=90001"),
        ({"grammar": f"start: %json {multiples(90001)}"}, "multipleOf=90001"),
        ({"grammar": "start: A\nA: /(a{2003})*/ & /(a{1999})*/"}, "operator &"),
        ({"grammar": "start: A\nA: ~/(a{2003})*/"}, "operator ~"),
        ({"grammar": 'start: A | <#>\nA: "/" /(a{2003})*/ & /(a{1999})*/ // "\n'}, "operator &"),
    ],
)
def test_forms_that_nothing_bounds_the_compilation_of_are_refused(form: dict[str, Any], word: str) -> None:
    with pytest.raises(StructuredOutputError, match=f"(?s){next(iter(form))} is refused.*{word}"):
        GrammarCompiler(ByteTokenizer(), 272).matcher(StructuredOutput(**form), 0)


def test_usual_multiples_and_operators_that_are_text_are_compiled() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 272)
    for form in (
        {"json_schema": multiples(5, 10, 15, 60, 100, 1000, 0.01, 0.25)},
        {"json_schema": multiples(9999)},
        {"json_schema": {"type": "object", "properties": {"multipleOf": {"type": "integer", "multipleOf": 7}}}},
        {"grammar": 'start: "a&b" /c&~d/ "e" ~ 3 // & ~\n# &'},
        {"json_schema": {"enum": [f"value number {number} of many" for number in range(5000)]}},
    ):
        assert compiler.matcher(StructuredOutput(**form), 0).allowed(()).any()  # type: ignore[arg-type]


def test_objects_of_very_many_properties_are_refused_before_they_are_compiled() -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(7000)}}
    with pytest.raises(StructuredOutputError, match="too big"):
        GrammarCompiler(ByteTokenizer(), 272).matcher(StructuredOutput(json_schema=schema), 0)


def test_what_is_missing_is_named_in_one_line(make_model: Make, make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wordy:
        vocab_size, eod = 64, None

    form = StructuredOutput(regex="a")
    with pytest.raises(StructuredOutputError, match="has no tokenizer$"):
        make_engine().add_request([1], SamplingParams(structured_output=form))
    with pytest.raises(StructuredOutputError, match=r"token_bytes\(\) or tokenizer_json\(\), and the engine has a Wordy$"):
        GrammarCompiler(Wordy(), 64).matcher(form, 0)  # type: ignore[arg-type]
    found = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    engine = make_engine(make_model(vocab_size=272), ByteTokenizer())
    with pytest.raises(StructuredOutputError, match=r"pip install 'mcore-inference\[structured\]'$") as caught:
        engine.add_request("x", SamplingParams(structured_output=form))
    assert "\n" not in str(caught.value)


def test_text_that_the_vocabulary_cannot_write_is_an_error_of_its_request() -> None:
    class Letters:
        vocab_size, eod = 3, None

        def token_bytes(self) -> list[bytes | None]:
            return [b"a", b"b", None]

        def tokenize(self, text: str) -> list[int]:
            return ["ab".index(letter) for letter in text if letter in "ab"]

        def detokenize(self, ids: list[int]) -> str:
            return "".join("ab"[number] for number in ids)

    compiler = GrammarCompiler(Letters(), 3)
    matcher = compiler.matcher(StructuredOutput(regex="abc"), 7)
    assert matcher.allowed([2]).tolist() == [1]
    matcher.accept(0)
    assert matcher.allowed([2]).tolist() == [2]
    with pytest.raises(StructuredOutputError, match="request 7: structured_output cannot go on"):
        matcher.accept(1)
    with pytest.raises(StructuredOutputError, match="no token of the vocabulary writes"):
        GrammarCompiler(Letters(), 1).matcher(StructuredOutput(regex="b"), 8)
    with pytest.raises(StructuredOutputError, match="cannot go on"):
        compiler.matcher(StructuredOutput(regex="a"), 9).accept(1)
    ends = compiler.matcher(StructuredOutput(regex="ab?"), 10)
    ends.accept(0)
    assert ends.may_end and not ends.is_complete and ends.allowed([2]).tolist() == [0b110] and ends.allowed([]).tolist() == [0b010]


def test_tokens_of_many_bytes_keep_a_form(tmp_path: Any, make_model: Make, make_engine: Make) -> None:
    from transformers import PreTrainedTokenizerFast

    own = train_bpe(
        ['{"name": "ada", "age": 12, "ok": true}', '{"name": "grace", "age": 90, "ok": false} \u00e9t\u00e9'] * 9, 320, tmp_path
    )
    theirs = TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>"))
    runs = []
    for tokenizer in (own, theirs):
        engine = make_engine(make_model(vocab_size=320), tokenizer, max_sequence_length=128)
        records = engine.generate(["x"] * 4, [params(seed, json_schema=SCHEMA) for seed in range(4)])
        assert all(is_record(record.generated_text) for record in records)
        assert any(record.num_generated < len(record.generated_text) for record in records)
        runs.append([record.generated_tokens for record in records])
    assert runs[0] == runs[1]


def blank_before_texts() -> TransformersTokenizer:
    from transformers import PreTrainedTokenizerFast

    return TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=sentence_pieces(), eos_token="</s>"))


def test_a_tokenizer_that_begins_texts_with_a_blank_writes_forms_too(make_model: Make, make_engine: Make) -> None:
    tokenizer = blank_before_texts()
    assert tokenizer.inner.convert_ids_to_tokens(tokenizer.tokenize("ace")) == ["\u2581a", "ce"]
    engine = make_engine(make_model(vocab_size=tokenizer.vocab_size), tokenizer, max_sequence_length=128)
    for form, has_form in FORMS:
        for record in engine.generate(["x"] * 4, [params(seed, **form) for seed in range(4)]):
            assert record.error is None and has_form(record.generated_text), record.generated_text


def test_what_a_form_forces_is_written_by_tokens_that_write_it_and_no_more() -> None:
    tokenizer = blank_before_texts()
    tokens = [None] * 3 + [tokenizer.inner.convert_ids_to_tokens(number) for number in range(3, tokenizer.vocab_size)]
    written = [
        token and (bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("\u2581", " ").encode()) for token in tokens
    ]
    vocabulary = _Vocabulary(written, tokenizer)
    for text in ("ace", " ada", "grace", '{"name": "\u00e9"}', "  x", "", "\n"):
        assert b"".join(written[token] for token in vocabulary(text)) == text.encode()
    # Words, where it has some, as it would write them behind other text.
    assert [tokens[token] for token in vocabulary(" ada grace")] == ["\u2581ada", "\u2581", "gra", "ce"]

    class Changes:
        """Lower case alone, whatever stands before."""

        vocab_size, eod = tokenizer.vocab_size, None

        def tokenize(self, text: str) -> list[int]:
            return tokenizer.tokenize(text.lower())

        def detokenize(self, ids: list[int]) -> str:
            return tokenizer.detokenize(ids)

    lower = _Vocabulary(written, Changes())
    assert [tokens[token] for token in lower("A grace")] == ["A", "\u2581", "gra", "ce"]
    # Nothing writes the end of it.
    assert _Vocabulary([b"a"], Changes())("aab") == [0, 0]


def test_results_that_fail_when_a_form_reads_them_take_no_other_requests_with_them(
    make_model: Make, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_model(vocab_size=272), ByteTokenizer(), run_ahead=True, max_sequence_length=128)
    plain = SamplingParams(temperature=0.0, num_tokens_to_generate=4, ignore_eos=True)
    wanted = engine.generate([[7, 8]], plain)[0].generated_tokens
    engine.add_request([1, 2], params(regex="[a-c]{3}"), request_id=10)
    engine.add_request([3, 4], plain, request_id=11)
    assert engine.step() == []
    # It waits while the results of the others are read.
    engine.add_request([7, 8], plain, request_id=12)

    def fail(_: Draws) -> Any:
        raise RuntimeError("no results")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no results"):
        patched.setattr(Draws, "wait", fail)
        engine.step()
    failed = {record.request_id: record.error for record in engine.take_finished()}
    assert failed.keys() == {10, 11} and all(isinstance(error, StepFailedError) for error in failed.values())
    records = []
    while engine.has_unfinished_requests():
        records += engine.step()
    assert [(record.request_id, record.generated_tokens) for record in records] == [(12, wanted)]


def test_one_form_is_compiled_once(make_model: Make, make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    engine = make_engine(make_model(vocab_size=272), ByteTokenizer())
    made = []
    matcher = llguidance.LLMatcher

    class Counted:
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            return matcher(*arguments, **options)

        @staticmethod
        def grammar_from_regex(regex: str) -> str:
            made.append(regex)
            return matcher.grammar_from_regex(regex)

    monkeypatch.setattr(llguidance, "LLMatcher", Counted)
    engine.generate(["x"] * 3, [params(seed, regex="[ab]{4}") for seed in range(3)])
    engine.generate(["x"], params(regex="[ab]{4}"))
    assert made == ["[ab]{4}"]
    for number in range(70):
        engine.abort(engine.add_request("x", params(regex=f"a{{{number + 1}}}")))
    engine.generate(["x"], params(regex="[ab]{4}"))
    assert made.count("[ab]{4}") == 2


def test_settings_with_a_form_survive_a_wire() -> None:
    for form, _ in FORMS:
        settings = SamplingParams(structured_output=StructuredOutput(**form))
        assert SamplingParams.deserialize(json.loads(json.dumps(settings.serialize()))) == settings
        assert hash(settings.structured_output) == hash(StructuredOutput(**form))
    assert StructuredOutput(json_object=True).serialize() == {"json_object": True}


def test_bits_say_which_scores_stay() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 70)
    allowed = torch.rand(2, 96) < 0.4
    words = torch.zeros(2, 3, dtype=torch.int64)
    for bit in range(96):
        words[:, bit // 32] |= allowed[:, bit].long() << bit % 32
    words = (words + 2**31) % 2**32 - 2**31
    masked = keep_allowed(scores, torch.tensor([2, 0]), words.int())
    assert torch.equal(masked[1], scores[1])
    for row, bits in ((2, allowed[0]), (0, allowed[1])):
        assert torch.equal(masked[row], scores[row].masked_fill(~bits[:70], -torch.inf))
    assert keep_allowed(scores.bfloat16(), torch.tensor([0]), words[:1].int()).dtype == torch.float32
