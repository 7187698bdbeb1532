# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a server needs of whoever generates."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from mcore_inference._stability import experimental_api
from mcore_inference.engine import EngineHealth, RequestStream
from mcore_inference.sampling import SamplingParams


@experimental_api
class Runner(Protocol):
    """One engine in its thread (``EngineRunner``), or the engines of a coordinator (``CoordinatedRunner``)."""

    async def submit(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = True,
        lora: str | None = None,
    ) -> RequestStream:
        """Queue a request and get its stream; lower priorities are served first. Without ``stream`` one increment comes, at the end.
        ``lora`` names an adapter of ``loras``, where the runner has some; None for the model alone."""
        ...

    @property
    def max_sequence_length(self) -> int:
        """Tokens of a prompt and its output together."""
        ...

    def room(self, num_prompt_tokens: int) -> int:
        """New tokens that a prompt of this length can get at most."""
        ...

    def health(self) -> EngineHealth:
        """Whether requests make progress."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What ended it for good."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by name."""
        ...

    def close(self) -> None:
        """Abort what is open and end; may be called again."""
        ...
