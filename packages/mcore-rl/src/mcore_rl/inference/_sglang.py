# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rollouts from an SGLang server, by its own route: that of OpenAI says no token ids."""

from typing import Any

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs
from mcore_rl.inference._peer import UNCHANGED, PeerAnswer, PeerInference


@experimental_api
class SGLangInference(PeerInference):
    """Asks ``/generate`` of an SGLang server; everything else is as of `OpenAIInference`, without a ``model``.

    SGLang divides logits by the temperature before it reports log-probabilities, unless it runs with SGLANG_RETURN_ORIGINAL_LOGPROB;
    ``logprobs="processed"`` is right for other temperatures then, without ``top_k`` and ``top_p``. It names the weights at the end of an
    answer and not those of each token, so that responses have no ``weight_versions``.
    """

    path = "/generate"

    def _body(self, prompt: list[int], args: GenericGenerationArgs) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": args.max_tokens,
            "temperature": 1.0 if args.temperature is None else args.temperature,
            "top_p": args.top_p or 1.0,
            "top_k": args.top_k or -1,
            **UNCHANGED,
        }
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": False}

    def _read(self, content: Any) -> PeerAnswer:
        about = content["meta_info"]
        pairs = about["output_token_logprobs"]
        return PeerAnswer(
            text=content["text"],
            tokens=[pair[1] for pair in pairs],
            scores=[pair[0] for pair in pairs],
            reason=about["finish_reason"]["type"],
        )
