# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels of a decode step against torch."""

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_inference.attention import PagedAttention
from mcore_inference.cache import LayerSlots
from mcore_inference.decoder._decoder import _turns_by_halves, layer_fits
from mcore_inference.decoder._partial_sums import PeerRows
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import Scaled, quantize_rows
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import (
    HeadNorms,
    NormedStream,
    PackedHeads,
    RMSNorm,
    StreamNorm,
    YarnScaling,
    apply_rotary,
    rotary_frequencies,
    rotary_tables,
)
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from tests.support.interpreter import run_interpreted


def test_layers_with_adapters_are_left_to_the_model() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, activation="swiglu")
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention())
    assert all(layer_fits(layer) for layer in model.layers.values())
    for number, target in enumerate(("0.*.qkv", "1.*.down")):
        add_lora(model, LoraConfig(rank=2, targets=(f"layers.{target}",)), model.groups)
        assert not layer_fits(model.layers[str(number)])


@pytest.mark.parametrize(("width", "fits"), [(256, True), (258, False)])
def test_heads_that_are_too_wide_for_the_kernel_of_decode_steps_are_left_to_the_model(width: int, fits: bool) -> None:
    shared = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 1, "vocab_size": 64, "activation": "swiglu"}
    model = GPTModel(TransformerConfig(**shared, kv_channels=width), ProcessGroups.single(), attention_core=PagedAttention())
    assert layer_fits(model.layers["0"]) == fits


def test_norms_across_heads_are_left_to_the_model() -> None:
    shared = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "activation": "swiglu", "qk_layernorm": True}
    for across in (False, True):
        config = TransformerConfig(**shared, qk_layernorm_across_heads=across)
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention())
        assert layer_fits(model.layers["0"]) == (not across)


@pytest.mark.parametrize("kind", ["rope", "yarn"])
def test_heads_that_turn_in_part_or_by_pairs_are_left_to_the_model(kind: str) -> None:
    shared = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "position_embedding_type": kind}
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=32) if kind == "yarn" else None
    assert _turns_by_halves(TransformerConfig(**shared, yarn=yarn))
    assert not _turns_by_halves(TransformerConfig(**shared, yarn=yarn, rotary_percent=0.5))
    assert not _turns_by_halves(TransformerConfig(**shared, yarn=yarn, rotary_interleaved=True))
    assert _turns_by_halves(TransformerConfig(**shared | {"position_embedding_type": "none"}, rotary_percent=0.5))


def close(result: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(result.double().cpu(), wanted.double().cpu(), rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def check_linear(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from mcore_inference.decoder._linear import streamed_linear

    for tokens, depth, width in ((1, 96, 40), (3, 256, 64), (16, 130, 33), (45, 130, 40)):
        x = torch.randn(tokens, depth, device=device, dtype=dtype)
        weight = torch.randn(width, depth, device=device, dtype=dtype)
        close(streamed_linear(x, weight), x.double() @ weight.double().T, tolerance)


def check_parts(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Sums over D in parts, each in a program of its own, that are added up; twice, for counters that are zero again."""
    from mcore_inference.decoder._linear import embed, streamed_linear, streamed_residual

    finished = torch.zeros(70, dtype=torch.int32, device=device)
    for tokens, depth, narrow in ((3, 512, True), (20, 512, False), (40, 512, True), (64, 256, False)):
        table = torch.randn(50, depth).to(device, dtype)
        weight = torch.randn(70, depth, device=device, dtype=dtype)
        scaled = quantize_rows(weight, torch.float8_e4m3fn, powers_of_two=True) if narrow else None
        read, wide = (weight, weight) if scaled is None else (scaled, scaled.value(dtype))
        norms = [StreamNorm(weight=torch.randn(n).to(device, dtype), epsilon=1e-3, shift=1.0) for n in (depth, 70)]
        x = embed(torch.randint(50, (tokens,), device=device), table, norms[0])
        whole = streamed_linear(x, wide)
        for _ in range(2):
            close(streamed_linear(x, read, finished=finished), whole, tolerance)
            assert not finished.any()
        residual = torch.randn(tokens, 70, device=device, dtype=dtype)
        stream = streamed_residual(x.x, read, residual, norms[1], finished=finished)
        alone = streamed_residual(x.x, wide, residual, norms[1])
        for name in ("x", "scaled"):
            close(getattr(stream, name), getattr(alone, name), tolerance)
        close(stream.squares.sum(0), alone.squares.sum(0), tolerance)


def check_narrow(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Kernels that leave e4m3, as norm and gate by themselves and a cast behind them."""
    from mcore_inference.decoder._narrow import add_and_norm, swiglu

    for tokens, depth in ((1, 96), (5, 130)):
        x, y, gates = (torch.randn(tokens, width, device=device).to(dtype) for width in (depth, depth, 2 * depth))
        norm = StreamNorm(weight=torch.randn(depth).to(device, dtype), epsilon=1e-3, shift=1.0)
        total = x + y
        for update in (y, None):
            rows = add_and_norm(x, update, norm)
            assert torch.equal(x, total)
            close_rows(rows, normed(total, norm.weight, norm.epsilon, norm.shift).to(dtype), tolerance)
        gate, value = gates.float().chunk(2, dim=-1)
        close_rows(swiglu(gates), (torch.nn.functional.silu(gate) * value).to(dtype), tolerance)
    if device == "cuda":
        x[0, 0] = float("nan")
        assert add_and_norm(x, None, norm).value()[0].isnan().all()


def close_rows(rows: Scaled, wanted: Tensor, tolerance: float) -> None:
    """Scales as of a cast of what was wanted, and elements off by one step of e4m3 at most."""
    cast = quantize_rows(wanted, torch.float8_e4m3fn)
    close(rows.inverse, cast.inverse, tolerance)
    # A value beside the middle of a step may fall to either side.
    step = 0.13 if tolerance > 1e-3 else tolerance
    torch.testing.assert_close(rows.value(), cast.value(), rtol=step, atol=step * 0.1 * float(wanted.abs().max()))


def normed(x: Tensor, weight: Tensor, epsilon: float, shift: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * (weight.double() + shift)


def check_stream(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Embedding, norm, gate, residual, norm and linear layer, as one after the other would compute them."""
    from mcore_inference.decoder._linear import embed, streamed_linear, streamed_residual, streamed_swiglu

    for tokens, depth, ffn in ((1, 96, 40), (5, 256, 64), (16, 130, 33)):
        table, weights = torch.randn(50, depth), [torch.randn(2 * ffn, depth), torch.randn(depth, ffn), torch.randn(24, depth)]
        table, up, down, last = (x.to(device, dtype) for x in (table, *weights))
        scales = [torch.randn(depth).to(device, dtype) for _ in range(2)]
        norms = [StreamNorm(weight=scale, epsilon=1e-3, shift=shift) for scale, shift in zip(scales, (0.0, 1.0), strict=True)]
        ids = torch.randint(50, (tokens,), device=device)
        x = embed(ids, table, norms[0])
        assert torch.equal(x.x, table[ids])
        y = streamed_swiglu(x, up)
        gate, value = (normed(table[ids], scales[0], 1e-3, 0.0) @ up.double().T).chunk(2, dim=-1)
        wanted = torch.nn.functional.silu(gate) * value
        close(y, wanted, tolerance)
        stream = streamed_residual(y, down, x.x, norms[1])
        close(stream.x, y.double() @ down.double().T + table[ids].double(), tolerance)
        close(streamed_linear(stream, last), normed(stream.x, scales[1], 1e-3, 1.0) @ last.double().T, tolerance)


def check_fp8(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Kernels over weights in fp8, as those over the same weights widened."""
    from mcore_inference.decoder._linear import embed, streamed_linear, streamed_residual, streamed_swiglu

    for tokens, depth, ffn in ((1, 96, 40), (5, 256, 64), (16, 130, 33)):
        table = torch.randn(50, depth).to(device, dtype)
        up, down, last = (
            quantize_rows(torch.randn(rows, columns, device=device) * scale, torch.float8_e4m3fn, powers_of_two=True)
            for rows, columns, scale in ((2 * ffn, depth, 0.1), (depth, ffn, 7.0), (24, depth, 1e-3))
        )
        norm = StreamNorm(weight=torch.randn(depth).to(device, dtype), epsilon=1e-3, shift=0.0)
        x = embed(torch.randint(50, (tokens,), device=device), table, norm)
        y = streamed_swiglu(x, up)
        close(y, streamed_swiglu(x, up.value(dtype)), tolerance)
        stream, wide = streamed_residual(y, down, x.x, norm), streamed_residual(y, down.value(dtype), x.x, norm)
        close(stream.x, wide.x, tolerance)
        close(streamed_linear(stream, last), streamed_linear(stream, last.value(dtype)), tolerance)
        plain = y[:, : ffn - 1]
        narrow = quantize_rows(torch.randn(17, plain.shape[1], device=device), torch.float8_e4m3fn)
        close(streamed_linear(plain, narrow), plain.double() @ narrow.value(torch.float64).T, tolerance)


def check_peers(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """A kernel that sums the rows of all ranks has the bits of a sum in rank order, rounded each time, and of the kernel behind it.

    All ranks are in this process, one after the other; those that are awaited have arrived before.
    """
    from mcore_inference.decoder._linear import enter_stream

    # The interpreter rounds to float16 as a device does, which shows the order.
    for kind, (ranks, tokens, depth) in itertools.product({dtype, torch.float16}, ((2, 1, 96), (4, 5, 256), (8, 17, 136))):
        parts = torch.randn(ranks, tokens, depth, device=device).to(kind)
        memories, peers = peer_memories(parts, room=20)
        residual = torch.randn(tokens, depth, device=device).to(kind)
        norm = StreamNorm(weight=torch.randn(depth).to(device, kind), epsilon=1e-3, shift=1.0)
        total = functools.reduce(torch.add, parts)
        wanted = enter_stream(total, norm, residual_TD=residual)
        assert torch.equal(wanted.x, (total.float() + residual.float()).to(kind))
        for rank, own in enumerate(peers):
            for counters in peers:
                counters.counters.fill_(0)
            own.counters[:, :tokens] = ranks - 1
            rows = memories[rank][: parts[0].nbytes].view(kind).view(tokens, depth)
            stream = enter_stream(rows, norm, residual_TD=residual, peers=own)
            for name in ("x", "scaled", "squares"):
                assert torch.equal(getattr(stream, name), getattr(wanted, name)), name
            # Each rank was told of each row, and this one is ready for the next launch.
            expected = torch.zeros(2, 20, dtype=torch.int32)
            assert torch.equal(own.counters.cpu(), expected)
            expected[:, :tokens] = 1
            assert all(torch.equal(other.counters.cpu(), expected) for other in peers if other is not own)
            # A row has the same bits in any company.
            own.counters[:, 0] = ranks - 1
            alone = enter_stream(rows[:1], norm, residual_TD=residual[:1], peers=own)
            assert torch.equal(alone.x, wanted.x[:1]) and torch.equal(alone.scaled, wanted.scaled[:1])
            assert torch.equal(alone.squares[:, 0], wanted.squares[:, 0])


def peer_memories(parts: Tensor, room: int) -> tuple[list[Tensor], list[PeerRows]]:
    """Memory of each rank, its part [T, D] at the beginning, and what a kernel of each rank is given; ``room`` rows have counters."""
    begin = -(-parts[0].nbytes // 16) * 16
    memories = [torch.zeros(begin + 8 * room, dtype=torch.uint8, device=parts.device) for _ in parts]
    for memory, part in zip(memories, parts, strict=True):
        memory[: part.nbytes].view(part.dtype).copy_(part.flatten())
    addresses = torch.tensor([memory.data_ptr() for memory in memories], device=parts.device)
    counters = [memory[begin:].view(torch.int32).view(2, room) for memory in memories]
    return memories, [PeerRows(addresses=addresses, counters=own, counters_at=begin) for own in counters]


def check_rotation(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from mcore_inference.attention._rotate import rotate_and_append

    shapes = [(2, 3, 16, True, True), (1, 1, 24, True, False), (3, 4, 8, False, True)]
    if device == "cuda":
        shapes += [(2, 4, 128, False, False), (2, 4, 128, True, True)]
    for kv_heads, group, width, rotates, normalises in shapes:
        qkv = torch.randn(5, kv_heads, group + 2, width, device=device, dtype=dtype)
        tables = rotary_tables(torch.arange(5, device=device) * 3, rotary_frequencies(width, device=device)) if rotates else None
        norms = [RMSNorm(width, epsilon=1e-3, dtype=dtype, device=device) for _ in range(2)]
        for norm in norms:
            torch.nn.init.normal_(norm.weight)
        slots = torch.tensor([7, 2, 9, 0, 4], device=device)
        keys, values = (torch.zeros(11, kv_heads, width, device=device, dtype=dtype) for _ in range(2))
        weights = [norm.weight.detach() for norm in norms]
        scaling = HeadNorms(query=weights[0], key=weights[1], epsilon=1e-3, shift=0.0) if normalises else None
        packed = PackedHeads(qkv=qkv.clone(), tables=tables, norms=scaling)
        q, k, v = rotate_and_append(packed, LayerSlots(keys=keys, values=values), slots)
        wanted_q, wanted_k = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2]
        if normalises:
            wanted_q, wanted_k = norms[0](wanted_q).detach(), norms[1](wanted_k).detach()
        if tables is not None:
            wanted_q, wanted_k = apply_rotary(wanted_q, tables), apply_rotary(wanted_k, tables)
        close(q, wanted_q, tolerance)
        close(keys[slots], wanted_k, tolerance)
        assert torch.equal(k, keys[slots]) and torch.equal(v, values[slots])
        assert torch.equal(values[slots], qkv[:, :, -1]) and not keys[[1, 3, 5, 6, 8, 10]].any()
        narrow = [torch.zeros(11, kv_heads, width, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
        scales = torch.zeros(2, kv_heads, 11, device=device).transpose(1, 2)
        cached = LayerSlots(keys=narrow[0], values=narrow[1], scales=(scales[0], scales[1]))
        _, k, v = rotate_and_append(PackedHeads(qkv=qkv.clone(), tables=tables, norms=scaling), cached, slots)
        # An element is off by 1/16 of itself at most, and the step reads what the cache stands for.
        close(k, wanted_k, 0.07)
        close(v, qkv[:, :, -1], 0.07)
        torch.testing.assert_close((k, v), cached.read(slots, dtype), rtol=tolerance, atol=tolerance)
        assert not scales[[0, 1]][:, [1, 3, 5]].any()


CHECKS = (check_linear, check_stream, check_fp8, check_parts, check_narrow, check_peers, check_rotation)


@pytest.mark.journey
def test_kernels_equal_torch_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.journey
@pytest.mark.parametrize(("dtype", "tokens", "depth", "width"), [(torch.bfloat16, 1, 4096, 12288), (torch.float16, 16, 130, 33)])
def test_kernels_over_fp8_weights_compile_for_hopper(
    dtype: torch.dtype, tokens: int, depth: int, width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from mcore_inference.decoder import _linear
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = CompiledLaunches(_linear._linear_kernel)
    monkeypatch.setattr(_linear, "_linear_kernel", launches)

    def weight(rows: int, columns: int) -> Scaled:
        return Scaled(torch.zeros(rows, columns).to(torch.float8_e4m3fn), torch.ones(rows, 1))

    x = torch.zeros(tokens, depth, dtype=dtype)
    stream = NormedStream(x=x, scaled=x, squares=torch.zeros(8, 16), epsilon=1e-5)
    _linear.streamed_linear(stream, weight(width, depth))
    y = _linear.streamed_swiglu(stream, weight(2 * width, depth))
    _linear.streamed_residual(y, weight(depth, width), x, StreamNorm(weight=x[0], epsilon=1e-5, shift=0.0))
    assert len(launches.shared_bytes) == 3


@pytest.mark.parametrize("ranks", [2, 8])
def test_sums_of_peers_compile_for_hopper_with_the_norm_of_the_kernel_behind_a_sum(
    ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from mcore_inference.decoder import _linear
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = CompiledLaunches(_linear._enter_kernel)
    monkeypatch.setattr(_linear, "_enter_kernel", launches)
    rows = torch.zeros(3, 4096, dtype=torch.bfloat16)
    norm = StreamNorm(weight=rows[0], epsilon=1e-5, shift=0.0)
    peers = PeerRows(addresses=torch.zeros(ranks, dtype=torch.int64), counters=torch.zeros(2, 64, dtype=torch.int32), counters_at=1 << 19)
    for given in (None, peers):
        _linear.enter_stream(rows, norm, residual_TD=rows, peers=given)
    behind, fused = launches.ptx
    # 16 bytes a thread of each rank, past the first-level cache; both meetings, of which the first is in front of all that is read.
    begin, loads, end = "atom.global.sys.release.add", "ld.global.cg.v4.b32", "atom.global.acquire.sys.cas"
    places = [(found.start(), found[0]) for found in re.finditer("|".join(map(re.escape, (begin, loads, end))), fused)]
    assert [name for _, name in places] == [begin, end, *[loads] * (ranks * 4096 // (128 * 8)), begin, end]
    assert "atom" not in behind
    # The sum of squares is of the same numbers in the same order.
    squares = [reduced_layout(ttgir) for ttgir in launches.ttgir]
    assert squares[0] == squares[1] and "sizePerThread = [8]" in squares[0]
    operations = [re.findall(r"(?:mul|add|fma\.rn)\.f32|shfl\.\S+", ptx) for ptx in (behind, fused)]
    assert sorted(operations[0]) == sorted(operations[1])


def reduced_layout(ttgir: str) -> str:
    """Of the one sum over a row."""
    [name] = re.findall(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32", ttgir)
    [layout] = re.findall(rf"^{name} = (.*)$", ttgir, re.MULTILINE)
    return layout


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_equal_torch_on_a_gpu(check, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    check("cuda", dtype, tolerance)


if __name__ == "__main__":
    for each in CHECKS:
        torch.manual_seed(0)
        each("cpu", torch.float32, 2e-5)
    print("same")
