# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a run needs to hold conversations: a tokenizer with a chat template, and interfaces that write by it."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from mcore_inference import DynamicInferenceEngine, LockstepConfig, chat_tokens
from mcore_parallel.data import Tokenizer
from mcore_rl import (
    ChatInferenceInterface,
    InferenceInterface,
    MegatronChatLocal,
    MegatronLocal,
    NumberedAgent,
    Problem,
    TokenRollout,
    recite,
)
from mcore_tools.assembly import has_files, open_tokenizer
from mcore_tools.chat import TemplateTokenizer, find_template
from mcore_tools.recipes import RunConfig
from mcore_tools.rl._attempts import evaluation_seed


def open_policy_tokenizer(config: RunConfig, environment: NumberedAgent | None) -> Tokenizer:
    """The tokenizer of a run: by its chat template where the environment holds conversations.

    Raises:
        ValueError: no such tokenizer, a model that is too small for it, or no template where one is needed.
    """
    name = config.data.tokenizer
    plain = open_tokenizer(name, config.model.vocab_size)
    if environment is None or not environment.holds_conversations:
        return plain
    if not has_files(name) or find_template(name) is None:
        raise ValueError(
            f"environment {environment.env_id!r} holds conversations, and data.tokenizer={name} has no chat template; name a model or a "
            "tokenizer with a chat_template.jinja"
        )
    return TemplateTokenizer(name)


def local_interfaces(
    engine: DynamicInferenceEngine, environment: NumberedAgent, seed: int, lockstep: LockstepConfig | None = None
) -> tuple[InferenceInterface, InferenceInterface]:
    """What answers an environment by an engine of this process, and what answers evaluations, which change no draw of the training;
    ``lockstep`` is the patience with other ranks of the engine."""
    own: dict[str, Any] = {"seed": seed, "lockstep": lockstep}
    is_chat = environment.holds_conversations
    interface = MegatronChatLocal(engine, tools=environment.tools, **own) if is_chat else MegatronLocal(engine, **own)
    return interface, interface.with_seed(evaluation_seed(seed))


def recited(
    environment: NumberedAgent, problem: Problem, answers: Sequence[str], tokenizer: Tokenizer, max_tokens: int
) -> Coroutine[Any, Any, TokenRollout]:
    """The conversation in which the policy gives these answers, and ends each as the template does where the engine stops there."""

    def template(messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
        return chat_tokens(tokenizer, messages, is_open, environment.tools)

    assert isinstance(tokenizer, TemplateTokenizer), "open_policy_tokenizer gives no other one where conversations are held"
    behind = template([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], False)
    ends = [token for token in behind if token in tokenizer.stop_token_ids]
    end = ends[-1] if ends else tokenizer.eod

    def encode(text: str) -> list[int]:
        return [*tokenizer.tokenize(text), *([] if end is None else [end])]

    return recite(environment, problem, answers, template=template, encode=encode, max_tokens=max_tokens)


def served_interface(interface: InferenceInterface, environment: NumberedAgent, tokenizer: Tokenizer, seq_len: int) -> InferenceInterface:
    """What answers an environment by servers; conversations have up to ``seq_len`` tokens."""
    if not environment.holds_conversations:
        return interface
    return ChatInferenceInterface(
        interface, lambda messages, is_open: chat_tokens(tokenizer, messages, is_open, environment.tools), max_tokens=seq_len
    )


def prompt_length(environment: NumberedAgent, tokenizer: Tokenizer, number: int) -> int:
    """Tokens of a problem, of a conversation those of one message of the user, with the tools."""
    prompt = environment.problem(number).prompt
    if not environment.holds_conversations:
        return len(tokenizer.tokenize(prompt))
    return len(chat_tokens(tokenizer, [{"role": "user", "content": prompt}], True, environment.tools))
