# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Linear mixers: every form of a scan gives the same, on one rank and on several."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.context_parallel import HeadSplitError, SequenceSplitError, zigzag_indices
from mcore_parallel.nn import GatedDeltaNet, GatedDeltaNetConfig, LinearMixer, MambaConfig, MambaMixer, RecurrentRows, RecurrentState, Step
from mcore_parallel.nn.kernels._chunks import plan_chunks
from mcore_parallel.nn.mixers._conv import causal_conv
from mcore_parallel.nn.mixers._recurrences import delta_chunked, delta_recurrent, ssd_chunked, ssd_recurrent
from mcore_parallel.optim import OptimizerConfig

CPU = torch.device("cpu")
WIDTH = 24
KINDS = ("mamba", "delta_net")


def build(kind: str, groups: ProcessGroups, num_groups: int = 2, *, exact: bool = False) -> LinearMixer:
    """A mixer in float64 whose parameters are all drawn."""
    mixer: LinearMixer
    if kind == "mamba":
        sizes = MambaConfig(state_dim=5, head_dim=3, num_groups=num_groups, num_heads=8, chunk_size=4)
        mixer = MambaMixer(WIDTH, sizes, groups, batch_invariant=exact, dtype=torch.float64)
    else:
        delta = GatedDeltaNetConfig(num_key_heads=num_groups, num_value_heads=8, key_head_dim=5, value_head_dim=3, chunk_size=4)
        mixer = GatedDeltaNet(WIDTH, delta, groups, batch_invariant=exact, dtype=torch.float64)
    with torch.no_grad():
        for number, shard in enumerate(named_shards(mixer)):
            if not shard.name.endswith(("A_log", "dt_bias")):
                whole = torch.randn(shard.spec.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
                shard.parameter.copy_(whole[shard.spec.slices(groups)] * 0.5)
    return mixer


def packed(*lengths: int) -> Step:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return dataclasses.replace(Step.causal(1, sum(lengths)), cu_seqlens=bounds)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lengths", [(8,), (7, 7), (1,), (3, 0, 9, 4, 1), ()])
@pytest.mark.parametrize("started", [False, True])
def test_chunks_of_the_state_space_scan_equal_the_recurrence(lengths: tuple[int, ...], started: bool) -> None:
    tokens = sum(lengths)
    x, b, c = drawn(tokens, 4, 3), drawn(tokens, 2, 5, seed=1), drawn(tokens, 2, 5, seed=2)
    dt, rates, skip = drawn(tokens, 4, seed=3).exp(), -drawn(4, seed=4).exp(), drawn(4, seed=5)
    initial = drawn(len(lengths), 4, 3, 5, seed=6)
    compare(ssd_chunked, ssd_recurrent, [x, dt, rates, b, c, skip], lengths, initial if started else None)


@pytest.mark.parametrize("lengths", [(8,), (7, 7), (1,), (3, 0, 9, 4, 1), ()])
@pytest.mark.parametrize("started", [False, True])
def test_chunks_of_the_delta_rule_equal_the_recurrence(lengths: tuple[int, ...], started: bool) -> None:
    tokens = sum(lengths)
    q, k, v = drawn(tokens, 2, 5), drawn(tokens, 2, 5, seed=1), drawn(tokens, 4, 3, seed=2)
    g, beta = -drawn(tokens, 4, seed=3).exp(), drawn(tokens, 4, seed=4).sigmoid()
    initial = drawn(len(lengths), 4, 5, 3, seed=6)
    compare(delta_chunked, delta_recurrent, [q, k, v, g, beta], lengths, initial if started else None)


def compare(fast, slow, inputs: list[Tensor], lengths: tuple[int, ...], initial: Tensor | None) -> None:
    plan, results = plan_chunks(lengths, 4, CPU), []
    for scan in (fast, slow):
        leaves = [value.clone().requires_grad_() for value in (*inputs, *([] if initial is None else [initial]))]
        y, behind = scan(*leaves[: len(inputs)], plan, leaves[-1] if initial is not None else None)
        loss = (y * drawn(*y.shape, seed=8)).sum() + (behind * drawn(*behind.shape, seed=9)).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append([y, behind, *(torch.zeros(1) if grad is None else grad for grad in grads)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted if wanted.shape == found.shape else torch.zeros_like(found), rtol=1e-9, atol=1e-10)


def test_the_convolution_sees_its_own_sequence_only() -> None:
    x, weight, bias = drawn(9, 2, 3), drawn(2, 3, 4, seed=1), drawn(2, 3, seed=2)
    found = causal_conv(x, weight, bias, plan_chunks((4, 5), 4, CPU).positions)
    for part in (slice(0, 4), slice(4, 9)):
        series = x[part].flatten(1).T[None]
        wanted = torch.nn.functional.conv1d(series, weight.flatten(0, 1)[:, None], bias.flatten(), padding=3, groups=6)
        wanted = torch.nn.functional.silu(wanted[0, :, : series.shape[-1]]).T.unflatten(1, (2, 3))
        torch.testing.assert_close(found[part], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_do_not_see_each_other(kind: str) -> None:
    mixer, x = build(kind, ProcessGroups.single()), drawn(12, WIDTH)
    together = mixer(x, packed(5, 0, 1, 6))
    for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
        torch.testing.assert_close(together[part], mixer(x[part], Step.causal(1, len(x[part]))))
    torch.testing.assert_close(mixer(x, packed(6, 6)), mixer(x, Step.causal(2, 6)))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_single_steps_go_on_from_a_prefill(exact: bool, kind: str) -> None:
    mixer, x = build(kind, ProcessGroups.single(), exact=exact), drawn(2, 9, WIDTH)
    wanted = mixer(x.flatten(0, 1), Step.causal(2, 9)).unflatten(0, (2, 9))
    y, state = mixer.prefill(x[:, :2].flatten(0, 1), Step.causal(2, 2))
    torch.testing.assert_close(y.unflatten(0, (2, 2)), wanted[:, :2])
    y, state = mixer.prefill(x[:, 2:7].flatten(0, 1), Step.causal(2, 5), state)
    torch.testing.assert_close(y.unflatten(0, (2, 5)), wanted[:, 2:7])
    for token in (7, 8):
        y, state = mixer.step(x[:, token], state)
        torch.testing.assert_close(y, wanted[:, token])
    one = mixer.empty_state(1)
    for token in range(9):
        y, one = mixer.step(x[1:, token], one)
        torch.testing.assert_close(y, wanted[1:, token])
    torch.testing.assert_close(one.memory, state.rows(torch.tensor([1])).memory)
    assert isinstance(state, RecurrentState)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_of_packed_sequences_gives_the_state_of_each(exact: bool, kind: str) -> None:
    mixer, x = build(kind, ProcessGroups.single(), exact=exact), drawn(9, WIDTH)
    _, states = mixer.prefill(x, packed(6, 1, 2))
    for number, part in enumerate((slice(0, 6), slice(6, 7), slice(7, 9))):
        _, alone = mixer.prefill(x[part], Step.causal(1, len(x[part])))
        torch.testing.assert_close(states.memory[number], alone.memory[0])
        torch.testing.assert_close(states.conv[number], alone.conv[0])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_goes_on_from_states_in_slots_and_leaves_the_new_ones_there(exact: bool, kind: str) -> None:
    mixer, x = build(kind, ProcessGroups.single(), exact=exact), drawn(3, 9, WIDTH)
    wanted = mixer(x.flatten(0, 1), Step.causal(3, 9)).unflatten(0, (3, 9))
    kept = mixer.empty_state(5)
    slots, done = {0: 4, 1: 0, 2: 2}, dict.fromkeys(range(3), 0)
    untouched = kept.rows(torch.tensor([1, 3])).memory
    # Of each step the sequences and how many tokens they get; those with one token come first.
    for parts in ([(1, 5), (0, 3)], [(0, 1), (2, 4)], [(2, 1), (1, 1), (0, 2)], [(1, 1)], [(0, 3), (1, 2), (2, 4)]):
        rows = RecurrentRows(
            layers={mixer.layer: kept},
            slots=torch.tensor([slots[sequence] for sequence, _ in parts]),
            num_decode=sum(count == 1 for _, count in parts),
            lengths=tuple(count for _, count in parts if count > 1),
        )
        tokens = torch.cat([x[sequence, done[sequence] : done[sequence] + count] for sequence, count in parts])
        y = mixer(tokens, dataclasses.replace(Step.causal(1, len(tokens)), states=rows))
        for (sequence, count), found in zip(parts, y.split([count for _, count in parts]), strict=True):
            torch.testing.assert_close(found, wanted[sequence, done[sequence] : done[sequence] + count])
            done[sequence] += count
    assert done == dict.fromkeys(range(3), 9)
    assert torch.equal(kept.rows(torch.tensor([1, 3])).memory, untouched)
    with pytest.raises(SequenceSplitError, match="rows of 9 tokens and the step 8"):
        mixer(x[0, :8], dataclasses.replace(Step.causal(1, 8), states=rows))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(5, 2, 0, 0), (9, 0, 0, 0), (1, 1, 6, 3), (0, 0, 0, 0)])
def test_a_step_whose_lengths_the_device_alone_knows_is_that_of_the_host(exact: bool, kind: str, lengths: tuple[int, ...]) -> None:
    mixer, total, size = build(kind, ProcessGroups.single(), exact=exact), sum(lengths), 14
    before = mixer.empty_state(8)
    for number, part in enumerate((before.conv, before.memory)):
        part.copy_(drawn(*part.shape, seed=number))
    known, bounded = (RecurrentState(conv=before.conv.clone(), memory=before.memory.clone()) for _ in range(2))
    # One token, the sequences, those without tokens in a slot that no other has, and padding.
    x, slots = drawn(size, WIDTH), [6, *(number if length else 7 for number, length in enumerate(lengths))]
    real = [0, *(1 + number for number, length in enumerate(lengths) if length)]
    rows = RecurrentRows(
        layers={0: known},
        slots=torch.tensor([slots[row] for row in real]),
        num_decode=1,
        lengths=tuple(length for length in lengths if length),
    )
    wanted = mixer(x[: 1 + total], dataclasses.replace(Step.causal(1, 1 + total), states=rows))
    starts = torch.tensor([1, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = RecurrentRows(layers={0: bounded}, slots=torch.tensor(slots), num_decode=1, lengths=(), starts=starts)
    y = mixer(x, dataclasses.replace(Step.causal(1, size), states=rows))
    torch.testing.assert_close(y[: 1 + total], wanted)
    assert (y[1 + total :] == 0).all()
    torch.testing.assert_close(bounded.memory, known.memory)
    torch.testing.assert_close(bounded.conv, known.conv)
    assert torch.equal(bounded.memory[7], before.memory[7]) and torch.equal(bounded.conv[7], before.conv[7])


def gradients(mixer: LinearMixer, x: Tensor, step: Step, weights: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = mixer(x, step)
    (y * weights).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, {shard.name: shard.parameter.grad for shard in named_shards(mixer) if shard.parameter.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_token_after_token_has_the_values_and_gradients_of_chunks(kind: str) -> None:
    x, weights = drawn(12, WIDTH), drawn(12, WIDTH, seed=1)
    both = [gradients(build(kind, ProcessGroups.single(), exact=exact), x, packed(5, 0, 7), weights) for exact in (True, False)]
    for found, wanted in zip(*both, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def check_tensor_parallel(kind: str, sequence_parallel: bool) -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    x, weights = drawn(12, WIDTH), drawn(12, WIDTH, seed=1)
    wanted = gradients(build(kind, ProcessGroups.single()), x, packed(5, 7), weights)
    part = slice(6 * groups.tp.rank, 6 * groups.tp.rank + 6) if sequence_parallel else slice(None)
    mixer = build(kind, groups)
    found = gradients(mixer, x[part], packed(5, 7), weights[part])
    torch.testing.assert_close(found[0], wanted[0][part])
    torch.testing.assert_close(found[1], wanted[1][part])
    assert found[2].keys() == wanted[2].keys()
    for shard in named_shards(mixer):
        grad = found[2][shard.name].clone()
        if "tp" in shard.spec.partial:
            torch.distributed.all_reduce(grad)
        torch.testing.assert_close(grad, wanted[2][shard.name][shard.spec.slices(groups)], msg=shard.name)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_equal_one(world, kind: str, sequence_parallel: bool) -> None:
    world(check_tensor_parallel, kind=kind, sequence_parallel=sequence_parallel)


def check_context_parallel(kind: str, num_groups: int) -> None:
    groups = ProcessGroups.build(ParallelPlan(cp=2))
    with pytest.raises(ValueError, match="batch_invariant=True goes through whole sequences, found cp=2"):
        build(kind, groups, num_groups, exact=True)
    for lengths, step, own in (((8, 8), Step.causal(2, 8), Step.causal(2, 4)), ((4, 12), packed(4, 12), packed(4, 12))):
        x, weights = drawn(16, WIDTH), drawn(16, WIDTH, seed=1)
        wanted = gradients(build(kind, ProcessGroups.single(), num_groups), x, step, weights)
        part = zigzag_indices(lengths, 2, groups.cp.rank)
        mixer = build(kind, groups, num_groups)
        found = gradients(mixer, x[part], own, weights[part])
        torch.testing.assert_close(found[0], wanted[0][part])
        torch.testing.assert_close(found[1], wanted[1][part])
        for name, grad in found[2].items():
            torch.distributed.all_reduce(grad)
            torch.testing.assert_close(grad, wanted[2][name], msg=name)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_two_context_parallel_ranks_equal_one(world, kind: str, num_groups: int) -> None:
    world(check_context_parallel, kind=kind, num_groups=num_groups)


def check_initial_values() -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    for make in (mamba, delta_net):
        whole, part = make(ProcessGroups.single()), make(groups)
        for one, cut in zip(named_shards(whole), named_shards(part), strict=True):
            assert one.name == cut.name
            assert torch.equal(one.parameter[cut.spec.slices(groups)], cut.parameter), one.name


def mamba(groups: ProcessGroups, **options) -> MambaMixer:
    return MambaMixer(WIDTH, MambaConfig(**{"num_groups": 2, "head_dim": 6, **options}), groups)


def delta_net(groups: ProcessGroups) -> GatedDeltaNet:
    return GatedDeltaNet(WIDTH, GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=6), groups)


@pytest.mark.world(2)
def test_initial_values_do_not_depend_on_tp(world) -> None:
    world(check_initial_values)


def test_initial_values_lie_in_their_ranges() -> None:
    mixer = mamba(ProcessGroups.single(), num_heads=64)
    rates, sizes = mixer.get_parameter("A_log").exp(), torch.nn.functional.softplus(mixer.get_parameter("dt_bias"))
    assert 1.0 <= rates.min() < 3.0 and 14.0 < rates.max() <= 16.0
    assert 0.9e-3 < sizes.min() < 2e-3 and 0.05 < sizes.max() < 0.101
    assert torch.equal(mixer.get_parameter("D"), torch.ones(64))
    assert mixer.conv.weight.abs().max() <= 0.5 and mixer.conv.bias is not None and 0.0 < mixer.conv.bias.abs().max() <= 0.5


def test_numbers_of_the_heads_stay_wide_under_narrow_weights() -> None:
    mixer = MambaMixer(WIDTH, MambaConfig(num_groups=2, head_dim=6), ProcessGroups.single(), dtype=torch.bfloat16)
    assert {name: parameter.dtype for name, parameter in mixer.named_parameters() if "." not in name} == dict.fromkeys(
        ("A_log", "D", "dt_bias"), torch.float32
    )
    assert mixer(torch.zeros(3, WIDTH, dtype=torch.bfloat16), Step.causal(1, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_the_heads_have_no_weight_decay(kind: str) -> None:
    shards = named_shards(build(kind, ProcessGroups.single()))
    rules = {shard.name: OptimizerConfig(lr=1e-3).rule(shard.name, shard.spec.shape).wd_mult for shard in shards}
    decayed = {name for name, factor in rules.items() if factor}
    assert decayed == {"in_proj.weight", "conv.weight", "out_proj.weight"}


def test_step_sizes_are_cut_to_their_limits() -> None:
    x = drawn(5, WIDTH).float()
    open_, tight = (mamba(ProcessGroups.single(), dt_limits=limits) for limits in ((0.0, float("inf")), (0.0, 0.0)))
    assert not torch.equal(open_(x, Step.causal(1, 5)), tight(x, Step.causal(1, 5)))
    # Nothing is written to the state.
    assert not tight.prefill(x, Step.causal(1, 5))[1].memory.any()


def with_degrees(tp: int = 1, cp: int = 1) -> ProcessGroups:
    ranks = {"tp": Group(tuple(range(tp)), 0), "cp": Group(tuple(range(cp)), 0)}
    return dataclasses.replace(ProcessGroups.single(), **ranks)


def test_degrees_that_do_not_divide_are_named() -> None:
    with pytest.raises(HeadSplitError, match=r"tp=4 must divide num_groups=2; lower tp"):
        mamba(with_degrees(tp=4))
    with pytest.raises(HeadSplitError, match=r"tp=4 must divide num_key_heads=2; lower tp"):
        delta_net(with_degrees(tp=4))
    with pytest.raises(HeadSplitError, match=r"cp=3 must divide the 4 heads of a tp rank"):
        mamba(with_degrees(tp=2, cp=3))


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"num_groups=3 must divide num_heads=8"):
        mamba(ProcessGroups.single(), num_groups=3)
    with pytest.raises(ValueError, match=r"head_dim=7 must divide expand \* hidden_size = 48"):
        mamba(ProcessGroups.single(), head_dim=7)
    with pytest.raises(ValueError, match=r"state_dim=0 must be at least 1"):
        MambaConfig(state_dim=0)
    with pytest.raises(ValueError, match=r"dt_limits=\(0.1, 0.0\) must rise"):
        MambaConfig(dt_limits=(0.1, 0.0))
    with pytest.raises(ValueError, match=r"num_key_heads=3 must divide num_value_heads=4"):
        GatedDeltaNetConfig(num_key_heads=3, num_value_heads=4)


def test_bounds_that_leave_out_tokens_are_an_error() -> None:
    with pytest.raises(SequenceSplitError, match=r"sequences of 5 tokens, but 1 cp ranks with 6 tokens"):
        mamba(ProcessGroups.single())(torch.zeros(6, WIDTH), packed(2, 3))
    with pytest.raises(NotImplementedError, match=r"cp=2 keeps no states"):
        mamba(with_degrees(cp=2)).prefill(torch.zeros(6, WIDTH), Step.causal(1, 6))
