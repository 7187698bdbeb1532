# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the weights that a run begins with say of themselves."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.inspect import resolve_folder
from mcore_ckpt.manifest import read_manifest
from mcore_moe import MoEConfig
from mcore_parallel.models import TransformerConfig
from mcore_tools.recipes import RECIPES, DataConfig, LoadConfig, RunConfig, TrainConfig, recipe
from mcore_tools.training._pretrained import HuggingFaceFolder, is_huggingface
from mcore_tools.training._start import check_names, steps_folder
from mcore_tools.training._stored import stored_dtype, stored_encoder, stored_model


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A model that a run begins with, and what it says of itself."""

    path: str
    """For ``load.path``."""
    model: TransformerConfig
    moe: MoEConfig | None
    tokenizer: str
    """Folder of a published model; empty for that of a checkpoint."""
    keeps_tokenizer: bool
    """Whether one lies there."""
    dtype: str
    longest: int
    """Tokens of its context; 0 where nothing is said."""

    @property
    def tokenizer_folder(self) -> str:
        """The tokenizer of a published model, or beside the steps of a run; empty where there is none."""
        steps = next((place for place in (Path(self.path), Path(self.path).parent) if place.name == "checkpoints"), None)
        folder = Path(self.tokenizer) if self.tokenizer else None if steps is None else steps.with_name("tokenizer")
        if folder is None or not folder.is_dir():
            return ""
        kinds = ("tokenizer.json", "tokenizer_metadata.json", ".model", ".tiktoken")
        return str(folder) if any(file.name.endswith(kinds) for file in folder.iterdir()) else ""


def find_origin(model: str) -> Origin:
    """What a Hugging Face folder, a checkpoint, or the folder of a run holds.

    Raises:
        ValueError: the weights do not say what model they are of, are those of an encoder, or have the names of another system.
        CheckpointingException: there are none.
    """
    if is_huggingface(model):
        source = HuggingFaceFolder(directory=Path(model))
        path, tokenizer, keeps, dtype = model, model, True, "float32" if source.dtype == "float32" else "bfloat16"
        longest = source.entries().get("max_position_embeddings", 0)
    else:
        path = str(steps_folder(model))
        source = resolve_folder(path)
        check_names(source, path)
        tokenizer, longest, dtype = "", 0, stored_dtype(source) or "float32"
        if encoder := stored_encoder(source):
            raise ValueError(f"{source} holds an encoder, which predicts no next token; name a run with {encoder}=none, or its own recipe")
        keeps = "tokenizer/tokenizer.json" in read_manifest(source).assets
    stored = stored_model(source)
    if stored is None:
        raise ValueError(f"{source} does not say what model it holds; save it with `mcore train`, or import it from a Hugging Face folder")
    return Origin(path=path, model=stored[0], moe=stored[1], tokenizer=tokenizer, keeps_tokenizer=keeps, dtype=dtype, longest=longest)


def trained_run(name: str) -> RunConfig:
    """A run whose model another one learns from: that of a recipe, or with the model, experts, dtype, weights and tokenizer of what lies
    at ``name``, a Hugging Face folder, a checkpoint or the folder of a run.

    Raises:
        RecipeError: neither a recipe nor a folder.
        ValueError, CheckpointingException: of ``find_origin``.
    """
    if name in RECIPES or not Path(name).exists():
        return recipe(name)
    origin = find_origin(name)
    return RunConfig(
        model=origin.model,
        moe=origin.moe,
        train=TrainConfig(dtype=origin.dtype),
        data=DataConfig(tokenizer=origin.tokenizer_folder),
        load=LoadConfig(path=origin.path),
    )


def with_tokenizer(run: RunConfig, trained: RunConfig) -> RunConfig:
    """``run`` with the tokenizer of the one that it learns from, where it names none."""
    return dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=run.data.tokenizer or trained.data.tokenizer))
