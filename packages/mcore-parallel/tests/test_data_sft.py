# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations: which tokens are learnt, how they are packed, and that nothing is lost."""

import itertools
import json
import random

import numpy as np
import pytest
import torch

from mcore_parallel.data import (
    BlendedMegatronDatasetBuilder,
    ByteTokenizer,
    DataError,
    DocumentError,
    IndexedDataset,
    PretrainingSampler,
    SFTDataset,
    SFTDatasetConfig,
    Split,
    batches,
    preprocess_conversations,
    read_conversations,
)
from mcore_parallel.data.datasets._sft import build_packs, pack_best_fit
from mcore_parallel.data.preprocessing._cli import main

BYTES = ByteTokenizer()
ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


def write(path, conversations, key="messages"):
    path.write_text("".join(json.dumps({key: messages}) + "\n" for messages in conversations))
    return path


def many(count, seed=0):
    source = random.Random(seed)
    return [
        [{"role": role, "content": "x" * source.randrange(1, 28)} for _ in range(source.randrange(1, 4)) for role in ("user", "assistant")]
        for _ in range(count)
    ]


def corpus(tmp_path, conversations, **options):
    preprocess_conversations([write(tmp_path / "in.jsonl", conversations)], tmp_path / "c", BYTES, **options)
    return IndexedDataset(tmp_path / "c", multimodal=True)


def make(data, *, seq_len=256, num_samples=None, cache=None, **options):
    config = SFTDatasetConfig(random_seed=1, sequence_length=seq_len, path_to_cache=cache, **options)
    return SFTDataset(data, None, np.arange(data.document_indices.size - 1), num_samples, Split.train, config)


def parts(sample):
    """(tokens, labels, loss_mask, position_ids) of each stretch between bounds."""
    bounds = sample["cu_seqlens"].tolist()
    names = ("tokens", "labels", "loss_mask", "position_ids")
    return [tuple(sample[name][first:last].tolist() for name in names) for first, last in itertools.pairwise(bounds)]


def test_answers_and_their_ends_are_learnt_and_nothing_else(tmp_path):
    more = [*ASK, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    sample = make(corpus(tmp_path, [more]))[0]
    conversation, padding = parts(sample)
    tokens, labels, mask, positions = conversation
    assert tokens == BYTES.apply_chat_template(more)
    assert labels == [*tokens[1:], 0]
    learnt = [token for token, weight in zip(labels, mask, strict=True) if weight]
    end = BYTES.special_tokens_dict["turn_end"]
    assert learnt == [*b"2", end, *b"yes", end]
    # The first learnt label is predicted from what a server gives a model that is to answer.
    given = BYTES.apply_chat_template(more[:2], add_generation_prompt=True)
    assert mask.index(1.0) == len(given) - 1
    assert positions == list(range(len(tokens)))
    assert set(padding[0]) == set(padding[1]) == {0}
    assert not any(padding[2])


def test_the_command_writes_the_same(tmp_path, capsys):
    corpus(tmp_path, many(20))
    source = str(tmp_path / "in.jsonl")
    assert main(["--conversations", "--input", source, "--output-prefix", str(tmp_path / "d"), "--tokenizer", "byte"]) == 0
    assert "20 documents" in capsys.readouterr().out
    for end in ("bin", "idx"):
        assert (tmp_path / f"c.{end}").read_bytes() == (tmp_path / f"d.{end}").read_bytes()
    for more, message in ((["--tokenizer", "null:9"], "knows no turns"), (["--append-eod"], "leave out --append-eod")):
        assert main(["--conversations", "--input", source, "--output-prefix", str(tmp_path / "e"), "--tokenizer", "byte", *more]) == 2
        assert message in capsys.readouterr().err


def test_other_roles_can_be_learnt_and_conversations_without_them_are_left_out(tmp_path):
    conversations = [ASK, [{"role": "tool", "content": "4"}]]
    path = write(tmp_path / "in.jsonl", conversations)
    report = preprocess_conversations([path], tmp_path / "c", BYTES)
    assert (report.num_documents, report.num_skipped, report.dtype) == (1, 1, "uint16")
    sample = make(corpus(tmp_path, conversations, trained_roles=("tool", "system")))[0]
    learnt = bytes(token for token in sample["labels"][sample["loss_mask"] > 0].tolist() if token < 256)
    assert sorted(learnt) == sorted(b"be brief4")


@pytest.mark.parametrize("multiple", [1, 8])
def test_each_epoch_holds_every_conversation_once_and_whole(tmp_path, multiple):
    conversations = many(200)
    data = corpus(tmp_path, conversations)
    dataset = make(data, seq_len=512, num_samples=None, sequence_multiple=multiple)
    wanted = sorted(BYTES.apply_chat_template(messages) for messages in conversations)
    seen = []
    for idx in range(len(dataset)):
        sample = dataset[idx]
        assert all(sample[name].shape == (512,) for name in ("tokens", "labels", "loss_mask", "position_ids"))
        assert sample["cu_seqlens"][-1] == 512
        assert not (sample["cu_seqlens"] % multiple).any()
        for tokens, _, mask, positions in parts(sample):
            assert positions == list(range(len(tokens)))
            if any(mask):
                while tokens[-1] == 0:
                    tokens.pop()
                seen.append(tokens)
            else:
                assert set(tokens) == {0}
    assert sorted(seen) == wanted
    used = sum(map(len, wanted)) / (len(dataset) * 512)
    assert used > (0.95 if multiple == 1 else 0.9)
    twice = make(data, seq_len=512, num_samples=len(dataset) + 1)
    assert np.bincount(twice.document_index).tolist() == [2] * 200


def test_order_follows_from_the_seed_and_the_cache_gives_it_back(tmp_path):
    data = corpus(tmp_path, many(50))
    built, loaded = (make(data, cache=str(tmp_path / "cache")) for _ in range(2))
    assert isinstance(loaded.document_index.base, np.memmap)
    assert all(torch.equal(built[3][name], loaded[3][name]) for name in built[3])
    config = SFTDatasetConfig(random_seed=2, sequence_length=256)
    other = SFTDataset(data, None, np.arange(50), None, Split.train, config)
    assert other.document_index.tolist() != built.document_index.tolist()


def test_a_conversation_that_is_too_long_is_cut_with_a_warning(tmp_path):
    data = corpus(tmp_path, [ASK, [{"role": "assistant", "content": "y" * 300}]])
    with pytest.warns(UserWarning, match="1 of 2 conversations exceed sequence_length=128; cut there"):
        dataset = make(data, seq_len=128)
    (tokens, _, mask, _), *_ = max((parts(dataset[idx]) for idx in range(2)), key=lambda found: len(found[0][0]))
    assert len(tokens) == 128
    assert tokens[-1] == ord("y")
    assert mask[-1] == 0.0
    assert dataset[None]["loss_mask"].sum() == 0


def test_batches_have_one_row_of_bounds(tmp_path):
    dataset = make(corpus(tmp_path, many(60)))
    first = next(batches(dataset, PretrainingSampler(len(dataset), 0, 2, 0, 1, 2)))
    ones, twos = (dataset[idx]["cu_seqlens"].tolist() for idx in (0, 1))
    assert first["cu_seqlens"].tolist() == [*ones, *(bound + 256 for bound in twos[1:])]
    assert first["tokens"].shape == (2, 256)


def test_the_builder_splits_and_blends_conversations(tmp_path):
    corpus(tmp_path, many(100))
    config = SFTDatasetConfig(
        random_seed=1, sequence_length=256, blend=([str(tmp_path / "c")], None), split="9,1", path_to_cache=str(tmp_path)
    )
    train, valid, test = BlendedMegatronDatasetBuilder(SFTDataset, [None, None, None], lambda: True, config).build()
    assert test is None
    assert sorted({*train.document_index.tolist(), *valid.document_index.tolist()}) == list(range(100))
    assert valid.document_index.min() == 90


def test_packs_fit_and_waste_little():
    generator = np.random.default_rng(0)
    for trial in range(100):
        capacity = int(generator.integers(1, 50))
        lengths = generator.integers(1, capacity + 1, int(generator.integers(0, 60))).tolist()
        groups = pack_best_fit(lengths, capacity)
        assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
        assert all(0 < sum(lengths[number] for number in group) <= capacity for group in groups)
        assert len(groups) <= 11 / 9 * -(-sum(lengths) // capacity) + max(lengths, default=0) + 1 or trial
        # No two groups could be one.
        rooms = sorted(sum(lengths[number] for number in group) for group in groups)
        assert len(rooms) < 2 or rooms[0] + rooms[1] > capacity
    order, bounds = build_packs(np.array([3, 5, 2, 4]), 5, 7, seed=1)
    assert np.bincount(order).tolist() == [3] * 4
    assert bounds.tolist() == [0, 2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', r"in\.jsonl:1 has no list of messages in the field 'messages' \(fields are text\)"),
        ('{"messages": []}', "has no list of messages"),
        ("[]", "holds a list, expected an object"),
        ('{"messages": [{"role": "user"}]}', 'must have "role" and "content"'),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            r"no conversation with a turn of assistant \(1 without\); check trained_roles",
        ),
    ],
)
def test_bad_conversations_are_named_and_write_nothing(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_text(line)
    with pytest.raises(DataError, match=message):
        preprocess_conversations([tmp_path / "in.jsonl"], tmp_path / "c", BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_wrong_arguments_are_refused(tmp_path):
    data = corpus(tmp_path, [ASK])
    with pytest.raises(DataError, match="sequence_multiple=3 must divide sequence_length=256"):
        make(data, sequence_multiple=3)
    with pytest.raises(DataError, match="pass multimodal=True"):
        make(IndexedDataset(tmp_path / "c"))
    with pytest.raises(DocumentError, match="no such file"):
        list(read_conversations(tmp_path / "none"))
    with pytest.raises(IndexError, match="ask the builder for more samples"):
        make(data)[1]


SHAREGPT = [{"from": "system", "value": "be brief"}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
PARTS = [*ASK[:1], {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]}, *ASK[2:]]


@pytest.mark.parametrize(("key", "messages"), [("messages", ASK), ("conversations", SHAREGPT), ("messages", PARTS)])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_shapes_of_data_sets_are_one_conversation(tmp_path, key, messages, ending):
    path = tmp_path / f"chat.{ending}"
    if ending == "jsonl":
        write(path, [messages, messages], key=key)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        if messages is PARTS:
            pytest.skip("a column has one type, PARTS has two")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist([{key: messages, "source": "a"}] * 2), path)
    assert [conversation.messages for conversation in read_conversations(path)] == [ASK, ASK]


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"one": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
AGENT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2"},
]


def written_agents():
    """The same conversation in each of the shapes that data sets have, and its call."""
    user, call, result, answer = AGENT
    bare = {"type": "function", "function": CALL["function"]}
    text = {"name": "add", "arguments": json.dumps({"one": 1})}
    yield {"messages": AGENT, "tools": [TOOL]}, CALL
    yield {"messages": [user, {**call, "content": None, "tool_calls": [{**CALL, "function": text}]}, result, answer], "tools": [TOOL]}, CALL
    old = [user, {"role": "assistant", "function_call": text}, {**result, "role": "function"}, answer]
    yield {"messages": old, "tools": [TOOL]}, bare
    turns = [("human", "1+1?"), ("function_call", json.dumps(bare["function"])), ("observation", "2"), ("gpt", "2")]
    yield {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([TOOL["function"]])}, bare
    turns[1:3] = [("function_call", json.dumps([bare["function"]])), ("function_response", "2")]
    yield {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([TOOL])}, bare


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("number", range(5), ids=["openai", "text", "function_call", "sharegpt", "list"])
def test_tools_calls_and_results_come_out_in_one_form(tmp_path, number, ending):
    entry, call = list(written_agents())[number]
    path = tmp_path / f"chat.{ending}"
    # A column of Parquet has the keys of all rows.
    other = {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "b", "arguments": {"c": "d"}}}]}]}
    entries = [entry, other] if number == 0 else [entry]
    if ending == "jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in entries))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(entries), path)
    conversation = next(read_conversations(path))
    assert conversation.messages == [AGENT[0], {**AGENT[1], "tool_calls": [call]}, *AGENT[2:]]
    assert conversation.tools == [TOOL]


def test_tokenizers_without_templates_refuse_tools(tmp_path):
    for entry, words in (
        ({"messages": AGENT}, r"messages\[1\] has tool_calls"),
        ({"messages": ASK, "tools": [TOOL]}, "conversation has tools"),
    ):
        (tmp_path / "chat.jsonl").write_text(json.dumps(entry))
        with pytest.raises(DocumentError, match=f"chat.jsonl:1: .*{words}"):
            preprocess_conversations([tmp_path / "chat.jsonl"], tmp_path / "c", BYTES)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\[0\] has a part of type 'image_url'"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            r'messages\[0\]\.tool_calls\[0\] must be a function with a "name"',
        ),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]}, "has tool_calls and the role 'user'"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]}, "arguments is no JSON"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]},
            "arguments must be an object.* found list",
        ),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, r"conversations\[0\]: its value is no JSON"),
        ({"conversations": [{"from": "function_call"}]}, r'conversations\[0\] must have "role" and "content" as text'),
        ({"conversations": [{"from": "function_call", "value": "[]"}]}, r'conversations\[0\] must have "role" and "content" as text'),
        ({"messages": ASK, "tools": [{"type": "function"}]}, r'tools\[0\] must be a function with a "name"'),
        ({"messages": ASK, "tools": "add"}, "tools is no JSON"),
        ({"messages": ASK, "tools": {"add": {}}}, "tools must be a list of functions"),
        ({"conversation": ASK}, "no list of messages in the field 'messages'"),
    ],
)
def test_what_no_template_renders_is_refused_by_its_name(tmp_path, line, words):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(DocumentError, match=f"chat.jsonl:1.*{words}"):
        list(read_conversations(path))
