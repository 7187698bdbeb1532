# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Distillation on a GPU: divergences of bfloat16 logits against float64, their memory, and a student that learns."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, train_step
from mcore_parallel.training.distill import (
    DistillationConfig,
    DistillationObjective,
    HiddenCapture,
    HiddenPair,
    HiddenProjection,
    Teacher,
    vocab_parallel_kl_divergence,
    vocab_parallel_sparse_kl_divergence,
    vocab_parallel_top_k,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ONE = ProcessGroups.single()


def logits(seed: int, tokens: int, vocabulary: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(tokens, vocabulary, device="cuda", generator=generator) * 3).bfloat16()


@pytest.mark.parametrize("reverse", [False, True])
def test_the_divergence_of_bfloat16_logits(reverse: bool) -> None:
    student, teacher = logits(0, 256, 32000).requires_grad_(), logits(1, 256, 32000)
    found = vocab_parallel_kl_divergence(student, teacher, group=ONE.tp, temperature=2.0, reverse=reverse)
    exact = student.detach().double().requires_grad_()
    q, p = F.log_softmax(exact / 2, -1), F.log_softmax(teacher.double() / 2, -1)
    expected = F.kl_div(*((p, q) if reverse else (q, p)), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    expected.sum().backward()
    assert student.grad is not None and exact.grad is not None
    assert (student.grad.double() - exact.grad).norm() < 4e-3 * exact.grad.norm()


def test_likely_tokens_of_bfloat16_logits() -> None:
    student, teacher = logits(0, 64, 4096).requires_grad_(), logits(1, 64, 4096)
    values, ids = vocab_parallel_top_k(teacher, 4096, group=ONE.tp)
    found = vocab_parallel_sparse_kl_divergence(student, values, ids, group=ONE.tp)
    torch.testing.assert_close(found, vocab_parallel_kl_divergence(student, teacher, group=ONE.tp), rtol=1e-4, atol=1e-4)
    values, ids = vocab_parallel_top_k(teacher, 64, group=ONE.tp)
    (few := vocab_parallel_sparse_kl_divergence(student, values, ids, group=ONE.tp)).sum().backward()
    assert (few <= found + 1e-4).all() and torch.isfinite(student.grad).all()


def test_no_wide_copy_of_the_logits_exists() -> None:
    student, teacher = logits(0, 8192, 64000).requires_grad_(), logits(1, 8192, 64000)
    size = student.numel() * student.element_size()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = vocab_parallel_kl_divergence(student, teacher, group=ONE.tp).sum()
    # The kept gradient in the logits' dtype, and parts in float32.
    assert torch.cuda.max_memory_allocated() - before < 1.6 * size
    assert torch.cuda.memory_allocated() - before < 1.05 * size
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 2.2 * size


def test_a_student_in_bfloat16_learns() -> None:
    sizes = {"num_attention_heads": 4, "vocab_size": 256, "init_method_std": 0.1}
    place = {"dtype": torch.bfloat16, "device": "cuda"}
    config = DistillationConfig(temperature=2.0, pairs=(HiddenPair(student="layers.1", teacher="layers.3"),))
    teacher = Teacher(
        GPTModel(TransformerConfig(num_layers=4, hidden_size=256, **sizes), ONE, seed=1, **place), capture=config.teacher_modules
    )
    student = GPTModel(TransformerConfig(num_layers=2, hidden_size=128, **sizes), ONE, **place)
    projection = HiddenProjection(128, 256, ONE, **place)
    student.add_module("distill_projection", projection)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), student, ONE)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=3e-3), sync, ONE)
    tokens = torch.randint(0, 256, (4, 129), device="cuda")
    batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(4, 128, device="cuda"))
    with HiddenCapture(student, config.student_modules) as capture:
        objective = DistillationObjective(config=config, teacher=teacher, capture=capture, projection=projection)
        reports = [train_step(student, teacher.label([batch]), objective, sync, optimizer, lr=3e-3) for _ in range(30)]
    first, last = (report.metrics["logits_distillation_loss"] for report in (reports[0], reports[-1]))
    assert last < 0.7 * first
