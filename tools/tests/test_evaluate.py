# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Perplexity, multiple choice and tasks of the harness, beside numbers of a plain forward."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mcore_parallel.nn import Step
from mcore_tools.cli import main
from mcore_tools.evaluation import Choice, Scorer, read_choices, read_texts, score_choices, score_texts
from mcore_tools.recipes import DataConfig, RunConfig, override, recipe
from mcore_tools.serving import open_engine
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus

TEXT = "one two three four five six seven eight nine ten. "
QUESTIONS = [
    {"question": "one two three four ", "choices": ["five", "nine", "two"], "answer": 0},
    {"question": "six seven eight", "choices": [" one", " nine", " eight"], "answer": 1},
    {"question": "two three four five six ", "choices": ["four", "ten", "seven"], "answer": 2},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run that counts to ten."""
    folder = tmp_path_factory.mktemp("count")
    write_corpus(folder, TEXT, num_documents=12)
    sizes = ["model.num_layers=2", "model.hidden_size=48", "model.ffn_hidden_size=96", "model.vocab_size=320", "optimizer.lr=1e-2"]
    rhythm = ["train.steps=40", "train.seq_len=32", "train.warmup_steps=2", "train.eval_interval=0", "train.eval_batches=1"]
    sinks = ["log.tensorboard=false", "log.html=false", f"output={folder}/run"]
    config = override(recipe("gpt_tiny"), [*sizes, *rhythm, *sinks])
    data = DataConfig(prefix=str(folder / "corpus"), tokenizer=str(folder / "tokenizer"), split="80,20,0")
    config = override(config, [f"data.{name}={getattr(data, name)}" for name in ("prefix", "tokenizer", "split")])
    train_rank(config, "cpu")
    return config


@pytest.fixture(scope="module")
def scorer(run: RunConfig) -> Scorer:
    return Scorer(open_engine(run.output, "cpu"))


def plain(scorer: Scorer, tokens: list[int]) -> list[float]:
    """Log-probabilities of tokens 1.. by one forward over all of them."""
    with torch.no_grad():
        output, _ = scorer.engine.model(torch.tensor(tokens[:-1]), Step.causal(1, len(tokens) - 1))
        scores = torch.log_softmax(output.logits().float(), -1)
    return [float(scores[place, token]) for place, token in enumerate(tokens[1:])]


def test_every_token_of_a_text_is_predicted_once_with_its_context(scorer: Scorer) -> None:
    short, long = TEXT[:20], TEXT * 5
    tokens = {text: [scorer.first, *scorer.tokenizer.tokenize(text)] for text in (short, long)}
    assert len(tokens[short]) < scorer.max_length < len(tokens[long])
    alone = score_texts(scorer, [short])
    assert alone.nats == pytest.approx(-math.fsum(plain(scorer, tokens[short])), rel=1e-4)
    assert alone.num_tokens == len(tokens[short]) - 1 and alone.num_bytes == 20
    # By hand: the first window, then strides with what fits before them.
    whole, stride, limit = tokens[long], 7, scorer.max_length
    values = plain(scorer, whole[:limit])
    for begin in range(limit, len(whole), stride):
        end = min(begin + stride, len(whole))
        values += plain(scorer, whole[max(0, end - limit) : end])[-(end - begin) :]
    both = score_texts(scorer, [short, long], stride=stride)
    assert both.num_tokens == len(whole) - 1 + alone.num_tokens
    assert both.nats == pytest.approx(alone.nats - math.fsum(values), rel=1e-4)
    assert both.loss == both.nats / both.num_tokens and both.perplexity == pytest.approx(math.exp(both.loss))
    assert both.bits_per_byte == pytest.approx(both.nats / math.log(2) / both.num_bytes)


def test_the_likeliest_answer_counts_and_short_ones_are_not_favoured_by_bytes(scorer: Scorer) -> None:
    questions = [Choice(question=one["question"], choices=tuple(one["choices"]), answer=one["answer"]) for one in QUESTIONS]
    measured = score_choices(scorer, questions)
    assert (measured.num_questions, measured.accuracy, measured.by_chance) == (3, 1.0, pytest.approx(1 / 3))
    wrong = [Choice(question=one.question, choices=one.choices, answer=(one.answer + 1) % 3) for one in questions]
    assert score_choices(scorer, wrong).accuracy == 0.0
    # A text is never likelier than its beginning; by bytes it is here, as what goes on is surer than how it begins.
    texts = ("one", "one two three four five six")
    sums = [sum(values) for values in scorer.log_probs([([scorer.first], scorer.tokenizer.tokenize(text)) for text in texts])]
    assert sums[0] > sums[1] and sums[0] / len(texts[0]) < sums[1] / len(texts[1])
    measured = score_choices(scorer, [Choice(question="", choices=texts, answer=1)])
    assert (measured.accuracy, measured.accuracy_by_bytes) == (0.0, 1.0)


def test_the_command_measures_what_it_is_asked_for(run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(3)), encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    words = ["eval", run.output, "--text", f"{tmp_path}/text.jsonl", "--choices", f"{tmp_path}/questions.jsonl"]
    assert main([*words, "--output", f"{tmp_path}/results.json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results == json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["text"]["num_documents"] == 3 and 1.0 < results["text"]["perplexity"] < 3.0
    assert results["choices"]["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("", [], "there is nothing to measure"),
        ("", ["--text", "FILE"], "holds no text"),
        ('{"txt": 1}', ["--text", "FILE"], ':1 must be an object with a string "text"'),
        ("[1", ["--choices", "FILE"], ":1: "),
        ('{"question": "a", "choices": ["b"], "answer": 0}', ["--choices", "FILE"], "must be at least two texts"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', ["--choices", "FILE"], "answer=2 must be the number of one of 2"),
        ('{"question": "a", "choices": ["b", "c"]}', ["--choices", "FILE"], "has no 'answer'"),
        ('{"text": "a"}', ["--text", "FILE", "--limit", "9"], "--limit is of --tasks; give both, or leave it out"),
        ("{}", ["--choices", "FILE", "--stride", "9"], "--stride is of --text; give both, or leave it out"),
        ('{"text": "a"}', ["--text", "FILE", "--stride", "99"], "--stride 99 must be below the length of"),
    ],
)
def test_bad_input_is_one_line(
    content: str, words: list[str], message: str, run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.jsonl").write_text(content, encoding="utf-8")
    assert main(["eval", run.output, *(word.replace("FILE", f"{tmp_path}/file.jsonl") for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_characters_that_end_lines_elsewhere_are_text(tmp_path: Path, end: str) -> None:
    texts, questions, plain_text = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.txt"
    one, two = {"text": f"a{end}b"}, {"question": f"a{end}", "choices": [f"{end}b", "c"], "answer": 0}
    texts.write_bytes((json.dumps(one, ensure_ascii=False) + "\r\n").encode() * 2)
    questions.write_bytes((json.dumps(two, ensure_ascii=False) + "\r\n").encode() * 2)
    plain_text.write_bytes(f"a{end}b\r\nc".encode())
    assert read_texts([texts, plain_text]) == [one["text"]] * 2 + [f"a{end}b\r\nc"]
    assert read_choices(questions) == [Choice(question=f"a{end}", choices=(f"{end}b", "c"), answer=0)] * 2


@pytest.mark.journey
def test_a_stride_is_refused_before_the_model_is_loaded(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*arguments: object, **more: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("mcore_tools.evaluate.open_engine", loads)
    (tmp_path / "file.txt").write_text("a", encoding="utf-8")
    words = ["--text", f"{tmp_path}/file.txt", "--max-length", "16", "--stride", "16"]
    assert main(["eval", run.output, *words]) == 2
    assert "--stride 16 must be below the length of 16 tokens; lower it" in capsys.readouterr().err


TASK = """\
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


SAYING = """\
task: saying
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question.strip()}}"
doc_to_target: "{{' ' + choices[answer].strip()}}"
target_delimiter: ""
generation_kwargs: {until: [" six", " ten", " eight"], max_gen_toks: 16}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def test_tasks_of_the_harness_take_the_engine(run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    (tmp_path / "counting.yaml").write_text(TASK.replace("FILE", f"{tmp_path}/questions.jsonl"), encoding="utf-8")
    (tmp_path / "saying.yaml").write_text(SAYING.replace("FILE", f"{tmp_path}/questions.jsonl"), encoding="utf-8")
    words = ["eval", run.output, "--tasks", "counting,saying", "--include", str(tmp_path)]
    assert main(words) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert tasks["counting"]["acc"] == 1.0 and tasks["saying"]["exact_match"] == 1.0


def test_a_continuation_leaves_its_prompt_room(scorer: Scorer) -> None:
    pytest.importorskip("lm_eval")
    from mcore_tools.evaluation.harness import EngineLM

    prompts: list[list[int]] = []

    def generate(given: Sequence[list[int]], _: object) -> list[SimpleNamespace]:
        prompts.extend(given)
        return [SimpleNamespace(error=None, generated_text="b")]

    engine = SimpleNamespace(generate=generate)
    for length, settings, count in ((64, {}, 32), (1024, {}, 768), (64, {"max_gen_toks": 60}, 4)):
        model = EngineLM(cast(Scorer, SimpleNamespace(engine=engine, first=1, max_length=length, tokenizer=scorer.tokenizer)))
        assert model.generate_until([SimpleNamespace(args=("a" * 2000, settings))]) == ["b"]
        assert len(prompts.pop()) == count
        with pytest.raises(ValueError, match=f"max_gen_toks={length} leaves no room for a prompt within {length} tokens"):
            model.generate_until([SimpleNamespace(args=("a", {"max_gen_toks": length}))])


@pytest.mark.slow
def test_a_task_that_the_harness_lacks_is_named_before_the_model_is_loaded(
    run: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("mcore_tools.evaluate.open_engine", None)
    assert main(["eval", run.output, "--tasks", "no_such_task"]) == 2
    assert "has no task 'no_such_task'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["text", "choices"])
def test_what_goes_wrong_behind_the_loading_is_a_failure(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise ValueError("the engine refused a text")

    content = {"text": {"text": "a"}, "choices": QUESTIONS[0]}[option]
    (tmp_path / "file.jsonl").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr("mcore_tools.evaluate.open_engine", lambda *arguments, **more: None)
    for name in ("score_texts", "score_choices"):
        monkeypatch.setattr(f"mcore_tools.evaluate.{name}", refuse)
    monkeypatch.setattr("mcore_tools.evaluate.Scorer", lambda engine, lora: engine)
    assert main(["eval", str(tmp_path), f"--{option}", f"{tmp_path}/file.jsonl"]) == 1
    assert capsys.readouterr().err == "error: the engine refused a text\n"


@pytest.mark.journey
def test_what_an_engine_refuses_is_told_with_its_remedy(scorer: Scorer) -> None:
    remedy = r"; check that the tokenizer is that of the model, or raise --cache-gb$"
    with pytest.raises(ValueError, match=f"^the engine refused a text: .*{remedy}"):
        scorer.log_probs([([scorer.first], [10**6])])
    pytest.importorskip("lm_eval")
    from mcore_tools.evaluation.harness import EngineLM

    alien = SimpleNamespace(
        engine=scorer.engine, first=scorer.first, max_length=scorer.max_length, tokenizer=SimpleNamespace(tokenize=lambda text: [10**6])
    )
    with pytest.raises(ValueError, match=f"^the engine refused 1 prompts: .*{remedy}"):
        EngineLM(cast(Scorer, alien)).generate_until([SimpleNamespace(args=("a", {}))])
