# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Cross entropy over a split vocabulary against torch's in float64."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel import Group
from mcore_parallel.tensor_parallel import vocab_parallel_cross_entropy, vocab_parallel_log_probs

TOKENS, VOCAB = 7, 24


def inputs(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = scale * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    target[2], target[3], target[4] = -100, 0, VOCAB - 1
    return logits, target, torch.randn(TOKENS, generator=generator, dtype=torch.float64)


def dense(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Spread the smoothing mass over the other classes by hand."""
    probabilities = torch.full_like(logits, smoothing / (VOCAB - 1)).scatter(-1, target.clamp(min=0).unsqueeze(-1), 1 - smoothing)
    return torch.where(target >= 0, -(probabilities * F.log_softmax(logits, -1)).sum(-1), 0.0)


def check_against_dense(group: Group | None = None) -> None:
    group = group or Group.of(dist.group.WORLD)
    for scale in (1.0, 1e4):
        logits, target, weight = inputs(scale)
        for smoothing in (0.0, 0.1):
            whole = logits.clone().requires_grad_()
            expected = dense(whole, target, smoothing)
            expected.backward(weight)
            part = logits.chunk(group.size, -1)[group.rank].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(part, target, smoothing, group=group)
            torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
            loss.backward(weight)
            torch.testing.assert_close(part.grad, whole.grad.chunk(group.size, -1)[group.rank], rtol=1e-10, atol=1e-12)
            assert not part.grad[2].any() and loss[2] == 0
        part.grad = None
        log_probs = vocab_parallel_log_probs(part, target, group)
        counted = target >= 0
        expected = F.log_softmax(logits, -1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(log_probs[counted], expected[counted], rtol=1e-10, atol=1e-12)
        log_probs.backward(weight)
        assert part.grad is not None and part.grad.any()


@pytest.mark.world(2)
def test_loss_and_gradient_equal_dense_on_two_ranks(world) -> None:
    world(check_against_dense)


@pytest.mark.world(4)
def test_loss_and_gradient_equal_dense_on_four_ranks(world) -> None:
    world(check_against_dense)


def test_loss_and_gradient_equal_dense_on_one_rank() -> None:
    check_against_dense(Group.single())


def test_smoothing_matches_torch_after_the_change_of_convention() -> None:
    logits, target, _ = inputs(3.0)
    ours = vocab_parallel_cross_entropy(logits, target, 0.1, group=Group.single())
    torch.testing.assert_close(ours, F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1 * VOCAB / (VOCAB - 1)))


def check_low_precision() -> None:
    group = Group.of(dist.group.WORLD)
    logits, target, weight = inputs(2.0)
    whole = logits.bfloat16().float().requires_grad_()
    expected = dense(whole, target, 0.1)
    expected.backward(weight.float())
    part = logits.bfloat16().chunk(2, -1)[group.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, 0.1, group=group)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward(weight.float())
    assert part.grad.dtype == torch.bfloat16
    torch.testing.assert_close(part.grad.float(), whole.grad.chunk(2, -1)[group.rank], rtol=2**-8, atol=1e-6)


@pytest.mark.world(2)
def test_bfloat16_logits_are_computed_in_float32(world) -> None:
    world(check_low_precision)


def check_gradients_sum_to_zero() -> None:
    """Over the vocabulary, whatever the size of the logits; and they have the logits' dtype and its precision, not a narrower one."""
    group = Group.of(dist.group.WORLD)
    for scale in (1.0, 1e4):
        for smoothing in (0.0, 0.3):
            for dtype, near in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
                logits, target, _ = inputs(scale)
                part = logits.to(dtype).chunk(group.size, -1)[group.rank].clone().requires_grad_()
                vocab_parallel_cross_entropy(part, target, smoothing, group=group).sum().backward()
                assert part.grad.dtype == dtype and torch.isfinite(part.grad).all()
                total = part.grad.double().sum(-1)
                dist.all_reduce(total)
                assert total.abs().max() <= near
                exact = logits.to(dtype).double().requires_grad_()
                dense(exact, target, smoothing).sum().backward()
                expected = exact.grad.chunk(group.size, -1)[group.rank]
                torch.testing.assert_close(part.grad.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=near / 10)


@pytest.mark.world(2)
def test_gradients_sum_to_zero_in_every_dtype_on_two_ranks(world) -> None:
    world(check_gradients_sum_to_zero)


@pytest.mark.world(4)
def test_gradients_sum_to_zero_in_every_dtype_on_four_ranks(world) -> None:
    world(check_gradients_sum_to_zero)


def test_impossible_classes_do_not_poison_the_loss() -> None:
    logits = torch.tensor([[1.0, float("-inf"), 2.0, float("-inf")]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([2]), group=Group.single())
    loss.sum().backward()
    torch.testing.assert_close(loss, F.cross_entropy(logits.detach(), torch.tensor([2]), reduction="none"))
    assert torch.isfinite(logits.grad).all()


def test_bad_arguments_are_named() -> None:
    logits = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"label_smoothing=1\.0"):
        vocab_parallel_cross_entropy(logits, torch.zeros(3, dtype=torch.int64), 1.0, group=Group.single())
    with pytest.raises(ValueError, match=r"target of shape \(3,\)"):
        vocab_parallel_cross_entropy(logits, torch.zeros(2, dtype=torch.int64), group=Group.single())
    with pytest.raises(ValueError, match="target holds 4"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 1, 4]), group=Group.single())


def check_compiled() -> None:
    group = Group.of(dist.group.WORLD)
    logits, target, weight = inputs(1.0)

    def loss(part: Tensor) -> Tensor:
        return (vocab_parallel_cross_entropy(part, target, 0.1, group=group) * weight).sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        part = logits.chunk(2, -1)[group.rank].clone().requires_grad_()
        value = function(part)
        value.backward()
        results.append((value.detach(), part.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-13, atol=1e-13)


@pytest.mark.journey
@pytest.mark.world(2)
def test_loss_compiles_without_a_graph_break(world) -> None:
    world(check_compiled)


def check_padding() -> None:
    """Columns after the real vocabulary are as if they were not there; the last rank may hold nothing else."""
    group = Group.of(dist.group.WORLD)
    for vocab, smoothing in ((VOCAB - 3, 0.0), (VOCAB - 3, 0.1), (5, 0.1)):
        logits, target, weight = inputs(2.0)
        target = torch.where(target >= vocab, 1, target)
        whole = logits[:, :vocab].clone().requires_grad_()
        share = smoothing / (vocab - 1)
        probabilities = torch.full_like(whole, share).scatter(-1, target.clamp(min=0).unsqueeze(-1), 1 - smoothing)
        expected = torch.where(target >= 0, -(probabilities * F.log_softmax(whole, -1)).sum(-1), 0.0)
        expected.backward(weight)
        part = logits.chunk(group.size, -1)[group.rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(part, target, smoothing, group=group, vocab_size=vocab)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        loss.backward(weight)
        padded = F.pad(whole.grad, (0, VOCAB - vocab))
        torch.testing.assert_close(part.grad, padded.chunk(group.size, -1)[group.rank], rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="vocab_size=25 must lie between 1 and the 24 columns"):
        vocab_parallel_cross_entropy(part, target, group=group, vocab_size=VOCAB + 1)


@pytest.mark.world(2)
def test_padding_takes_no_part(world) -> None:
    world(check_padding)
