# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rollouts from a model of the transformers library: a yardstick for other engines, and for models that only it has."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, InferenceRequest, InferenceResponse
from mcore_rl.inference._interface import InferenceInterface


@experimental_api
class HFInference(InferenceInterface):
    """Continues prompts by ``model.generate``, batch after batch, in a thread beside the event loop.

    Log-probabilities are of the distribution that tokens were drawn from. An answer's text is what its tokens add behind the prompt, as
    that of an engine. A caller that gives up ends its batch at the next token.

    Args:
        model: a causal language model of transformers, in eval mode where dropout must not count.
        tokenizer: its tokenizer; ``eos_token_id`` ends answers.
        max_batch_size: prompts of one batch.
        generation_args: choices for requests that leave them open.

    Raises:
        ValueError: a batch size below 1, or a tokenizer without ``eos_token_id``.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_batch_size: int = 64, generation_args: GenericGenerationArgs | None = None
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{type(tokenizer).__name__}.eos_token_id is None: nothing would end an answer; set it")
        self.model, self.tokenizer, self.max_batch_size = model, tokenizer, max_batch_size
        self.generation_args = generation_args or GenericGenerationArgs()
        self._lock = threading.Lock()

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """Continuations from the model.

        Raises:
            ValueError: ``max_tokens`` is open, or a prompt is empty; nothing is generated.
        """
        args = self.generation_args.add(request.generation_args)
        if args.max_tokens is None:
            raise ValueError("generation_args.max_tokens=None: a model ends where its configuration says; set it")
        rows = [list(prompt) for prompt in request.prompts for _ in range(request.n)]
        if not all(rows):
            raise ValueError("a prompt has no tokens; give each at least one")
        given_up = threading.Event()
        try:
            flat = await asyncio.to_thread(self._generate, rows, args, given_up)
        finally:
            given_up.set()
        return [flat[i : i + request.n] for i in range(0, len(flat), request.n)]

    def _generate(self, rows: list[list[int]], args: GenericGenerationArgs, given_up: threading.Event) -> list[InferenceResponse]:
        answers: list[InferenceResponse] = []
        # The model is one: batches take turns.
        with self._lock:
            for start in range(0, len(rows), self.max_batch_size):
                if given_up.is_set():
                    break
                answers += self._batch(rows[start : start + self.max_batch_size], args, given_up)
        return answers

    def _batch(self, rows: list[list[int]], args: GenericGenerationArgs, given_up: threading.Event) -> list[InferenceResponse]:
        from transformers import StoppingCriteriaList

        pad, width = self.tokenizer.eos_token_id, max(map(len, rows))
        device = next(self.model.parameters()).device
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        greedy = args.temperature == 0

        def over(ids: Tensor, _: Any, **__: Any) -> Tensor:
            return torch.full((len(ids),), given_up.is_set(), device=ids.device)

        drawing = {} if greedy else {"temperature": args.temperature or 1.0, "top_k": args.top_k or 0, "top_p": args.top_p or 1.0}
        with torch.no_grad():
            output = self.model.generate(
                tokens, attention_mask=mask, do_sample=not greedy, num_beams=1, max_new_tokens=args.max_tokens,
                eos_token_id=pad, pad_token_id=pad, return_dict_in_generate=True, output_scores=True,
                stopping_criteria=StoppingCriteriaList([over]), **drawing,
            )  # fmt: skip
        drawn = output.sequences[:, width:]
        scores = torch.stack([score.float().log_softmax(-1).gather(1, drawn[:, [i]])[:, 0] for i, score in enumerate(output.scores)], dim=1)
        return [self._answer(row, *pair) for row, *pair in zip(rows, drawn.tolist(), scores.tolist(), strict=True)]

    def _answer(self, prompt: list[int], drawn: list[int], scores: list[float]) -> InferenceResponse:
        from mcore_inference import TransformersTokenizer
        from mcore_inference.text import whole_text

        eos = self.tokenizer.eos_token_id
        spoken = drawn[: drawn.index(eos)] if eos in drawn else drawn
        count = len(spoken) + (eos in drawn)
        return InferenceResponse(
            response=whole_text(TransformersTokenizer(self.tokenizer), spoken, prompt),
            token_ids=[*prompt, *drawn[:count]],
            prompt_length=len(prompt),
            logprobs=scores[:count],
            finish_reason="stop" if eos in drawn else "length",
        )
