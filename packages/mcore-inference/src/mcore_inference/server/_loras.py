# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: adapters come and go while a server runs."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fastapi import Request

from mcore_inference._stability import experimental_api
from mcore_inference.adapters import LoraLoadError, LoraWeights
from mcore_inference.server._bodies import BodyReader
from mcore_inference.server._errors import ApiError
from mcore_inference.server._folders import check_folders, find_folder, guard_of
from mcore_inference.server._models import ServedModels
from mcore_inference.server._schema import LoadLoraBody, UnloadLoraBody


@experimental_api
@dataclass(frozen=True, kw_only=True)
class LoraFolders:
    """Where a server may take adapters from, when a client asks it to.

    Raises:
        ValueError: the root is no folder, or the token is empty.

    Example:
        >>> folders = LoraFolders(root=shared, read=read_adapter)  # read_adapter(folder) is a LoraWeights
    """

    root: Path
    """Only folders below it are read, with the links that lie in them."""
    read: Callable[[Path], LoraWeights]
    """The adapter of a folder."""
    token: str | None = field(default=None, repr=False)
    """Bearer token of loading and unloading alone, so that who may generate changes no adapter; None for the server's, on loopback only."""

    def __post_init__(self) -> None:
        check_folders(self.root, self.token)

    def find(self, name: str) -> Path:
        """The folder of that name, or of that path below the root.

        Raises:
            ApiError: 400; it is not there, or not below the root.
        """
        return find_folder(self.root, name, "lora_path")


@runtime_checkable
class LoraLoader(Protocol):
    """A runner that takes adapters."""

    async def load_lora(self, name: str, weights: LoraWeights) -> None: ...

    async def unload_lora(self, name: str) -> None: ...


class LoraRoutes:
    """Handlers of both routes; changes come one after the other.

    Args:
        reader: reads bodies.
        models: whose names an adapter may not take.
        runner: takes the adapters.
        folders: where they may come from.
    """

    def __init__(self, reader: BodyReader, models: ServedModels, runner: LoraLoader, folders: LoraFolders) -> None:
        self._reader, self._models, self._runner, self._folders = reader, models, runner, folders
        self._turn = asyncio.Lock()
        self.guard = guard_of(folders)
        """In place of the server's; empty for that one."""

    async def load(self, request: Request) -> dict[str, Any]:
        """Load the adapter of a folder between two steps."""
        body = await self._reader.read(request, LoadLoraBody)
        if body.lora_name == self._models.base:
            raise ApiError(400, f"lora_name={body.lora_name!r} is the model's; give the adapter another name", param="lora_name")
        folder = self._folders.find(body.lora_path)
        async with self._turn:
            if body.lora_name in await self._models.loaded():
                message = f"lora_name={body.lora_name!r} is loaded; unload it first, or give the adapter another name"
                raise ApiError(400, message, code=LoraLoadError.__name__, param="lora_name")
            try:
                weights = await asyncio.to_thread(self._folders.read, folder)
            except Exception as error:
                message = f"{folder} holds no adapter for this model: {error}"
                raise ApiError(400, message, code=type(error).__name__, param="lora_path") from error
            try:
                await self._runner.load_lora(body.lora_name, weights)
            except LoraLoadError as error:
                raise ApiError(400, str(error), code=type(error).__name__, param="lora_path") from error
            except Exception as error:
                raise ApiError.of(error) from error
        return {"success": True, "message": f"the adapter of {folder} is loaded as {body.lora_name!r}"}

    async def unload(self, request: Request) -> dict[str, Any]:
        """Forget an adapter that no request uses."""
        body = await self._reader.read(request, UnloadLoraBody)
        async with self._turn:
            try:
                await self._runner.unload_lora(body.lora_name)
            except Exception as error:
                answer = ApiError.of(error)
                answer.param = "lora_name"
                raise answer from error
        return {"success": True, "message": f"{body.lora_name!r} is unloaded"}
