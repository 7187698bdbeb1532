# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the assistant writes, and nothing else, is learnt, by the chat template of each family."""

import shutil
from pathlib import Path

import pytest

from mcore_inference import JsonTokenizer, ToolChatTokenizer, chat_tokens
from mcore_parallel.data import train_bpe
from mcore_tools.chat import TEMPLATES, TemplateError, TemplateTokenizer, find_template

SPECIAL = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "<bos>"),
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token or '' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant are known') }}{% endif %}{% endfor %}"
)
# The last answer begins with thoughts, earlier ones lose theirs.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = LLAMA3.replace(
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}",
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}",
)
BACKWARDS = "{% for m in messages | reverse %}{{ m['role'] + m['content'] }}{% endfor %}"
CHAT = [
    {"role": "user", "content": "one and one?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "two, yes"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens of all families, as transformers saves it."""
    from transformers import AutoTokenizer

    place = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["one and one? two, yes. sure? " * 20], 300, place / "bpe")
    tokenizer = AutoTokenizer.from_pretrained(str(place / "bpe"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.save_pretrained(place / "full")
    return place / "full"


def learnt(tokenizer: TemplateTokenizer, messages: list[dict[str, str]]) -> list[str]:
    """The text of each turn that has a loss; all turns together are the whole conversation."""
    turns = tokenizer.chat_turns(messages)
    assert [token for turn in turns for token in (*turn.header, *turn.body, *turn.tail)] == tokenizer.apply_chat_template(messages)
    return [tokenizer.detokenize(turn.body, skip_special=False) for turn in turns if turn.role == "assistant"]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (LLAMA3, ["two<|eot_id|>", "two, yes<|eot_id|>"]),
        (MARKED, ["two<|eot_id|>", "two, yes<|eot_id|>"]),
        (GEMMA, ["two<end_of_turn>", "two, yes<end_of_turn>"]),
        (MISTRAL, [" two<|endoftext|>", " two, yes<|endoftext|>"]),
        (QWEN3, ["two<|im_end|>", "<think>\n\n</think>\n\ntwo, yes<|im_end|>"]),
        (TEMPLATES["chatml"], ["two<|im_end|>", "two, yes<|im_end|>"]),
        (TEMPLATES["plain"], [" two<|endoftext|>", " two, yes<|endoftext|>"]),
    ],
    ids=["llama3", "marked", "gemma", "mistral", "qwen3", "chatml", "plain"],
)
def test_the_answers_and_the_ends_of_their_turns_are_learnt(folder: Path, template: str, answers: list[str]) -> None:
    tokenizer = TemplateTokenizer(folder, template)
    assert learnt(tokenizer, CHAT) == answers
    # An answer follows what a server gives the model.
    given = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)
    assert tokenizer.chat_turns(CHAT)[0].header == given


def test_tools_calls_and_results_are_written_by_the_template(folder: Path) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{{ '\\n' }}{% endfor %}"
    )
    tokenizer = TemplateTokenizer(folder, template)
    assert isinstance(tokenizer, ToolChatTokenizer) and isinstance(tokenizer, JsonTokenizer)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"one": 1}}}
    messages = [*CHAT[:1], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "two"}]
    written = 'user:one and one?\nassistant:add({"one": 1})\ntool:two\n'
    assert tokenizer.detokenize(chat_tokens(tokenizer, messages)) == written
    assert tokenizer.detokenize(chat_tokens(tokenizer, messages, tools=[{"name": "add"}])) == '[{"name": "add"}]' + written


def test_a_template_that_is_not_prefix_stable_is_refused(folder: Path) -> None:
    with pytest.raises(TemplateError, match=r"not prefix-stable: its text of the messages before messages\[1\].*sft\.template=FILE"):
        TemplateTokenizer(folder, BACKWARDS).chat_turns(CHAT)


def test_what_a_template_refuses_is_told_in_its_words(folder: Path) -> None:
    with pytest.raises(TemplateError, match="refused the messages: .*only user and assistant are known"):
        TemplateTokenizer(folder, MISTRAL).chat_turns([{"role": "system", "content": "be brief"}, *CHAT])


def test_the_template_of_the_folder_is_found_where_releases_put_it(folder: Path, tmp_path: Path) -> None:
    assert find_template(folder) is None
    with pytest.raises(TemplateError, match=r"has no chat template; name one with sft\.template=FILE, or one of chatml, plain"):
        TemplateTokenizer(folder)
    beside, inside = tmp_path / "beside", tmp_path / "inside"
    for place in (beside, inside):
        shutil.copytree(folder, place)
    (beside / "chat_template.jinja").write_text(LLAMA3)
    config = inside / "tokenizer_config.json"
    config.write_text(config.read_text().rstrip()[:-1] + ', "chat_template": [{"name": "default", "template": "{{ 1 }}"}]}')
    assert find_template(beside) == LLAMA3 and find_template(inside) == "{{ 1 }}"
    assert learnt(TemplateTokenizer(beside), CHAT) == ["two<|eot_id|>", "two, yes<|eot_id|>"]
