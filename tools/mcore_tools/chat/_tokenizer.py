# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A tokenizer that writes conversations by its chat template."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mcore_parallel.data import ChatTurn, HuggingFaceTokenizer
from mcore_tools.chat._generation import end_tokens, read_generation
from mcore_tools.chat._spans import Messages, TemplateError, assistant_spans
from mcore_tools.chat._tool_support import Tools, ToolSupport, find_tool_support


def _base_template(begin: str, header: str, body: str, end: str, given_end: str) -> str:
    """Arguments but the first are Jinja expressions: a newline behind a block would be trimmed, so that all text is in expressions."""
    written = "{% generation %}{{ " + f"{body} + {end}" + " }}{% endgeneration %}"
    given = "{{ " + f"{body} + {given_end}" + " }}"
    turn = "{{ " + header.replace("ROLE", "message.role") + " }}"
    turn += "{% if message.role == 'assistant' %}" + written + "{% else %}" + given + "{% endif %}{{ '\\n' }}"
    opening = "{% if add_generation_prompt %}{{ " + header.replace("ROLE", "'assistant'") + " }}{% endif %}"
    return begin + "{% for message in messages %}" + turn + "{% endfor %}" + opening


TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "chatml": _base_template("", "'<|im_start|>' + ROLE + '\\n'", "message.content", "'<|im_end|>'", "'<|im_end|>'"),
        # The blank is of the answer, whose first word tokenizers join with it.
        "plain": _base_template("{{ bos_token or '' }}", "ROLE + ':'", "' ' + message.content", "eos_token", "''"),
    }
)
"""Templates for base models, which have none: ``chatml`` for a tokenizer with its tokens, ``plain`` for any with an end of text."""
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def find_template(folder: str | Path) -> str | None:
    """The chat template that a tokenizer's folder holds; None for none."""
    place = Path(folder)
    place = place.parent if place.is_file() else place
    if (file := place / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not (place / name).is_file():
            continue
        try:
            template = json.loads((place / name).read_text(encoding="utf-8")).get("chat_template")
        except (ValueError, AttributeError) as error:
            raise TemplateError(f"{place / name} is no JSON object: {error}; save the tokenizer again") from None
        if isinstance(template, list):
            template = {one.get("name"): one.get("template") for one in template}.get("default")
        if isinstance(template, str):
            return template
    return None


class TemplateTokenizer:
    """A tokenizer.json whose conversations are rendered by a Jinja template, as the transformers library does it, in its sandbox.

    Args:
        path: folder of the tokenizer.
        template: in place of the folder's own.

    Raises:
        TemplateError: there is no template, or tokens that it needs are missing.
        TokenizerError: as `HuggingFaceTokenizer`.
    """

    def __init__(self, path: str | Path, template: str | None = None) -> None:
        self.path = str(path)
        self._plain = HuggingFaceTokenizer(path)
        self.template = find_template(path) if template is None else template
        if self.template is None:
            raise TemplateError(
                f"{path} has no chat template; name one with sft.template=FILE, or one of {', '.join(TEMPLATES)} for a base model"
            )
        if self.template == TEMPLATES["chatml"] and not {"turn_start", "turn_end"} <= set(self._plain.special_tokens_dict):
            raise TemplateError(f"{path} has no <|im_start|> and <|im_end|> tokens; set sft.template=plain")
        self._inner = _load(Path(self._plain.path))
        self._inner.chat_template = self.template
        self._special = tuple(str(token) for token in self._inner.added_tokens_decoder.values() if token.special)

    @property
    def vocab_size(self) -> int:
        """Largest id plus one."""
        return self._plain.vocab_size

    @property
    def eod(self) -> int | None:
        """Id that ends a text."""
        return self._plain.eod

    @property
    def bos(self) -> int | None:
        """Id that begins a text."""
        return self._plain.bos

    @property
    def pad(self) -> int | None:
        """Id that fills up."""
        return self._plain.pad

    @functools.cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: those of generation_config.json, the end of a text, and what the template puts behind an answer."""
        ends = [*end_tokens(read_generation(Path(self._plain.path).parent)), *([] if self.eod is None else [self.eod])]
        try:
            answers = [turn.body for turn in self.chat_turns(_PROBE) if turn.body]
        except TemplateError:
            answers = []
        special = {token for token, added in self._inner.added_tokens_decoder.items() if added.special}
        return tuple(dict.fromkeys([*ends, *(answer[-1] for answer in answers if answer[-1] in special)]))

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        return self._plain.special_tokens_dict

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {**self._plain.unique_identifiers, "class": "TemplateTokenizer", "template": self.template}

    def tokenize(self, text: str) -> list[int]:
        return self._plain.tokenize(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._plain.tokenize_batch(texts)

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._plain.detokenize(ids, skip_special)

    def tokenizer_json(self) -> str:
        """What the file says, from which structured output reads the bytes of tokens."""
        return self._plain.tokenizer_json()

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> list[int]:
        """Ids of a conversation, with an open turn of the assistant at the end.

        Raises:
            TemplateError: as of ``apply_tool_template``.
        """
        return self.apply_tool_template(messages, (), add_generation_prompt)

    def apply_tool_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[int]:
        """Ids of a conversation with tools, in OpenAI's form; none for messages that only hold calls.

        Args:
            messages: as of ``chat_turns``, and rendered alike.
            tools: that the model may call.
            add_generation_prompt: open a turn of the assistant at the end.

        Raises:
            TemplateError: the template refuses the messages, or does not write their tools, calls or results.
        """
        return self.tokenize(self._render(self._with_tools(messages, tools), add_generation_prompt, tools))

    def chat_turns(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[ChatTurn]:
        """Ids of a conversation, apart by who writes them: ``body`` of the assistant's turns is what the model writes, its calls included.

        Args:
            messages: ``{"role", "content"}``; ``tool_calls`` of an assistant have their arguments as objects.
            tools: that it may call, in OpenAI's form.

        Raises:
            TemplateError: the template refuses the messages, does not write their tools, calls or results, or does not say what the
                assistant writes.
        """
        messages = self._with_tools(messages, tools)
        ids, mask = self._marked(messages, tools) if _MARKED.search(str(self.template)) else self._by_prefixes(messages, tools)
        turns, header, begin = [], [], 0
        for place in range(1, len(ids) + 1):
            if place < len(ids) and mask[place] == mask[begin]:
                continue
            if mask[begin]:
                turns.append(ChatTurn(role="assistant", header=header, body=ids[begin:place], tail=[]))
                header = []
            else:
                header = ids[begin:place]
            begin = place
        return [*turns, ChatTurn(role="", header=header, body=[], tail=[])] if header else turns

    @functools.cached_property
    def _tool_support(self) -> ToolSupport:
        return find_tool_support(lambda messages, tools: self._render(messages, False, tools))

    def _with_tools(self, messages: Messages, tools: Tools) -> Messages:
        """``messages`` in the form that the template writes; what it would drop is refused."""
        called = [number for number, message in enumerate(messages) if message.get("tool_calls")]
        answered = [number for number, message in enumerate(messages) if message.get("role") == "tool"]
        if not (tools or called or answered):
            return messages
        support = self._tool_support
        for what, is_written in (
            ("tools", support.tools or not tools),
            (f"messages[{called[0]}].tool_calls" if called else "", support.calls or not called),
            (f"messages[{answered[0]}] of role tool" if answered else "", support.results or not answered),
        ):
            if not is_written:
                raise TemplateError(
                    f"the chat template does not write {what}; name one that does with sft.template=FILE, put it into the model's folder, "
                    "or remove them"
                )
        return [_with_text(message) for message in messages] if support.arguments_as_text else messages

    def _marked(self, messages: Messages, tools: Tools) -> tuple[list[int], list[int]]:
        """By the ``generation`` blocks of the template."""
        try:
            rendered: Any = self._inner.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:
            raise _refused(error) from None
        return list(rendered["input_ids"]), list(rendered["assistant_masks"])

    def _by_prefixes(self, messages: Messages, tools: Tools) -> tuple[list[int], list[int]]:
        rendered = assistant_spans(messages, functools.partial(self._render, tools=tools), self._special)
        encoded = self._inner(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
        mask, spans = [], list(rendered.spans)
        for first, last in encoded["offset_mapping"]:
            while spans and first >= spans[0][1]:
                spans.pop(0)
            mask.append(int(bool(spans) and last > spans[0][0] and first < spans[0][1]))
        return list(encoded["input_ids"]), mask

    def _render(self, messages: Messages, add_generation_prompt: bool, tools: Tools = ()) -> str:
        more = {"tools": list(tools)} if tools else {}
        try:
            return str(self._inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **more))
        except Exception as error:
            raise _refused(error) from None


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls have their arguments as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _refused(error: Exception) -> TemplateError:
    """Templates raise what they like."""
    return TemplateError(f"the chat template refused the messages: {type(error).__name__}: {error}")


def _load(file: Path) -> Any:
    """The tokenizer by transformers, which takes a second to import.

    Its class of any ``tokenizer.json`` has the ids of that file, as prompts have; those of families make some of their own.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        if (file.parent / "tokenizer_config.json").is_file() and file.name == "tokenizer.json":
            return PreTrainedTokenizerFast.from_pretrained(str(file.parent), local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:
        raise TemplateError(
            f"{file.parent} cannot be opened by transformers: {type(error).__name__}: {error}; fetch its files again"
        ) from None
