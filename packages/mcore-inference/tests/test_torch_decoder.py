# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The forward in few calls of torch against the model's own."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import DynamicInferenceContext, InferenceConfig, PagedAttention, SamplingParams
from mcore_inference.decoder import TorchDecoder
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import MLP, Step

Make = Callable[..., Any]
_CONFIG = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.3, norm_epsilon=1e-3
)


class Doubled(MLP):
    """A feed-forward that is called as it is."""

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, None]:
        return 2 * super().forward(x, step)[0], None


def _model(config: TransformerConfig, dtype: torch.dtype = torch.float64) -> GPTModel:
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=dtype).eval()
    with torch.no_grad():
        # Else norms multiply by 1.
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())).to(dtype), alpha=0.1)
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
        {"share_embeddings_and_output_weights": True, "no_rope_freq": 2},
        {"softmax_type": "learnable", "window_size": (3, 0), "window_attn_skip_freq": 2, "rotary_base_window": 100.0},
        {"position_embedding_type": "none"},
    ],
    ids=["plain", "head norms", "tied, without rotation", "window and sink", "no positions"],
)
@torch.no_grad()
def test_it_computes_what_the_model_does(fields: dict[str, Any]) -> None:
    model = _model(replace(_CONFIG, **fields))
    names = ("layers.0", "final_norm")
    assert TorchDecoder.fits(model, names)
    states: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: states.update({name: out[0] if isinstance(out, tuple) else out})
        )
    decoder, wanted = TorchDecoder(model, modules=names), []
    contexts = [DynamicInferenceContext.for_model(model, InferenceConfig(max_sequence_length=32, num_blocks=16)) for _ in range(2)]
    for work in ([(0, list(range(9))), (1, list(range(20, 25)))], [(0, [3]), (1, [5])], [(0, [7]), (1, [1, 2, 3])]):
        rows = torch.tensor([1, 0])
        for context in contexts:
            for number, tokens in work:
                if not context.holds(number):
                    context.add_request(number)
                context.extend(number, len(tokens))
        first, second = (context.build_step(work) for context in contexts)
        output, _ = model(first.tokens_T, first.step)
        torch.testing.assert_close(decoder.logits(second.tokens_T, second.step, rows), output.logits(rows), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(decoder.take_states(), states, rtol=1e-10, atol=1e-10)
        wanted.append(states.copy())
        for context in contexts:
            for number, tokens in work:
                context.advance(number, len(tokens))
    assert decoder.take_states() == {} and len(wanted) == 3


@torch.no_grad()
def test_a_feed_forward_of_another_kind_is_called_as_it_is() -> None:
    model = _model(_CONFIG)
    for layer in model.layers.values():
        layer.mlp.__class__ = Doubled
    tokens, step = torch.arange(6), Step.causal(2, 3)
    assert TorchDecoder.fits(model)
    torch.testing.assert_close(TorchDecoder(model).logits(tokens, step), model(tokens, step)[0].logits(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "fields",
    [
        {"add_bias_linear": True},
        {"activation": "geglu"},
        {"normalization": "LayerNorm"},
        {"rotary_percent": 0.5},
        {"rotary_interleaved": True},
        {"sandwich_norm": True},
        {"output_multiplier": 0.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_parts_are_left_to_the_model(fields: dict[str, Any]) -> None:
    assert not TorchDecoder.fits(_model(replace(_CONFIG, **fields)))


def test_half_precision_and_outputs_of_other_modules_are_left_to_the_model() -> None:
    assert not TorchDecoder.fits(_model(_CONFIG, torch.bfloat16))
    assert not TorchDecoder.fits(_model(_CONFIG), ("layers.0.mlp",))


def test_an_engine_follows_hooks_and_modules_that_come_later(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(), max_requests=2)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=6, ignore_eos=True)
    assert isinstance(engine._executor._decoder, TorchDecoder)
    (wanted,), calls = engine.generate([[1, 2, 3]], params), list[int]()
    hook = engine.model.layers["0"].register_forward_hook(lambda *_: calls.append(1))
    (found,) = engine.generate([[1, 2, 3]], params)
    assert found.generated_tokens == wanted.generated_tokens and len(calls) >= 6
    hook.remove()
    count = len(calls)
    engine.generate([[1, 2, 3]], params)
    assert len(calls) == count
    doubled = copy.deepcopy(engine.model.layers["0"].mlp)
    doubled.__class__ = Doubled
    engine.model.layers["0"].mlp = doubled
    (other,) = engine.generate([[1, 2, 3]], params)
    assert other.generated_tokens != wanted.generated_tokens
