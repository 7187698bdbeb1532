# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``/update_weights_from_disk``: a trainer gives a running server the weights of a folder that both can read."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from fastapi import Request
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.engine import WeightLoadError, WeightSlice
from mcore_inference.server._bodies import BodyReader
from mcore_inference.server._errors import ApiError
from mcore_inference.server._folders import check_folders, find_folder, guard_of
from mcore_inference.server._models import ServedModels
from mcore_inference.server._schema import UpdateWeightsBody


@experimental_api
@dataclass(frozen=True, kw_only=True)
class WeightFolders:
    """Where a server may take weights from, when a client asks it to.

    Raises:
        ValueError: the root is no folder, or the token is empty.

    Example:
        >>> folders = WeightFolders(root=shared, read=lambda folder: import_hf(folder).tensors)
    """

    root: Path
    """Only folders below it are read, with the links that lie in them."""
    read: Callable[[Path], Iterable[tuple[str, Tensor | WeightSlice]]]
    """The weights of a folder, by their global names."""
    token: str | None = field(default=None, repr=False)
    """Bearer token of this route alone, so that who may generate cannot replace the model; None for the server's, on loopback only."""

    def __post_init__(self) -> None:
        check_folders(self.root, self.token)

    def find(self, name: str) -> Path:
        """The folder of that name, or of that path below the root.

        Raises:
            ApiError: 400; it is not there, or not below the root.
        """
        return find_folder(self.root, name, "model_path")


@runtime_checkable
class WeightLoader(Protocol):
    """A runner that takes new weights."""

    async def load_weights(
        self,
        chunks: Iterable[tuple[str, Tensor | WeightSlice]],
        version: int | None = None,
        *,
        in_flight: Literal["recompute", "keep", "drain"] = ...,
    ) -> Any: ...


class WeightRoute:
    """The handler; loads come one after the other.

    Args:
        reader: reads bodies.
        models: whose base gets the weights.
        runner: takes the weights.
        folders: where they may come from.
    """

    def __init__(self, reader: BodyReader, models: ServedModels, runner: WeightLoader, folders: WeightFolders) -> None:
        self._reader, self._models, self._runner, self._folders = reader, models, runner, folders
        self._turn = asyncio.Lock()
        self.guard = guard_of(folders)
        """In place of the server's; empty for that one."""

    async def update(self, request: Request) -> dict[str, Any]:
        """Load a folder between two steps."""
        body = await self._reader.read(request, UpdateWeightsBody)
        if self._models.lora_of(body.model) is not None:
            message = f"model={body.model!r} is an adapter, which keeps its weights; name {self._models.base!r}, or leave model out"
            raise ApiError(400, message, param="model")
        folder = self._folders.find(body.model_path)
        async with self._turn:
            try:
                chunks = await asyncio.to_thread(self._folders.read, folder)
            except Exception as error:
                raise ApiError(400, f"{folder} holds no weights for this model: {error}", code=type(error).__name__) from error
            try:
                await self._runner.load_weights(chunks, body.weight_version, in_flight=body.in_flight)
            except WeightLoadError as error:
                raise ApiError(400, str(error), code=type(error).__name__, param="model_path") from error
            except Exception as error:
                raise ApiError.of(error) from error
        return {"success": True, "message": f"weights of {folder} are loaded", "weight_version": body.weight_version}
