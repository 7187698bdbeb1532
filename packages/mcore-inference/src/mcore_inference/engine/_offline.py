# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Prompts served to the end by an engine that nobody else uses."""

from collections.abc import Collection, Sequence
from typing import Protocol

from mcore_inference.requests import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Prompt,
    RequestError,
    integers_of,
)
from mcore_inference.sampling import SamplingParams

Completion = tuple[Prompt, SamplingParams, str | None]
"""A prompt, and the settings and the adapter of one completion of it."""


class Stepper(Protocol):
    """What generates."""

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora: str | None = None) -> int: ...

    def step(self) -> list[DynamicInferenceRequestRecord]: ...

    def has_unfinished_requests(self) -> bool: ...


def settings_of(prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """The settings of each prompt.

    Raises:
        ValueError: the prompts are one string or no list, their number is not that of the settings, or one is no ``SamplingParams``.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; wrap it in a list")
    # A matrix of token ids is fine.
    if not isinstance(prompts, Collection):
        raise ValueError(f"prompts is a {type(prompts).__name__}; give a list of them")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * len(prompts)
    settings = list(sampling_params)
    if len(settings) != len(prompts):
        raise ValueError(f"sampling_params has {len(settings)} entries for {len(prompts)} prompts; give one, or one for each")
    for params in settings:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params holds a {type(params).__name__}; give SamplingParams(...) for each prompt")
    return settings


def loras_of(prompts: Sequence[Prompt], lora: str | Sequence[str | None] | None) -> list[str | None]:
    """The adapter of each prompt.

    Raises:
        ValueError: it is no name, nor a sequence of them, or their number is not that of the prompts.
    """
    if lora is None or isinstance(lora, str):
        return [lora] * len(prompts)
    if not isinstance(lora, Sequence) or isinstance(lora, (bytes, bytearray, memoryview)):
        raise ValueError(f"lora is a {type(lora).__name__}; give the name of a loaded adapter for all, or one or None for each prompt")
    loras = list(lora)
    if len(loras) != len(prompts):
        raise ValueError(f"lora has {len(loras)} entries for {len(prompts)} prompts; give one, or one for each")
    return loras


def completions_of(prompts: Sequence[Prompt], settings: Sequence[SamplingParams], loras: Sequence[str | None]) -> list[Completion]:
    """All completions, prompt by prompt."""
    each = zip(prompts, settings, loras, strict=True)
    return [(prompt, choice, lora) for prompt, params, lora in each for choice in params.choices()]


def run_to_end(engine: Stepper, completions: Sequence[Completion]) -> tuple[list[DynamicInferenceRequestRecord], int]:
    """The records of these completions, in order; those of refused ones are among them, and how many they are.

    A setting that this engine has no tokenizer, token or adapter for ends its own completion, as a prompt does that cannot be served.
    """
    results: list[DynamicInferenceRequestRecord | None] = []
    place: dict[int, int] = {}
    for completion in completions:
        prompt, params, lora = completion
        try:
            place[engine.add_request(prompt, params, lora=lora)] = len(results)
            results.append(None)
        except RequestError as error:
            results.append(_refused(completion, error))
        except ValueError as error:
            results.append(_refused(completion, RequestError(None, str(error))))
    while engine.has_unfinished_requests():
        for record in engine.step():
            results[place[record.request_id]] = record
    return [record for record in results if record is not None], len(completions) - len(place)


def _refused(completion: Completion, error: RequestError) -> DynamicInferenceRequestRecord:
    prompt, params, lora = completion
    number = -1 if error.request_id is None else error.request_id
    request = DynamicInferenceRequest(request_id=number, prompt_tokens=integers_of(prompt), sampling_params=params, lora=lora)
    request.prompt = prompt if isinstance(prompt, str) else None
    request.fail(error)
    return DynamicInferenceRequestRecord.from_request(request)
