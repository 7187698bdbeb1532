# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The only thing an agent knows of a language model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mcore_rl._stability import experimental_api
from mcore_rl._types import InferenceRequest, InferenceResponse


@experimental_api
class InferenceInterface(ABC):
    """Continues prompts; token ids in, token ids and log-probabilities out."""

    @abstractmethod
    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """``request.n`` continuations of every prompt, in the order of the prompts."""

    @abstractmethod
    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a prompt."""
