# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights reach the engines of other layouts, box by box; who does not come is named."""

import contextlib
import itertools
import os
import signal
import time
import weakref
from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_ckpt.chunks import Box
from mcore_inference import WeightSlice
from mcore_inference.engine._weights import ModelWeights
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.backends import quantize_base
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from mcore_rl import GRPOConfig, RankTimeoutError, RefitPlanError, RefitTimeoutError, WeightTransfer, gather_weights, refit
from mcore_rl._ranks._rendezvous import rendezvous
from mcore_rl._refit import _transfer as transfer_module
from mcore_rl._rollouts._collect import Drawn, exchange
from tests.support.world import leave_together, run

SIZES = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, vocab_size=32)
MIXTURE = MoEConfig(num_moe_experts=4, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)


class Engine:
    """Takes over the boxes that its model holds, as an inference engine does."""

    def __init__(self, model: GPTModel) -> None:
        self.model = model

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, WeightSlice]]) -> None:
        own = {shard.name: (shard.parameter, shard.spec) for shard in named_shards(self.model)}
        own |= {buffer.name: (buffer.tensor, buffer.spec) for buffer in named_buffer_shards(self.model)}
        left = {name: mine.numel() for name, (mine, _) in own.items()}
        for name, part in weights:
            mine, spec = own[name]
            # No element of other ranks comes.
            box = Box(part.offsets, tuple(part.tensor.shape)).relative_to(Box(spec.offset(self.model.groups), tuple(mine.shape)))
            mine[box.slices()].copy_(part.tensor)
            left[name] -= part.tensor.numel()
        assert set(left.values()) == {0}


class Whole:
    """Takes whole weights, and says nothing of itself."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}


def build(plan: ParallelPlan | None, seed: int, *, experts: bool = False, dtype: torch.dtype = torch.float32) -> GPTModel:
    groups = ProcessGroups.single() if plan is None else ProcessGroups.build(plan)
    parts = {"feed_forward": moe_feed_forward(MIXTURE)} if experts else {}
    return GPTModel(SIZES, groups, seed=seed, dtype=dtype, **parts)


@contextlib.contextmanager
def on_devices_of_their_own() -> Iterator[None]:
    """Ranks that share no memory, as those of several machines."""
    place_of, transfer_module.place_of = transfer_module.place_of, lambda device: None
    try:
        yield
    finally:
        transfer_module.place_of = place_of


def values(model: GPTModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in gather_weights(model, model.groups)}


def check_between(plan: ParallelPlan, engine_plan: ParallelPlan | None, experts: bool, beside: bool = True) -> tuple[str, int]:
    with contextlib.nullcontext() if beside else on_devices_of_their_own():
        return carry_between(plan, engine_plan, experts)


def carry_between(plan: ParallelPlan, engine_plan: ParallelPlan | None, experts: bool) -> tuple[str, int]:
    model = build(plan, 1, experts=experts)
    # Other weights, in another dtype, in another layout.
    engine, sink = Engine(build(engine_plan, 2, experts=experts, dtype=torch.float64)), Whole()
    transfer = WeightTransfer(bucket_bytes=3000)
    plans = []
    for _ in range(2):
        refit(model, model.groups, engine, transfer)
        refit(model, model.groups, sink)
        wanted, taken = values(model), values(engine.model)
        assert wanted.keys() == sink.weights.keys() and all(torch.equal(wanted[name], sink.weights[name]) for name in wanted)
        assert wanted.keys() == taken.keys() and all(torch.equal(wanted[name].double(), taken[name]) for name in wanted)
        plans.append(transfer.plan)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    first, second = plans
    assert first is second and first is not None
    moved = sum(copy.box.num_elements for copy in first.copies if copy.source_rank != copy.destination_rank)
    return first.digest, moved


def test_one_rank_hands_over_its_own_tensors() -> None:
    _, moved = check_between(ParallelPlan(), None, False)
    assert moved == 0


LAYOUTS = [
    (ParallelPlan(tp=2), None, False),
    (ParallelPlan(pp=2), None, False),
    (ParallelPlan(dp=2), ParallelPlan(tp=2), False),
    (ParallelPlan(pp=2), ParallelPlan(tp=2), True),
    (ParallelPlan(ep=2, dp=2), ParallelPlan(tp=2), True),
]


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "apart"])
@pytest.mark.parametrize(("plan", "engine_plan", "experts"), LAYOUTS, ids=str)
def test_engines_of_other_layouts_have_equal_weights(
    world, plan: ParallelPlan, engine_plan: ParallelPlan | None, experts: bool, beside: bool
) -> None:
    one, other = world(check_between, plan=plan, engine_plan=engine_plan, experts=experts, beside=beside)
    assert one == other
    # A replica takes nothing from the other one.
    assert (one[1] == 0) == (plan == ParallelPlan(dp=2))


def watch_buckets() -> tuple[list[int], list[int], int]:
    """Of each weight as it comes, its bucket, how many buckets were begun, and the bytes of messages then."""
    model, transfer, begun = build(ParallelPlan(tp=2), 1), WeightTransfer(bucket_bytes=12000), []
    transfer_module.place_of = lambda device: None
    begin = transfer._begin
    transfer._begin = lambda *inputs: (begun.append(1), begin(*inputs))[1]  # type: ignore[method-assign]
    bucket_of: dict[str, int] = {}
    rows = []
    for name, _ in transfer.weights(model, model.groups, Whole()):
        assert transfer._schedule is not None
        bucket_of = bucket_of or {one: number for number, bucket in enumerate(transfer._schedule.buckets, 1) for one in bucket.names}
        rows.append((bucket_of[name], len(begun), sum(part.nbytes for some in transfer._under_way for _, part, _ in some.transfers)))
    buckets, counts, sizes = map(list, zip(*rows, strict=True))
    return buckets, counts, max(sizes)


@pytest.mark.world(2)
def test_the_next_bucket_is_between_the_ranks_while_one_is_taken(world) -> None:
    for buckets, counts, most in world(watch_buckets):
        assert buckets[-1] > 4 and counts == [min(bucket + 1, buckets[-1]) for bucket in buckets]
        # Halves of the weights go each way.
        assert 0 < most <= 6000


def gather_then_send(bucket_bytes: int) -> tuple[int, bool, bool]:
    """Buckets that were under way while weights came, whether these are the ones of whole parameters, and were gathered once."""
    from torch.distributed.fsdp import fully_shard

    model, transfer, sink = build(ParallelPlan(dp=2), 1), WeightTransfer(bucket_bytes=bucket_bytes), Whole()
    wanted = values(model)
    fully_shard(model)
    ahead: list[int] = []
    gathered: list[int] = []
    undivided = transfer_module.undivided
    transfer_module.undivided = lambda tensor: (gathered.append(id(tensor)), undivided(tensor))[1]

    def watched() -> Iterator[tuple[str, Tensor]]:
        for weight in transfer.weights(model, model.groups, sink):
            ahead.append(len(transfer._under_way))
            yield weight

    sink.load_weights(watched())
    equal = wanted.keys() == sink.weights.keys() and all(torch.equal(wanted[name], sink.weights[name]) for name in wanted)
    return max(ahead), equal, len(gathered) == len(set(gathered)) == len(wanted)


@pytest.mark.world(2)
@pytest.mark.parametrize("bucket_bytes", [12_000, 1000])
def test_weights_that_are_gathered_do_not_run_ahead(world, bucket_bytes: int) -> None:
    """In one bucket or in several."""
    assert world(gather_then_send, bucket_bytes=bucket_bytes) == [(0, True, True), (0, True, True)]


def gather_for_slices(bucket_bytes: int, beside: bool) -> tuple[int, int, int, bool]:
    """Most bytes of gathered weights at once, those of two buckets that follow each other, and of all; whether the engine has them."""
    from torch.distributed.fsdp import fully_shard

    model, engine = build(ParallelPlan(dp=2), 1), build(ParallelPlan(tp=2), 2)
    wanted = values(model)
    fully_shard(model)
    sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
    most = 0
    undivided = transfer_module.undivided

    def watched(tensor: Tensor) -> Tensor:
        nonlocal most
        whole = undivided(tensor)
        sizes[weakref.ref(whole.untyped_storage())] = whole.nbytes
        most = max(most, sum(size for storage, size in sizes.items() if storage() is not None))
        return whole

    transfer_module.undivided = watched
    transfer = WeightTransfer(bucket_bytes=bucket_bytes)
    with contextlib.nullcontext() if beside else on_devices_of_their_own():
        # It copies when it has 256 MiB, or is told to.
        ModelWeights(engine).load(transfer.weights(model, model.groups, Engine(engine)))
    assert transfer._schedule is not None
    buckets = [set(bucket.names) for bucket in transfer._schedule.buckets]
    two = max(sum(wanted[name].nbytes for name in one | other) for one, other in itertools.pairwise(buckets))
    taken = values(engine)
    return most, two, sum(tensor.nbytes for tensor in wanted.values()), all(torch.equal(wanted[name], taken[name]) for name in wanted)


@pytest.mark.world(2)
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "apart"])
@pytest.mark.parametrize("bucket_bytes", [6000, 1000])
def test_an_engine_that_takes_slices_holds_gathered_weights_of_two_buckets(world, bucket_bytes: int, beside: bool) -> None:
    for most, two, everything, is_equal in world(gather_for_slices, bucket_bytes=bucket_bytes, beside=beside):
        assert is_equal and 0 < most <= two < everything / 2


def give_up_between(whole: bool, beside: bool, device: str = "cpu") -> bool:
    with contextlib.nullcontext() if beside else on_devices_of_their_own():
        model, transfer = build(ParallelPlan(tp=2), 1).to(device), WeightTransfer(bucket_bytes=12000, timeout_s=20.0)
        engine = Whole() if whole else Engine(build(None, 2).to(device))
        stream = transfer.weights(model, model.groups, engine)
        # A slice of this rank's own is the first, and its bucket's messages are still on their way.
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        with torch.no_grad():
            # What is on its way holds the old weights.
            for parameter in model.parameters():
                parameter.add_(1.0)
        refit(model, model.groups, engine, transfer)
    assert not transfer._under_way
    wanted, taken = values(model), engine.weights if isinstance(engine, Whole) else values(engine.model)
    return wanted.keys() == taken.keys() and all(torch.equal(wanted[name], taken[name]) for name in wanted)


@pytest.mark.world(2)
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "apart"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "slices"])
def test_a_load_that_was_given_up_leaves_nothing_for_the_next(world, whole: bool, beside: bool) -> None:
    assert world(give_up_between, whole=whole, beside=beside) == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "apart"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "slices"])
def test_a_load_between_gpus_that_was_given_up_leaves_nothing_for_the_next(whole: bool, beside: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert run(give_up_between, 2, backend="nccl", timeout_s=120.0, whole=whole, beside=beside, device="cuda") == [True, True]


def leave_one_out() -> str:
    transfer_module.place_of = lambda device: None
    model, sink = build(ParallelPlan(tp=2), 1), Whole()
    transfer, message = WeightTransfer(timeout_s=1.0), ""
    # Before that none is late.
    dist.barrier()
    refit(model, model.groups, sink, transfer)
    dist.barrier()
    if dist.get_rank() == 0:
        try:
            refit(model, model.groups, sink, transfer)
        except RefitTimeoutError as error:
            message = str(error)
    else:
        # It agrees on the layout, and then does not come.
        stream = transfer.weights(model, model.groups, sink)
        transfer._begin = lambda *inputs: None  # type: ignore[method-assign]  # pyright: ignore[reportAttributeAccessIssue]
        transfer._take = lambda *inputs: iter(transfer._under_way.clear() or ())  # type: ignore[method-assign]  # pyright: ignore[reportAttributeAccessIssue]
        assert not list(stream)
    leave_together()
    return message


@pytest.mark.world(2)
def test_a_rank_that_does_not_come_is_named(world) -> None:
    message, _ = world(leave_one_out)
    assert message.startswith("rank 1 did not send weights within timeout_s=1 (bucket 1 of 1, from ")


def die_between(beside: bool) -> str:
    if not beside:
        transfer_module.place_of = lambda device: None
    model = build(ParallelPlan(tp=2), 1)
    stream = WeightTransfer(bucket_bytes=12000, timeout_s=5.0).weights(model, model.groups, Whole())
    next(stream)
    if dist.get_rank() == 1:
        os._exit(1)
    time.sleep(0.5)
    with pytest.raises(RefitTimeoutError) as caught:
        list(stream)
    return str(caught.value)


@pytest.mark.world(2)
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "apart"])
def test_a_rank_that_dies_between_two_buckets_is_named(world, beside: bool) -> None:
    error = world(die_between, doomed=(1,), beside=beside)[0]
    assert error.startswith("rank 1 died, no process is left (bucket ") and error.endswith("look at the log of that rank")


def die_inside_a_bucket() -> tuple[str, float]:
    model = build(ParallelPlan(tp=2), 1).to(torch.device("cuda", dist.get_rank()))
    transfer = WeightTransfer(bucket_bytes=12000, timeout_s=600.0)
    refit(model, model.groups, Whole(), transfer)
    stream = transfer.weights(model, model.groups, Whole())
    next(stream)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RefitTimeoutError) as caught:
        list(stream)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.gpu
def test_a_rank_that_is_killed_inside_a_bucket_between_gpus_is_named_within_seconds() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    message, seconds = run(die_inside_a_bucket, 2, backend="nccl", timeout_s=120.0, doomed=(1,))[0]
    assert message.startswith("rank 1 died, no process is left (bucket ") and seconds < 10


def stay_away() -> str:
    model, sink = build(ParallelPlan(tp=2), 1), Whole()
    for _ in range(2):
        refit(model, model.groups, sink)
    message = ""
    if dist.get_rank() != 1:
        with pytest.raises(RefitTimeoutError) as caught:
            refit(model, model.groups, sink, WeightTransfer(timeout_s=0.5))
        message = str(caught.value)
    leave_together()
    return message


@pytest.mark.world(2)
def test_a_rank_that_never_calls_is_named(world) -> None:
    message, _ = world(stay_away)
    assert message == "rank 1 did not come within timeout_s=0.5 (weights); look at the log of that rank"


def draw_nothing() -> str:
    groups, config = ProcessGroups.build(ParallelPlan(dp=3)), GRPOConfig(num_groups=3, group_size=2, seq_len=8)
    dist.barrier()
    message = ""
    if dist.get_rank() != 1:
        failure = OSError("the engine is gone") if dist.get_rank() == 2 else None
        with pytest.raises(RankTimeoutError if failure is None else OSError) as caught:
            exchange(config, Drawn(groups=[], failure=failure), groups, torch.device("cpu"), timeout_s=1.0)
        message = str(caught.value)
    leave_together()
    return message


def die_before_rollouts() -> str:
    groups, config = ProcessGroups.build(ParallelPlan(dp=2)), GRPOConfig(num_groups=2, group_size=2, seq_len=8)
    rendezvous(groups.world, 60.0, "rollouts")
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RankTimeoutError) as caught:
        # Longer than a world may take.
        exchange(config, Drawn(groups=[]), groups, torch.device("cpu"), timeout_s=300.0)
    return str(caught.value)


@pytest.mark.world(2)
def test_a_rank_that_dies_before_its_rollouts_is_named_long_before_the_limit(world) -> None:
    message = world(die_before_rollouts, doomed=(1,))[0]
    assert message == "rank 1 died, no process is left (rollouts); look at the log of that rank"


@pytest.mark.world(3)
def test_a_rank_whose_rollouts_never_come_is_named(world) -> None:
    first, _, last = world(draw_nothing)
    assert first == "rank 1 did not come within timeout_s=1 (rollouts); look at the log of that rank"
    # What went wrong here comes before who stayed away.
    assert last == "the engine is gone"


def refuse() -> str:
    model = build(ParallelPlan(tp=2), 1)
    model.register_parameter("more", nn.Parameter(torch.zeros(3))) if dist.get_rank() else None
    try:
        refit(model, model.groups, Engine(build(None, 2, experts=True)))
    except RefitPlanError as error:
        return str(error)
    return ""


@pytest.mark.world(2)
def test_another_model_is_refused_on_every_rank_by_name(world) -> None:
    one, other = world(refuse)
    assert one == other and "no source has layers.0.mlp" in one


def check_stored() -> tuple[list[str], list[str]]:
    """Weights that come, and what is refused, where the last stage alone keeps a weight in eight bits."""
    model = build(ParallelPlan(pp=2), 1)
    add_lora(model, LoraConfig(rank=2, targets=("layers.1.mlp.up",), base_dtype="fp8_weight_only"), model.groups)
    quantize_base(model)
    came, refused = [], []
    try:
        came += [name for name, _ in gather_weights(model, model.groups)]
    except ValueError as error:
        refused.append(str(error))
    try:
        refit(model, model.groups, Whole())
    except (ValueError, RefitTimeoutError) as error:
        refused.append(str(error))
    return came, refused


@pytest.mark.world(2)
def test_stored_values_without_their_scales_are_not_sent(world) -> None:
    for came, refused in world(check_stored):
        assert came == [] and len(refused) == 2
        assert all("layers.1.mlp.up.weight is in torch.float8_e4m3fn, and its scales would not go with it" in words for words in refused)


def test_numbers_that_are_not_positive_are_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=0 and timeout_s=1 must be positive"):
        WeightTransfer(bucket_bytes=0, timeout_s=1)
    with pytest.raises(ValueError, match="timeout_s=inf must be positive and finite"):
        WeightTransfer(timeout_s=float("inf"))
