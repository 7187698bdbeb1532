# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fine-tune a model on conversations, and export it.

mcore sft path/to/Qwen3-0.6B --data chat.jsonl --output runs/tuned
torchrun --nproc-per-node 8 -m mcore_tools.sft path/to/Llama-3.1-8B-Instruct --data chat.jsonl --layout llama3_8b@8

MODEL is a Hugging Face folder, a checkpoint, or the folder of a run. Conversations are JSON lines or Parquet with `messages` (or ShareGPT's
`conversations`), and maybe `tools`, written by the tokenizer's own chat template; only what the assistant writes is learnt, its calls of
tools included. The output folder holds the checkpoints, and `hf`, the tuned model with its tokenizer and chat template, which `mcore serve`
and transformers load. The same command goes on where it was stopped. `--set lora.rank=16` trains adapters alone; `--set
sft.export=adapter` exports them in PEFT's format; `--set load.adapter=FOLDER` trains such an adapter of MODEL further.

Exit status: as of `mcore train`.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcore_ckpt import CheckpointingException, CheckpointManager
from mcore_ckpt.assets import extract_assets
from mcore_ckpt.inspect import resolve_folder
from mcore_parallel.data import IndexedDataset
from mcore_parallel.optim import OptimizerConfig
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser
from mcore_tools.assembly import has_files, removed_if_refused
from mcore_tools.corpus import ChatCorpus, prepare_chat
from mcore_tools.exit_code import under_way
from mcore_tools.recipes import DataConfig, LoadConfig, RecipeError, RunConfig, SFTConfig, TrainConfig, add_fields_option, layout, override
from mcore_tools.train import refused, run_to_end
from mcore_tools.training import (
    check_lora,
    check_origin,
    check_run,
    export_adapter,
    export_run,
    find_base,
    find_origin,
    find_source,
    first_folder,
    is_huggingface,
    may_be_local,
    with_adapter,
)

_LONGEST = 2048
"""Tokens of a row, where nothing is said."""
_LORA_LR = 2e-4
"""Adapters bear ten times the rate of whole weights."""


def base_config(model: str, data: Sequence[str], output: str) -> RunConfig:
    """The run that fine-tunes a model, before any field is changed; its configuration is that of the weights.

    Args:
        model: a Hugging Face folder, a checkpoint, or the folder of a run.
        data: files of conversations.
        output: folder of the run.

    Raises:
        ValueError, CheckpointingException: of ``find_origin``.
    """
    origin = find_origin(model)
    return RunConfig(
        model=origin.model,
        moe=origin.moe,
        sft=SFTConfig(data=tuple(data)),
        train=TrainConfig(
            steps=1,
            seq_len=min(origin.longest or _LONGEST, _LONGEST),
            micro_batch_size=1,
            global_batch_size=8,
            warmup_steps=0,
            eval_interval=50,
            dtype=origin.dtype,
        ),
        optimizer=OptimizerConfig(lr=2e-5, min_lr=2e-6, weight_decay=0.0, clip_grad=1.0),
        data=DataConfig(tokenizer=origin.tokenizer or str(Path(output) / "base")),
        load=LoadConfig(path=origin.path),
        output=output,
    )


def keep_tokenizer(config: RunConfig, rank: int) -> None:
    """Write the tokenizer that the checkpoint of ``load.path`` keeps to ``data.tokenizer``, where it is not there; every rank has it then.

    Args:
        config: the run.
        rank: of this process; the first one writes.

    Raises:
        ValueError: there is no such file or folder, and nobody will write it.
    """
    name, origin = config.data.tokenizer, config.load.path
    source, beside = Path(name), Path(config.output) / "base"
    remedy = "set data.tokenizer to the folder of this model's tokenizer.json"
    if not has_files(name):
        raise ValueError(f"data.tokenizer={name!r} has no tokenizer.json, which conversations are written with; {remedy}")
    kept = source == beside and not is_huggingface(origin) and (source.exists() or find_origin(origin).keeps_tokenizer)
    if not kept and not (source if source.is_file() else source / "tokenizer.json").is_file():
        # What nobody set is not named.
        place = origin if name == origin or source == beside else f"data.tokenizer={name!r}"
        raise ValueError(f"{place} holds no tokenizer.json; {remedy}")
    if kept and not source.exists() and rank == 0:
        partial = beside.with_name("base.partial")
        extract_assets(resolve_folder(origin), partial)
        os.replace(partial / "tokenizer", source)
    wait_for(source)


def prepared(config: RunConfig, changed: Sequence[str], rank: int) -> RunConfig:
    """``config`` with its conversations tokenised, and as many steps as they need.

    Args:
        config: the run.
        changed: fields that the user set, which stay.
        rank: of this process; the first one writes.
    """
    assert config.sft is not None
    folder = Path(config.output)
    keep_tokenizer(config, rank)
    corpus = prepare_chat(config.sft, config.data.tokenizer, folder / "chat", rank=rank)
    if rank == 0:
        print(f"{corpus.num_conversations} conversations, {corpus.num_tokens} tokens, in {folder / 'chat'}")
    split = config.data.split if "data.split" in changed else _split(config.sft, corpus)
    optimizer = config.optimizer
    if config.lora is not None and "optimizer.lr" not in changed:
        low = optimizer.min_lr if "optimizer.min_lr" in changed else _LORA_LR / 10
        optimizer = dataclasses.replace(optimizer, lr=_LORA_LR, min_lr=low)
    data = dataclasses.replace(config.data, prefix=corpus.prefix, eval_prefix=corpus.eval_prefix, tokenizer=corpus.tokenizer, split=split)
    train: dict[str, Any] = {}
    per_epoch = _num_rows(corpus.prefix, config.train.seq_len)
    if "train.steps" not in changed:
        train["steps"] = max(1, math.ceil(config.sft.epochs * per_epoch / config.train.global_batch_size))
    if "train.warmup_steps" not in changed:
        train["warmup_steps"] = train.get("steps", config.train.steps) // 20
    if "train.eval_batches" not in changed:
        share = per_epoch * config.sft.eval_share if not corpus.eval_prefix else _num_rows(corpus.eval_prefix, config.train.seq_len)
        train["eval_batches"] = min(64, max(1, math.ceil(share / config.train.global_batch_size)))
    return dataclasses.replace(config, data=data, optimizer=optimizer, train=dataclasses.replace(config.train, **train))


def _split(config: SFTConfig, corpus: ChatCorpus) -> str:
    """Shares of the conversations: at least one is evaluated, and one is trained on."""
    evaluated = max(1, round(corpus.num_conversations * config.eval_share))
    return f"{corpus.num_conversations - evaluated},{evaluated},0"


def _num_rows(prefix: str, seq_len: int) -> int:
    """Sequences that the tokens of a corpus fill, about; each is a conversation at most."""
    corpus = IndexedDataset(prefix, multimodal=True)
    ends = np.concatenate([[0], np.cumsum(corpus.sequence_lengths, dtype=np.int64)])[corpus.document_indices]
    return max(1, math.ceil(int(np.minimum(np.diff(ends), seq_len).sum()) / seq_len))


def wait_for(path: Path, timeout_s: float = 600.0) -> None:
    """Until the first rank has written a file or folder.

    Raises:
        TimeoutError: it has not.
    """
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 wrote no {path} within {timeout_s:.0f} s; is it on a disk that all hosts see?")
        time.sleep(0.2)


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    entry = time.time()
    parser = Parser("mcore sft", __doc__)
    parser.add_argument("model", help="Hugging Face folder, checkpoint, or folder of a run")
    parser.add_argument("--data", action="append", required=True, metavar="FILE", help="conversations; may be given again")
    parser.add_argument("--output", default="runs/sft", help="folder of the run (default: %(default)s)")
    parser.add_argument("--no-export", dest="export", action="store_false", help="write no OUTPUT/hf at the end")
    parser.add_argument(
        "--layout", metavar="RECIPE@GPUS", help="the layout for so many GPUs of a published size, such as llama3_8b@8; --set changes it"
    )
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, for instance train.seq_len=4096")
    add_fields_option(parser, RunConfig)
    options = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    try:
        changed = [assignment.partition("=")[0].strip() for assignment in options.set]
        base = with_adapter(base_config(options.model, options.data, options.output), options.set)
        job = "lora" if base.lora is not None or any(path.partition(".")[0] == "lora" for path in changed) else "sft"
        placed = layout(options.layout, job) if options.layout else ()
        config = override(base, [*placed, *options.set])
        if config.sft is None:
            raise RecipeError("sft=none has no conversations to learn; leave it out, or start the run with `mcore train`")
        as_adapter = config.sft.export == "adapter"
        export = Path(config.output) / ("adapter" if as_adapter else "hf")
        if options.export and export.exists():
            raise ValueError(f"{export} is there, of a run that ended; name another --output, or remove it")
        # Before anything is written.
        check_run(config, paced="train.steps" in changed)
        own = CheckpointManager(Path(config.output) / "checkpoints")
        check_lora(config, own)
        source = find_source(config.load, own, may_be_local=may_be_local(config)) if config.lora is None else find_base(config.load)
        check_origin(config, first_folder(config.load, own, source), is_own=source is None)
        with removed_if_refused(config.output):
            config = prepared(config, changed, rank)
            check_run(config)
        code = run_to_end(config, entry)
        if options.export and code == 0 and rank == 0:
            with under_way():
                (export_adapter if as_adapter else export_run)(Path(config.output) / "checkpoints", export)
            print(f"exported to {export}; " + ("PEFT loads it onto its base model" if as_adapter else f"`mcore serve {export}` serves it"))
        return code
    except (ValueError, OSError, CheckpointingException) as error:
        return refused(error)


if __name__ == "__main__":
    sys.exit(main())
