# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bodies the server accepts, every field bounded."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag, ValidationInfo

from mcore_inference.sampling import SamplingParams, StructuredOutput
from mcore_inference.server._errors import ApiError
from mcore_inference.server._messages import EXACT, ChosenTool, Messages, Schema, Text, Tools

MAX_CHOICES = 128
MAX_MODEL_NAME = 256
"""Characters."""
MAX_PROMPTS = 128
_MAX_TOKENS = 2**20

# What JSON schema can say of fields that exclude each other.
_ABSENT: dict[str, Any] = {"type": "null"}
_PROMPT_ALONE: dict[str, Any] = {
    "required": ["prompt"],
    "properties": {"prompt": {"type": "string"}, "messages": _ABSENT, "tools": _ABSENT},
}
_MESSAGES_ALONE: dict[str, Any] = {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": _ABSENT}}


def _fits(tokens: object, info: ValidationInfo) -> object:
    """Refuse more tokens than the longest sequence has, which is the context, before they are looked at; 0 or None refuses none."""
    if info.context and isinstance(tokens, list) and len(tokens) > info.context:
        name = info.field_name or "prompt"
        message = f"{name} holds {len(tokens)} tokens and max_sequence_length={info.context}; send fewer"
        raise ApiError(400, message, code="context_length_exceeded", param=name)
    return tokens


def _printable(name: str) -> str:
    """Refuse a name that no adapter can have."""
    if not name.isprintable() or name != name.strip():
        message = f"lora_name={name[:80]!r} must be printable characters without outer spaces"
        raise ApiError(400, message, code="invalid_body", param="lora_name")
    return name


def _prompt_kind(prompt: object) -> str:
    """By the first element of a list, so that each is looked at as one kind only."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


ModelName = Annotated[str, StringConstraints(max_length=MAX_MODEL_NAME)]
LoraName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_MODEL_NAME), AfterValidator(_printable)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# JSON's names of fields are strings; one spelling of each id, so that none comes twice.
TokenKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-1000, le=1000)]
# The first fault of a list ends its check: a body may hold a million.
Tokens = Annotated[list[Token], Field(min_length=1, max_length=_MAX_TOKENS, fail_fast=True), BeforeValidator(_fits)]


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = EXACT

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    """Nothing is added to chunks to hide their lengths."""


class TextFormat(BaseModel):
    """``response_format`` of any text."""

    model_config = EXACT

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """``response_format`` of any JSON object."""

    model_config = EXACT

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """A JSON schema and what it is called."""

    model_config = EXACT

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    json_schema: Schema = Field(alias="schema")
    strict: bool | None = None
    """The output has the form in either case."""


class JsonSchemaFormat(BaseModel):
    """``response_format`` of a JSON schema."""

    model_config = EXACT

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
    """Forms that OpenAI's ``response_format`` does not have; exactly one is set."""

    model_config = EXACT

    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: Text | None = None


class _Sampling(BaseModel):
    """What both endpoints share; names after the empty line are additions to OpenAI's."""

    model_config = EXACT

    model: ModelName = ""
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4, fail_fast=True)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024, json_schema_extra={"additionalProperties": False})] | None = None
    user: Annotated[str, StringConstraints(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=1e-3, le=1e3)
    min_tokens: int | None = Field(default=None, ge=0, le=_MAX_TOKENS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    """Keep what ended the output in its text."""
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Lower numbers are served first; 0 when absent."""
    stop_token_ids: Annotated[list[Token], Field(max_length=64, fail_fast=True)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=64, fail_fast=True)] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    """Put ``token_ids`` (and the prompt's) into each choice."""

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_words(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The form that the output must have.

        Raises:
            ValueError: two forms are asked for.
        """
        wanted = self.response_format
        if isinstance(wanted, TextFormat):
            wanted = None
        if self.structured_outputs is not None:
            if wanted is not None:
                raise ValueError(f"response_format={wanted.type!r} and structured_outputs exclude each other; set one")
            more = self.structured_outputs
            return StructuredOutput(regex=more.regex, choices=more.choice, grammar=more.grammar)
        if isinstance(wanted, JsonSchemaFormat):
            return StructuredOutput(json_schema=wanted.json_schema.json_schema)
        return None if wanted is None else StructuredOutput(json_object=True)

    def sampling_params(self, *, budget: int, choice: int, **more: Any) -> SamplingParams:
        """Settings of one choice; with a seed, choice i is drawn with seed + i."""
        settings = {
            name: value
            for name in (
                "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
                "ignore_eos", "stop_token_ids", "allowed_token_ids", "bad_words",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        if self.include_stop_str_in_output is not None:
            settings["detokenize_stop_sequence"] = self.include_stop_str_in_output
        if self.seed is not None:
            # Wrapped into 64 signed bits, so that no choice leaves the range.
            settings["seed"] = (self.seed + choice + 2**63) % 2**64 - 2**63
        if self.logit_bias:
            settings["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        more.setdefault("structured_output", self.structured_output)
        return SamplingParams(num_tokens_to_generate=budget, stop_words=self.stop_words or None, **settings, **more)


class CompletionBody(_Sampling):
    """Body of ``/v1/completions``."""

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[Tokens, Tag("tokens")]
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("lists")],
        Discriminator(_prompt_kind),
    ]
    max_tokens: int | None = Field(default=None, ge=0, le=_MAX_TOKENS)
    """16 when absent."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """Of the logits as they are, as when absent; or of the distribution that each token was drawn from."""
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatBody(_Sampling):
    """Body of ``/v1/chat/completions``."""

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    """``auto`` when absent and there are tools."""
    parallel_tool_calls: bool | None = None
    """False for one call at most."""


class TokenizeBody(BaseModel):
    """Body of ``/tokenize``; either ``prompt`` or ``messages``, with ``tools`` or without."""

    model_config: ClassVar[ConfigDict] = {**EXACT, "json_schema_extra": {"oneOf": [_PROMPT_ALONE, _MESSAGES_ALONE]}}

    model: ModelName = ""
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    """Open the assistant's turn behind the messages."""
    add_special_tokens: bool = False
    """Begin with the begin-of-text token; ``/v1/completions`` adds none."""
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """Body of ``/detokenize``."""

    model_config = EXACT

    model: ModelName = ""
    tokens: Annotated[list[Token], Field(max_length=_MAX_TOKENS, fail_fast=True), BeforeValidator(_fits)]


class UpdateWeightsBody(BaseModel):
    """Body of ``/update_weights_from_disk``."""

    model_config = EXACT

    model: ModelName = ""
    model_path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """Folder below the server's root of weights; a relative one begins there."""
    weight_version: int = Field(ge=0, lt=2**53)
    """That tokens of these weights are reported with."""
    in_flight: Literal["recompute", "keep", "drain"] = "recompute"
    """What answers in flight do."""


class LoadLoraBody(BaseModel):
    """Body of ``/v1/load_lora_adapter``."""

    model_config = EXACT

    lora_name: LoraName
    """That requests name as their model."""
    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """Folder below the server's root of adapters; a relative one begins there."""
    lora_int_id: int | None = None
    """Of vLLM; adapters have no numbers here."""
    load_inplace: Literal[False] = False
    """Of vLLM, whose True puts an adapter in the place of a loaded one; here that is unloaded first."""


class UnloadLoraBody(BaseModel):
    """Body of ``/v1/unload_lora_adapter``."""

    model_config = EXACT

    lora_name: LoraName
    lora_int_id: int | None = None
    """Of vLLM; adapters have no numbers here."""
