# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Plain draws by settings that a recording reads, and their sums from the output layer: token for token those of any other draw."""

from typing import Any

import numpy as np
import pytest
import torch

from mcore_inference import SamplingParams
from mcore_inference.sampling import DrawRows, PlainInputs, PlainRows, Sampler
from mcore_inference.sampling._draw import SamplingRows
from mcore_parallel.nn import NormedStream, StreamNorm
from tests.support.interpreter import run_interpreted

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "processed_log_probs": True},
    {"temperature": 1.7},
    {"temperature": 0.0, "processed_log_probs": True},
    {"temperature": 1.0, "processed_log_probs": True},
)


def settings_of(rows: int) -> tuple[list[SamplingParams], list[int], list[int]]:
    params = [SamplingParams(return_log_probs=True, **KINDS[row % len(KINDS)]) for row in range(rows)]
    return params, [2**62 - 3 * row**5 if row % 2 else -(2**40) * row - 7 for row in range(rows)], [5 * row for row in range(rows)]


def inputs_of(rows: int, device: str, idle: int | None = None) -> PlainInputs:
    """Of rows with one line each, but for one that is padding."""
    plain = PlainRows.of(*settings_of(rows))
    assert plain is not None
    lines = torch.arange(rows, dtype=torch.int32)
    if idle is not None:
        lines[idle] = -1
    return PlainInputs(words=torch.from_numpy(plain.words(rows)).to(device), lines_R=lines.to(device))


def check_draws(device: str, dtype: torch.dtype, columns: int, vocab_size: int, rows: int) -> None:
    """``draw_plain`` gives the tokens of ``draw``, leaves them for the next step, and passes over padding."""
    torch.manual_seed(0)
    logits = (torch.randn(rows, columns) * 4).to(dtype).to(device)
    logits[1, [7, vocab_size - 1]] = torch.nan
    sampler, other = (Sampler(torch.full((rows + 1,), 3, device=device), vocab_size) for _ in range(2))
    sampler.draw_plain(logits, inputs_of(rows, device, idle=2))
    drawn = sampler.take(rows, wants_log_probs=True).wait()
    wanted = other.draw(logits, DrawRows.of(*settings_of(rows), range(rows), vocab_size, torch.device(device))).wait()
    del drawn[2], wanted[2]
    tokens, values = [token for token, _, _ in drawn], [value for _, value, _ in drawn]
    assert tokens == [token for token, _, _ in wanted] and tokens[1] == -1
    assert values == pytest.approx([value for _, value, _ in wanted], nan_ok=True, rel=0, abs=1e-12 if dtype == torch.float64 else 1e-6)
    other.last_tokens[2] = 3
    assert sampler.last_tokens.tolist() == other.last_tokens.tolist()
    # A step without draws leaves everything as it is.
    still = PlainInputs(
        words=torch.zeros(PlainRows.num_words(rows), dtype=torch.int32, device=device), lines_R=inputs_of(rows, device).lines_R
    )
    sampler.draw_plain(-logits, still)
    assert sampler.last_tokens.tolist() == other.last_tokens.tolist() and sampler.take(rows, wants_log_probs=True).wait()[0] == drawn[0]


def check_sums(device: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """The output layer has the logits and the sums, bit for bit, of a kernel that reads the logits."""
    from mcore_inference.decoder._linear import embed, streamed_linear, sums_parts
    from mcore_inference.sampling._triton import part_sums

    rows, depth, columns, vocab_size = sizes
    assert sums_parts(columns, depth, rows)
    torch.manual_seed(1)
    table, weight = ((torch.randn(count, depth) * 0.2).to(dtype).to(device) for count in (50, columns))
    norm = StreamNorm(weight=torch.ones(depth, dtype=dtype, device=device), epsilon=1e-3, shift=0.0)
    x = embed(torch.randint(50, (rows,), device=device), table, norm)
    inputs, sampler = inputs_of(rows, device), Sampler(torch.zeros(rows, dtype=torch.int64, device=device), vocab_size)
    sums = sampler.plain_sums(inputs, columns)
    logits = streamed_linear(x, weight, sums=sums)
    assert torch.equal(logits, streamed_linear(x, weight))
    temperature = SamplingRows.of(*settings_of(rows), vocab_size, device).temperature
    wanted = part_sums(logits, temperature, vocab_size, wants_log_probs=True)
    for name in ("best_RN", "weight_RN", "raw_RN"):
        assert torch.equal(getattr(sums, name), getattr(wanted, name)), name
    results = []
    for given in (sums, None):
        sampler.draw_plain(logits, inputs, given)
        results.append((sampler.take(rows, wants_log_probs=True).wait(), sampler.last_tokens.tolist()))
    assert results[0] == results[1]


def test_plain_draws_are_those_of_any_rows() -> None:
    check_draws("cpu", torch.float64, 300, 290, 7)


def test_plain_draws_and_sums_of_the_output_layer_are_the_same_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize(
    "fields", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_n_logprobs": 2, "return_log_probs": True}, {"top_k": 2**20}]
)
def test_rows_that_ask_for_more_are_not_plain(fields: dict[str, Any]) -> None:
    plain = SamplingParams(temperature=0.7)
    assert PlainRows.of([plain, SamplingParams(**fields)], [0, 1], [0, 0]) is None
    assert PlainRows.of([plain, SamplingParams(top_k=1), SamplingParams(temperature=0.0, top_p=0.5)], [0, 1, 2], [0, 0, 0]) is not None


def test_words_hold_all_bits_of_seeds() -> None:
    seeds = [-1, 2**63 - 1, -(2**63), 2**32, 5]
    plain = PlainRows.of([SamplingParams(temperature=0.1 * row) for row in range(5)], seeds, [0, 1, 2, 2**31 - 1, 4])
    assert plain is not None
    inputs = PlainInputs(words=torch.from_numpy(plain.words(8)), lines_R=torch.zeros(8, dtype=torch.int32))
    temperature_R, seed_R, position_R, processed_R = inputs.fields()
    assert seed_R.tolist() == [*seeds, 0, 0, 0] and position_R.tolist() == [0, 1, 2, 2**31 - 1, 4, 0, 0, 0]
    assert temperature_R.tolist()[:5] == [float(np.float32(0.1 * row)) for row in range(5)] and not processed_R.any()


def compiled(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[Any]:
    from tests.support.hopper import CompiledLaunches

    launches = [CompiledLaunches(getattr(module, name)) for name in names]
    for name, launch in zip(names, launches, strict=True):
        monkeypatch.setattr(module, name, launch)
    return launches


@pytest.mark.journey
@pytest.mark.parametrize("rows", [1, 64])
def test_kernels_compile_for_hopper(rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("triton")
    from mcore_inference.decoder import _linear
    from mcore_inference.sampling import _triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    linear, tile, pick = compiled(monkeypatch, _linear, "_linear_kernel") + compiled(monkeypatch, _triton, "_tile_kernel", "_pick_kernel")
    depth, columns = 256, 65600
    x = torch.zeros(rows, depth, dtype=torch.bfloat16)
    stream = NormedStream(x=x, scaled=x, squares=torch.zeros(8, max(16, rows)), epsilon=1e-5)
    sampler, inputs = Sampler(torch.zeros(rows, dtype=torch.int64), columns), inputs_of(rows, "cpu")
    sums, weight = sampler.plain_sums(inputs, columns), torch.zeros(columns, depth, dtype=torch.bfloat16)
    logits = _linear.streamed_linear(stream, weight, sums=sums)
    for given in (sums, None):
        _triton.draw_plain(logits, inputs, given, torch.zeros(rows, 2, dtype=torch.int64), sampler.last_tokens, columns)
    assert (len(linear.ptx), len(tile.ptx), len(pick.ptx)) == (1, 1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "vocab_size"), [(1000, 1000), (9000, 8990), (128256, 128256), (151936, 151643)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_draws_are_those_of_any_rows_on_a_gpu(dtype: torch.dtype, columns: int, vocab_size: int) -> None:
    check_draws("cuda", dtype, columns, vocab_size, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("depth", "columns", "vocab_size"), [(2048, 128256, 128256), (4096, 151936, 151643), (96, 65600, 65599)])
def test_sums_of_the_output_layer_are_those_of_its_logits_on_a_gpu(rows: int, depth: int, columns: int, vocab_size: int) -> None:
    check_sums("cuda", torch.bfloat16, (rows, depth, columns, vocab_size))


if __name__ == "__main__":
    from mcore_inference.decoder import _linear
    from mcore_inference.sampling import _sampler

    _sampler.has_kernels = lambda *_: True
    check_draws("cpu", torch.float32, 300, 290, 7)
    _linear._tile = lambda *_, **__: (64, 32, 2, 1)
    for each in ((1, 48, 200, 200), (5, 64, 256, 250), (17, 40, 130, 129)):
        check_sums("cpu", torch.bfloat16, each)
    print("same")
