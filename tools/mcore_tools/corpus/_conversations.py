# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations on disk become the tokenised corpora of a fine-tuning run, once, whatever ranks wait for them."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.hf import tokenizer_files
from mcore_parallel.data import DataError, DocumentError, preprocess_conversations
from mcore_tools.chat import TEMPLATES, TemplateTokenizer, find_template, read_generation
from mcore_tools.recipes import SFTConfig
from mcore_tools.whole_file import write_whole

_READY = "ready.json"


@dataclass(frozen=True, kw_only=True)
class ChatCorpus:
    """Where conversations and their tokenizer lie, and what was counted."""

    prefix: str
    eval_prefix: str
    """Empty where the evaluation is a share of the conversations."""
    tokenizer: str
    """Folder with the tokenizer, its chat template, and the tokens that end an answer."""
    num_conversations: int
    num_tokens: int


def prepare_chat(config: SFTConfig, tokenizer: str | Path, folder: Path, *, rank: int = 0, timeout_s: float = 7200.0) -> ChatCorpus:
    """Tokenise the conversations on the first rank, unless that was done; the others wait for it.

    Args:
        config: which conversations.
        tokenizer: folder of the tokenizer, which may hold weights beside.
        folder: to write, seen by all ranks.
        rank: of this process in the world.
        timeout_s: that the others wait.

    Raises:
        DocumentError: conversations are missing or have another form.
        TemplateError: there is no chat template, or it does not say what the assistant writes.
        TimeoutError: the first rank did not write them.
    """
    template = _template(config.template)
    facts = _facts(config, tokenizer, template)
    if rank == 0:
        return _read(folder, facts) or _write(config, tokenizer, template, folder, facts)
    deadline = time.monotonic() + timeout_s
    while (corpus := _read(folder, facts)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 wrote no {folder / _READY} within {timeout_s:.0f} s; is {folder} on a disk that all hosts see?")
        time.sleep(0.2)
    return corpus


def _template(name: str) -> str | None:
    if not name or name in TEMPLATES:
        return TEMPLATES.get(name)
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"sft.template={name!r} cannot be read: {error}; name a Jinja file, or one of {', '.join(TEMPLATES)}") from None


def _facts(config: SFTConfig, tokenizer: str | Path, template: str | None) -> dict[str, Any]:
    """What the corpora depend on."""
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in tokenizer_files(tokenizer).items()}
    files = {}
    for path in (*config.data, *config.eval_data):
        if not Path(path).exists():
            raise DocumentError(f"sft.data: cannot read {path}: no such file or folder; check the path")
        inside = [path] if Path(path).is_file() else sorted(str(one) for one in Path(path).rglob("*") if one.is_file())
        files |= {one: [os.stat(one).st_size, os.stat(one).st_mtime_ns] for one in inside}
    return {"tokenizer": digests, "template": template, "data": list(config.data), "eval_data": list(config.eval_data), "files": files}


def _read(folder: Path, facts: Mapping[str, Any]) -> ChatCorpus | None:
    """What was written of the same conversations."""
    try:
        ready = json.loads((folder / _READY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return ChatCorpus(**ready["corpus"]) if ready.get("facts") == facts else None


def _write(config: SFTConfig, source: str | Path, template: str | None, folder: Path, facts: Mapping[str, Any]) -> ChatCorpus:
    # Whatever is wrong with the template shows before anything is written.
    tokenizer = TemplateTokenizer(source, template)
    (folder / _READY).unlink(missing_ok=True)
    report = preprocess_conversations(config.data, folder / "train", tokenizer)
    if report.num_documents < 2 and not config.eval_data:
        raise DocumentError(f"{', '.join(config.data)} hold one conversation; add a second for the evaluation, or set sft.eval_data=FILE")
    if config.eval_data:
        preprocess_conversations(config.eval_data, folder / "eval", tokenizer)
    corpus = ChatCorpus(
        prefix=str(folder / "train"),
        eval_prefix=str(folder / "eval") if config.eval_data else "",
        tokenizer=str(folder / "tokenizer"),
        num_conversations=report.num_documents,
        num_tokens=report.num_tokens,
    )
    _write_tokenizer(tokenizer, source, folder / "tokenizer")
    write_whole(folder / _READY, json.dumps({"facts": facts, "corpus": vars(corpus)}))
    return corpus


def _write_tokenizer(tokenizer: TemplateTokenizer, source: str | Path, folder: Path) -> None:
    """The tokenizer as the tuned model needs it: with the template, and the token that ends an answer among those that end a text."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, path in tokenizer_files(source).items():
        shutil.copyfile(path, folder / name.removeprefix("tokenizer/"))
    if tokenizer.template != find_template(folder):
        (folder / "chat_template.jinja").write_text(str(tokenizer.template), encoding="utf-8")
    ends = list(tokenizer.stop_token_ids)
    text = json.dumps({**read_generation(folder), "eos_token_id": ends[0] if len(ends) == 1 else ends}, indent=2)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
