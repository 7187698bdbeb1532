# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Names that bodies may have as their ``model``: that of the served model, and those of its adapters."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mcore_inference.requests import CoordinatorError, EngineDeadError
from mcore_inference.server._errors import ApiError


@runtime_checkable
class HasLoras(Protocol):
    """A runner whose requests may name an adapter."""

    @property
    def loras(self) -> Sequence[str]:
        """Those that are loaded."""
        ...


@runtime_checkable
class FindsLoras(Protocol):
    """A runner of engines that others change, too, and whose ``loras`` may be a moment old."""

    async def find_loras(self) -> Sequence[str]:
        """Those that are loaded now."""
        ...


class ServedModels:
    """The model and its adapters.

    Args:
        base: name of the model.
        runner: of the engine; one without adapters has the model alone.
    """

    def __init__(self, base: str, runner: object) -> None:
        self.base = base
        self._runner = runner

    @property
    def loras(self) -> list[str]:
        """Names of the adapters, in the order of their loads."""
        return [name for name in self._runner.loras if name != self.base] if isinstance(self._runner, HasLoras) else []

    async def loaded(self) -> Sequence[str]:
        """Names of the adapters that are loaded now, by whomever.

        Raises:
            ApiError: 503; nobody says so.
        """
        if not isinstance(self._runner, FindsLoras):
            return self.loras
        try:
            return await self._runner.find_loras()
        except (CoordinatorError, EngineDeadError) as error:
            raise ApiError.of(error) from error

    def check_names(self) -> None:
        """See that no adapter has the name of the model.

        Raises:
            ValueError: one has.
        """
        if isinstance(self._runner, HasLoras) and self.base in self._runner.loras:
            raise ValueError(f"model_name={self.base!r} is that of a loaded adapter; give the model another name")

    async def check(self, name: str) -> None:
        """Refuse a name that is not served here; empty stands for the model.

        Raises:
            ApiError: 404.
        """
        if name in ("", self.base) or name in self.loras or name in await self.loaded():
            return
        more = f", its adapters are {', '.join(map(repr, loras))}" if (loras := self.loras) else ""
        message = f"model={name!r} is not served here; the model is {self.base!r}{more}"
        raise ApiError(404, message, code="model_not_found", param="model")

    def lora_of(self, name: str) -> str | None:
        """The adapter of a name that was checked; None for the model."""
        return None if name in ("", self.base) else name
