# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``/tokenize`` and ``/detokenize``: what a text costs before it is sent."""

from typing import Any

from fastapi import Request

from mcore_inference.server._bodies import BodyReader
from mcore_inference.server._errors import ApiError
from mcore_inference.server._prompts import PromptEncoder
from mcore_inference.server._runner import Runner
from mcore_inference.server._schema import DetokenizeBody, TokenizeBody
from mcore_inference.text import TokenBytes


class TokenizeRoutes:
    """Handlers of both routes; neither reaches the engine.

    Args:
        reader: reads bodies.
        encoder: text to tokens and back.
        runner: names the longest sequence.
    """

    def __init__(self, reader: BodyReader, encoder: PromptEncoder, runner: Runner) -> None:
        self._reader, self._encoder, self._runner = reader, encoder, runner
        self._token_bytes = TokenBytes(encoder.tokenizer)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Ids of a prompt or of a conversation, as the generating routes compute them."""
        body = await self._reader.read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(422, "give either prompt or messages", code="invalid_body", param="prompt")
        if body.prompt is not None and body.tools is not None:
            raise ApiError(422, "tools go with messages; leave them out, or give messages", code="invalid_body", param="tools")
        if body.messages is None:
            assert body.prompt is not None
            tokens = self._encoder.encode(body.prompt)
        else:
            messages = [message.plain() for message in body.messages]
            tools = [tool.plain() for tool in body.tools or ()]
            tokens = self._encoder.encode_chat(messages, tools=tools, add_generation_prompt=body.add_generation_prompt)
        if body.add_special_tokens and self._encoder.bos is not None and tokens[:1] != [self._encoder.bos]:
            tokens = [self._encoder.bos, *tokens]
        longest = self._runner.max_sequence_length
        if body.return_token_strs and len(tokens) > longest:
            message = f"return_token_strs is for at most max_model_len={longest} tokens and these are {len(tokens)}; leave it out"
            raise ApiError(400, message, param="return_token_strs")
        texts = [self._token_bytes.text(token) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, request: Request) -> dict[str, str]:
        """Text of at most as many ids as the longest sequence has, as the generating routes return it."""
        body = await self._reader.read(request, DetokenizeBody)
        return {"prompt": self._encoder.decode(body.tokens, "tokens")}
