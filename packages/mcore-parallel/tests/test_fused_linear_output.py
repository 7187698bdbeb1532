# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The methods of a model's output: fused and unfused agree in every layout."""

import itertools

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, OutputLayer, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.training import Batch, CrossEntropyObjective

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def check_methods(tp: int) -> None:
    cases = [*itertools.product((False, True), (False, True), (None, 13), (None,)), (False, True, 13, 0.6), (True, False, None, 0.6)]
    for sequence_parallel, tied, unpadded, cap in cases:
        plan = ParallelPlan.for_world(tp, tp=tp, sequence_parallel=sequence_parallel)
        groups = ProcessGroups.build(plan) if tp > 1 else ProcessGroups.single()
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=4, vocab_size=16, ffn_hidden_size=16,
            share_embeddings_and_output_weights=tied, final_logit_softcapping=cap,
        )  # fmt: skip
        model = GPTModel(config, groups, dtype=torch.float64, seed=1, unpadded_vocab_size=unpadded)
        tokens = torch.randint(0, 13, (12,), generator=torch.Generator().manual_seed(1))
        labels = tokens.roll(-1)
        labels[3] = -100
        weights = torch.linspace(0.0, 2.0, 12, dtype=torch.float64)

        def gradients(value: Tensor, model: GPTModel = model) -> list[Tensor]:
            model.zero_grad()
            value.backward()
            return [value.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

        def output(model: GPTModel = model, tokens: Tensor = tokens):
            return model(tokens, Step.causal(2, 6))[0]

        def same(pairs) -> None:
            for ours, expected in pairs:
                torch.testing.assert_close(ours, expected, **EXACT)

        plain = gradients((output().token_losses(labels, fused=False) * weights).sum())
        if cap is None:
            same(zip(gradients((output().token_losses(labels, fused=True) * weights).sum()), plain, strict=True))
        else:
            with pytest.raises(ValueError, match=r"fused=True computes logits without final_logit_softcapping=0\.6; leave it at None"):
                output().token_losses(labels, fused=True)
            assert output().logits().abs().max() < 0.6
        same(zip(gradients(output().loss_sum(labels, weights)), plain, strict=True))
        same(zip(gradients(-(output().log_probs(labels) * weights).sum()), plain, strict=True))
        cold = gradients((output().log_probs(labels, 0.7, fused=False) * weights).sum())
        same(zip(gradients((output().log_probs(labels, 0.7, fused=True if cap is None else None) * weights).sum()), cold, strict=True))
        log_probs, entropy = output().log_probs_and_entropy(labels, 0.7)
        same(zip(gradients((log_probs * weights).sum()), cold, strict=True))
        if tp == 1:
            log_p = (output().logits()[:, :unpadded] / 0.7).log_softmax(-1)
            torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), **EXACT)
        if unpadded is not None and not tied:
            rows = OutputLayer(16, 8, groups).shard_specs()["weight"].slices(groups)[0]
            assert not model.output.weight.grad[max(0, unpadded - rows.start) :].any()


def test_methods_agree_on_one_rank() -> None:
    check_methods(1)


@pytest.mark.journey
@pytest.mark.world(2)
def test_methods_agree_on_two_ranks(world) -> None:
    world(check_methods, tp=2)


@pytest.mark.journey
@pytest.mark.world(4)
def test_methods_agree_on_four_ranks(world) -> None:
    world(check_methods, tp=4)


def test_objective_is_the_masked_sum_with_and_without_gradients() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16)
    model = GPTModel(config, ProcessGroups.single(), seed=1)
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.5]])
    batch = Batch(tokens=torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[2, 3, 4, 5]]), loss_mask=mask)
    output = model(batch.tokens.flatten(), batch.step())[0]
    expected = (output.token_losses(batch.labels.flatten()) * mask.flatten()).sum()
    report = CrossEntropyObjective()(output, batch)
    torch.testing.assert_close(report.sum, expected)
    assert report.sum.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(CrossEntropyObjective()(model(batch.tokens.flatten(), batch.step())[0], batch).sum, expected.detach())


def test_a_bad_unpadded_size_is_named() -> None:
    with pytest.raises(ValueError, match="unpadded_vocab_size=17 must lie between 1 and vocab_size=16"):
        OutputLayer(16, 8, ProcessGroups.single(), unpadded_vocab_size=17)


def test_hooks_of_the_output_layer_run_for_every_loss() -> None:
    """Wrappers bring the weight in there."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16)
    model = GPTModel(config, ProcessGroups.single(), seed=1)
    calls: list[int] = []
    model.output.register_forward_pre_hook(lambda module, inputs: calls.append(1))
    tokens = torch.arange(4)
    output = model(tokens, Step.causal(1, 4))[0]
    output.token_losses(tokens, fused=True)
    output.token_losses(tokens, fused=False)
    output.loss_sum(tokens, torch.ones(4))
    output.log_probs(tokens)
    output.log_probs_and_entropy(tokens)
    assert len(calls) == 5
