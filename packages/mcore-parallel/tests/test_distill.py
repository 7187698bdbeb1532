# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The losses of distillation against their formulas, whole and over two ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, ModelOutput, OutputLayer, TransformerConfig
from mcore_parallel.training import Batch
from mcore_parallel.training.distill import (
    DistillationConfig,
    DistillationObjective,
    FixedBalancer,
    HiddenCapture,
    HiddenPair,
    HiddenProjection,
    LossParts,
    RatioBalancer,
    Teacher,
    _divergence,
    hidden_cosine_loss,
    hidden_mse_loss,
    vocab_parallel_kl_divergence,
    vocab_parallel_sparse_kl_divergence,
    vocab_parallel_top_k,
)

T, V, REAL = 6, 8, 7
ONE = ProcessGroups.single()


def logits(seed: int) -> Tensor:
    return torch.randn(2, T // 2, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def whole(student: Tensor, teacher: Tensor, temperature: float, reverse: bool, vocab_size: int) -> Tensor:
    q, p = (F.log_softmax(x[..., :vocab_size] / temperature, -1) for x in (student, teacher))
    if reverse:
        p, q = q, p
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("temperature", "vocab_size"), [(1.0, V), (2.5, REAL)])
def test_the_divergence_is_that_of_the_formula_with_its_gradient(
    monkeypatch: pytest.MonkeyPatch, reverse: bool, temperature: float, vocab_size: int
) -> None:
    # A few tokens at a time.
    monkeypatch.setattr(_divergence, "_CHUNK", 2 * V)
    student, teacher = logits(0).requires_grad_(), logits(1)
    given = student.detach().clone(), teacher.clone()

    def loss(x: Tensor) -> Tensor:
        return vocab_parallel_kl_divergence(x, teacher, group=ONE.tp, temperature=temperature, reverse=reverse, vocab_size=vocab_size)

    torch.testing.assert_close(loss(student), whole(student, teacher, temperature, reverse, vocab_size), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(loss, student)
    assert torch.equal(student, given[0]) and torch.equal(teacher, given[1])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_have_no_divergence_and_huge_ones_a_finite_one(reverse: bool, dtype: torch.dtype) -> None:
    x = (logits(0) * 1000).to(dtype).requires_grad_()
    same = vocab_parallel_kl_divergence(x, x, group=ONE.tp, reverse=reverse)
    assert same.dtype == torch.float32
    assert torch.equal(same, torch.zeros_like(same))
    (grad,) = torch.autograd.grad(same.sum(), x)
    assert grad.dtype == dtype and grad.abs().max() == 0
    other = vocab_parallel_kl_divergence(x, (logits(1) * 1000).to(dtype), group=ONE.tp, reverse=reverse)
    assert torch.isfinite(other).all() and (other >= 0).all() and other.max() > 100


def test_likely_tokens_and_the_rest_bound_the_divergence_and_reach_it() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    before = torch.zeros(2, T // 2, dtype=torch.float64)
    for k in range(1, REAL + 1):
        values, ids = vocab_parallel_top_k(teacher, k, group=ONE.tp, temperature=2.0, vocab_size=REAL)
        p = F.softmax(teacher[..., :REAL] / 2, -1)
        torch.testing.assert_close(values.exp(), p.topk(k).values)
        assert torch.equal(ids, p.topk(k).indices)

        def loss(x: Tensor, values: Tensor = values, ids: Tensor = ids) -> Tensor:
            return vocab_parallel_sparse_kl_divergence(x, values, ids, group=ONE.tp, temperature=2.0, vocab_size=REAL)

        assert torch.autograd.gradcheck(loss, student)
        found = loss(student).detach()
        # Finer events tell more apart.
        assert (found >= before - 1e-12).all()
        before = found
    torch.testing.assert_close(before, whole(student.detach(), teacher, 2.0, False, REAL), rtol=1e-12, atol=1e-12)


def check_split(expected: dict[str, Any]) -> None:
    tp = ProcessGroups.build(ParallelPlan(tp=2)).tp
    mine = slice(tp.rank * V // 2, (tp.rank + 1) * V // 2)
    for name, (value, grad) in expected.items():
        student, teacher = logits(0)[..., mine].requires_grad_(), logits(1)[..., mine]
        found = losses(student, teacher, tp)[name]
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
        found.square().sum().backward()
        torch.testing.assert_close(student.grad, grad[..., mine], rtol=1e-12, atol=1e-12)


def losses(student: Tensor, teacher: Tensor, tp: Any) -> dict[str, Tensor]:
    found = {}
    for size in (V, REAL, V // 2):
        options = {"group": tp, "temperature": 1.5, "vocab_size": size}
        values, ids = vocab_parallel_top_k(teacher, 3, **options)
        found[f"forward {size}"] = vocab_parallel_kl_divergence(student, teacher, **options)
        found[f"reverse {size}"] = vocab_parallel_kl_divergence(student, teacher, reverse=True, **options)
        found[f"sparse {size}"] = vocab_parallel_sparse_kl_divergence(student, values, ids, **options)
    return found


@pytest.mark.world(2)
def test_two_ranks_find_the_divergence_of_one(world: Any) -> None:
    expected = {}
    for name in losses(logits(0), logits(1), ONE.tp):
        student = logits(0).requires_grad_()
        found = losses(student, logits(1), ONE.tp)[name]
        found.square().sum().backward()
        expected[name] = (found.detach(), student.grad)
    world(check_split, expected=expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"vocab_size": V + 1}, "vocab_size=9 must lie between 1 and the 8 columns"),
        ({"teacher_logits": torch.zeros(1, V)}, r"teacher_logits of shape \(1, 8\) must have the shape of student_logits, \(2, 3, 8\)"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    given = {"student_logits": logits(0), "teacher_logits": logits(1), "group": ONE.tp}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_kl_divergence(**{**given, **change})
    with pytest.raises(ValueError, match="k=9 must lie between 1 and vocab_size=8"):
        vocab_parallel_top_k(logits(0), 9, group=ONE.tp)


def test_losses_of_hidden_states() -> None:
    a, b = logits(0).requires_grad_(), logits(1)
    cosine = (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)
    torch.testing.assert_close(hidden_cosine_loss(a, b), 1 - cosine)
    torch.testing.assert_close(hidden_mse_loss(a, b), (a - b).pow(2).mean(-1))
    assert hidden_mse_loss(a.bfloat16(), b.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match="models of different widths need a HiddenProjection"):
        hidden_mse_loss(a, b[..., :4])
    projection = HiddenProjection(V, 5, ONE, dtype=torch.float64)
    assert projection(a).shape == (2, 3, 5)
    assert projection.weight.std() < 0.02 and projection.bias.abs().max() == 0
    with pytest.raises(ValueError, match="loss='l1' must be one of cosine, mse"):
        HiddenPair(student="a", teacher="b", loss="l1")


def parts(*values: float) -> LossParts:
    language, logit, *rest = (torch.tensor(value, dtype=torch.float64) for value in values)
    return LossParts(language=language, logits=logit, intermediate=rest[0] if rest else None)


def test_balancers() -> None:
    found = RatioBalancer().weights(parts(6.0, 2.0, 0.5))
    assert (found.language, found.logits, found.intermediate) == (0.0, 1.0, 4.0)
    # kd = 2 + 4 * 0.5 = 4 is scaled to 6, and weighs 3 / 2.
    found = RatioBalancer(skip_lm_loss=False, kd_loss_scale=3.0).weights(parts(6.0, 2.0, 0.5))
    assert (found.language, found.logits, found.intermediate) == (1.0, 2.25, 9.0)
    found = RatioBalancer(skip_lm_loss=False, kd_loss_scale=3.0).weights(parts(6.0, 2.0))
    assert (found.language, found.logits, found.intermediate) == (1.0, 9.0, None)
    assert FixedBalancer(language=0.5).weights(parts(6.0, 2.0, 0.5)).language == 0.5
    for balancer in (RatioBalancer(), RatioBalancer(skip_lm_loss=False)):
        for nothing in (parts(0.0, 0.0, 0.0), parts(3.0, 0.0, 0.0), parts(0.0, 2.0, 0.0)):
            found = balancer.weights(nothing)
            assert all(torch.isfinite(x) for x in (found.language, found.logits, found.intermediate) if x is not None)
    with pytest.raises(ValueError, match="kd_loss_scale=-1 must be at least 0"):
        RatioBalancer(kd_loss_scale=-1)
    with pytest.raises(ValueError, match="logits=-1 must be at least 0"):
        FixedBalancer(logits=-1)


def test_a_capture_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    capture = HiddenCapture(model, ["0", "1", "0"])
    with pytest.raises(RuntimeError, match="nothing was captured of"):
        capture.take()
    with capture:
        out = model(torch.ones(1, 2))
        found = capture.take()
        assert found["1"] is out and set(found) == {"0", "1"}
        model[0](torch.ones(1, 2))
        with pytest.raises(RuntimeError, match="nothing was captured of"):
            capture.take()
        model(torch.ones(1, 2))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="nothing was captured of"):
        capture.take()
    with pytest.raises(ValueError, match="no module '7' in the chunk with the output"):
        HiddenCapture(model, ["7"])


CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=8, vocab_size=V)


def batch() -> Batch:
    tokens = torch.randint(0, V, (2, 4), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 3, dtype=torch.float64)
    mask[0, 1] = 0.0
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask)


def test_masked_tokens_count_for_nothing() -> None:
    teacher = Teacher(GPTModel(CONFIG, ONE, dtype=torch.float64, seed=1))
    (given,) = teacher.label([batch()])
    layer = OutputLayer(V, 8, ONE, dtype=torch.float64)
    assert layer.weight is not None
    nn.init.normal_(layer.weight)
    hidden = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    objective = DistillationObjective(teacher=teacher, balancer=FixedBalancer(language=1.0))
    report = objective(ModelOutput(hidden, layer), given)
    report.sum.backward()
    assert hidden.grad is not None
    assert (hidden.grad.abs().sum(-1) > 0).tolist() == [True, False, True, True, True, True]
    assert report.count == 5
    torch.testing.assert_close(report.sum.detach(), report.metrics["lm_loss"] + report.metrics["logits_distillation_loss"])


def test_a_model_that_is_its_teacher_learns_nothing_from_it() -> None:
    frozen, student = (GPTModel(CONFIG, ONE, dtype=torch.float64) for _ in range(2))
    config = DistillationConfig(pairs=(HiddenPair(student="layers.0", teacher="layers.0", loss="mse"),))
    teacher = Teacher(frozen, capture=config.teacher_modules)
    assert not frozen.training and not any(parameter.requires_grad for parameter in frozen.parameters())
    (given,) = teacher.label([batch()])
    with HiddenCapture(student, config.student_modules) as capture:
        objective = DistillationObjective(config=config, teacher=teacher, capture=capture)
        output, _ = student(given.tokens.flatten(), given.step())
        with pytest.raises(ValueError, match="the batch has no extra 'teacher_hidden'"):
            objective(output, batch())
        report = objective(output, given)
        report.sum.backward()
    assert report.sum == 0 and report.metrics["intermediate_distillation_loss"] == 0
    assert report.metrics["lm_loss"] > 0
    assert all(parameter.grad is not None and parameter.grad.abs().max() < 1e-15 for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in frozen.parameters())


def test_objectives_that_cannot_be_are_refused() -> None:
    config = DistillationConfig(pairs=(HiddenPair(student="layers.0", teacher="layers.0"),))
    with pytest.raises(ValueError, match="pairs=1 of hidden states need a teacher that runs and a HiddenCapture"):
        DistillationObjective(config=config)
    student = GPTModel(CONFIG, ONE)
    output, given = student(batch().tokens.flatten(), batch().step())[0], batch()
    with pytest.raises(ValueError, match="the batch has no extra 'teacher_log_probs'"):
        DistillationObjective()(output, given)
    other = Teacher(GPTModel(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=2 * V), ONE))
    with pytest.raises(ValueError, match="teacher and student differ in"):
        DistillationObjective(teacher=other)(output, other.label([given])[0])
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        DistillationConfig(temperature=0)
