# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Penalties, biases and bans by state on the device, against one row after the other on the host."""

import math
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import SamplingParams
from mcore_inference.sampling import AdjustRows, ScoreAdjuster
from tests.support.interpreter import run_interpreted


def adjust(
    logits_RV: Tensor,
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    banned: Sequence[Collection[int]],
    bad_words: Sequence[Sequence[Sequence[int]]],
) -> Tensor:
    """[R, V] in float32: what each row's own settings and tokens make of its logits, one row after the other."""
    result_RV = logits_RV.to(torch.float32, copy=True)
    for row_V, p, prompt, output, bans, words in zip(result_RV, params, prompts, outputs, banned, bad_words, strict=True):
        if p.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.int64)
            values = row_V[seen]
            row_V[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if output and (p.presence_penalty or p.frequency_penalty):
            counts_V = torch.bincount(torch.tensor(list(output)), minlength=logits_RV.shape[1])
            row_V -= p.frequency_penalty * counts_V + p.presence_penalty * (counts_V > 0)
        if p.logit_bias:
            row_V[list(p.logit_bias)] += torch.tensor(list(p.logit_bias.values()))
        row_V[list(bans)] = -math.inf
        if p.allowed_token_ids is not None:
            kept_V = torch.full_like(row_V, -math.inf)
            kept_V[list(p.allowed_token_ids)] = row_V[list(p.allowed_token_ids)]
            row_V.copy_(kept_V)
        row_V[[word[-1] for word in words if [*output, word[-1]][-len(word) :] == word]] = -math.inf
    return result_RV


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Settings of any kind, some of none."""
    ids = rng.sample(range(vocab_size), rng.choice([1, 5, min(40, vocab_size // 2)]))
    fields: dict[str, Any] = {
        "repetition_penalty": rng.uniform(0.5, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "logit_bias": {token: rng.uniform(-9, 9) for token in ids},
        "min_tokens": rng.randrange(1, 12),
        "allowed_token_ids": rng.choices(range(vocab_size), k=rng.choice([1, 5, vocab_size])),
    }
    return SamplingParams(**{name: value for name, value in fields.items() if rng.random() < (0.25 if name[0] == "a" else 0.5)})


class Line:
    """A request on a line, as the host knows it."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self.params = random_params(rng, vocab_size)
        self.stop_ids = rng.sample(range(vocab_size), rng.choice([0, 1, 6]))
        self.prompt = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 40]))]
        # Some come back with an output.
        self.output = [rng.randrange(min(vocab_size, 9)) for _ in range(rng.choice([0, 0, 7, 40]))]
        sizes = rng.choice([(), (1, 1), (1, 2, 2, 3, 5), (2,) * 20])
        self.bad_words = [[rng.randrange(min(vocab_size, 9)) for _ in range(size)] for size in sizes]
        if self.bad_words and self.output:
            self.bad_words.append([*self.output[-31:], rng.randrange(vocab_size)])

    def banned(self, position: int) -> Collection[int]:
        return self.stop_ids if position < self.params.min_tokens else ()


def check(device: str, dtype: torch.dtype, columns: int, vocab_size: int, steps: int, seed: int = 0) -> None:
    """Requests come, go and come back on eight lines; some rows assume proposals. Scores are those of the host, to the bit."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    last_tokens = torch.zeros(8, dtype=torch.int64, device=device)
    adjuster, lines = ScoreAdjuster(last_tokens, vocab_size), dict[int, Line]()
    banned_rows = 0
    for step in range(steps):
        for line in range(8):
            if line in lines and rng.random() < 0.2:
                del lines[line]
                adjuster.release(line)
            if line not in lines and rng.random() < 0.5:
                lines[line] = new = Line(rng, vocab_size)
                adjuster.begin(line, new.params, new.stop_ids, new.prompt, new.output, new.bad_words)
        if step == steps // 2:
            adjuster.clear()
            for line, old in lines.items():
                adjuster.begin(line, old.params, old.stop_ids, old.prompt, old.output, old.bad_words)
        if not lines:
            continue
        drafts = {line: [rng.randrange(9) for _ in range(rng.choice([0, 0, 3]))] for line in lines}
        places = [(line, count) for line in rng.sample(list(lines), len(lines)) for count in range(len(drafts[line]) + 1)]
        # Two rows are of nobody who asks.
        logits = (torch.randn(len(places) + 2, columns, generator=generator) * 4).to(dtype)
        logits[0, 0], logits[-1, 1] = -math.inf, math.inf
        rows = list(range(1, len(places) + 1))
        numbers = [line for line, _ in places]
        assumed = [drafts[line][:count] for line, count in places]
        chosen = adjuster.rows(rows, numbers, assumed, [line for line in numbers if not drafts[line]])
        outputs = [[], *([*lines[line].output, *tokens] for line, tokens in zip(numbers, assumed, strict=True)), []]
        positions = [len(output) for output in outputs]
        scores = adjuster.adjust(logits.to(device), torch.tensor(positions, device=device), chosen)
        owners = [None, *(lines[line] for line in numbers), None]
        wanted = adjust(
            logits[:, :vocab_size],
            [SamplingParams() if owner is None else owner.params for owner in owners],
            [() if owner is None else owner.prompt for owner in owners],
            outputs,
            [() if owner is None else owner.banned(position) for owner, position in zip(owners, positions, strict=True)],
            [() if owner is None else owner.bad_words for owner in owners],
        )
        assert torch.equal(scores.cpu(), wanted), f"step {step}"
        for line, one in lines.items():
            one.output.append(rng.randrange(min(vocab_size, 9)))
            last_tokens[line] = one.output[-1]
        adjuster.count(chosen)
        for line, tokens in drafts.items():
            if tokens:
                # Of proposals the host says which were drawn.
                lines[line].output += tokens[:1]
                adjuster.extend(line, lines[line].output[-1 - len(tokens[:1]) :])
        assert all(adjuster.num_counted[line] == len(one.output) for line, one in lines.items() if one.params.has_penalties)
        banned_rows += len(chosen.words_B3)
    assert banned_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_scores_of_random_requests_are_those_of_one_row_after_the_other(dtype: torch.dtype, seed: int) -> None:
    check("cpu", dtype, 61, 57, steps=40, seed=seed)


@pytest.mark.journey
def test_the_kernel_gives_the_bits_of_torch_in_the_interpreter() -> None:
    run_interpreted(__file__)


def test_the_kernel_compiles_for_hopper_and_rounds_every_product_and_quotient(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mcore_inference.sampling import _adjust_triton, _adjuster
    from tests.support.hopper import CompiledLaunches

    launches, bans = CompiledLaunches(_adjust_triton._adjust_kernel), CompiledLaunches(_adjust_triton._ban_kernel)
    monkeypatch.setattr(_adjust_triton, "_adjust_kernel", launches)
    monkeypatch.setattr(_adjust_triton, "_ban_kernel", bans)
    monkeypatch.setattr(_adjuster, "has_kernels", lambda *_: True)
    adjuster = ScoreAdjuster(torch.zeros(2, dtype=torch.int64), 9000)
    adjuster.begin(0, SamplingParams(repetition_penalty=2.0), (), [1], [2], [[3, 4]])
    adjuster.adjust(torch.zeros(1, 9000), torch.tensor([1]), one_row(adjuster))
    (ptx,) = launches.ptx
    assert len(bans.ptx) == 1
    assert "fma" not in ptx and "div.rn.f32" in ptx and "div.full" not in ptx


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "vocab_size"), [(61, 57), (9000, 8990), (151936, 151936)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_bits_of_torch_on_a_gpu(dtype: torch.dtype, columns: int, vocab_size: int) -> None:
    check("cuda", dtype, columns, vocab_size, steps=20)


def one_row(adjuster: ScoreAdjuster) -> AdjustRows:
    return adjuster.rows([0], [0], [()], [0])


def test_penalties_biases_and_bans_move_scores_as_defined() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 3.0]])
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: -10.0, 2: 1.0}, min_tokens=3
    )
    adjuster = ScoreAdjuster(torch.tensor([0, 1]), 4)
    adjuster.begin(0, params, [2], [0], [1])
    rows = one_row(adjuster)
    assert adjuster.adjust(logits, torch.tensor([1]), rows).tolist() == [[0.5, -2.0 - 0.5 - 0.25, -math.inf, -7.0]]
    # Token 0 was drawn, and then 1 twice.
    adjuster.count(rows)
    adjuster.extend(0, [1, 1])
    scores = adjuster.adjust(logits, torch.tensor([4]), one_row(adjuster))
    assert scores.tolist() == [[0.5 - 0.5 - 0.25, -2.0 - 0.5 - 0.75, 3.0, -7.0]]
    assert logits.tolist() == [[1.0, -1.0, 2.0, 3.0]]
    exact = adjuster.adjust(logits.double() / 3, torch.tensor([4]), rows)
    assert exact.dtype == torch.float64 and exact.tolist() == [[0.5 / 3 - 0.75, -2.0 / 3 - 1.25, 2.0 / 3 + 1, 1.0 - 10]]


def test_the_last_token_of_a_word_is_banned_behind_the_others_only() -> None:
    adjuster = ScoreAdjuster(torch.tensor([7]), 9)
    adjuster.begin(0, SamplingParams(logit_bias={2: 5.0}), (), [1, 1], [1], [[5], [1, 2], [4, 1, 3], [1, 6, 8]])

    def banned(*drafts: int) -> list[int]:
        rows = adjuster.rows([0], [0], [drafts], [])
        return adjuster.adjust(torch.zeros(1, 9), torch.tensor([1]), rows)[0].isneginf().nonzero()[:, 0].tolist()

    # The prompt is no output: 3 may follow.
    assert banned() == [2, 5]
    assert banned(6) == [5, 8] and banned(4) == [5] and banned(4, 1) == [2, 3, 5]
    # 7 was drawn last; then the host says 1.
    adjuster.count(adjuster.rows([0], [0], [()], [0]))
    assert banned() == [5]
    adjuster.extend(0, [4, 1])
    assert banned() == [2, 3, 5]
    # Another request has the line.
    adjuster.begin(0, SamplingParams(), (), [1], [], [[1, 2], [8]])
    assert banned() == [8] and banned(1) == [2, 8]


def test_memory_is_of_the_requests_that_ask_and_of_no_more_than_there_are_lines() -> None:
    vocab_size, num_lines = 1000, 5
    adjuster = ScoreAdjuster(torch.zeros(num_lines, dtype=torch.int64), vocab_size)
    assert adjuster.num_bytes == 0
    penalty, bias = SamplingParams(frequency_penalty=1.0), SamplingParams(logit_bias={3: 1.0, 4: 1.0})
    adjuster.begin(0, bias, (), [1], [])
    one_row(adjuster)
    tables = 3 * 8 * 1024
    assert adjuster.num_bytes == tables
    sizes = []
    for line in range(num_lines):
        adjuster.begin(line, penalty, (), [1], [])
        adjuster.rows([0], [line], [()], [line])
        sizes.append((adjuster.num_bytes - tables) // (4 * vocab_size))
    assert sizes == [1, 2, 4, 4, 5]
    for _ in range(20):
        for line in range(num_lines):
            adjuster.begin(line, SamplingParams(presence_penalty=1.0, logit_bias=dict.fromkeys(range(100), 1.0)), (), [1], [2])
        adjuster.rows(range(num_lines), range(num_lines), [()] * num_lines, [])
    # The entries of those that went leave no gaps for good.
    assert adjuster.num_bytes == tables + 4 * vocab_size * num_lines
    adjuster.clear()
    assert adjuster.num_bytes == 0


if __name__ == "__main__":
    from mcore_inference.sampling import _adjuster

    _adjuster.has_kernels = lambda *_: True
    check("cpu", torch.float32, 61, 57, steps=6)
    check("cpu", torch.bfloat16, 9000, 8990, steps=4)
    print("same")
