# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations as token ids, turn after turn."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from mcore_rl._stability import experimental_api
from mcore_rl._types import InferenceRequest, InferenceResponse
from mcore_rl.inference._interface import InferenceInterface
from mcore_rl.inference._local import MegatronLocal

if TYPE_CHECKING:
    from torch import Tensor

    from mcore_inference import DynamicInferenceEngine, LockstepConfig, WeightSlice

_USER = {"role": "user", "content": "x"}
_ANSWERS = ({"role": "assistant", "content": "x"}, {"role": "assistant", "content": "7"})


@experimental_api
class ChatInferenceInterface(InferenceInterface):
    """Answers conversations: messages become tokens by a chat template, and a text alone is one message of the user.

    A conversation grows by tokens: those that the policy wrote stay as they were drawn, and only what stands between two of its turns is
    written by the template.

    Args:
        interface: answers.
        template: ids of messages (``role`` and ``content``), with an open turn of the assistant at the end if the second argument is true:
            ``tokenizer.apply_chat_template``, or ``chat_tokens`` of mcore-inference with its tokenizer bound.
        max_tokens: of a conversation, as engine and trainer have room for; None for no limit.

    Raises:
        ValueError: a template that leaves earlier answers out.
    """

    def __init__(
        self,
        interface: InferenceInterface,
        template: Callable[[Sequence[Mapping[str, Any]], bool], Sequence[int]],
        *,
        max_tokens: int | None = None,
    ) -> None:
        self.interface, self._template, self.max_tokens = interface, template, max_tokens
        self._end = self._behind_answer(())
        """What ends a turn of the assistant."""
        self._behind_answer([_USER])

    def encode(self, text: str) -> Sequence[int]:
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation with the assistant's turn open at its end."""
        return self._ids(messages, is_open=True)

    def encode_replies(self, answer: InferenceResponse, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids that follow an answer: the end of its turn, as far as the policy did not write it, ``messages``, an open turn.

        Args:
            answer: the assistant's last turn.
            messages: that follow it, of the user or of tools.
        """
        following, own = self._behind_answer(messages, is_open=True), list(answer.token_ids[answer.prompt_length :])
        written = next((count for count in range(min(len(self._end), len(own)), 0, -1) if own[-count:] == following[:count]), 0)
        return following[written:]

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """Continuations from the interface."""
        return await self.interface.agenerate(request)

    def _behind_answer(self, messages: Sequence[Mapping[str, Any]], *, is_open: bool = False) -> list[int]:
        """Ids from the end of an answer on, with ``messages`` behind it: those that do not depend on what the answer is."""
        one, other = (self._ids([_USER, answer, *messages], is_open=is_open) for answer in _ANSWERS)
        if one == other:
            raise ValueError("the chat template leaves earlier answers of a conversation out; turns cannot be appended")
        return _common_end(one, other)

    def _ids(self, messages: Sequence[Mapping[str, Any]], *, is_open: bool = False) -> list[int]:
        return list(self._template(messages, is_open))


@experimental_api
class MegatronChatLocal(ChatInferenceInterface):
    """Conversations with a `DynamicInferenceEngine` of this process, by the chat template of its tokenizer; as long as the engine's
    ``max_sequence_length``, at most.

    Args:
        engine: with a tokenizer; one without a template writes each message as a line ``role: content``.
        tools: that the policy may call, in OpenAI's form.
        seed: as of `MegatronLocal`.
        lockstep: as there.

    Raises:
        ValueError: the engine has no tokenizer, or one whose template writes no tools; or as of `ChatInferenceInterface`.
    """

    def __init__(
        self,
        engine: "DynamicInferenceEngine",
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        seed: int | None = None,
        lockstep: "LockstepConfig | None" = None,
    ) -> None:
        from mcore_inference import chat_tokens

        local = MegatronLocal(engine, seed=seed, lockstep=lockstep)
        self.engine, self.tokenizer, self.tools, self._local = engine, local.tokenizer, tuple(tools), local
        super().__init__(
            local,
            lambda messages, is_open: chat_tokens(local.tokenizer, messages, is_open, self.tools),
            max_tokens=engine.context.max_sequence_length,
        )

    def drawing(self) -> contextlib.AbstractContextManager[bool]:
        """As of `MegatronLocal`."""
        return self._local.drawing()

    def with_seed(self, seed: int) -> Self:
        """As of `MegatronLocal`."""
        other = copy.copy(self)
        other.interface = other._local = self._local.with_seed(seed)
        return other

    async def load_weights(
        self,
        weights: "Iterable[tuple[str, Tensor | WeightSlice]]",
        version: int | None = None,
        *,
        in_flight: Literal["recompute", "keep", "drain"] = "recompute",
    ) -> None:
        """As of `MegatronLocal`."""
        await self._local.load_weights(weights, version, in_flight=in_flight)


def _common_end(one: Sequence[int], other: Sequence[int]) -> list[int]:
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return list(one[len(one) - count :])
