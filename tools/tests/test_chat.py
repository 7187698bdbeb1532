# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the assistant writes, and nothing else, is learnt, by the chat template of each family."""

import json
import shutil
from pathlib import Path

import pytest

from mcore_inference import JsonTokenizer, ToolChatTokenizer, chat_tokens
from mcore_parallel.data import HuggingFaceTokenizer, train_bpe
from mcore_tools.chat import TEMPLATES, TemplateError, TemplateTokenizer, find_template
from tests.support.sentence_pieces import sentence_pieces

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
# Tools in a system turn, calls as JSON between tags, results as user turns that neighbours share; the last answer begins with thoughts.
QWEN_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}{{ '<tool_call>\n{\"name\": \"' + c.function.name }}"
    "{{ '\", \"arguments\": ' + (c.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Tools in the first user turn, one call a turn with "parameters", results of a role of their own.
LLAMA_TOOLS = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{% set head = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' %}"
    "{% if m.role == 'tool' %}{{ head | replace('tool', 'ipython') }}{{ m.content | tojson }}{{ '<|eot_id|>' }}"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ head + '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% else %}{{ head }}{% if loop.first and tools %}{% for t in tools %}{{ t | tojson }}{{ '\n' }}{% endfor %}{% endif %}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Arguments are joined to text, as releases of DeepSeek do.
TEXT_ARGUMENTS = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# Would print an object as Python does.
PRINTED_ARGUMENTS = TEXT_ARGUMENTS.replace("c.function.name + ' ' + c.function.arguments", "c.function.name }} {{ c.function.arguments")
TEXT_ANSWERS = ['add {"one": 1}<|im_end|>', "two, yes<|im_end|>", 'yes.add {"two": 2}<|im_end|>', "sure<|im_end|>"]
MARKED_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
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


@pytest.mark.parametrize(
    ("template", "answer"),
    [(LLAMA3, "two<|eot_id|>"), (GEMMA, "two<end_of_turn>"), (MISTRAL, " two<|endoftext|>"), (TEMPLATES["chatml"], "two<|im_end|>")],
    ids=["llama3", "gemma", "mistral", "chatml"],
)
def test_a_conversation_may_begin_with_the_assistant(folder: Path, template: str, answer: str) -> None:
    assert learnt(TemplateTokenizer(folder, template), CHAT[1:3])[0] == answer


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


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(**arguments: int) -> dict[str, object]:
    return {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}


AGENT = [
    {"role": "user", "content": "one and one?"},
    {"role": "assistant", "content": "", "tool_calls": [call(one=1)]},
    {"role": "tool", "tool_call_id": "call00001", "content": "two"},
    {"role": "assistant", "content": "two, yes"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes.", "tool_calls": [call(two=2)]},
    {"role": "tool", "tool_call_id": "call00001", "content": "4"},
    {"role": "assistant", "content": "sure"},
]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (
            QWEN_TOOLS,
            [
                '<tool_call>\n{"name": "add", "arguments": {"one": 1}}\n</tool_call><|im_end|>',
                "two, yes<|im_end|>",
                'yes.\n<tool_call>\n{"name": "add", "arguments": {"two": 2}}\n</tool_call><|im_end|>',
                "<think>\n\n</think>\n\nsure<|im_end|>",
            ],
        ),
        (
            LLAMA_TOOLS,
            [
                '{"name": "add", "parameters": {"one": 1}}<|eot_id|>',
                "two, yes<|eot_id|>",
                '{"name": "add", "parameters": {"two": 2}}<|eot_id|>',
                "sure<|eot_id|>",
            ],
        ),
        (TEXT_ARGUMENTS, TEXT_ANSWERS),
        (PRINTED_ARGUMENTS, TEXT_ANSWERS),
    ],
    ids=["qwen", "llama31", "text", "printed"],
)
def test_calls_are_learnt_and_tools_and_results_are_not(folder: Path, template: str, answers: list[str]) -> None:
    tokenizer = TemplateTokenizer(folder, template)
    tools = [TOOL] if answers is not TEXT_ANSWERS else []
    turns = tokenizer.chat_turns(AGENT, tools)
    assert [tokenizer.detokenize(turn.body, skip_special=False) for turn in turns if turn.role == "assistant"] == answers
    given = tokenizer.detokenize([token for turn in turns for token in turn.header], skip_special=False)
    assert "two" in given and ("add" in given) == bool(tools)
    # A call follows what a server gives the model.
    assert turns[0].header == tokenizer.apply_tool_template(AGENT[:1], tools, add_generation_prompt=True)
    assert [token for turn in turns for token in (*turn.header, *turn.body)] == tokenizer.apply_tool_template(AGENT, tools)


@pytest.mark.parametrize("legacy", [{}, {"legacy": False}, {"legacy": True}], ids=str)
def test_turns_are_learnt_by_the_ids_that_a_server_reads_whatever_the_class_of_the_tokenizer(
    tmp_path: Path, legacy: dict[str, bool]
) -> None:
    sentence_pieces().save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ bos_token + '[' + m.role + '] ' + m.content + eos_token }}{% endfor %}"
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": template, **legacy}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = "".join(f"<s>[{message['role']}] {message['content']}</s>" for message in CHAT)
    served = HuggingFaceTokenizer(tmp_path).tokenize(text)
    marked = template.replace("+ m.content + eos_token }}", "}}{% generation %}{{ m.content + eos_token }}{% endgeneration %}")
    for tokenizer in (TemplateTokenizer(tmp_path), TemplateTokenizer(tmp_path, marked)):
        turns = tokenizer.chat_turns(CHAT)
        assert [token for turn in turns for token in (*turn.header, *turn.body)] == tokenizer.apply_chat_template(CHAT) == served


def test_tools_before_a_first_turn_of_the_assistant_are_not_learnt(folder: Path) -> None:
    tokenizer = TemplateTokenizer(folder, QWEN_TOOLS)
    header, *_ = turns = tokenizer.chat_turns([{"role": "assistant", "content": "two, yes"}, *CHAT[:1]], [TOOL])
    (body,) = [tokenizer.detokenize(turn.body, skip_special=False) for turn in turns if turn.role == "assistant"]
    assert body.startswith("two, yes") and "add" in tokenizer.detokenize(header.header)


def test_two_calls_of_a_turn_are_learnt_whole(folder: Path) -> None:
    twice = [AGENT[0], {**AGENT[1], "tool_calls": [call(one=1), call(one=1)]}, AGENT[2], AGENT[2], AGENT[3]]
    turns = TemplateTokenizer(folder, QWEN_TOOLS).chat_turns(twice, [TOOL])
    one = '<tool_call>\n{"name": "add", "arguments": {"one": 1}}\n</tool_call>'
    assert TemplateTokenizer(folder, QWEN_TOOLS).detokenize(turns[0].body, skip_special=False) == f"{one}\n{one}<|im_end|>"
    with pytest.raises(TemplateError, match="one call a turn"):
        TemplateTokenizer(folder, LLAMA_TOOLS).chat_turns(twice, [TOOL])


def test_a_marked_template_is_given_the_tools(folder: Path) -> None:
    tokenizer = TemplateTokenizer(folder, MARKED_TOOLS)
    turns = tokenizer.chat_turns(AGENT[:3], [TOOL])
    assert tokenizer.detokenize(turns[0].body, skip_special=False) == '{"name": "add", "arguments": {"one": 1}}<|endoftext|>'
    assert '"add"' in tokenizer.detokenize(turns[0].header)
    assert tokenizer.detokenize(turns[1].header) == "tool:two"


@pytest.mark.parametrize(
    ("template", "number", "tools", "words"),
    [
        (TEMPLATES["chatml"], 1, [TOOL], "does not write tools"),
        (TEMPLATES["chatml"], 2, [], r"does not write messages\[1\]\.tool_calls"),
        (LLAMA3, 2, [], r"does not write messages\[1\]\.tool_calls"),
        (TEXT_ARGUMENTS, 4, [TOOL], "does not write tools"),
        (QWEN_TOOLS.replace("m.content + '\n</tool_response>'", "'</tool_response>'"), 4, [], r"does not write messages\[2\] of role tool"),
    ],
    ids=["tools", "calls", "llama3", "text", "results"],
)
def test_what_a_template_would_drop_is_refused_by_name(
    folder: Path, template: str, number: int, tools: list[dict[str, object]], words: str
) -> None:
    with pytest.raises(TemplateError, match=f"the chat template {words}; name one that does with sft.template=FILE"):
        TemplateTokenizer(folder, template).chat_turns(AGENT[:number], tools)
    # Of a server too.
    with pytest.raises(TemplateError, match=f"the chat template {words}"):
        chat_tokens(TemplateTokenizer(folder, template), AGENT[:number], tools=tools)


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
