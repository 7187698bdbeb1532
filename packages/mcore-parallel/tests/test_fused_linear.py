# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Projection and cross entropy in one against the two in float64."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.tensor_parallel import MainGradient, WeightGradientQueue, fused_linear_cross_entropy
from mcore_parallel.tensor_parallel._fused_linear import early_chunk, token_chunks
from tests.support.interpreter import run_interpreted

TOKENS, WIDTH, VOCAB, TRUE_VOCAB = 12, 5, 24, 21
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def inputs(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = {"generator": generator, "dtype": torch.float64}
    hidden, weight = scale * torch.randn(TOKENS, WIDTH, **draw), torch.randn(VOCAB, WIDTH, **draw)
    target = torch.randint(0, TRUE_VOCAB, (TOKENS,), generator=generator)
    target[2], target[3], target[7] = -100, TRUE_VOCAB - 1, 0
    return hidden, weight, target, torch.randn(TOKENS, **draw), torch.rand(TOKENS, **draw)


def dense(hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float, vocab: int, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = F.log_softmax(hidden @ weight[:vocab].T / temperature, -1)
    probabilities = torch.full_like(log_p, smoothing / (vocab - 1)).scatter(-1, target.clamp(min=0).unsqueeze(-1), 1 - smoothing)
    losses = torch.where(target >= 0, -(probabilities * log_p).sum(-1), 0.0)
    return losses, -(log_p.exp() * log_p).sum(-1)


CASES = list(itertools.product((1.0, 3e3), (0.0, 0.1), (VOCAB, TRUE_VOCAB, 3), (None, 5, 12)))


def check_against_dense(groups: ProcessGroups, cases: list[tuple[float, float, int, int | None]]) -> None:
    """Every option; the arriving gradient differs from token to token."""
    tp, split = groups.tp, groups.sequence_parallel
    for scale, smoothing, vocab, chunk in cases:
        hidden, weight, target, upstream, weights = inputs(scale)
        target = torch.where(target >= vocab, 1, target)
        for weighted in (False, True):
            whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_(), weights.clone().requires_grad_()
            expected, entropy = dense(whole[0], whole[1], target, smoothing, vocab, 1.5)
            expected = expected * whole[2] if weighted else expected
            local = slice(tp.rank * TOKENS // tp.size, (tp.rank + 1) * TOKENS // tp.size) if split else slice(None)
            rows = slice(tp.rank * VOCAB // tp.size, (tp.rank + 1) * VOCAB // tp.size)
            x, w, m = (y.clone().requires_grad_() for y in (hidden[local], weight[rows], weights))
            options = {
                "label_smoothing": smoothing,
                "vocab_size": vocab,
                "temperature": 1.5,
                "chunk_tokens": chunk,
                "sequence_parallel": split,
            }
            losses, found = fused_linear_cross_entropy(
                x, w, target, tp, with_entropy=True, token_weights=m if weighted else None, **options
            )
            torch.testing.assert_close(losses, expected, **EXACT)
            torch.testing.assert_close(found, entropy, rtol=1e-9, atol=1e-9)
            if weighted:
                # First the promised gradient, then one that breaks the promise.
                for gradient in (torch.tensor(0.7, dtype=torch.float64).expand(TOKENS), upstream):
                    ours = torch.autograd.grad(losses, (x, w, m), gradient, retain_graph=True)
                    theirs = torch.autograd.grad(expected, whole, gradient, retain_graph=True)
                    for mine, full in zip(ours, (theirs[0][local], theirs[1][rows], theirs[2]), strict=True):
                        torch.testing.assert_close(mine, full, **EXACT)
            else:
                ours = torch.autograd.grad((losses, found), (x, w), (upstream, weights))
                theirs = torch.autograd.grad((expected, entropy), whole[:2], (upstream, weights))
                torch.testing.assert_close(ours[0], theirs[0][local], rtol=1e-8, atol=1e-9)
                torch.testing.assert_close(ours[1], theirs[1][rows], rtol=1e-8, atol=1e-9 * scale)
                assert not ours[1][max(0, vocab - rows.start) :].any()


def check_ranks(tp: int) -> None:
    for sequence_parallel in (False, True):
        # Eight in which every value meets every value of another option, but for one pair of chunk and vocabulary.
        check_against_dense(ProcessGroups.build(ParallelPlan.for_world(tp, tp=tp, sequence_parallel=sequence_parallel)), CASES[::5])


def test_fused_equals_dense_on_one_rank() -> None:
    check_against_dense(ProcessGroups.single(), CASES)


@pytest.mark.world(2)
def test_fused_equals_dense_on_two_ranks(world) -> None:
    world(check_ranks, tp=2)


@pytest.mark.world(4)
def test_fused_equals_dense_on_four_ranks(world) -> None:
    world(check_ranks, tp=4)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_pass_gradcheck(weighted) -> None:
    hidden, weight, target, _, weights = inputs()
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        options = {"token_weights": weights} if weighted else {}
        return fused_linear_cross_entropy(x, w, target, Group.single(), chunk_tokens=5, label_smoothing=0.1, **options).sum()

    assert torch.autograd.gradcheck(loss, leaves)


def test_impossible_classes_do_not_poison_the_gradient() -> None:
    hidden = torch.ones(2, 1, requires_grad=True)
    weight = torch.tensor([[1.0], [float("-inf")], [2.0]])
    losses, entropy = fused_linear_cross_entropy(hidden, weight, torch.tensor([2, 0]), Group.single(), with_entropy=True)
    expected = F.cross_entropy(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([1, 0]), reduction="none")
    torch.testing.assert_close(losses, expected)
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_sums_the_weight_gradient_wide(dtype) -> None:
    hidden, weight, target, _, weights = inputs()
    x, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    expected, _ = dense(x.double(), w.double(), target, 0.0, VOCAB, 1.0)
    grads = torch.autograd.grad((expected * weights).sum(), (x, w))
    tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-5
    for options in ({}, {"token_weights": weights.float()}):
        losses = fused_linear_cross_entropy(x, w, target, Group.single(), chunk_tokens=4, **options)
        assert losses.dtype == torch.float32
        ours = torch.autograd.grad((losses if options else losses * weights.float()).sum(), (x, w))
        for mine, theirs in zip(ours, grads, strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [5, None])
@pytest.mark.parametrize("weighted", [False, True])
def test_main_gradient_takes_the_weight_gradient_instead_of_autograd(weighted, chunk) -> None:
    hidden, weight, target, _, weights = inputs()
    whole = weight.clone().requires_grad_()
    (dense(hidden, whole, target, 0.0, VOCAB, 1.0)[0] * weights).sum().backward()
    total, calls = torch.zeros_like(weight), []
    sink = MainGradient(total, begin=lambda: calls.append("begin"), done=lambda: calls.append("done"))
    w = weight.clone().requires_grad_()
    for _ in range(2):
        options = {"token_weights": weights} if weighted else {}
        losses = fused_linear_cross_entropy(hidden, w, target, Group.single(), chunk_tokens=chunk, main_grad=sink, **options)
        (losses if weighted else losses * weights).sum().backward()
    assert w.grad is None and calls == ["begin", "done"] * 2
    torch.testing.assert_close(total, 2 * whole.grad, **EXACT)


def test_one_chunk_where_it_takes_no_more_than_a_sum_and_a_chunk() -> None:
    # An 8B model's 8192 tokens; a narrower one's 16384 in chunks as large as its sum; a vocabulary over many ranks.
    for tokens, width, depth, itemsize, count in (
        (8192, 128256, 4096, 2, 1), (16384, 128256, 4096, 2, 1), (16385, 128256, 4096, 2, 3),
        (16384, 128256, 2048, 2, 4), (8192, 128256, 2048, 2, 1), (32768, 16032, 4096, 2, 2), (0, 128256, 4096, 2, 1),
    ):  # fmt: skip
        chunks = token_chunks(tokens, width, None, early_chunk(tokens, width, depth, itemsize))
        assert len(chunks) == count, (tokens, width, chunks)
        total, logits = max(4, itemsize) * width * depth, itemsize * width * (chunks[0][1] - chunks[0][0])
        assert logits <= (2 * total if count == 1 else max(total, itemsize << 28)) + 128 * itemsize * width


def test_kept_gradients_serve_two_backwards() -> None:
    hidden, weight, target, _, weights = inputs()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = fused_linear_cross_entropy(*leaves, target, Group.single(), token_weights=weights).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(3 * loss, leaves)
    for one, three in zip(first, second, strict=True):
        torch.testing.assert_close(three, 3 * one, **EXACT)


def test_queue_defers_the_weight_gradient() -> None:
    hidden, weight, target, upstream, _ = inputs()
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    expected = torch.autograd.grad(fused_linear_cross_entropy(x, w, target, Group.single()), (x, w), upstream)
    queue, sink = WeightGradientQueue(limit=2), MainGradient(torch.zeros_like(weight))
    for count in range(1, 4):
        losses = fused_linear_cross_entropy(x, w, target, Group.single(), chunk_tokens=5, main_grad=sink, queue=queue)
        losses.backward(upstream)
        assert len(queue) == min(count, 2) and sink.total.any() == (count > 2)
    torch.testing.assert_close(x.grad, 3 * expected[0], **EXACT)
    queue.drain()
    torch.testing.assert_close(sink.total, 3 * expected[1].detach(), **EXACT)


def test_nothing_of_the_size_of_all_logits_exists() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            found = result if isinstance(result, list | tuple) else [result]
            largest = max([largest, *(x.numel() for x in found if isinstance(x, Tensor))])
            return result

    x, w = torch.randn(256, 2, requires_grad=True), torch.randn(100, 2, requires_grad=True)
    target = torch.randint(0, 100, (256,))
    for options in ({}, {"token_weights": torch.ones(256)}):
        largest = 0
        with Largest():
            fused_linear_cross_entropy(x, w, target, Group.single(), chunk_tokens=16, **options).sum().backward()
        assert largest == 16 * 100


def test_no_gradient_is_computed_early_when_none_is_wanted() -> None:
    hidden, weight, target, _, weights = inputs()
    with torch.no_grad():
        quiet = fused_linear_cross_entropy(hidden, weight, target, Group.single(), token_weights=weights)
    assert not quiet.requires_grad
    frozen = fused_linear_cross_entropy(hidden.requires_grad_(), weight, target, Group.single(), token_weights=weights)
    torch.testing.assert_close(frozen, quiet)
    frozen.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_no_tokens_give_no_loss_and_zero_gradients() -> None:
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.zeros(4, 3, requires_grad=True)
    for options in ({}, {"token_weights": torch.zeros(0)}):
        fused_linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64), Group.single(), **options).sum().backward()
        assert hidden.grad.shape == (0, 3) and not weight.grad.any()


def check_compiled() -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    hidden, weight, target, upstream, weights = inputs()
    w = weight.chunk(2)[groups.tp.rank].requires_grad_()
    x = hidden.requires_grad_()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        general = fused_linear_cross_entropy(x, w, target, groups.tp, chunk_tokens=6)
        return (general * upstream).sum() + fused_linear_cross_entropy(
            x, w, target, groups.tp, chunk_tokens=12, token_weights=weights
        ).sum()

    eager = torch.autograd.grad(loss(x, w), (x, w))
    compiled = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x, w), (x, w))
    for mine, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.journey
@pytest.mark.world(2)
def test_fused_loss_compiles(world) -> None:
    world(check_compiled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(3, dtype=torch.int64)}, "do not fit a target of shape"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"vocab_size": 99}, "vocab_size=99 must lie between 1 and the 24 rows"),
        ({"vocab_size": 20}, "target holds 20"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"token_weights": torch.ones(3)}, "token_weights of shape"),
        ({"queue": WeightGradientQueue()}, "queue needs main_grad"),
    ],
)
def test_bad_arguments_are_named(change, message) -> None:
    hidden, weight, target, _, _ = inputs()
    with pytest.raises(ValueError, match=message):
        fused_linear_cross_entropy(**{"hidden": hidden, "weight": weight, "target": target, "group": Group.single(), **change})


KERNELS = """
import itertools, torch
from mcore_parallel.tensor_parallel import _picked_rows, _rows, _triton_embedding, _triton_rows
# Smaller than the row, so that the running maximum is carried from block to block.
_triton_rows._BLOCK = 128
cases = itertools.product((torch.float32, torch.bfloat16), (0.0, 0.1), (False, True), ((300, 1e3), (257, 1.0)))
for number, (dtype, smoothing, entropy, (valid, scale)) in enumerate(cases):
    if number.bit_count() % 2:
        continue  # half of them, in which every three choices meet
    maths = _rows.RowMaths(vocab_size=valid, smoothing=smoothing, entropy=entropy, temperature=1.25)
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(3, 300, generator=generator)).to(dtype)
    logits[1, 5] = float("-inf") if not smoothing else 0.0
    column = torch.tensor([4, -1, valid - 1])
    expected = _rows.row_statistics(logits, column, valid, maths)
    found = _triton_rows.statistics(logits, column, valid, maths)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    norm = expected[0] + expected[1].log()
    grad, entropy_grad = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.0, 0.3])
    extra = (torch.tensor([1.0, 2.0, 3.0]), entropy_grad) if entropy else (None, None)
    ours, theirs = logits.clone(), logits.clone()
    _rows.to_gradient_(theirs, column, valid, maths, norm, grad, *extra)
    _triton_rows.to_gradient_(ours, column, valid, maths, norm, grad, *extra)
    # The kernel multiplies by 1 / temperature: a last bit of a logit of thousands is 1e-4 of its probability.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6 * (20 + scale)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-4)
    assert not ours[:, valid:].any()
for dtype in (torch.float32, torch.bfloat16):
    rows = torch.randint(-1, 7, (53,), generator=generator)
    rows[10:40] = 3  # more than a program takes at a time
    grad, start = torch.randn(53, 600, generator=generator).to(dtype), torch.randn(9, 600, generator=generator)
    ours, theirs = start.clone(), start.clone()
    _triton_embedding.add_rows_(ours, rows, grad)
    _picked_rows.add_rows_(theirs, rows, grad.float())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
print("same")
"""


@pytest.mark.journey
def test_triton_kernels_equal_torch_in_the_interpreter() -> None:
    run_interpreted("-c", KERNELS)
