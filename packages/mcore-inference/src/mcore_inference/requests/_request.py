# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests as the engine keeps them and hands them back."""

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor

from mcore_inference._fields import check_fields
from mcore_inference._stability import internal_api
from mcore_inference.requests._errors import RequestError, recalled, recorded
from mcore_inference.sampling import SamplingParams

__all__ = [
    "DynamicInferenceEvent",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "EventType",
    "FinishReason",
    "Status",
    "TextMaker",
]


class Status(enum.IntEnum):
    """Where a request is in its life."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    """Its prompt is still being computed."""
    COMPLETED = 4
    FAILED = 5


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """Termination id, stop token or stop word."""
    LENGTH = "length"
    """Budget used up."""
    ABORT = "abort"
    ERROR = "error"


class EventType(enum.StrEnum):
    """What happened to a request."""

    ADD = "ADD"
    """Took a slot in the context."""
    PAUSE = "PAUSE"
    """Stopped for want of a cache block, or because the engine was suspended; only with ``InferenceConfig.track_paused_request_events``."""
    EVICT = "EVICT"
    """Lost its cache blocks and waits to be recomputed."""
    FINISH = "FINISH"
    FAIL = "FAIL"
    ERROR_TRANSIENT = "ERROR_TRANSIENT"
    ERROR_NONTRANSIENT = "ERROR_NONTRANSIENT"


_WITH_PAYLOAD = (EventType.ERROR_TRANSIENT, EventType.ERROR_NONTRANSIENT)


@dataclass(frozen=True, kw_only=True)
class DynamicInferenceEvent:
    """One entry of a request's history.

    Raises:
        ValueError: an error event without payload, or another event with one.
    """

    type: EventType
    payload: str | None = None
    """Text of the error."""
    timestamp: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def __post_init__(self) -> None:
        if (self.payload is not None) != (self.type in _WITH_PAYLOAD):
            raise ValueError(f"payload={self.payload!r} does not fit event {self.type}; error events have one, others none")


@dataclass(kw_only=True)
class DynamicInferenceRequest:
    """One segment of a request: a prompt, its settings and what was generated for it so far.

    Example:
        >>> request = DynamicInferenceRequest(request_id=0, prompt_tokens=[1, 2], sampling_params=SamplingParams())
        >>> request.status.name
        'WAITING_IN_QUEUE'
    """

    request_id: int
    prompt_tokens: list[int]
    sampling_params: SamplingParams
    num_tokens_to_generate: int = 0
    """Budget of this segment, after all limits."""
    budget_clamped: bool = False
    """Whether the context's sequence length cut the budget that was asked for."""
    prompt: str | None = None
    priority: int = 0
    """Lower numbers are served first."""
    lora: str | None = None
    """Name of the adapter; None for the base model."""
    status: Status = Status.WAITING_IN_QUEUE
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """Why a FAILED request failed."""
    finished_chunk_token_count: int = 0
    """Prompt tokens whose keys and values are computed."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were found in the cache; of the first segment only."""
    generated_tokens: list[int] = field(default_factory=list)
    generated_log_probs: list[float] = field(default_factory=list)
    """One for each generated token, when asked for."""
    generated_top_n_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Token id -> log-probability, best first, one dict for each generated token."""
    prompt_log_probs: list[float] | None = None
    """Of prompt tokens 1.., when asked for; empty for a prompt of one token."""
    prompt_top_n_logprobs: list[dict[int, float]] | None = None
    """Token id -> log-probability, best first, one dict for each of prompt tokens 1.., when both are asked for."""
    generated_text: str = ""
    """Text of the generated tokens, cut before a stop word; of a merged request only."""
    weight_version: int = 0
    """How often the engine's weights had been loaded anew when this segment ran; a load closes every segment."""
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    arrival_time: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def remaining_prompt_tokens(self) -> list[int]:
        return self.prompt_tokens[self.finished_chunk_token_count :]

    @property
    def generated_length(self) -> int:
        return len(self.generated_tokens)

    def succeeded(self) -> bool:
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        return self.status is Status.FAILED

    def add_event_add(self) -> None:
        self._add_event(EventType.ADD)

    def add_event_pause(self) -> None:
        self._add_event(EventType.PAUSE)

    def add_event_evict(self) -> None:
        self._add_event(EventType.EVICT)

    def add_event_finish(self) -> None:
        self._add_event(EventType.FINISH)

    def add_event_fail(self) -> None:
        self._add_event(EventType.FAIL)

    def add_event_error_transient(self, error: Exception) -> None:
        self._add_event(EventType.ERROR_TRANSIENT, error)

    def add_event_error_nontransient(self, error: Exception) -> None:
        self._add_event(EventType.ERROR_NONTRANSIENT, error)

    def add_event_error(self, error: Exception) -> None:
        """Transient or not, as the error says."""
        transient = isinstance(error, RequestError) and error.is_transient
        self._add_event(EventType.ERROR_TRANSIENT if transient else EventType.ERROR_NONTRANSIENT, error)

    @internal_api
    def fail(self, error: Exception) -> None:
        """End it by an error, also where it had been completed."""
        self.status, self.finish_reason, self.error = Status.FAILED, FinishReason.ERROR, error
        self.events = [event for event in self.events if event.type is not EventType.FINISH]
        self.add_event_error(error)
        self.add_event_fail()

    def _add_event(self, kind: EventType, error: Exception | None = None) -> None:
        payload = None if error is None else f"{type(error).__name__}: {error}"
        self.events.append(DynamicInferenceEvent(type=kind, payload=payload))

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON-ready data; an error becomes its text."""
        data = dict(vars(self))
        data["sampling_params"] = self.sampling_params.serialize()
        data["status"] = self.status.name
        data["finish_reason"] = None if self.finish_reason is None else self.finish_reason.value
        data["error"] = None if self.error is None else recorded(self.error)
        # Lists of pairs keep integer keys in JSON.
        data["generated_top_n_logprobs"] = _as_pairs(self.generated_top_n_logprobs)
        data["prompt_top_n_logprobs"] = None if self.prompt_top_n_logprobs is None else _as_pairs(self.prompt_top_n_logprobs)
        data["events"] = [{"type": event.type.value, "payload": event.payload, "timestamp": event.timestamp} for event in self.events]
        return data

    @classmethod
    def deserialize(cls, data: Mapping[str, Any], sampling_params: SamplingParams | None = None) -> "DynamicInferenceRequest":
        """A request from ``serialize``'s data; an error of a request comes back as one, others as a RuntimeError with their text.

        Args:
            data: of ``serialize``.
            sampling_params: its settings, for one who has them; None to read them from the data.

        Raises:
            ValueError: a field is unknown or missing; names it. Data of another version are no request of this one.
        """
        separate = () if sampling_params is None else ("sampling_params",)
        check_fields("DynamicInferenceRequest", data, set(cls.__dataclass_fields__) - {*separate}, separate)
        fields = dict(data) if sampling_params is None else {**data, "sampling_params": sampling_params}
        if sampling_params is None:
            fields["sampling_params"] = SamplingParams.deserialize(fields["sampling_params"])
        fields["status"] = Status[fields["status"]]
        fields["finish_reason"] = None if fields["finish_reason"] is None else FinishReason(fields["finish_reason"])
        for name in ("generated_top_n_logprobs", "prompt_top_n_logprobs"):
            if fields[name] is not None:
                fields[name] = [{int(token): value for token, value in best} for best in fields[name]]
        fields["events"] = [
            DynamicInferenceEvent(type=EventType(event["type"]), payload=event["payload"], timestamp=event["timestamp"])
            for event in fields["events"]
        ]
        transient = any(event.type is EventType.ERROR_TRANSIENT for event in fields["events"])
        fields["error"] = None if fields["error"] is None else recalled(fields["error"], is_transient=transient)
        return cls(**fields)


def _as_pairs(ranked: list[dict[int, float]]) -> list[list[list[float]]]:
    return [[[token, value] for token, value in best.items()] for best in ranked]


TextMaker = Callable[[list[int]], tuple[str, Exception | None]]
"""Of all tokens of an output its text, and what the tokenizer raised in it; the text ends there then."""


@dataclass(frozen=True)
class _LateText:
    """Makes the text of a request that has ended, for whoever reads it first."""

    make: TextMaker
    fail: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(kw_only=True)
class DynamicInferenceRequestRecord:
    """A request over all its segments: each eviction closes one and opens the next, whose prompt is all tokens so far.

    The properties speak of the whole request, as ``merge`` does.
    """

    # First: whoever reads all fields in their order has the segments as the text leaves them.
    generated_text: str = ""
    """Text of the generated tokens, cut before a stop word. With stop words it grows with the tokens, by whole characters. Else it is made
    behind the end, by whoever reads it first, or reads how the request ended (``status``, ``finish_reason``, ``error``, ``merge``,
    ``serialize``); before the end by ``DynamicInferenceEngine.get_request``. Streams make theirs."""
    requests: list[DynamicInferenceRequest] = field(default_factory=list)
    """Of one that has ended, ask the record and not its last segment how: a tokenizer that fails ends it when the text is made."""
    latency: float | None = None
    """Seconds from arrival to the end."""
    time_to_first_token: float | None = None
    """Seconds from arrival to the first generated token."""
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    """[tokens - 1, layers, experts a token] int16, the experts of all tokens but the last, -1 for those found in the cache; of a finished
    request in this process, where ``ExecutionConfig.record_routing`` asks for it."""

    def __post_init__(self) -> None:
        self._late_text: _LateText | None = None

    def __getstate__(self) -> dict[str, Any]:
        while True:
            self._make_text()
            # Of its own: other threads change the record while this is written.
            state = dict(vars(self))
            if state["_late_text"] is None and "generated_text" in state:
                return state

    @internal_api
    def defer_text(self, make: TextMaker, fail: Callable[[], None]) -> None:
        """Leave the text of a request that has ended to whoever reads it first.

        Args:
            make: called once, in the reader's thread.
            fail: called then, where it failed and the request had been completed, which it is no longer.
        """
        late = _LateText(make, fail)
        # A reader that had the record before waits: in other threads it has a text or one that is late, at any time.
        with late.lock:
            self._late_text = late
            del vars(self)["generated_text"]

    @internal_api
    def settle_text(self, text: str, failure: Exception | None) -> None:
        """Give a request that has ended the text that a stream of it has, in place of the one that is left to readers. Where a reader has
        one, text and status stay as they were shown.

        Args:
            text: up to where the tokenizer failed.
            failure: what it raised; ends a request that had been completed.
        """
        if (late := self._late_text) is not None:
            with late.lock:
                if self._late_text is not None:
                    self._end_text(text, failure)

    def _make_text(self) -> str:
        """The text, which is made where it is left to readers."""
        while True:
            if (late := self._late_text) is not None:
                with late.lock:
                    # Another reader may have made it meanwhile.
                    if self._late_text is not None:
                        self._end_text(*late.make(self.generated_tokens))
            # None where it was left to readers just now.
            if (text := vars(self).get("generated_text")) is not None:
                return text

    def _set_text(self, text: str) -> None:
        """In place of the one that may be left to readers, which is not made any more."""
        late = vars(self).get("_late_text")
        with contextlib.nullcontext() if late is None else late.lock:
            vars(self)["generated_text"], self._late_text = text, None

    def _end_text(self, text: str, failure: Exception | None) -> None:
        vars(self)["generated_text"] = text
        last, late = self.requests[-1], self._late_text
        if failure is not None and last.succeeded():
            last.fail(failure)
            if late is not None:
                late.fail()
        # Last: readers that find none do not wait.
        self._late_text = None

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> "DynamicInferenceRequestRecord":
        return cls(requests=[request])

    def __getitem__(self, index: int) -> DynamicInferenceRequest:
        return self.requests[index]

    @property
    def request_id(self) -> int:
        return self.requests[0].request_id

    @property
    def sampling_params(self) -> SamplingParams:
        return self.requests[0].sampling_params

    @property
    def lora(self) -> str | None:
        return self.requests[0].lora

    def _last(self) -> DynamicInferenceRequest:
        """The segment that says how the request ended, where it has."""
        self._make_text()
        return self.requests[-1]

    @property
    def status(self) -> Status:
        return self._last().status

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._last().finish_reason

    @property
    def error(self) -> Exception | None:
        return self._last().error

    @property
    def prompt_tokens(self) -> list[int]:
        return self.requests[0].prompt_tokens

    @property
    def cached_prompt_tokens(self) -> int:
        return self.requests[0].cached_prompt_tokens

    @property
    def generated_tokens(self) -> list[int]:
        return list(chain.from_iterable(request.generated_tokens for request in self.requests))

    @property
    def generated_log_probs(self) -> list[float]:
        return list(chain.from_iterable(request.generated_log_probs for request in self.requests))

    @property
    def generated_top_n_logprobs(self) -> list[dict[int, float]]:
        return list(chain.from_iterable(request.generated_top_n_logprobs for request in self.requests))

    @property
    def prompt_log_probs(self) -> list[float] | None:
        return self.requests[0].prompt_log_probs

    @property
    def prompt_top_n_logprobs(self) -> list[dict[int, float]] | None:
        return self.requests[0].prompt_top_n_logprobs

    @property
    def weight_versions(self) -> list[tuple[int, int]]:
        """(weight version, tokens generated with it), in order."""
        return [(request.weight_version, len(request.generated_tokens)) for request in self.requests if request.generated_tokens]

    @property
    def num_generated(self) -> int:
        return sum(len(request.generated_tokens) for request in self.requests)

    @property
    def num_preemptions(self) -> int:
        return sum(event.type is EventType.EVICT for request in self.requests for event in request.events)

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between generated tokens; None before there are two."""
        if self.latency is None or self.time_to_first_token is None or self.num_generated < 2:
            return None
        return (self.latency - self.time_to_first_token) / (self.num_generated - 1)

    def since(self, num_tokens: int) -> tuple[list[int], list[float], list[dict[int, float]]]:
        """Generated tokens, their log-probabilities and best tokens, without the first ``num_tokens``."""
        first = self.requests[0]
        if len(self.requests) == 1:
            return first.generated_tokens[num_tokens:], first.generated_log_probs[num_tokens:], first.generated_top_n_logprobs[num_tokens:]
        tokens: list[int] = []
        values: list[float] = []
        best: list[dict[int, float]] = []
        for request in self.requests:
            tokens += request.generated_tokens[num_tokens:]
            values += request.generated_log_probs[num_tokens:]
            best += request.generated_top_n_logprobs[num_tokens:]
            num_tokens = max(0, num_tokens - len(request.generated_tokens))
        return tokens, values, best

    def checkpoint(self) -> None:
        """Open a new segment that continues the last one: its prompt is all tokens so far, its budget what is left."""
        last = self.requests[-1]
        self.requests.append(
            DynamicInferenceRequest(
                request_id=last.request_id,
                prompt_tokens=last.prompt_tokens + last.generated_tokens,
                sampling_params=last.sampling_params,
                num_tokens_to_generate=max(0, last.num_tokens_to_generate - len(last.generated_tokens)),
                budget_clamped=last.budget_clamped,
                prompt=last.prompt,
                priority=last.priority,
                lora=last.lora,
                weight_version=last.weight_version,
                arrival_time=last.arrival_time,
            )
        )

    def merge(self) -> DynamicInferenceRequest:
        """One request with the first prompt, everything generated, every event, and the last status."""
        first, last = self.requests[0], self._last()
        return DynamicInferenceRequest(
            request_id=first.request_id,
            prompt_tokens=list(first.prompt_tokens),
            sampling_params=first.sampling_params,
            num_tokens_to_generate=first.num_tokens_to_generate,
            budget_clamped=first.budget_clamped,
            prompt=first.prompt,
            priority=first.priority,
            lora=first.lora,
            status=last.status,
            finish_reason=last.finish_reason,
            error=last.error,
            finished_chunk_token_count=min(len(first.prompt_tokens), last.finished_chunk_token_count),
            cached_prompt_tokens=first.cached_prompt_tokens,
            generated_tokens=self.generated_tokens,
            generated_log_probs=self.generated_log_probs,
            generated_top_n_logprobs=self.generated_top_n_logprobs,
            prompt_log_probs=self.prompt_log_probs,
            prompt_top_n_logprobs=self.prompt_top_n_logprobs,
            generated_text=self.generated_text,
            weight_version=last.weight_version,
            events=[event for request in self.requests for event in request.events],
            arrival_time=first.arrival_time,
        )

    def serialize(self) -> dict[str, Any]:
        """JSON-ready data."""
        text = self._make_text()
        return {
            "requests": [request.serialize() for request in self.requests],
            "generated_text": text,
            "latency": self.latency,
            "time_to_first_token": self.time_to_first_token,
        }

    @classmethod
    def deserialize(cls, data: Mapping[str, Any], sampling_params: SamplingParams | None = None) -> "DynamicInferenceRequestRecord":
        """A record from ``serialize``'s data; arguments and errors as of ``DynamicInferenceRequest.deserialize``."""
        check_fields("DynamicInferenceRequestRecord", data, ("requests", "generated_text", "latency", "time_to_first_token"))
        requests = [DynamicInferenceRequest.deserialize(request, sampling_params) for request in data["requests"]]
        return cls(
            requests=requests,
            generated_text=data["generated_text"],
            latency=data["latency"],
            time_to_first_token=data["time_to_first_token"],
        )


class _TextOfReader:
    """The text of a record, which may have none yet."""

    def __get__(self, record: DynamicInferenceRequestRecord | None, owner: type) -> str:
        # The class is asked for the default of the field.
        return "" if record is None else record._make_text()

    def __set__(self, record: DynamicInferenceRequestRecord, text: str) -> None:
        record._set_text(text)


DynamicInferenceRequestRecord.generated_text = _TextOfReader()  # pyright: ignore[reportAttributeAccessIssue]
