# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From a Hugging Face folder to a tuned model, its export and a served answer, by commands alone."""

import json
import shutil
import urllib.request
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager
from mcore_ckpt.hf import import_hf
from mcore_inference.server import serve
from mcore_parallel.data import HuggingFaceTokenizer, IndexedDataset
from mcore_parallel.data.corpus import HAS_LOSS
from mcore_tools import sft
from mcore_tools.launch import launch
from mcore_tools.recipes import override
from mcore_tools.serving import open_engine
from mcore_tools.training import train_rank
from tests.support.published import ANSWERS, write_chat, write_published

FAST = ("train.seq_len=128", "train.global_batch_size=4", "optimizer.lr=3e-3", "log.tensorboard=false", "log.html=false")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("published") / "llama")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("chat") / "chat.jsonl")


def tune(model: Path, chat: Path, output: Path, *changes: str) -> int:
    sets = [word for change in (*FAST, *changes) for word in ("--set", change)]
    return sft.main([str(model), "--data", str(chat), "--output", str(output), *sets])


@pytest.fixture(scope="module")
def tuned(published: Path, chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 epochs and its export."""
    output = tmp_path_factory.mktemp("run") / "tuned"
    assert tune(published, chat, output, "sft.epochs=12", "optimizer.lr=8e-3") == 0
    return output


def answer(url: str, question: str) -> str:
    body = {"model": "tuned", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def test_the_export_answers_over_http_as_it_was_taught(tuned: Path) -> None:
    engine = open_engine(tuned / "hf", "cpu", cache_gb=0.01)
    with serve(engine, model_name="tuned") as server:
        answers = {colour: answer(server.url, f"which fruit is {colour}?") for colour in ANSWERS}
    assert answers == ANSWERS


def test_the_export_has_everything_that_the_model_came_with(tuned: Path, published: Path) -> None:
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (published, tuned / "hf"))
    for name in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "rms_norm_eps", "vocab_size", "model_type"):
        assert ours[name] == theirs[name], name
    assert (tuned / "hf" / "chat_template.jinja").read_text() == (published / "chat_template.jinja").read_text()
    generation = json.loads((tuned / "hf" / "generation_config.json").read_text())
    tokenizer = json.loads((published / "tokenizer.json").read_text())
    turn_end = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<|im_end|>")
    assert generation["temperature"] == 0.6
    assert generation["eos_token_id"] == [theirs["eos_token_id"], turn_end]


@pytest.mark.journey
def test_transformers_answers_from_the_export_too(tuned: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(tuned / "hf"), AutoModelForCausalLM.from_pretrained(tuned / "hf")
    turns = [{"role": "user", "content": "which fruit is green?"}]
    given = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.generate(**given, do_sample=False, max_new_tokens=16)[0, given["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "lime"


def test_the_model_is_that_of_the_weights_and_another_is_refused(
    published: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(published, chat, tmp_path / "run", "model.norm_epsilon=1e-3") == 2
    message = capsys.readouterr().err
    assert "model.norm_epsilon=1e-06 there, 0.001 here" in message and "load.override=[model.norm_epsilon]" in message
    assert not (tmp_path / "run").exists()
    assert tune(published, chat, tmp_path / "run", "model.norm_epsilon=1e-3", "load.override=[model.norm_epsilon]", "train.steps=1") == 0
    assert import_hf(tmp_path / "run" / "hf").config["norm_epsilon"] == 1e-3


def test_a_run_is_tuned_further_by_its_name(tuned: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(tuned, chat, tmp_path / "more", "train.steps=2") == 0
    assert f"weights of {tuned / 'checkpoints'}" in capsys.readouterr().out
    assert import_hf(tmp_path / "more" / "hf").family == "llama"
    # And goes on under the same command.
    shutil.rmtree(tmp_path / "more" / "hf")
    assert tune(tuned, chat, tmp_path / "more", "train.steps=3") == 0
    assert CheckpointManager(tmp_path / "more" / "checkpoints").latest() == 3


def test_evaluation_conversations_are_not_trained_on(published: Path, chat: Path, tmp_path: Path) -> None:
    other = write_chat(tmp_path / "eval.jsonl", 4)
    assert tune(published, chat, tmp_path / "run", f"sft.eval_data=[{other}]", "train.steps=1") == 0
    assert (tmp_path / "run" / "chat" / "eval.idx").is_file()


def test_a_run_learns_calls_of_tools_and_not_their_results(published: Path, tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + '(' + (c.function.arguments | tojson) + ')' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    turns = [
        ("human", "red?"),
        ("function_call", '{"name": "find", "arguments": {"hue": "red"}}'),
        ("observation", "lime"),
        ("gpt", "apple"),
    ]
    entry = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": '[{"name": "find"}]'}
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(entry)}\n" * 4)
    output = tmp_path / "run"
    assert tune(published, tmp_path / "chat.jsonl", output, f"sft.template={template}", "train.steps=1") == 0
    corpus = IndexedDataset(output / "chat" / "train", multimodal=True)
    tokenizer = HuggingFaceTokenizer(output / "chat" / "tokenizer")
    parts = [(tokenizer.detokenize(ids.tolist(), skip_special=False), mode) for ids, mode in (corpus[number] for number in range(4))]
    assert [text for text, mode in parts if mode == HAS_LOSS] == ['find({"hue": "red"})<|im_end|>', "apple<|im_end|>"]
    assert '"name": "find"' in parts[0][0] and "lime" in parts[2][0]


@pytest.mark.journey
@pytest.mark.parametrize("layout", [["plan.tp=2"], ["plan.cp=2"], ["plan.dp=2", "data_parallel=fsdp"]], ids=lambda layout: layout[0])
def test_every_layout_learns_the_same(published: Path, chat: Path, tmp_path: Path, layout: list[str]) -> None:
    # With cp conversations are padded, which packs them differently: one a row, and the first step, then.
    rows, steps = (["train.seq_len=40"], 1) if "plan.cp=2" in layout else ([], 3)
    losses = []
    for number, changes in ((1, []), (2, layout)):
        base = sft.base_config(str(published), [str(chat)], str(tmp_path / f"run{number}"))
        config = override(base, [*FAST, f"train.steps={steps}", "train.dtype=float64", *rows, *changes])
        config = sft.prepared(config, ["train.steps"], rank=0)
        train_rank(config, "cpu") if number == 1 else launch(train_rank, number, config=config, kind="cpu")
        lines = (tmp_path / f"run{number}" / "train.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)])
    assert len(losses[0]) == steps and losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"}', "chat.jsonl:1 has no list of messages in the field 'messages' (fields are prompt)"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no conversation with a turn of assistant"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [1]}]}',
            'chat.jsonl:1: messages[0].tool_calls[0] must be a function with a "name"',
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "add"}]}]}',
            "chat.jsonl:1: the chat template does not write messages[0].tool_calls; name one that does with sft.template=FILE",
        ),
    ],
)
def test_conversations_that_cannot_be_learnt_are_one_line(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    (tmp_path / "chat.jsonl").write_text(line + "\n")
    assert tune(published, tmp_path / "chat.jsonl", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message
    assert not (tmp_path / "run" / "checkpoints").exists()
