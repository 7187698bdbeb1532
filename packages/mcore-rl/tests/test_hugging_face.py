# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model of transformers as the one that answers: its tokens are in the distribution it reports."""

import asyncio
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl import GenericGenerationArgs, HFInference, InferenceRequest
from tests.support.sentence_pieces import sentence_pieces

transformers = pytest.importorskip("transformers")


class Tokenizer:
    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(letter) + 1 for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(str(number - 1) for number in ids if number)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        initializer_range=0.5, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def ask(interface: HFInference, n: int = 1, **args: Any) -> list[Any]:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    request = InferenceRequest(prompts=prompts, n=n, generation_args=GenericGenerationArgs(**args))
    return [answer for row in asyncio.run(interface.agenerate(request)) for answer in row]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (0.7, 4)])
def test_log_probs_are_of_the_distribution_drawn_from(model: Any, temperature: float, top_k: int | None) -> None:
    answers = ask(HFInference(model, Tokenizer(), max_batch_size=4), n=3, temperature=temperature, top_k=top_k, max_tokens=6)
    assert len(answers) == 9
    for answer in answers:
        with torch.no_grad():
            logits = model(torch.tensor([list(answer.token_ids)])).logits[0, answer.prompt_length - 1 : -1].float() / temperature
        if top_k:
            logits[logits < logits.topk(top_k)[0][:, -1:]] = -torch.inf
        drawn = torch.tensor(answer.token_ids[answer.prompt_length :])
        expected = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=1e-4)
        assert (answer.finish_reason == "stop") == (answer.token_ids[-1] == 0) and 0 not in answer.token_ids[:-1]


def test_greedy_answers_do_not_depend_on_their_batch(model: Any) -> None:
    one, all_at_once = (ask(HFInference(model, Tokenizer(), max_batch_size=size), temperature=0.0, max_tokens=8) for size in (1, 3))
    assert [answer.token_ids for answer in one] == [answer.token_ids for answer in all_at_once]


class Says:
    """A model that continues each prompt by the same tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.drawn = tokens

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)

    def generate(self, tokens: torch.Tensor, **_: Any) -> SimpleNamespace:
        drawn = torch.tensor([self.drawn]).expand(len(tokens), -1)
        scores = [torch.zeros(len(tokens), max(self.drawn) + 1) for _ in self.drawn]
        return SimpleNamespace(sequences=torch.cat([tokens, drawn], dim=1), scores=scores)


@pytest.mark.parametrize(
    ("prompt", "drawn", "text"),
    [(["\u2581ada"], ["\u2581name", "gra", "ce"], " namegrace"), (["a", "<0xC3>"], ["<0xA9>", "b"], "\u00e9b"), (["a"], [], "")],
)
def test_texts_are_what_tokens_add_behind_their_prompt(prompt: list[str], drawn: list[str], text: str) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=sentence_pieces(), eos_token="</s>")
    prompt_ids, ids = tokenizer.convert_tokens_to_ids(prompt), tokenizer.convert_tokens_to_ids([*drawn, "</s>", "a"])
    request = InferenceRequest(prompts=[prompt_ids], generation_args=GenericGenerationArgs(max_tokens=9))
    [[answer]] = asyncio.run(HFInference(Says(ids), tokenizer).agenerate(request))
    assert answer.response == text
    assert answer.token_ids == [*prompt_ids, *ids[:-1]] and len(answer.logprobs) == len(drawn) + 1 and answer.finish_reason == "stop"


def test_a_long_answer_is_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(Tokenizer, "decode", lambda _, ids, **__: calls.append(len(ids)) or "".join(str(number - 1) for number in ids))
    request = InferenceRequest(prompts=[[1, 2]], generation_args=GenericGenerationArgs(max_tokens=300))
    [[answer]] = asyncio.run(HFInference(Says([5, 6, 7] * 100), Tokenizer()).agenerate(request))
    assert answer.response == "456" * 100 and len(calls) < 5


def test_who_gives_up_ends_the_batch(model: Any) -> None:
    endless = copy.deepcopy(model)
    with torch.no_grad():
        endless.lm_head.weight[0] = 0.0  # never the greatest
    interface = HFInference(endless, Tokenizer())

    async def give_up() -> None:
        request = InferenceRequest(prompts=[[1]], generation_args=GenericGenerationArgs(temperature=0.0, max_tokens=10**6))
        async with asyncio.timeout(0.3):
            await interface.agenerate(request)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert interface._lock.acquire(timeout=20), "the batch goes on"
    interface._lock.release()


def test_what_cannot_be_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="max_batch_size=0"):
        HFInference(model, Tokenizer(), max_batch_size=0)
    with pytest.raises(ValueError, match="max_tokens=None"):
        ask(HFInference(model, Tokenizer()))
    with pytest.raises(ValueError, match="no tokens"):
        asyncio.run(
            HFInference(model, Tokenizer()).agenerate(InferenceRequest(prompts=[[]], generation_args=GenericGenerationArgs(max_tokens=1)))
        )

    class Endless(Tokenizer):
        eos_token_id = None

    with pytest.raises(ValueError, match="eos_token_id"):
        HFInference(model, Endless())
