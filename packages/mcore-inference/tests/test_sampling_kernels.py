# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels that draw tokens against the torch path."""

import math

import pytest
import torch

from mcore_inference import SamplingParams
from mcore_inference.sampling import SamplingRows, log_probs, processed_log_probs, sample
from tests.support.interpreter import run_interpreted


def check(device: str, dtype: torch.dtype, columns: int, vocab_size: int) -> None:
    """Same seeds, same tokens as the torch path, row by row; a threshold within rounding of a border may fall on either side."""
    from mcore_inference.sampling._triton import draw

    torch.manual_seed(0)
    rows = 12
    logits = (torch.randn(rows, columns) * 4).to(dtype).to(device)
    # The best of these rows stands twice; the tail of that one is forbidden.
    logits[3, [7, 900]] = 50.0
    logits[4, 5:] = -torch.inf
    temperatures = [0.0, 1.0, 0.3, 0.0, 2.0, 1.0, 0.7, 1.0, 1.0, 1e-3, 1.0, 1.0]
    params = [SamplingParams(temperature=t) for t in temperatures]
    seeds, positions = [11 * row - 40 for row in range(rows - 1)] + [2**62 + 5], list(range(3, 3 + rows))
    settings = SamplingRows.of(params, seeds, positions, vocab_size, device)
    processed = torch.arange(rows, device=device) % 3 // 2
    inputs = settings.temperature.float(), settings.seed, settings.position, processed, vocab_size
    tokens, values = draw(logits, *inputs)
    wanted = sample(logits[:, :vocab_size].double(), settings)
    assert tokens.tolist() == wanted.tolist()
    assert torch.equal(draw(logits, *inputs, wants_log_probs=False)[0], tokens)
    raw, drawn = log_probs(logits), processed_log_probs(logits[:, :vocab_size], settings)
    wanted_values = torch.where(processed == 1, *(x.gather(1, wanted[:, None])[:, 0] for x in (drawn, raw)))
    torch.testing.assert_close(values, wanted_values, rtol=1e-4, atol=1e-4)
    assert (tokens < vocab_size).all() and tokens[3] == 7 and tokens[4] < 5

    logits[0, 3], logits[1, vocab_size - 1], logits[2, :] = math.nan, math.inf, -math.inf
    tokens, _ = draw(logits, *inputs)
    assert tokens[:3].tolist() == [-1, -1, -1] and tokens[3:].tolist() == wanted[3:].tolist()


def check_ranked(device: str, dtype: torch.dtype, columns: int, vocab_size: int, draws: int) -> None:
    """Rows of different top-k, top-p and min-p, with ties at every border, against the torch path."""
    from mcore_inference.sampling._ranked import draw_ranked

    generator = torch.Generator().manual_seed(0)
    kinds = [
        {"top_k": 5}, {"top_k": 1}, {"top_p": 0.9}, {"top_p": 0.3, "top_k": 40}, {"min_p": 0.05}, {"min_p": 0.2, "top_p": 0.5}, {},
        {"top_k": 7, "top_p": 0.999}, {"temperature": 0.0}, {"top_k": 900, "temperature": 0.2}, {"top_p": 1e-6}, {"top_k": 3, "min_p": 1.0},
    ]  # fmt: skip
    params = [SamplingParams(**{"temperature": 0.8, **fields}) for fields in kinds]
    for number in range(draws):
        logits = torch.randn(len(params), columns, generator=generator) * 3
        if number % 2:
            # Few different values: every border lies among equal scores.
            logits = (logits * 1.5).round() / 1.5
        logits = logits.to(dtype).to(device)
        seeds, positions = list(range(100 * number, 100 * number + len(params))), list(range(len(params)))
        settings = SamplingRows.of(params, seeds, positions, vocab_size, device)
        processed = torch.arange(len(params), device=device) % 2
        tokens, values = draw_ranked(logits, settings, processed, vocab_size)
        wanted = sample(logits[:, :vocab_size], settings)
        assert tokens.tolist() == wanted.tolist()
        raw, drawn = log_probs(logits), processed_log_probs(logits[:, :vocab_size], settings)
        wanted_values = torch.where(processed == 1, *(x.gather(1, wanted[:, None])[:, 0] for x in (drawn, raw)))
        torch.testing.assert_close(values, wanted_values, rtol=1e-4, atol=1e-4)
    logits[0, 3], logits[1, vocab_size - 1], logits[2, :] = math.nan, math.inf, -math.inf
    tokens, _ = draw_ranked(logits, settings, processed, vocab_size, wants_log_probs=False)
    assert tokens[:3].tolist() == [-1, -1, -1] and tokens[3:].tolist() == wanted[3:].tolist()


def check_frequencies(device: str) -> None:
    """Chi-square of draws from one distribution by 512 seeds a launch, each row with top-k and top-p."""
    from mcore_inference.sampling._ranked import draw_ranked

    rows, launches, logits = 512, 8, torch.linspace(0.0, 3.0, 40, device=device).expand(512, 40).contiguous()
    params, counts = [SamplingParams(temperature=1.0, top_k=12, top_p=0.8)] * rows, torch.zeros(40)
    for launch in range(launches):
        settings = SamplingRows.of(params, list(range(rows)), [launch] * rows, 40, device)
        tokens, _ = draw_ranked(logits, settings, torch.zeros(rows, dtype=torch.int64, device=device), 40, wants_log_probs=False)
        counts += torch.bincount(tokens.cpu(), minlength=40)
    shares = processed_log_probs(logits[:1].cpu(), SamplingRows.of(params[:1], [0], [0], 40))[0].exp()
    assert not counts[shares == 0].any()
    expected = shares[shares > 0] * rows * launches
    # 99.9 % of a chi-square with fewer than 12 degrees of freedom lies below 31.3.
    assert ((counts[shares > 0] - expected).square() / expected).sum() < 31.3


@pytest.mark.journey
def test_kernels_draw_the_tokens_of_the_torch_path_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "vocab_size"), [(1000, 1000), (9000, 8990), (151936, 151936)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_draw_the_tokens_of_the_torch_path_on_a_gpu(dtype: torch.dtype, columns: int, vocab_size: int) -> None:
    check("cuda", dtype, columns, vocab_size)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "vocab_size"), [(1000, 1000), (9000, 8990), (151936, 151936)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranked_draws_are_those_of_the_torch_path_on_a_gpu(dtype: torch.dtype, columns: int, vocab_size: int) -> None:
    check_ranked("cuda", dtype, columns, vocab_size, draws=10)


@pytest.mark.gpu
def test_ranked_draws_have_the_frequencies_of_their_distribution_on_a_gpu() -> None:
    check_frequencies("cuda")


if __name__ == "__main__":
    check("cpu", torch.float32, 1000, 1000)
    check("cpu", torch.float32, 9000, 8990)
    check_ranked("cpu", torch.float32, 1000, 1000, draws=2)
    check_ranked("cpu", torch.float32, 9000, 8990, draws=1)
    print("same")
