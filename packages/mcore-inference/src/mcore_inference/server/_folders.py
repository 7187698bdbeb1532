# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Folders that a client may have read, and who is such a client."""

from pathlib import Path
from typing import Protocol

from fastapi import Depends
from fastapi.params import Depends as Dependency

from mcore_inference._fields import is_loopback
from mcore_inference.server._errors import ApiError
from mcore_inference.server._tokens import BearerToken


class GuardedFolders(Protocol):
    """``WeightFolders`` and ``LoraFolders``."""

    @property
    def root(self) -> Path: ...

    @property
    def token(self) -> str | None: ...


def check_folders(root: Path, token: str | None) -> None:
    """See that there is a root, and a token that is not empty.

    Raises:
        ValueError: names the field.
    """
    if token is not None and not token:
        raise ValueError("token='' is empty; give a secret, or None for the token of the server")
    if not root.is_dir():
        raise ValueError(f"root={str(root)!r} is no folder; make it, or name the one that the trainer writes to")


def check_guard(field: str, folders: GuardedFolders, token: str | None, host: str) -> None:
    """See that not everybody who reaches a server may change its model.

    Args:
        field: of ``serve``, whose folders they are.
        folders: with a token of their own, or none.
        token: of the server.
        host: address of the server.

    Raises:
        ValueError: there is no token, none but the server's beyond loopback, or both are one.
    """
    place = f"{field}={folders.root}"
    if token is None and folders.token is None:
        raise ValueError(f"{place} lets clients replace the model; give a token, to it or to the server")
    if folders.token is None and not is_loopback(host):
        raise ValueError(
            f"host={host!r} is reachable from other machines, and {place} has no token of its own; give {type(folders).__name__} one, "
            "other than the server's, or bind to 127.0.0.1"
        )
    if folders.token is not None and folders.token == token:
        raise ValueError(f"the token of {field} is that of the server, whose clients would replace the model; give it one of its own")


def guard_of(folders: GuardedFolders) -> list[Dependency]:
    """What routes that read the folders depend on: their own token, or nothing, where they share the server's."""
    return [] if folders.token is None else [Depends(BearerToken(folders.token))]


def find_folder(root: Path, name: str, param: str) -> Path:
    """The folder of that name, or of that path below the root.

    Args:
        root: a name that leads out of it by a link is refused. Links that lie in a folder are the reader's to follow: whoever may write
            there is trusted.
        name: as the client wrote it.
        param: field that it wrote it in.

    Raises:
        ApiError: 400; it is not there, or not below the root. Both are said in the same words: what else the machine has is no client's
            business.
    """
    refusal = ApiError(400, f"{param}={name!r} is no folder below {root}", param=param)
    try:
        folder = (root / name).resolve(strict=True)
        is_below = folder.is_dir() and root.resolve() in folder.parents
    except (OSError, ValueError, RuntimeError) as error:
        # Links in a circle are a RuntimeError.
        raise refusal from error
    if not is_below:
        raise refusal
    return folder
