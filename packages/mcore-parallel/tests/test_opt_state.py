# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Narrow states, host states, parameter groups, loss scale, and the fused kernel under the interpreter."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import DynamicLossScale, MegatronOptimizer, OptimizerConfig, ParamGroup
from mcore_parallel.optim import _offload as offload_module
from mcore_parallel.optim._offload import ParkedTensors, _Window
from mcore_parallel.optim._state import BLOCK, ScaledStorage, join_bits, split_bits
from mcore_parallel.training import optimizer_state
from tests.support.interpreter import run_interpreted


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.Parameter(torch.ones(40, dtype=dtype))
        self.up = nn.Linear(40, 60, dtype=dtype)
        self.down = nn.Linear(60, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x * self.norm))).float().square().sum()


def start(dtype: torch.dtype, sliced: bool = False, **config: object) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    groups = ProcessGroups.single()
    ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=sliced), Net(dtype), groups)
    options = {"lr": 1e-3, "weight_decay": 0.1, "use_distributed_optimizer": sliced, **config}
    return ddp, MegatronOptimizer(OptimizerConfig(**options), ddp, groups)  # type: ignore[arg-type]


def advance(ddp: DistributedDataParallel, optimizer: MegatronOptimizer, steps: range, loss_scale: float = 1.0) -> None:
    dtype = ddp.module.norm.dtype
    for step in steps:
        ddp.zero_grad_buffer()
        (ddp(torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(dtype)) * loss_scale).backward()
        ddp.finish_grad_sync()
        optimizer.step()


def transfer(source: MegatronOptimizer, target: MegatronOptimizer) -> None:
    """What a checkpoint does: boxes of the global tensors, however each side cuts them."""
    full: dict[str, Tensor] = {}
    for optimizer, saves in ((source, True), (target, False)):
        for name, value in optimizer_state(optimizer, optimizer.groups).items():
            for part in value if isinstance(value, list) else [value]:
                whole = full.setdefault(name, torch.full(part.global_shape, torch.nan, dtype=part.data.dtype))
                place = whole[tuple(slice(begin, begin + size) for begin, size in zip(part.offset, part.data.shape, strict=True))]
                (place if saves else part.data).copy_(part.data if saves else place)
    assert not any(whole.isnan().any() for whole in full.values())
    target.load_step_count(source.step_count)


def weights(ddp: DistributedDataParallel) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in ddp.module.parameters()])


def test_a_master_is_its_parameter_and_a_remainder_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    edges = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x00008000, 0x7F7F8000, 0, -(2**31), -1082097664]
    masters = torch.cat([bits, torch.tensor(edges)]).to(torch.int32).view(torch.float32)
    masters = masters[masters.isfinite()]
    parameter, low = split_bits(masters)
    assert torch.equal(join_bits(parameter, low).view(torch.int32), masters.view(torch.int32))
    nearest, ties = masters.bfloat16(), (masters.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(parameter[~ties].view(torch.int16), nearest[~ties].view(torch.int16))
    assert ties.sum() >= 3


def test_remainders_train_like_float32_masters() -> None:
    ddp, optimizer = start(torch.bfloat16, store_param_remainders=False)
    narrow, other = start(torch.bfloat16)
    # The same masters give the same parameters unless a master is a tie, which does not occur here.
    for steps in (range(5), range(5, 12)):
        advance(ddp, optimizer, steps)
        advance(narrow, other, steps)
        assert torch.equal(weights(ddp), weights(narrow))
        for name, shard in optimizer.state_shards().items():
            assert torch.equal(shard.tensor, other.state_shards()[name].tensor), name
    numel = len(weights(ddp))
    assert optimizer.state_bytes == {"device": 12 * numel, "host": 0}
    assert other.state_bytes == {"device": 10 * numel, "host": 0}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 1e-2), (torch.float8_e4m3fn, 0.2)])
def test_narrow_moments_train_nearly_the_same_and_survive_a_reload(dtype: torch.dtype, tolerance: float) -> None:
    config = {"use_precision_aware_optimizer": True, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    ddp, optimizer = start(torch.bfloat16, sliced=True)
    begin = weights(ddp)
    narrow, other = start(torch.bfloat16, sliced=True, **config)
    advance(ddp, optimizer, range(20))
    advance(narrow, other, range(20))
    moved, error = (weights(ddp) - begin).norm(), (weights(ddp) - weights(narrow)).norm()
    assert 0 < error < tolerance * moved
    assert other.state_bytes["device"] < (2 + 2 * dtype.itemsize + 0.1) * len(begin)
    resumed, again = start(torch.bfloat16, sliced=True, **config)
    with torch.no_grad():
        for p, q in zip(resumed.module.parameters(), narrow.module.parameters(), strict=True):
            p.copy_(q)
    saved = {name: shard.tensor.clone() for name, shard in other.state_shards().items()}
    assert all(value.dtype == torch.float32 for value in saved.values())
    for name, shard in again.state_shards().items():
        shard.tensor.copy_(saved[name])
    again.load_step_count(other.step_count)
    advance(narrow, other, range(20, 24))
    advance(resumed, again, range(20, 24))
    assert torch.equal(weights(resumed), weights(narrow))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_scaled_values_keep_their_relative_size(dtype: torch.dtype) -> None:
    values = torch.cat([torch.full((BLOCK,), 1e-12), torch.linspace(0, 5e3, 700)])
    for rooted in (True, False):
        holder = ScaledStorage(torch.zeros(len(values), dtype=dtype), rooted=rooted)
        holder.write(values)
        torch.testing.assert_close(holder.read(), values, rtol=0.15, atol=5e3 * (1e-3 if dtype == torch.float8_e4m3fn else 1e-6))
        assert holder.read()[0] == pytest.approx(1e-12, rel=1e-2)
        before = holder.read()
        for _ in range(3):
            holder.write(holder.read())
            assert torch.equal(holder.read(), before), "what was read and is written again keeps its bits"
    holder = ScaledStorage(torch.zeros(4, dtype=dtype), rooted=True)
    holder.write(torch.tensor([1.0, 1e-30, 0.0, 1e-3]))
    # A second moment that is not zero stays so.
    assert holder.read()[1] > 0 and holder.read()[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sliced", [True, False])
def test_host_updates_have_the_bits_of_device_updates(dtype: torch.dtype, sliced: bool) -> None:
    ddp, plain = start(dtype, sliced)
    advance(ddp, plain, range(20))
    for fraction in (0.0, 0.3, 1.0):
        for overlap in (False, True):
            config = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": overlap}
            hosted, optimizer = start(dtype, sliced, **config)
            advance(hosted, optimizer, range(6))
            if not overlap:
                advance(hosted, optimizer, range(6, 20))
                assert torch.equal(weights(hosted), weights(ddp))
                continue
            # Saved here, loaded into another share on the host.
            resumed, again = start(dtype, sliced, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0 - fraction)
            with torch.no_grad():
                for p, q in zip(resumed.module.parameters(), hosted.module.parameters(), strict=True):
                    p.copy_(q)
            transfer(optimizer, again)
            for some, which in ((hosted, optimizer), (resumed, again)):
                advance(some, which, range(6, 20))
                assert torch.equal(weights(some), weights(ddp))
            total = plain.state_bytes["device"]
            assert sum(optimizer.state_bytes.values()) == total
            # To the next block, not to the next whole parameter, of which one holds most of the elements.
            each = total // len(weights(ddp))
            assert fraction * total <= optimizer.state_bytes["host"] < fraction * total + each * BLOCK


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_without_gradient_stays_as_it_is_on_the_host(overlap: bool) -> None:
    options = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": overlap}
    hosted, optimizer = start(torch.bfloat16, weight_decay=0.0, **options)
    plain, other = start(torch.bfloat16, weight_decay=0.0)
    # What travels back is as narrow as the parameter, and no trial step was made to set the state up.
    assert all(unit.on_host and unit.target.dtype == torch.bfloat16 for unit in optimizer._units)
    assert not any(part.data.any() for name, part in optimizer_state(optimizer, optimizer.groups).items() if "exp_avg" in name)
    before = hosted.module.norm.detach().clone()
    for ddp, which in ((hosted, optimizer), (plain, other)):
        # Only one parameter has a gradient, then only another one: no gradient of an earlier step is used again.
        for name in ("up.weight", "down.weight"):
            ddp.zero_grad_buffer()
            dict(ddp.module.named_parameters())[name].float().sum().backward()
            ddp.finish_grad_sync()
            which.step()
    assert torch.equal(weights(hosted), weights(plain)) and torch.equal(hosted.module.norm, before)
    frozen = Net()
    frozen.up.weight.requires_grad_(False)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), frozen, ProcessGroups.single())
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-1, **options), ddp, ProcessGroups.single())
    before = frozen.up.weight.clone()
    advance(ddp, optimizer, range(2))
    assert torch.equal(frozen.up.weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slices_of_one_rank_have_the_bits_of_a_replica(dtype: torch.dtype) -> None:
    ends = []
    for sliced in (False, True):
        ddp, optimizer = start(dtype, sliced, clip_grad=0.1)
        advance(ddp, optimizer, range(20))
        ends.append((weights(ddp), sum(optimizer.state_bytes.values())))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_groups_by_name_set_rates_decays_and_rules() -> None:
    groups = (
        ParamGroup(patterns=("down.*",), lr_mult=0.0),
        ParamGroup(patterns=("up.weight",), wd_mult=0.0, optimizer="sgd"),
        ParamGroup(patterns=("norm",), wd_mult=2.0),
    )
    ddp, optimizer = start(torch.float32, param_groups=groups, clip_grad=0.0, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    advance(ddp, optimizer, range(1))
    after = dict(ddp.module.named_parameters())
    gradients = ddp.gradients()
    assert torch.equal(before["down.weight"], after["down.weight"])
    torch.testing.assert_close(after["up.weight"].detach(), before["up.weight"] - 1e-3 * gradients["up.weight"])
    torch.testing.assert_close(after["norm"].detach(), before["norm"] * (1 - 1e-3) - 1e-3 * gradients["norm"].sign(), rtol=1e-4, atol=1e-6)
    names = set(optimizer.state_shards())
    assert "optimizer.momentum.up.weight" in names and "optimizer.exp_avg_sq.up.weight" not in names
    with pytest.raises(ValueError, match=r"param_groups give norm the values \[0\.5, 2\.0\] of lr_mult"):
        start(torch.float32, param_groups=(ParamGroup(patterns=("n*",), lr_mult=0.5), ParamGroup(patterns=("*",), lr_mult=2.0)))


def test_the_loss_scale_follows_a_table() -> None:
    rule = DynamicLossScale(initial=8.0, window=3, hysteresis=2)
    state, seen = rule.start(), []
    for overflow in (False, True, True, True, False, False, False, False, True):
        rule.update(state, torch.tensor(overflow))
        seen.append(int(state[0]))
    assert seen == [8, 8, 4, 2, 2, 2, 4, 4, 4]
    for rearms, expected in ((False, 2.0), (True, 4.0)):
        rule = DynamicLossScale(initial=4.0, window=100, hysteresis=2, rearms=rearms)
        state = rule.start()
        for overflow in (True, False, True):
            rule.update(state, torch.tensor(overflow))
        assert state[0] == expected
    state = DynamicLossScale(initial=2.0, minimum=2.0, hysteresis=1).start()
    DynamicLossScale(initial=2.0, minimum=2.0, hysteresis=1).update(state, torch.tensor(True))
    assert state[0] == 2.0


def test_a_scaled_loss_gives_the_same_update_and_overflows_are_skipped() -> None:
    ddp, optimizer = start(torch.float32)
    advance(ddp, optimizer, range(4))
    scaled, other = start(torch.float32, fp16=True, initial_loss_scale=256.0, loss_scale_window=4, hysteresis=1)
    assert other.loss_scale is not None
    advance(scaled, other, range(4), loss_scale=256.0)
    torch.testing.assert_close(weights(scaled), weights(ddp), rtol=1e-6, atol=1e-7)
    assert other.loss_scale == 512.0
    scaled.gradients()["norm"][0] = torch.inf
    assert other.step().skipped and other.loss_scale == 256.0 and other.step_count == 4
    assert other.state_shards()["optimizer.loss_scale"].tensor.tolist() == [256.0, 0.0, 0.0]


def test_zeros_of_the_gradient_are_counted() -> None:
    ddp, optimizer = start(torch.float32, log_num_zeros_in_grad=True)
    for grad in ddp.gradients().values():
        grad.fill_(1.0)
    ddp.gradients()["up.weight"][:3] = 0.0
    assert optimizer.step().num_zeros == 120


@pytest.mark.parametrize("sliced", [True, False])
def test_state_and_gradients_can_leave_between_steps(sliced: bool) -> None:
    ddp, optimizer = start(torch.bfloat16, sliced)
    other, staying = start(torch.bfloat16, sliced)
    advance(other, staying, range(9))
    held = [holder.data for unit in optimizer._units for _, holder in unit.storages()]
    # The first time state leaves the places where it was made, later its block of memory.
    for first in (0, 3, 6):
        advance(ddp, optimizer, range(first, first + 3))
        optimizer.offload_to_cpu()
        ddp.offload_grad_buffers()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*held, *(buffer.data for buffer in ddp.grad_buffers)))
        optimizer.restore_from_cpu()
        ddp.restore_grad_buffers()
    assert torch.equal(weights(ddp), weights(other))
    assert_equal_states(optimizer, staying)


def assert_equal_states(optimizer: MegatronOptimizer, other: MegatronOptimizer) -> None:
    shards = other.state_shards()
    for name, shard in optimizer.state_shards().items():
        assert torch.equal(shard.tensor, shards[name].tensor), name


@pytest.mark.parametrize("window_bytes", [1, 4096, 1 << 28])
@pytest.mark.parametrize(
    "config", [{}, {"optimizer": "muon"}, {"optimizer": "sgd"}, {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.float16}]
)
def test_a_step_streams_state_that_is_in_host_memory(config: dict[str, object], window_bytes: int) -> None:
    ddp, optimizer = start(torch.bfloat16, **config)
    other, staying = start(torch.bfloat16, **config)
    optimizer._parked = ParkedTensors([[h.data for _, h in unit.storages()] for unit in optimizer._resident], window_bytes=window_bytes)
    held = [holder.data for unit in optimizer._units for _, holder in unit.storages()]
    advance(other, staying, range(9))
    optimizer.offload_to_cpu()
    advance(ddp, optimizer, range(3))
    assert optimizer._parked.are_parked and all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    optimizer.restore_from_cpu()
    advance(ddp, optimizer, range(3, 6))
    optimizer.offload_to_cpu()
    advance(ddp, optimizer, range(6, 9))
    assert torch.equal(weights(ddp), weights(other)) and optimizer.step_count == 9
    # A save reads it where it is: it may have no room on the device.
    assert_equal_states(optimizer, staying)
    assert optimizer._parked.are_parked and all(tensor.untyped_storage().nbytes() == 0 for tensor in held)


@pytest.mark.parametrize("keep", [0, 1, 3, 7, 100])
@pytest.mark.parametrize("config", [{}, {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.float16}])
def test_a_share_of_the_state_stays_on_the_device(config: dict[str, object], keep: int) -> None:
    ddp, optimizer = start(torch.bfloat16, **config)
    other, staying = start(torch.bfloat16, **config)
    parked = ParkedTensors([[h.data for _, h in unit.storages()] for unit in optimizer._resident], window_bytes=1)
    optimizer._parked = parked
    sizes = [window.num_bytes for window in parked._windows]
    advance(other, staying, range(6))
    # One byte short of another window.
    keep_bytes = sum(sizes[: keep + 1]) - 1 if keep < len(sizes) else sum(sizes)
    for first in (0, 3):
        optimizer.offload_to_cpu(keep_bytes)
        on_device = [all(tensor.untyped_storage().nbytes() for tensor in window.tensors) for window in parked._windows]
        assert on_device == [number < keep for number in range(len(sizes))] and parked.are_parked == (keep < len(sizes))
        advance(ddp, optimizer, range(first, first + 3))
        assert [all(tensor.untyped_storage().nbytes() for tensor in window.tensors) for window in parked._windows] == on_device
        if first:
            assert_equal_states(optimizer, staying)
        optimizer.restore_from_cpu()
    assert torch.equal(weights(ddp), weights(other))
    assert_equal_states(optimizer, staying)


def test_the_share_that_stays_may_change_while_state_is_away() -> None:
    ddp, optimizer = start(torch.bfloat16)
    other, staying = start(torch.bfloat16)
    parked = ParkedTensors([[h.data for _, h in unit.storages()] for unit in optimizer._resident], window_bytes=1)
    optimizer._parked = parked
    sizes = [window.num_bytes for window in parked._windows]
    advance(other, staying, range(8))
    for step, keep in enumerate((0, 3, 1, 4, len(sizes), 2, 0, 0)):
        optimizer.offload_to_cpu(sum(sizes[:keep]))
        assert parked._away == list(range(keep, len(sizes)))
        advance(ddp, optimizer, range(step, step + 1))
    assert torch.equal(weights(ddp), weights(other))
    assert_equal_states(optimizer, staying)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float8_e4m3fn},
        {"use_precision_aware_optimizer": True, "store_param_remainders": True},
    ],
)
def test_state_in_host_memory_is_saved_and_loaded_there(config: dict[str, object]) -> None:
    ddp, optimizer = start(torch.bfloat16, **config)
    advance(ddp, optimizer, range(3))
    saved = {name: shard.tensor.clone() for name, shard in optimizer.state_shards().items()}
    resumed, state = start(torch.bfloat16, **config)
    with torch.no_grad():
        for own, trained in zip(resumed.module.parameters(), ddp.module.parameters(), strict=True):
            own.copy_(trained)
    state.offload_to_cpu()
    for name, shard in state.state_shards().items():
        shard.tensor.copy_(saved[name])
    state.load_step_count(3)
    advance(ddp, optimizer, range(3, 6))
    advance(resumed, state, range(3, 6))
    assert torch.equal(weights(ddp), weights(resumed))
    assert_equal_states(state, optimizer)


def test_a_skipped_step_leaves_state_in_host_memory_as_it_was() -> None:
    ddp, optimizer = start(torch.bfloat16)
    advance(ddp, optimizer, range(2))
    before = {name: shard.tensor.clone() for name, shard in optimizer.state_shards().items()}
    optimizer.offload_to_cpu()
    ddp.gradients()["norm"][0] = torch.inf
    assert optimizer.step().skipped
    assert all(torch.equal(shard.tensor, before[name]) for name, shard in optimizer.state_shards().items())


def test_windows_hold_whole_pieces_within_the_limit() -> None:
    parked = ParkedTensors([[torch.zeros(n)] if n else [] for n in (4, 4, 9, 0, 2, 2, 2)], window_bytes=32)
    assert parked.windows == [[0, 1], [2], [4, 5, 6]]
    assert ParkedTensors([]).windows == []


def test_state_travels_in_pieces_that_let_others_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "_PIECE_BYTES", 64)
    values = [torch.arange(50, dtype=torch.float32), torch.arange(7, dtype=torch.float64)]
    before = [tensor.clone() for tensor in values]
    parked = ParkedTensors([values])
    gaps = parked._gaps = torch.zeros(1)
    sizes: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                sizes.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        with Copies():
            parked.park()
            parked.restore()
        parked.wait()
        assert all(map(torch.equal, values, before))
    assert sizes and max(sizes) <= 64 and sum(sizes) >= 4 * sum(tensor.nbytes for tensor in values)
    # Behind each of them others are served.
    assert gaps.item() == len(sizes)


def test_state_that_does_not_fit_stays_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, optimizer = start(torch.bfloat16)
    other, staying = start(torch.bfloat16)
    advance(ddp, optimizer, range(2))
    advance(other, staying, range(2))
    optimizer._parked = ParkedTensors([[h.data for _, h in unit.storages()] for unit in optimizer._resident], window_bytes=1)
    optimizer.offload_to_cpu()
    held = [holder.data for unit in optimizer._units for _, holder in unit.storages()]
    allocate, calls = _Window.allocate, []

    def full(window: _Window) -> Tensor:
        calls.append(window)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("full")
        return allocate(window)

    with monkeypatch.context() as patched:
        patched.setattr(_Window, "allocate", full)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.restore_from_cpu()
    assert optimizer._parked.are_parked and all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    assert_equal_states(optimizer, staying)


class FakeStream:
    """Work of a stream: each item with the number of items of every other stream that are done before it."""

    def __init__(self, name: str) -> None:
        self.name, self.items, self.seen = name, [], {}

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event((other, len(other.items)))

    def wait_event(self, event: "tuple[FakeStream, int]") -> None:
        other, count = event
        self.seen[other.name] = max(self.seen.get(other.name, 0), count)
        # What the other one had waited for by then is done, too.
        for name, number in (other.items[count - 1][1] if count else {}).items():
            self.seen[name] = max(self.seen.get(name, 0), number)

    def queue(self, what: str) -> None:
        self.items.append((what, dict(self.seen)))


def test_copies_wait_for_the_window_that_lay_there_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, up, down = FakeStream("compute"), FakeStream("up"), FakeStream("down")
    parked = ParkedTensors([[torch.full((4,), float(n))] for n in range(6)], window_bytes=1)
    parked.park()
    current = [compute]

    class Event:
        def record(self, stream: FakeStream) -> None:
            self.place = (stream, len(stream.items))

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    copy = Tensor.copy_

    def queued(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        current[-1].queue("copy")
        return copy(target, source)

    parked._up, parked._down = up, down
    monkeypatch.setattr(parked, "_current", lambda: compute)
    for stream in (compute, up, down):
        stream_wait = stream.wait_event
        monkeypatch.setattr(stream, "wait_event", lambda event, wait=stream_wait: wait(getattr(event, "place", event)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(Tensor, "copy_", queued)
    parked.stream(lambda number: compute.queue(f"update {number}"))
    for number in range(6):
        # A window comes when the one that had its place has left, and not later.
        assert up.items[number][1].get("down", 0) == max(0, number - 2)
        assert compute.items[number][1]["up"] == number + 1
        assert down.items[number][1]["compute"] == number + 1
    assert compute.seen["down"] == 6


INTERPRETED = """
import itertools, torch
from dataclasses import replace
from torch import nn
from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import CosineSchedule, MegatronOptimizer, OptimizerConfig, ParamGroup, RateAndDecaySchedule, WeightDecaySchedule
from mcore_parallel.optim._fused import FusedAdam
from mcore_parallel.comm._sum_rows import sum_rows_kernel

def make(dtype, grads32, config):
    torch.manual_seed(0)
    groups = ProcessGroups.single()
    model = nn.ParameterList([nn.Parameter(torch.randn(52, 50).to(dtype)), nn.Parameter(torch.randn(7).to(dtype))])
    ddp = DistributedDataParallel(DistributedDataParallelConfig(grad_reduce_in_fp32=grads32), model, groups)
    return ddp, MegatronOptimizer(config, ddp, groups)

schedule = RateAndDecaySchedule(
    rate=CosineSchedule(max_lr=1e-2, decay_steps=9), decay=WeightDecaySchedule(start=0.1, end=0.4, steps=4)
)
limits = (ParamGroup(patterns=("1",), max_lr=3e-2, min_lr=1e-3, lr_mult=0.5),)
wide, half, eight = torch.float32, torch.float16, torch.float8_e4m3fn
cases = [(torch.float32, True, {}), (torch.bfloat16, True, {}), (torch.float16, False, {})]
cases += [(torch.float32, True, {"decoupled_weight_decay": False}), (torch.float32, True, {"param_groups": limits})]
for a, b in [(wide, wide), (torch.bfloat16, half), (half, wide)]:
    cases.append((torch.bfloat16, False, {"use_precision_aware_optimizer": True, "exp_avg_dtype": a, "exp_avg_sq_dtype": b}))
for dtype, grads32, options in cases:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, **options)
    (one, plain), (two, fused) = make(dtype, grads32, config), make(dtype, grads32, config)
    fused._updates = replace(fused._updates, fused=FusedAdam(fused._units, config), plain=[])
    left = []
    for step in range(4):
        if step == 1:
            # The second moments alone have moved; what lies at the old place is another's.
            for unit in fused._units:
                left.append(unit.exp_avg_sq.data)
                unit.exp_avg_sq.data = left[-1].clone()
                left[-1].fill_(torch.nan)
        for ddp, optimizer in ((one, plain), (two, fused)):
            for number, grad in enumerate(ddp.gradients().values()):
                grad.copy_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(10 * step + number)) * 0.1)
            if step == 2:
                grad[0] = torch.nan
            lr = schedule.lr(step) if "param_groups" in options else None
            assert optimizer.step(lr=lr).skipped == (step == 2)
    loose = options.get("exp_avg_dtype", wide) != wide
    near = {"rtol": 2e-2, "atol": 2e-3} if loose else {"rtol": 2e-5, "atol": 1e-6}
    for name, shard in plain.state_shards().items():
        torch.testing.assert_close(shard.tensor, fused.state_shards()[name].tensor, **near)
    for a, b in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype != wide else 1e-5, atol=1e-3 if dtype != wide else 1e-6)

rows = torch.randn(4, 5000).bfloat16()
out = torch.empty(5000, dtype=torch.bfloat16)
sum_rows_kernel(rows, out)
total = rows[0].float()
for row in rows[1:]:
    total += row
# The interpreter cuts where the device rounds; the bits are compared on a GPU.
torch.testing.assert_close(out.float(), total, rtol=2**-7, atol=0)
print("same")
"""


def test_the_fused_kernels_agree_with_the_operators_under_the_interpreter() -> None:
    run_interpreted("-c", INTERPRETED)


@pytest.mark.parametrize("remainders", [True, False])
@pytest.mark.parametrize("moved", ["apart", "exchanged"])
def test_masters_are_loaded_whose_bits_add_up_to_those_that_they_replace(moved: str, remainders: bool) -> None:
    ddp, optimizer = start(torch.bfloat16, store_param_remainders=remainders)
    advance(ddp, optimizer, range(1))
    name = "optimizer.master.norm"
    shard = optimizer.state_shards()[name]
    assert not isinstance(shard, list)
    bits = shard.tensor.view(torch.int32)
    if moved == "apart":
        bits[3] += 1
        bits[17] -= 1
    else:
        bits.copy_(bits.flip(0))
    loaded = shard.tensor.clone()
    optimizer.load_step_count(1)
    shard = optimizer.state_shards()[name]
    assert not isinstance(shard, list) and torch.equal(shard.tensor, loaded)
