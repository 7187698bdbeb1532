# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A checkpoint that holds adapters alone, and says which model they belong to."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mcore_ckpt._core import check_files, is_checkpoint, read_manifest, read_tensor
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import Folder, open_folder
from mcore_ckpt.hf._adapter import HFAdapterConfig, is_adapter, merge_adapter
from mcore_ckpt.hf._import import import_hf

__all__ = ["StoredAdapter"]

_OPTIMIZER = "optimizer."


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """The adapters of one checkpoint. Its ``extra`` has "lora" with rank, alpha and dropout, and "lora_base", where the base model is: a
    Hugging Face folder or a checkpoint."""

    checkpoint: Folder
    adapter: HFAdapterConfig

    @classmethod
    def of(cls, checkpoint: str | Path | Folder) -> "StoredAdapter | None":
        """Of a checkpoint; None for one that holds a whole model.

        Raises:
            CheckpointingException: there is no checkpoint, or what it says of its adapters is not complete.
        """
        folder = open_folder(checkpoint)
        extra = read_manifest(folder).extra
        if "lora" not in extra:
            return None
        try:
            lora, base = extra["lora"], extra["lora_base"]
            adapter = HFAdapterConfig(rank=lora["rank"], alpha=lora["alpha"], dropout=lora.get("dropout", 0.0), base_model=str(base))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointingException(f"{folder}: what extra says of its adapters is not complete: {error}") from None
        return cls(checkpoint=folder, adapter=adapter)

    def tensors(self, *, verify: bool = True) -> dict[str, Tensor]:
        """``lora.A`` and ``lora.B`` by our names, whole, in host memory.

        Args:
            verify: compare the SHA-256 of their files first.

        Raises:
            CheckpointingException: a damaged file.
        """
        manifest = read_manifest(self.checkpoint)
        names = [name for name in manifest.tensors if is_adapter(name) and not name.startswith(_OPTIMIZER)]
        files = {chunk.file for name in names for chunk in manifest.tensors[name].chunks}
        check_files(self.checkpoint, manifest, files, digests=verify)
        return {name: read_tensor(self.checkpoint, name, manifest) for name in names}

    def merged(self, *, verify: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The base model's tensors with the adapters added, one at a time.

        Raises:
            CheckpointingException: the base model is not there any more, or a damaged file.
        """
        return merge_adapter(self._base_tensors(), self.tensors(verify=verify), self.adapter.scaling)

    def _base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        base = self.adapter.base_model
        if (Path(base) / "config.json").is_file():
            yield from import_hf(base).tensors
            return
        if not is_checkpoint(base):
            raise CheckpointingException(f"{self.checkpoint} holds adapters of {base}, and there is no model; put it back")
        folder = open_folder(base)
        manifest = read_manifest(folder)
        for name in manifest.tensors:
            if not name.startswith(_OPTIMIZER):
                yield name, read_tensor(folder, name, manifest)
