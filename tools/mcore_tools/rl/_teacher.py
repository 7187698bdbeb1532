# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The model whose distributions a policy takes over."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_ckpt.storage import Folder
from mcore_parallel import ProcessGroups
from mcore_parallel.data import Tokenizer, build_tokenizer
from mcore_parallel.models import GPTModel, OutputLayer
from mcore_parallel.pipeline import ModelChunks
from mcore_parallel.training import model_state
from mcore_parallel.training.distill import Teacher
from mcore_tools.assembly import build_stage, shard_stage
from mcore_tools.recipes import RunConfig
from mcore_tools.training import HuggingFaceFolder, fill_model, open_weights, stored_model


def teacher_run(config: RunConfig) -> tuple[RunConfig, Folder | HuggingFaceFolder]:
    """The teacher's model in the layout of a run, and where its weights are.

    Raises:
        ValueError: it does not say what model it is, or it has another vocabulary.
        CheckpointingException: there is none.
    """
    assert config.rl is not None
    path = config.rl.teacher
    folder = open_weights(path)
    stored = stored_model(folder)
    if stored is None:
        raise ValueError(f"rl.teacher={path!r} does not say what model it holds; save it with `mcore train`, or name a Hugging Face folder")
    model, moe = stored
    if model.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"rl.teacher={path!r} has model.vocab_size={model.vocab_size}, and the policy {config.model.vocab_size}; both need one "
            "tokenizer and one padding"
        )
    # What only learning needs stays with the policy.
    return dataclasses.replace(config, model=dataclasses.replace(model, mtp_num_layers=0), moe=moe, rl=None), folder


def open_teacher(
    config: RunConfig, tokenizer: Tokenizer, groups: ProcessGroups, device: torch.device, group: dist.ProcessGroup | None = None
) -> Teacher:
    """The teacher of a run, frozen, with its weights, sharded as the policy is; ``group`` are the ranks that read it, None for all.

    Raises:
        ValueError, CheckpointingException: as of ``teacher_run``; another tokenizer, weights that are missing.
    """
    assert config.rl is not None
    run, folder = teacher_run(config)
    check_tokenizer("rl.teacher", config.rl.teacher, tokenizer)
    model = build_stage(run, groups, device)
    for module in model.modules():
        if isinstance(module, OutputLayer):
            # Rows of padding are in neither distribution.
            module.unpadded_vocab_size = tokenizer.vocab_size
    # Frozen before it is sharded: nothing of it is kept for gradients.
    model.requires_grad_(False).eval()
    if config.data_parallel == "ddp":
        fill_model(model_state(model, groups), folder, group=group)
        return Teacher(model, groups=groups)
    assert isinstance(model, GPTModel | ModelChunks), "RunConfig refuses encoders with rl"
    sharded = shard_stage(config, model, groups)
    fill_model(model_state(sharded, groups), folder, group=group)
    return Teacher(sharded, groups=groups)


def check_tokenizer(field: str, path: str, tokenizer: Tokenizer) -> None:
    """Whether the tokenizer of a model that is compared with the policy, where it has one in a folder, divides a text as the policy's does.

    Raises:
        ValueError: it does not; names the field.
    """
    folders = [folder for folder in (Path(path), Path(path) / "tokenizer") if (folder / "tokenizer.json").is_file()]
    text = "One text of 20 words or so: (3 + 4) * 5 = 35, which a tokenizer divides.\n\tNa\u00efve fa\u00e7ade, \u6771\u4eac <answer>"
    for folder in folders[:1]:
        if list(build_tokenizer(str(folder)).tokenize(text)) != list(tokenizer.tokenize(text)):
            raise ValueError(f"{field}={path!r} has another tokenizer than the policy; token by token they cannot be compared")
