# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A Hugging Face folder that a run begins with."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt import CheckpointingException
from mcore_ckpt.hf import import_hf, load_hf

# Entries of config.json that say nothing about the weights, and that an export of the tuned model has again.
EXPORTED_ENTRIES = ("bos_token_id", "eos_token_id", "max_position_embeddings", "pad_token_id")
_LONGEST_HEADER = 100_000_000


def is_huggingface(path: str | Path) -> bool:
    """Whether a folder on this machine holds a config.json."""
    return (Path(path) / "config.json").is_file()


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder:
    """Weights and sizes of a published model, quantised or not; each rank reads the tensors and experts that it holds, one at a time."""

    directory: Path

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def family(self) -> str:
        return import_hf(self.directory).family

    def sizes(self) -> dict[str, Any]:
        """The model's config in our field names.

        Raises:
            CheckpointingException: an unknown family, or weights that do not fit it.
        """
        return import_hf(self.directory).config

    def entries(self) -> dict[str, Any]:
        """The entries of config.json that an export has again."""
        config = self._config()
        return {name: config[name] for name in EXPORTED_ENTRIES if config.get(name) is not None}

    @property
    def dtype(self) -> str:
        """Of the weights as they are read; where config.json says nothing, "bfloat16" of quantised ones and "float32" of others."""
        config = self._config()
        silent = "bfloat16" if config.get("quantization_config") else "float32"
        return str(config.get("dtype") or config.get("torch_dtype") or silent).removeprefix("torch.")

    def digest(self) -> str:
        """SHA-256 of config.json, and of the name, header and length of each file of weights; the weights themselves are not read.

        Raises:
            OSError: a file cannot be read.
        """
        digest = hashlib.sha256((self.directory / "config.json").read_bytes())
        for path in sorted(self.directory.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = file.read(min(length, _LONGEST_HEADER))
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + header)
        return digest.hexdigest()

    def fill(self, wanted: Mapping[str, Any]) -> frozenset[str]:
        """Copy into the parts of this rank, but for those that it has no weights for, whose names it returns.

        Args:
            wanted: name -> `TensorShard`, or several of them, as of ``model_state``.

        Raises:
            CheckpointingException: a weight has another shape.
        """
        return load_hf(self.directory, wanted)

    def _config(self) -> dict[str, Any]:
        path = self.directory / "config.json"
        try:
            return dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise CheckpointingException(f"{path} is no JSON object: {error}; fetch the folder again") from None
