# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What clients, the coordinator and engines send each other: one msgpack array a message, its first element the number of its kind."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mcore_inference._stability import experimental_api

PROTOCOL = 10
"""Version that both sides name when they meet."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""Default of the longest message: a record with log-probabilities, the tokens of a step, a bucket of weights."""
MAX_REQUEST_BYTES = 8 * 2**20
"""Longest request."""
NUMBER_BYTES = 64
"""By which a message to engines and clients may be longer: the coordinator gives requests numbers of its own, and back."""
SHORT_BYTES = 2**20
"""Longest message of those that carry neither tokens nor weights."""
GREETING_BYTES = 64 * 2**10
"""Longest message of a peer that is not known."""
MAX_FIGURES = 128
"""That an engine may report."""
MAX_NAME = 64
"""Characters of the name of a figure or an engine."""
MAX_LORA_NAME = 256
"""Characters of the name of an adapter."""
MAX_LORAS = 128
"""Adapters that engines may have beside their model."""

MAX_NUMBER = 2**62
"""Largest integer of a message that something is added to; the wire ends at 2**64 - 1."""
MAX_TEXT = MAX_TOKENS = MAX_REQUEST_BYTES
"""Characters and tokens of a prompt: each has a byte at least."""

Number = Annotated[int, Meta(ge=-1, le=MAX_NUMBER)]
"""-1 where there is none."""
Size = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Count = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
LoraName = Annotated[str, Meta(min_length=1, max_length=MAX_LORA_NAME)]
LoadName = Annotated[str, Meta(max_length=MAX_NAME)]
"""By which the coordinator tells loads of one name apart."""

_Scalar = None | bool | int | float | str
_Level1 = _Scalar | list[_Scalar] | dict[str, _Scalar]
_Level2 = _Scalar | list[_Level1] | dict[str, _Level1]
_Level3 = _Scalar | list[_Level2] | dict[str, _Level2]
_Level4 = _Scalar | list[_Level3] | dict[str, _Level3]
_Level5 = _Scalar | list[_Level4] | dict[str, _Level4]
Plain = _Scalar | list[_Level5] | dict[str, _Level5]
"""Data of any form, of at most six levels: with the array of its message and the field that it stands in, none is deeper than eight."""

Figures = Annotated[
    dict[Annotated[str, Meta(max_length=MAX_NAME)], Annotated[float, Meta(ge=-1e18, le=1e18)]], Meta(max_length=MAX_FIGURES)
]
"""Finite numbers by name."""


class Message(msgspec.Struct, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """A message; its number is its ``tag``. Numbers 1 to 11 are those of the first protocol of this kind."""


class Connect(Message, tag=1):
    """Client to coordinator: let me send requests."""

    protocol: Size
    secret: str
    control_secret: str = ""
    """Of those that may send signals and weights; empty for none."""


class ConnectAck(Message, tag=2):
    """Coordinator to client: you may."""

    max_sequence_length: Size
    """Of the engine with the shortest; 0 while there is none."""


class SubmitRequest(Message, tag=3):
    """Client to coordinator, with the client's number; coordinator to engine, with the coordinator's."""

    request_id: Number
    prompt: Annotated[str, Meta(max_length=MAX_TEXT)] | Annotated[list[int], Meta(max_length=MAX_TOKENS)]
    sampling_params: Annotated[dict[Annotated[str, Meta(max_length=MAX_NAME)], Plain], Meta(max_length=MAX_FIGURES)]
    """As ``SamplingParams.serialize``."""
    stream: bool
    """Whether tokens are sent as they come."""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    """Engines serve lower numbers first."""
    lora: LoraName | None = None
    """Adapter that the answer is of; None for the model alone."""


class EngineReply(Message, tag=4):
    """A request ended; the way back of ``SubmitRequest``."""

    request_id: Number
    record: dict[str, Plain]
    """As ``DynamicInferenceRequestRecord.serialize``."""
    tokens: list[int] = []
    """Of a stream: what came since the last ``Partial``, as there."""
    log_probs: list[float] = []
    top_n_logprobs: list[list[tuple[int, float]]] = []
    text: str = ""


class Signal(Message):
    """Client to coordinator, or coordinator to every engine: change the state of all engines."""

    call: Number
    """Number that the acknowledgement repeats."""


class Pause(Signal, tag=5):
    """Stop at the end of a step; requests stay where they are."""


class SignalAck(Message, tag=6):
    """A signal took effect: on this engine, or (coordinator to client) on all of them."""

    call: Number
    error: str = ""
    """Of an engine, why it did not; the engine is as it was."""


class Unpause(Signal, tag=7):
    """Go on."""


class Suspend(Signal, tag=8):
    """Free the memory of the cache."""


class Resume(Signal, tag=9):
    """Take the memory of the cache again; engines stay paused."""


class Stop(Signal, tag=10):
    """Abort what is open and end."""


class Failure(Message, tag=12):
    """A request ended by an error; the way back of ``SubmitRequest``."""

    request_id: Number
    kind: str
    """Class of the error."""
    message: str
    is_transient: bool


class Abort(Message, tag=13):
    """End a request: nobody waits for it any more."""

    request_id: Number


class Partial(msgspec.Struct, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of a request that goes on."""

    request_id: Number
    tokens: list[int]
    log_probs: list[float]
    top_n_logprobs: list[list[tuple[int, float]]]
    text: str


class Heartbeat(Message, tag=15):
    """I am here. The coordinator answers each with one."""


class Disconnect(Message, tag=16):
    """A client or an engine leaves; what it waits for is aborted, what it had begun is given to others."""


class Leave(Message, tag=26):
    """Engine to coordinator: send me no more requests; I leave when those that I have are over."""

    call: Number
    """Number that the acknowledgement repeats."""


class LeaveAck(Message, tag=27):
    """Coordinator to engine: no request comes behind this, and all that was sent before ``Leave`` was read."""

    call: Number


class Register(Message, tag=17):
    """Engine to coordinator: send me requests."""

    protocol: Size
    secret: str
    name: str
    """For messages to humans: ``dp-3``; no two engines have one."""
    state: str
    max_sequence_length: Size
    weight_version: Size = 0
    worker: str = ""
    """Drawn by the worker at its start: tells one that comes back from another of its name."""
    stats: Figures = {}
    registration: Size = 0
    """Grows each time that the worker has to register again: several of one may wait in the queue of a connection."""
    max_requests: Count = 1
    """That it computes at a time; others wait."""
    cache_tokens: Count = MAX_NUMBER
    """That its cache holds, of all requests together."""
    loras: Annotated[dict[LoraName, LoadName], Meta(max_length=MAX_LORAS)] = {}
    """Adapters that it had from a coordinator, and the names of their loads."""


class Report(Message, tag=25):
    """Engine to coordinator, at each heartbeat and in place of it: I am here, and this is how I am."""

    is_alive: bool
    """Whether it makes progress (``EngineHealth.alive``)."""
    last_step_age_s: Seconds | None
    """As of ``EngineHealth``."""
    stats: Figures


class RegisterAck(Message, tag=18):
    """Coordinator to engine: requests may come."""


class Refusal(Message, tag=19):
    """The coordinator does not do that; -1 for ``call`` when it was no call."""

    call: Number
    message: str


class AskStatus(Message, tag=20):
    """Client to coordinator: how are the engines?"""

    call: Number


@experimental_api
class EngineStatus(msgspec.Struct, kw_only=True):
    """One engine, as the coordinator knows it."""

    name: str
    open_requests: Size
    open_tokens: Size
    """Tokens of prompts and budgets of these."""
    finished_requests: Size
    silent_s: float
    """Seconds since it was last heard."""
    state: str = "serving"
    """``draining`` of one that ends the requests it has, takes no more, and leaves then."""
    weight_version: Size = 0
    """Of its weights; while an engine has those of the last load, others get no requests."""
    last_step_age_s: float | None = None
    """Seconds since its last step ended, or since work arrived, as it reported them last; None when idle."""
    stats: dict[str, float] = {}
    """``EngineRunner.stats``, as it reported them last."""


@experimental_api
class Status(Message, tag=21):
    """Answer to ``AskStatus``."""

    call: Number
    state: str
    waiting_requests: Size
    """Those that wait for an engine."""
    max_sequence_length: Size
    """Of the engine with the shortest; 0 while there is none."""
    engines: list[EngineStatus]
    past: dict[str, float] = {}
    """Sums of the counters of engines that are gone; ``lost_engines`` and ``drained_engines``: how many."""
    loras: list[str] = []
    """Adapters that requests may name, in the order of their loads."""


class LoadWeights(Signal, tag=22):
    """Begin to load weights: as a signal of a client, and as the coordinator's to each engine. Buckets follow."""

    version: Number
    """Of the new weights; -1 for the next."""
    in_flight: Literal["recompute", "keep", "drain"]
    """As of ``DynamicInferenceEngine.load_weights``."""
    timeout_s: Seconds = 0.0
    """That an engine waits for a bucket; the coordinator's to say."""


class WireChunk(msgspec.Struct, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter, or a box of it."""

    name: str
    dtype: str
    shape: Annotated[list[Size], Meta(max_length=64)]
    offsets: Annotated[list[Size], Meta(max_length=64)] | None
    """None for all of it."""
    data: bytes


class WeightBucket(Message, tag=23):
    """Some of the weights of a load, sent when the one before was acknowledged."""

    call: Number
    index: Size
    """From 1."""
    chunks: list[WireChunk]
    end: Literal["", "whole", "aborted"] = ""
    """Of the last one: whether all weights came."""


class WeightAck(Message, tag=24):
    """A bucket was taken (0 is the beginning), or the load is over: on this engine, or (coordinator to client) on all of them."""

    call: Number
    index: Size
    error: str = ""
    """Why the load failed."""
    version: Number = -1
    bucket_bytes: Size = 0
    """Largest bucket; the coordinator's to say."""
    is_over: bool = False


class LoadLora(Message, tag=28):
    """An adapter comes, by ``WeightBucket``: from a client with ``control_secret``, or from the coordinator to an engine. Each bucket is
    acknowledged as those of weights are, the last one when the adapter is loaded."""

    call: Number
    name: LoraName
    rank: Count
    alpha: float
    load: LoadName = ""
    """The coordinator's to say."""


class UnloadLora(Message, tag=29):
    """Forget an adapter; engines answer by ``SignalAck``, the coordinator by ``WeightAck``."""

    call: Number
    name: LoraName
    load: LoadName = ""
    """As of ``LoadLora``."""


class Partials(Message, tag=14):
    """What one step brought to several requests: a message for each would cost more than its tokens."""

    items: list[Partial]
    replies: list[EngineReply] = []
    """Of requests that it ended; ``items`` may have tokens before those."""

    @property
    def num_parts(self) -> int:
        return len(self.items) + len(self.replies)

    def halves(self) -> tuple["Partials", "Partials"]:
        """What it says in two messages, for one that is too long; it has two parts or more."""
        middle = self.num_parts // 2
        behind = max(0, middle - len(self.items))
        return (
            Partials(items=self.items[:middle], replies=self.replies[:behind]),
            Partials(items=self.items[middle:], replies=self.replies[behind:]),
        )


Incoming = (
    Connect | SubmitRequest | EngineReply | Pause | SignalAck | Unpause | Suspend | Resume | Stop | Failure | Abort | Partials | Heartbeat
    | Disconnect | Leave | Register | AskStatus | LoadWeights | WeightBucket | WeightAck | Report | LoadLora | UnloadLora
)  # fmt: skip
"""What a coordinator may get."""
ToEngine = (
    SubmitRequest | Pause | Unpause | Suspend | Resume | Stop | Abort | Heartbeat | RegisterAck | LeaveAck | Refusal | LoadWeights
    | WeightBucket | LoadLora | UnloadLora
)  # fmt: skip
ToClient = ConnectAck | EngineReply | SignalAck | Failure | Partials | Heartbeat | Refusal | Status | WeightAck
SIGNALS: tuple[type[Signal], ...] = (Pause, Unpause, Suspend, Resume, Stop)

UNKNOWN = Refusal(call=-1, message="you are not known here; connect or register first")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a frame raises that is no message."""
encode = msgspec.msgpack.Encoder().encode
decode_incoming = msgspec.msgpack.Decoder(Incoming).decode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_for_client = msgspec.msgpack.Decoder(ToClient).decode


def is_greeting(frame: bytes) -> bool:
    """Whether a frame may be a ``Connect`` or a ``Register``, by its length and first two bytes: a short array, and their numbers."""
    return len(frame) <= GREETING_BYTES and _kind(frame) in (1, 17)


def is_too_long(frame: bytes) -> bool:
    """Whether a frame is longer than its kind may be, by its first two bytes: nothing of it is decoded."""
    if len(frame) <= SHORT_BYTES:
        return False
    kind = _kind(frame)
    return kind not in _LONG and not (kind == _REQUEST and len(frame) <= MAX_REQUEST_BYTES)


def number_of_request(frame: bytes) -> int | None:
    """The ``request_id`` of a frame that begins as a ``SubmitRequest``, whatever follows; None where there is none."""
    if _kind(frame) != _REQUEST or len(frame) < 3:
        return None
    try:
        return msgspec.msgpack.decode(frame[2 : 2 + _INTEGER_BYTES.get(frame[2], 1)], type=Size)
    except UNREADABLE:
        return None


def _kind(frame: bytes) -> int:
    """Number of a frame's kind; -1 for what is no message."""
    return frame[1] if len(frame) > 1 and frame[0] & 0xF0 == 0x90 else -1


_REQUEST = 3
_INTEGER_BYTES = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
"""Of msgpack's integers by their first byte; others have that alone."""
_LONG = (4, 14, 23)
"""Records, tokens of a step, weights."""
