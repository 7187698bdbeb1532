# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Errors a request or a server can end with, and their wire form."""

from collections.abc import Mapping
from typing import Any

from mcore_inference._fields import check_fields
from mcore_inference._stability import experimental_api

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextErrorFactory",
    "ContextOverflowError",
    "CoordinatorError",
    "EngineDeadError",
    "EngineLostError",
    "InvalidTokenError",
    "MaxSequenceLengthOverflowError",
    "NonFiniteLogitsError",
    "PortInUseError",
    "QueueFullError",
    "RankFailedError",
    "RequestError",
    "RequestOverflowError",
    "StaleWeightsError",
    "StepFailedError",
    "StructuredOutputError",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
    "UnknownLoraError",
    "request_error",
]


class RequestError(ValueError):
    """One request cannot be served; the engine and all other requests go on.

    Args:
        request_id: the request, None while it has no id yet.
        message: what is wrong and what helps; None for the class name.
        is_transient: whether the same request can succeed later.
    """

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = False) -> None:
        self.request_id = request_id
        self.message = message or type(self).__name__
        self.is_transient = is_transient
        super().__init__(self.message if request_id is None else f"request {request_id}: {self.message}")


class ContextOverflowError(RequestError):
    """A request does not fit the context: now (transient) or ever."""

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = True) -> None:
        super().__init__(request_id, message, is_transient=is_transient)


class RequestOverflowError(ContextOverflowError):
    """No request slot is free."""


class TokenOverflowError(ContextOverflowError):
    """The tokens exceed what one step may compute."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """The sequence is longer than the context ever holds; never transient."""

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = False) -> None:
        super().__init__(request_id, message, is_transient=is_transient)


class BlockOverflowError(ContextOverflowError):
    """The key-value cache has too few blocks."""


class ActiveRequestCountOverflowError(ContextOverflowError):
    """A step holds more requests than the context has slots."""

    def __init__(
        self,
        max_request_count: int,
        active_request_count: int,
        *,
        request_id: int | None = None,
        message: str | None = None,
        is_transient: bool = True,
    ) -> None:
        self.max_request_count = max_request_count
        self.active_request_count = active_request_count
        text = message or f"active requests {active_request_count} > max_requests={max_request_count}; raise max_requests"
        super().__init__(request_id, text, is_transient=is_transient)


class TensorStateDeallocatedError(ContextOverflowError):
    """A step was to be made while the cache has no memory on the device: the engine is suspended, or closed."""


class InvalidTokenError(RequestError):
    """A prompt is empty, is refused by the tokenizer, or holds ids outside the vocabulary."""


class UnknownLoraError(RequestError):
    """An adapter that is asked for is not loaded."""


class NonFiniteLogitsError(RequestError):
    """The model gave NaN, or no finite score, for the next token of one request."""


class StructuredOutputError(RequestError):
    """The form of an output is wrong or not available, or the output cannot go on in it."""


class StepFailedError(RequestError):
    """The forward pass of a step raised; every request of that step ends with this, the engine goes on."""

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = True) -> None:
        super().__init__(request_id, message, is_transient=is_transient)


class QueueFullError(RequestError):
    """Too many requests wait; the client should try again later."""

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = True) -> None:
        super().__init__(request_id, message, is_transient=is_transient)


class EngineDeadError(RuntimeError):
    """The engine failed in several steps one after the other, or was closed, and serves no request any more."""


@experimental_api
class RankFailedError(EngineDeadError):
    """A rank of a split engine is gone, late, or did something else than the first; the engine serves no request any more.

    Args:
        rank: its position among the ranks of the model (``ProcessGroups.tp_pp``), of which those of one stage follow each other, or among
            those that share its experts (``tp_ep``).
        message: what it did.
        name: what the message calls it; None for ``tp rank`` and its position.
    """

    def __init__(self, rank: int, message: str, name: str | None = None) -> None:
        self.rank = rank
        super().__init__(f"{name or f'tp rank {rank}'} {message}")


class EngineLostError(RuntimeError):
    """The engine of a request was lost, and the request could not go to another."""


@experimental_api
class StaleWeightsError(EngineLostError):
    """No engine has the weights that were loaded last: those that had were lost, and others started with older ones. Load them again."""


class CoordinatorError(RuntimeError):
    """A coordinator refused something, or is gone."""


class PortInUseError(OSError):
    """The address of a server is taken.

    Args:
        host: address asked for.
        port: port asked for.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        super().__init__(f"port={port} on host={host} is in use; choose another port, or port=0 for a free one")


def request_error(kind: str, message: str, *, is_transient: bool) -> ValueError:
    """An error of a request from the name of its class and its message, as they came over a wire; a ``RequestError`` for unknown names."""
    if kind == "ValueError":
        return ValueError(message)
    others = (InvalidTokenError, StepFailedError, QueueFullError, NonFiniteLogitsError, StructuredOutputError, UnknownLoraError)
    classes = {cls.__name__: cls for cls in (*_WIRE_CLASSES.values(), *others)}
    if kind == "RequestError":
        return RequestError(None, message, is_transient=is_transient)
    cls = classes.get(kind)
    if cls is None or cls is ActiveRequestCountOverflowError:
        return RequestError(None, f"{kind}: {message}", is_transient=is_transient)
    return cls(None, message, is_transient=is_transient)


def recorded(error: Exception) -> str:
    """An error as text: the name of its class, and what it says without the number of its request."""
    return f"{type(error).__name__}: {error.message if isinstance(error, RequestError) else error}"


def recalled(text: str, *, is_transient: bool) -> Exception:
    """The error of ``recorded``'s text: of its class where that is one of a request's, a RuntimeError with the text otherwise."""
    kind, _, message = text.partition(": ")
    error = request_error(kind, message, is_transient=is_transient)
    return error if isinstance(error, RequestError) and type(error).__name__ == kind else RuntimeError(text)


_WIRE_CLASSES: dict[str, type[ContextOverflowError]] = {
    cls.__name__: cls
    for cls in (
        ContextOverflowError,
        RequestOverflowError,
        TokenOverflowError,
        MaxSequenceLengthOverflowError,
        BlockOverflowError,
        ActiveRequestCountOverflowError,
        TensorStateDeallocatedError,
    )
}


class ContextErrorFactory:
    """Context errors as plain data and back.

    Example:
        >>> data = ContextErrorFactory.serialize(BlockOverflowError(3, "full"))
        >>> ContextErrorFactory.deserialize(data).request_id
        3
    """

    @staticmethod
    def serialize(error: ContextOverflowError) -> dict[str, Any]:
        """``{type, request_id, message, is_transient}`` and, where the class has them, the two counts."""
        data: dict[str, Any] = {
            "type": type(error).__name__,
            "request_id": error.request_id,
            "message": error.message,
            "is_transient": error.is_transient,
        }
        if isinstance(error, ActiveRequestCountOverflowError):
            data |= {"max_request_count": error.max_request_count, "active_request_count": error.active_request_count}
        return data

    @staticmethod
    def deserialize(data: Mapping[str, Any]) -> ContextOverflowError:
        """The error that was serialised.

        Raises:
            ValueError: the type is not a context error, or a field is unknown or missing; names it.
        """
        counts = ("max_request_count", "active_request_count")
        check_fields("context error", data, ("type", "request_id", "message", "is_transient"), counts)
        cls = _WIRE_CLASSES.get(data["type"])
        if cls is None:
            raise ValueError(f"type={data['type']!r} is no context error; expected one of {sorted(_WIRE_CLASSES)}")
        request_id, message, is_transient = data["request_id"], data["message"], bool(data["is_transient"])
        if cls is ActiveRequestCountOverflowError:
            check_fields(cls.__name__, data, {*data, *counts})
            return ActiveRequestCountOverflowError(
                data["max_request_count"], data["active_request_count"], request_id=request_id, message=message, is_transient=is_transient
            )
        return cls(request_id, message, is_transient=is_transient)
