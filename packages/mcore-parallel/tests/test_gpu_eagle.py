# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Draft heads on a GPU: unrolled attention by flash kernels against float64, their memory, and a head in bfloat16 that learns from disk."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.models.eagle import DraftRows, DraftVocabulary, EagleConfig, EagleHead, UnrolledAttention
from mcore_parallel.nn import AttentionSpec, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, evaluate, train_step
from mcore_parallel.training.distill import DistillationObjective, Teacher, quantize_student
from mcore_parallel.training.eagle import EagleObjective, FeatureStore, FeatureStoreConfig, FeatureStoreWriter, TargetEnds, record_features

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ONE = ProcessGroups.single()
PLACE: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def unroll(dtype: torch.dtype, seq_len: int, passes: int = 3) -> list[torch.Tensor]:
    """Outputs of the passes and gradients of what they read, of the same random numbers."""
    A, K, d = 8, 2, 64
    spec = AttentionSpec(num_heads=A, num_kv_heads=K, head_dim=d, dtype=dtype)
    core: Any = UnrolledAttention().build_core(spec, ONE, 0)
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(2 * seq_len, heads, d, device="cuda", generator=generator).bfloat16().to(dtype).requires_grad_()
        for heads in (A, K, K) * passes
    ]
    weights = [torch.randn(2 * seq_len, A, d, device="cuda", generator=generator).to(dtype) for _ in range(passes)]
    step = dataclasses.replace(Step.causal(2, seq_len, "cuda"), attention=DraftRows())
    outs = [core(*given[3 * n : 3 * n + 3], 0, step) for n in range(passes)]
    torch.stack([(out * weight).sum() for out, weight in zip(outs, weights, strict=True)]).sum().backward()
    return [x.detach().double() for x in (*outs, *(x.grad for x in given if x.grad is not None))]


def test_unrolled_attention_by_flash_kernels() -> None:
    for found, exact in zip(unroll(torch.bfloat16, 128), unroll(torch.float64, 128), strict=True):
        assert (found - exact).norm() < 1.5e-2 * exact.norm()


def test_no_scores_are_held() -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seq_len = 4096
    unroll(torch.bfloat16, seq_len, passes=4)
    # All scores of one pass would take as much in bfloat16 alone.
    assert torch.cuda.max_memory_allocated() - before < 2 * 8 * seq_len * seq_len * 2


def text(seed: int, count: int = 32, vocab: int = 512, length: int = 64) -> Batch:
    rows = [torch.randint(0, vocab, (count, 1), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))]
    for _ in range(length):
        rows.append((5 * rows[-1] + 7) % vocab)
    tokens = torch.cat(rows, dim=1)
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(count, length, device="cuda"))


def learn(module: Any, objective: Any, batches: list[Batch], steps: int) -> None:
    sync = DistributedDataParallel(DistributedDataParallelConfig(), module, ONE)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-3, weight_decay=0.0), sync, ONE)
    for step in range(steps):
        train_step(module, [batches[step % len(batches)]], objective, sync, optimizer, lr=2e-3)
    sync.close()


def test_a_head_in_bfloat16_learns_from_disk(tmp_path: Path) -> None:
    config = TransformerConfig(num_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=512)
    target = GPTModel(config, ONE, **PLACE)
    learn(target, CrossEntropyObjective(), [text(seed) for seed in range(16)], 200)
    vocabulary = DraftVocabulary.from_counts(torch.bincount(text(0).tokens.flatten().cpu(), minlength=512), 384)
    head_config = EagleConfig.of_target(config, draft_vocab_size=384)
    head, ends = EagleHead(head_config, ONE, vocabulary=vocabulary, **PLACE), TargetEnds(target, vocabulary)
    teacher = Teacher(target, capture=head_config.aux_modules)
    settings = FeatureStoreConfig(
        target="this one", ends=ends.digest(), seq_len=64, hidden_size=256, aux_modules=head_config.aux_modules, dtype="bfloat16"
    )
    with FeatureStoreWriter(tmp_path, settings) as writer:
        record_features(teacher, head_config.aux_modules, [[text(seed)] for seed in range(4)], writer)
    store = FeatureStore(tmp_path, ends=ends.digest(), aux_modules=head_config.aux_modules)
    objective = EagleObjective(target=ends, num_steps=4)
    batches = [store.batch(range(first, first + 32), ONE, device="cuda") for first in range(0, len(store) - 31, 32)]
    (held_out,) = teacher.label([text(1000)])

    def accepted() -> float:
        report = evaluate(head, [held_out], objective)
        return (report.metrics["accepted_tokens"] / report.count).item()

    before = accepted()
    learn(head, objective, batches, 200)
    after = accepted()
    print(f"accepted {before:.3f} before, {after:.3f} after")
    assert before < 0.3 and after > 1.0


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="needs nvidia-modelopt")
@pytest.mark.parametrize("preset", ["FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"])
def test_a_quantised_student_recovers(preset: str) -> None:
    config = TransformerConfig(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=512, init_method_std=0.1)
    teacher, student = Teacher(GPTModel(config, ONE, **PLACE)), GPTModel(config, ONE, **PLACE)
    batches = teacher.label([text(seed) for seed in range(4)])
    quantize_student(student, preset, [text(100)])
    objective = DistillationObjective(teacher=teacher)
    before = evaluate(student, batches, objective).mean.item()
    learn(student, objective, batches, 100)
    after = evaluate(student, batches, objective).mean.item()
    print(f"{preset}: divergence {before:.5f} before, {after:.5f} after")
    assert 0 < after < before
