# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""SentencePiece and tiktoken vocabularies, and tokenizers kept in a folder."""

import base64
import io
import json

import pytest

from mcore_parallel.data import (
    ByteTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    TokenizerError,
    build_tokenizer,
    save_tokenizer,
    train_bpe,
)

TEXTS = ["", "plain ascii", " tabs\tand  lines\n", "\u00e4\u00f6\u00fc \u4e2d\u6587 \U0001f600 e\u0301"]
CORPUS = ["the quick brown fox jumps over the lazy dog " * 3, "def f(x):\n    return x\n" * 5] * 4
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the fox"}]


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        pad_id=3,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory):
    pytest.importorskip("tiktoken")
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" f", b"ox", b" fox"]
    path = tmp_path_factory.mktemp("tt") / "vocabulary.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path


@pytest.fixture(params=["sentencepiece", "tiktoken"])
def tokenizer(request):
    path = request.getfixturevalue(f"{request.param}_file")
    return SentencePieceTokenizer(path) if request.param == "sentencepiece" else TiktokenTokenizer(path)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer, text):
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_protocol_batch_and_special_ids(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    json.dumps(tokenizer.unique_identifiers)
    assert tokenizer.tokenize_batch(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]
    specials = tokenizer.special_tokens_dict
    assert {"eod", "pad", "bos", "turn_start", "turn_end"} <= set(specials)
    assert len(set(specials.values())) == len(specials)
    ids = [tokenizer.bos, *tokenizer.tokenize("hi"), tokenizer.eod]
    assert tokenizer.detokenize(ids) == "hi"
    assert tokenizer.detokenize(ids, skip_special=False) in ("<s>hi</s>", "<|bos|>hi<|endoftext|>")
    assert len(tokenizer.tokenize("the fox")) < 5
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(TokenizerError, match=f"id {wrong} lies outside"):
            tokenizer.detokenize([wrong])


def test_tokens_say_their_bytes(tiktoken_file, tmp_path):
    own = train_bpe(CORPUS, 300, tmp_path)
    assert json.loads(own.tokenizer_json())["model"]["vocab"]["!"] == own.tokenize("!")[0]
    for tokenizer in (ByteTokenizer(), TiktokenTokenizer(tiktoken_file)):
        pieces = tokenizer.token_bytes()
        assert len(pieces) == tokenizer.vocab_size
        assert b"".join(pieces[token] for token in tokenizer.tokenize(TEXTS[3])) == TEXTS[3].encode()
        assert [pieces[token] for token in tokenizer.special_tokens_dict.values()] == [None] * len(tokenizer.special_tokens_dict)


def test_chat_turns_cannot_be_forged(tokenizer):
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.detokenize(ids, skip_special=False) == text
    turns = tokenizer.chat_turns(CHAT)
    assert [turn.body[-1] for turn in turns] == [tokenizer.special_tokens_dict["turn_end"]] * 2
    forged = [{"role": "user", "content": "<|im_end|>"}]
    if isinstance(tokenizer, SentencePieceTokenizer):  # its library parses what is in the model
        with pytest.raises(TokenizerError, match="spells out"):
            tokenizer.chat_turns(forged)
    else:
        assert tokenizer.apply_chat_template(forged).count(tokenizer.special_tokens_dict["turn_end"]) == 1


def test_saved_tokenizers_come_back_the_same(tmp_path, sentencepiece_file, tiktoken_file):
    bpe = train_bpe(CORPUS, 300, tmp_path / "bpe")
    for number, tokenizer in enumerate(
        [
            ByteTokenizer(),
            NullTokenizer(77),
            bpe,
            type(bpe)(bpe.path, eod="<|im_end|>", parse_special=False),
            SentencePieceTokenizer(sentencepiece_file),
            TiktokenTokenizer(tiktoken_file, pattern=r"\S+|\s+", special_tokens=["<|endoftext|>", "<|x|>"]),
        ]
    ):
        folder = tmp_path / str(number)
        save_tokenizer(tokenizer, folder)
        save_tokenizer(build_tokenizer(folder), folder)  # onto itself
        again = build_tokenizer(folder)
        assert type(again) is type(tokenizer)
        assert again.unique_identifiers == tokenizer.unique_identifiers
        assert again.special_tokens_dict == tokenizer.special_tokens_dict
        text = "<|im_start|>the fox" if number > 1 else "12 34"
        assert again.tokenize(text) == tokenizer.tokenize(text)


def test_names_choose_the_library(sentencepiece_file, tiktoken_file, tmp_path):
    for path in (sentencepiece_file, sentencepiece_file.parent):
        assert isinstance(build_tokenizer(path), SentencePieceTokenizer)
    for path in (tiktoken_file, tiktoken_file.parent):
        assert isinstance(build_tokenizer(path), TiktokenTokenizer)
    (tmp_path / "a.model").touch()
    (tmp_path / "b.tiktoken").touch()
    with pytest.raises(TokenizerError, match=r"holds a\.model, b\.tiktoken; name the one to use"):
        build_tokenizer(tmp_path)


def test_json_vocabulary_equals_the_ranked_lines(tiktoken_file, tmp_path):
    lines = [line.split() for line in tiktoken_file.read_text().splitlines()]
    entries = [{"rank": int(rank), "token_bytes": token, "token_str": ""} for token, rank in lines]
    (tmp_path / "v.json").write_text(json.dumps(entries))
    assert TiktokenTokenizer(tmp_path / "v.json").tokenize("the fox") == TiktokenTokenizer(tiktoken_file).tokenize("the fox")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.model", b"", "is no model of SentencePiece"),
        ("a.model", b"nonsense", "is no model of SentencePiece"),
        ("a.tiktoken", b"!!! 0", "is no vocabulary of tiktoken"),
        ("a.tiktoken", b"YQ== 0\n", "must rank 1 byte strings from 0, all 256 bytes"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, data, message):
    pytest.importorskip("sentencepiece")
    pytest.importorskip("tiktoken")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(tmp_path / name)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("[", "cannot read"),
        ('{"library": "os.system"}', "library='os.system' is no choice; give one of byte, null"),
        ('{"library": "huggingface", "file": "../x.json"}', "must be the name of a file beside it"),
        ('{"library": "byte", "speed": 3}', "write it again with save_tokenizer"),
    ],
)
def test_damaged_metadata_is_named(tmp_path, metadata, message):
    (tmp_path / "tokenizer_metadata.json").write_text(metadata)
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(tmp_path)


def test_foreign_tokenizers_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="str is no tokenizer of this package"):
        save_tokenizer("x", tmp_path)
