# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Paged attention against causal attention over the whole sequence."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceContext, InferenceConfig, PagedAttention
from mcore_inference.attention import GatheredRows, PagedStep, TableRows, _core
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import PackedHeads, Step, causal_attention


def make_context(block_size: int, kv_heads: int) -> DynamicInferenceContext:
    config = TransformerConfig(num_layers=2, hidden_size=24, num_attention_heads=6, num_query_groups=kv_heads, kv_channels=4, vocab_size=8)
    sizes = InferenceConfig(max_sequence_length=40, num_blocks=100, block_size_tokens=block_size, max_requests=6, max_tokens=300)
    return DynamicInferenceContext(config, sizes, dtype=torch.float64)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_any_cut_of_sequences_into_steps_equals_causal_attention(block_size: int, kv_heads: int) -> None:
    rng = random.Random(block_size * 10 + kv_heads)
    torch.manual_seed(0)
    context = make_context(block_size, kv_heads)
    core = PagedAttention()
    lengths = [1, 17, 8, 9, 40, 3]
    q = [torch.randn(n, 6, 4, dtype=torch.float64) for n in lengths]
    k = [torch.randn(n, kv_heads, 4, dtype=torch.float64) for n in lengths]
    v = [torch.randn(n, kv_heads, 4, dtype=torch.float64) for n in lengths]
    wanted = [causal_attention(*qkv, 0, Step.causal(1, n)) for *qkv, n in zip(q, k, v, lengths, strict=True)]
    got = [torch.empty_like(x) for x in q]
    # Blocks in random order: a request's blocks are no range.
    rng.shuffle(context.allocator._free)
    for number in range(len(lengths)):
        context.add_request(number)
    done = [0] * len(lengths)
    while done != lengths:
        left = [number for number in range(len(lengths)) if done[number] < lengths[number]]
        work = [(n, rng.choice([1, 1, 2, 7, 40])) for n in rng.sample(left, rng.randint(1, len(left)))]
        work = sorted(((n, min(count, lengths[n] - done[n])) for n, count in work), key=lambda item: item[1] > 1)
        for number, count in work:
            context.extend(number, count)
        inputs = context.build_step([(number, [0] * count) for number, count in work])
        prefill = inputs.step.attention.rows.prefill
        assert prefill is None or (prefill.visible_PQL is None) == all(done[number] == 0 for number, count in work if count > 1)
        parts = [torch.cat([x[n][done[n] : done[n] + count] for n, count in work]) for x in (q, k, v)]
        for layer in range(2):
            out = core(*parts, layer, inputs.step)
        starts = itertools.accumulate((count for _, count in work[:-1]), initial=0)
        for (number, count), start in zip(work, starts, strict=True):
            got[number][done[number] : done[number] + count] = out[start : start + count]
            context.advance(number, count)
            done[number] += count
    for number, length in enumerate(lengths):
        torch.testing.assert_close(got[number], wanted[number], rtol=1e-12, atol=1e-12)
        table = torch.tensor(context.block_table(number)).repeat_interleave(block_size)[:length] * block_size
        slots = table + torch.arange(length) % block_size
        keys, values = context.cache.slots(1)
        assert torch.equal(keys[slots], k[number]) and torch.equal(values[slots], v[number])


def test_garbage_of_one_request_reaches_no_other() -> None:
    context, core = make_context(4, 2), PagedAttention()
    for number in (0, 1, 2):
        context.add_request(number)
        context.extend(number, 6 + number)
    inputs = context.build_step([(number, [0] * (6 + number)) for number in (0, 1, 2)])
    torch.manual_seed(0)
    q, k, v = torch.randn(21, 6, 4).double(), torch.randn(21, 2, 4).double(), torch.randn(21, 2, 4).double()
    k[6:13], v[6:13] = torch.nan, torch.nan
    out = core(q, k, v, 0, inputs.step)
    assert torch.isfinite(out[:6]).all() and torch.isfinite(out[13:]).all()
    # A later request takes over the poisoned blocks, and fills them only in part.
    context.release(1)
    context.add_request(3)
    context.extend(3, 5)
    inputs = context.build_step([(3, [0] * 5)])
    assert torch.isfinite(core(q[:5], k[:5], v[:5], 0, inputs.step)).all()


def test_without_paged_data_it_is_causal_attention_and_keeps_no_state() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(12, 6, 4), torch.randn(12, 2, 4), torch.randn(12, 2, 4)
    step = Step.causal(3, 4)
    torch.testing.assert_close(PagedAttention()(q, k, v, 0, step), causal_attention(q, k, v, 0, step))
    assert not PagedAttention().state_dict()


def test_layers_alike_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 8, "window_size": (3, 0)}
    config = TransformerConfig(**sizes, window_attn_skip_freq=2)
    with caplog.at_level("INFO", "mcore_parallel.nn"):
        GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention())
    assert len(caplog.messages) == 2 and "window=(3, 0)" in caplog.messages[0]


def test_data_of_another_core_is_refused() -> None:
    x = torch.zeros(1, 1, 4)
    step = Step(batch_size=1, seq_len=1, positions=torch.zeros(1, dtype=torch.int64), attention={"mask": None})
    with pytest.raises(TypeError, match="PagedStep"):
        PagedAttention()(x, x, x, 0, step)


def test_packed_heads_are_taken_where_the_kernels_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "has_kernels", lambda *_: True)
    context, core = make_context(16, 2), PagedAttention()
    numbers = torch.zeros(2, dtype=torch.int32)
    rows = TableRows(
        tables_RB=numbers[:, None], starts_R=numbers, contexts_R=numbers, num_decode=2, tiles=None, whole_tiles=None, block_size=16,
        longest=64, longest_query=1,
    )  # fmt: skip
    paged = PagedStep(cache=context.cache, slots_T=numbers.long(), rows=rows, finished=numbers)
    step = dataclasses.replace(Step.causal(1, 2), attention=paged)

    def takes(width: int = 8, dtype: torch.dtype = torch.bfloat16, step: Step = step, turned: int | None = None, **fields: Any) -> bool:
        tables = None if turned is None else (torch.ones(2, turned), torch.ones(2, turned))
        return core.takes_packed(PackedHeads(qkv=torch.zeros(2, 2, 4, width, dtype=dtype), tables=tables, **fields), 0, step)

    assert takes() and takes(turned=8) and takes(256) and takes(128, torch.float32)
    assert not takes(turned=4), "heads that turn in part"
    assert not takes(turned=8, interleaved=True)
    assert not takes(258) and not takes(256, torch.float32) and not takes(7)
    assert not takes(step=Step.causal(1, 2))
    gathered = dataclasses.replace(paged, rows=GatheredRows(decode=None, prefill=None))
    assert not takes(step=dataclasses.replace(step, attention=gathered))
    assert not takes(step=dataclasses.replace(step, attention=dataclasses.replace(paged, finished=None)))
    with pytest.raises(TypeError, match="step.attention is a str"):
        takes(step=dataclasses.replace(step, attention="pages"))
    monkeypatch.setattr(_core, "has_kernels", lambda *_: False)
    assert not takes()
