# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hidden states between grids of any degrees, against the same tensor cut by hand."""

import dataclasses
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import HyperCommGrid
from mcore_parallel.comm import BridgeBatch, BridgeCommunicator, BridgeEnd, plan_rows, plan_spread

WIDTH = 3


def end(tp: int, cp: int, dp: int, offset: int = 0, sequence_parallel: bool = False) -> BridgeEnd:
    grid = HyperCommGrid((tp, cp, dp), ("tp", "cp", "dp"), offset, world_size=offset + tp * cp * dp)
    return BridgeEnd.of(grid, last=True, sequence_parallel=sequence_parallel)


def cut(full: Tensor, side: BridgeEnd, lengths: tuple[int, ...], sequences: tuple[int, ...] | None = None) -> dict[int, Tensor]:
    """What each rank holds of the rows of all sequences."""
    parts = full.split(list(lengths))
    replicas, found = len(side.ranks), {}
    bounds = [len(parts) * d // replicas for d in range(replicas + 1)]
    if sequences is not None:
        bounds = [sum(sequences[:d]) for d in range(replicas + 1)]
    for d, replica in enumerate(side.ranks):
        for c, cell in enumerate(replica):
            mine = [full[:0]]
            for part in parts[bounds[d] : bounds[d + 1]]:
                slices = part.chunk(2 * len(replica)) if len(replica) > 1 else (part, part[:0])
                mine += [slices[c], slices[len(slices) - 1 - c]]
            held = torch.cat(mine)
            for t, rank in enumerate(cell):
                found[rank] = held.chunk(len(cell))[t] if side.sequence_parallel else held
    return found


def test_every_row_crosses_once_and_arrives_everywhere_it_is_needed() -> None:
    generator = random.Random(0)
    for _ in range(150):
        ends = [
            end(*(generator.choice([1, 2, 3]) for _ in range(3)), generator.choice([0, 2, 40]), generator.random() < 0.5) for _ in range(2)
        ]
        # 36 is what 2 cp tp divides for all degrees here.
        lengths = tuple(36 * generator.randint(1, 2) for _ in range(generator.randint(1, 7)))
        batch = BridgeBatch(sequence_lengths=lengths, hidden_size=1)
        full = torch.arange(sum(lengths)).unsqueeze(1)
        for backward in (False, True):
            source, destination = ends[::-1] if backward else ends
            here, there = cut(full, source, lengths), cut(full, destination, lengths)
            came = {rank: torch.full_like(rows, -1) for rank, rows in there.items()}
            plan = plan_rows(*ends, batch, backward=backward)
            assert sum(part.num_rows for part in plan) == sum(lengths)
            for part in plan:
                rows = here[part.sender][part.sender_row : part.sender_row + part.num_rows]
                came[part.receiver][part.receiver_row : part.receiver_row + part.num_rows] = rows
            for part in plan_spread(destination, batch, None):
                rows = came[part.sender][part.sender_row : part.sender_row + part.num_rows]
                assert (rows >= 0).all()
                came[part.receiver][part.receiver_row : part.receiver_row + part.num_rows] = rows
            assert all(torch.equal(came[rank], rows) for rank, rows in there.items())


def test_tensor_parallel_ranks_share_the_work() -> None:
    batch = BridgeBatch(sequence_lengths=(8,), hidden_size=1)
    assert [tuple(part) for part in plan_rows(end(2, 1, 1), end(2, 1, 1, 2), batch)] == [(0, 2, 0, 0, 4), (1, 3, 4, 4, 4)]
    assert [tuple(part) for part in plan_rows(end(2, 1, 1), end(2, 1, 1, 2, True), batch)] == [(0, 2, 0, 0, 4), (1, 3, 4, 0, 4)]
    assert plan_spread(end(2, 1, 1, 2, True), batch, None) == []
    # Three replicas to two: the middle one splits its rows.
    batch = BridgeBatch(sequence_lengths=(2,) * 6, hidden_size=1, destination_sequences=(3, 3))
    crossing = plan_rows(end(1, 1, 3), end(1, 1, 2, 3), batch)
    assert [tuple(part) for part in crossing] == [(0, 3, 0, 0, 4), (1, 3, 0, 4, 2), (1, 4, 2, 0, 2), (2, 4, 0, 2, 4)]


def test_the_ends_of_a_grid_are_its_outer_stages() -> None:
    grid = HyperCommGrid((2, 2, 2), ("tp", "pp", "dp"), 3, world_size=11)
    assert BridgeEnd.of(grid, last=False).ranks == (((3, 4),), ((7, 8),))
    assert BridgeEnd.of(grid, last=True).ranks == (((5, 6),), ((9, 10),))
    with pytest.raises(ValueError, match="grid has axis 'ep' of 2 ranks; a bridge joins grids of tp, cp, dp, pp"):
        BridgeEnd.of(HyperCommGrid((2,), ("ep",), world_size=2), last=True)


def test_a_batch_that_does_not_fit_is_named() -> None:
    two, three = end(1, 1, 2), end(3, 1, 1, 2, True)
    with pytest.raises(ValueError, match=r"source_sequences=\(1, 2\) must have one entry for each of 2 replicas and add up to 2"):
        plan_rows(two, three, BridgeBatch(sequence_lengths=(3, 3), hidden_size=1, source_sequences=(1, 2)))
    with pytest.raises(ValueError, match="tp=3 of the destination must divide its 4 rows"):
        plan_rows(two, three, BridgeBatch(sequence_lengths=(2, 2), hidden_size=1))
    with pytest.raises(ValueError, match="a sequence of 6 tokens must be a multiple of 2 \\* cp = 4"):
        plan_rows(two, end(1, 2, 1), BridgeBatch(sequence_lengths=(6, 6), hidden_size=1))


def full_rows(batch: BridgeBatch, seed: int) -> Tensor:
    rows = torch.randn(sum(batch.sequence_lengths), WIDTH, generator=torch.Generator().manual_seed(seed))
    return rows.to(batch.dtype)


def check_pair(source: BridgeEnd, destination: BridgeEnd, batch: BridgeBatch, connects: bool = False) -> None:
    """Two micro-batches there and back, call by call and with calls that do both; with ``connects`` as NCCL would have it."""
    link, rank = BridgeCommunicator(source, destination), dist.get_rank()
    link._connects = connects
    fulls = [full_rows(batch, seed) for seed in range(4)]
    here = [cut(full, source, batch.sequence_lengths, batch.source_sequences).get(rank) for full in fulls]
    there = [cut(full, destination, batch.sequence_lengths, batch.destination_sequences).get(rank) for full in fulls]
    out: list[Tensor] = []
    back: list[Tensor] = []
    for number in range(2):
        if here[number] is not None:
            link.send_forward(here[number], batch)
        if there[number] is not None:
            out.append(link.recv_forward(batch))
            link.send_backward(there[number + 2], batch)
        if here[number] is not None:
            back.append(link.recv_backward(batch))
    if not source.members & destination.members:
        # One forward ahead, then both ways at once.
        if link.is_source:
            link.send_forward(here[0], batch)
            back.append(link.send_forward_recv_backward(here[1], batch, batch))
            back.append(link.recv_backward(batch))
        elif link.is_destination:
            out.append(link.recv_forward(batch))
            out.append(link.send_backward_recv_forward(there[2], batch, batch))
            link.send_backward(there[3], batch)
    link.finish()
    for number, rows in enumerate(out):
        assert torch.equal(rows, there[number % 2]) and rows.requires_grad and rows.dtype == batch.dtype
    for number, rows in enumerate(back):
        assert torch.equal(rows, here[number % 2 + 2]) and not rows.requires_grad


def check_pairs(offset: int, size: int, connects: bool) -> None:
    """Degrees of a grid on the first ranks against those of one on ``size`` ranks from ``offset``; each ``connects`` takes half of them."""
    world = dist.get_world_size()
    first = [end(tp, cp, dp, 0, sp) for tp, cp, dp, sp in degrees(world - offset if offset else size)]
    second = [end(tp, cp, dp, offset, sp) for tp, cp, dp, sp in degrees(size)]
    for (i, source), (j, destination) in itertools.product(enumerate(first), enumerate(second)):
        if (i + j) % 2 == connects:
            batch = BridgeBatch(sequence_lengths=(24, 72, 48), hidden_size=WIDTH, dtype=torch.float64)
            check_pair(source, destination, batch, connects)
    uneven = BridgeBatch(
        sequence_lengths=(4, 2, 6, 2),
        hidden_size=WIDTH,
        dtype=torch.bfloat16,
        source_sequences=tuple([4] + [0] * (world - offset - 1)) if offset else None,
        destination_sequences=tuple([1] * (size - 1) + [5 - size]),
    )
    check_pair(end(1, 1, world - offset if offset else size), end(1, 1, size, offset), uneven, connects)


def degrees(size: int) -> list[tuple[int, int, int, bool]]:
    found = []
    for tp, cp, dp in itertools.product(range(1, size + 1), repeat=3):
        if tp * cp * dp == size:
            found += [(tp, cp, dp, sp) for sp in ((False, True) if tp > 1 else (False,))]
    return found


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    ("offset", "size", "connects"), [(2, 2, False), (2, 2, True), (1, 3, False), (1, 3, True), (3, 1, False), (0, 4, False), (0, 4, True)]
)
def test_rows_are_those_of_one_grid(world, offset: int, size: int, connects: bool) -> None:
    """Grids that share no rank, 2 + 2, 3 + 3 with two in common, 1 + 1, and two grids on the same four ranks."""
    world(check_pairs, offset=offset, size=size, connects=connects)


def check_three_to_two() -> None:
    """Three replicas on ranks 0 to 2, two replicas or one cut another way on ranks 2 and 3: a replica's rows are divided."""
    three = end(1, 1, 3)
    batch = BridgeBatch(sequence_lengths=(4, 8, 4, 12), hidden_size=WIDTH, dtype=torch.float64)
    uneven = dataclasses.replace(batch, source_sequences=(2, 0, 2), destination_sequences=(1, 3))
    for connects in (False, True):
        for two in (end(1, 1, 2, 2), end(2, 1, 1, 2), end(2, 1, 1, 2, True), end(1, 2, 1, 2)):
            check_pair(three, two, batch, connects)
            # The way back through the same grids, so that three receive from two.
            check_pair(two, three, batch, connects)
        check_pair(three, end(1, 1, 2, 2), uneven, connects)


@pytest.mark.world(4)
def test_numbers_of_replicas_need_not_divide_one_another(world) -> None:
    world(check_three_to_two)


def check_new_acquaintances() -> list[list[int]]:
    """Micro-batches that bring other pairs of ranks together connect those only, also inside a call that goes both ways."""
    source, destination, rank = end(1, 1, 2), end(1, 1, 2, 2), dist.get_rank()
    link = BridgeCommunicator(source, destination)
    link._connects = True
    straight = BridgeBatch(sequence_lengths=(2, 2), hidden_size=WIDTH)
    crossed = dataclasses.replace(straight, destination_sequences=(0, 2))
    rows = torch.full((2, WIDTH), float(rank))
    met = []
    if link.is_source:
        link.send_forward(rows, straight)
        met.append(sorted(link._connected))
        link.send_forward_recv_backward(rows, crossed, straight)
        met.append(sorted(link._connected))
        link.recv_backward(crossed)
    else:
        link.recv_forward(straight)
        met.append(sorted(link._connected))
        came = link.send_backward_recv_forward(rows, straight, crossed)
        met.append(sorted(link._connected))
        assert came[:, 0].tolist() == ([] if rank == 2 else [0, 0, 1, 1])
        link.send_backward(torch.zeros_like(came), crossed)
    link.finish()
    return met


@pytest.mark.world(4)
def test_ranks_connect_when_a_micro_batch_brings_them_together(world) -> None:
    assert world(check_new_acquaintances) == [[[2], [2, 3]], [[3], [3]], [[0], [0]], [[1], [0, 1]]]


def check_errors() -> None:
    source, destination, rank = end(1, 1, 1), end(1, 1, 1, 1), dist.get_rank()
    link, batch, rows = (
        BridgeCommunicator(source, destination),
        BridgeBatch(sequence_lengths=(2,), hidden_size=WIDTH),
        torch.zeros(2, WIDTH),
    )
    wrong = [
        ("send_forward", (rows, batch), 1),
        ("recv_backward", (batch,), 1),
        ("send_forward_recv_backward", (rows, batch, batch), 1),
        ("recv_forward", (batch,), 0),
        ("send_backward", (rows, batch), 0),
        ("send_backward_recv_forward", (rows, batch, batch), 0),
    ]
    for call, arguments, caller in wrong:
        if rank == caller:
            name, members = ("source", r"\[0\]") if caller else ("destination", r"\[1\]")
            with pytest.raises(ValueError, match=f"{call} is for the ranks of the {name} {members}; rank {rank} is not among them"):
                getattr(link, call)(*arguments)
    if rank == 0:
        with pytest.raises(
            ValueError, match=r"rank 0 sends \(3, 3\) torch.float32, but its part of the micro-batch is \(2, 3\) torch.float32"
        ):
            link.send_forward(torch.zeros(3, WIDTH), batch)
    both = BridgeCommunicator(end(1, 1, 2), end(2, 1, 1))
    two = BridgeBatch(sequence_lengths=(2, 2), hidden_size=WIDTH)
    with pytest.raises(ValueError, match=f"rank {rank} is in both grids and has sent nothing yet; call send_forward first"):
        both.recv_forward(two)


@pytest.mark.world(2)
def test_a_call_from_the_wrong_grid_is_named(world) -> None:
    world(check_errors)


def check_two_grids(second: int, mapping: dict[str, int] | None, combined: bool, ndim: int = 3) -> None:
    """Tensors in the layout of ``dim_mapping``, of another length each time; gradients come back to where their rows were."""
    order = mapping or {"s": 1, "b": 0, "h": 2}
    for (tp1, dp1), (tp2, dp2) in itertools.product([(1, 2), (2, 1)], repeat=2):
        first = HyperCommGrid((tp1, dp1, 1), ("tp", "dp", "pp"))
        other = HyperCommGrid((tp2, 1, dp2), ("tp", "pp", "dp"), second)
        link = BridgeCommunicator(first, other, dim_mapping=mapping, comm_dtype=torch.float64, tensor_ndim=ndim)
        assert link.is_current_rank_in_grid(first) == link.is_source

        def part(seed: int, length: int, replicas: int, replica: int, order: dict[str, int] = order) -> Tensor:
            full = torch.randn(4, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            mine = full.chunk(replicas)[replica]
            if ndim == 2:
                return mine.reshape(-1, WIDTH)
            return mine.permute(["bsh".index(name) for name in sorted(order, key=lambda name: order[name])])

        def expect(x: Tensor, y: Tensor) -> None:
            assert torch.equal(x, y) and x.is_contiguous()

        rank = dist.get_rank()
        here = [part(n, 2 + n, dp1, rank // tp1 % dp1) for n in range(2)]
        there = [part(n, 2 + n, dp2, (rank - second) // tp2 % dp2) for n in range(2)]
        if combined:
            if link.is_source:
                link.send_forward(here[0])
                expect(link.send_forward_recv_backward(here[1]), -here[0])
                expect(link.recv_backward(), -here[1])
            else:
                expect(link.recv_forward(), there[0])
                expect(link.send_backward_recv_forward(-there[0]), there[1])
                link.send_backward(-there[1])
        else:
            for n in range(2):
                if link.is_source:
                    link.send_forward(here[n])
                if link.is_destination:
                    came = link.recv_forward()
                    assert came.requires_grad and came.is_leaf
                    expect(came, there[n])
                    link.send_backward(-came)
                if link.is_source:
                    expect(link.recv_backward(), -here[n])
        link.finish()


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("mapping", [None, {"s": 0, "b": 1, "h": 2}])
@pytest.mark.parametrize("combined", [False, True])
def test_a_bridge_of_two_grids_sends_tensors(world, mapping: dict[str, int] | None, combined: bool) -> None:
    world(check_two_grids, second=2, mapping=mapping, combined=combined)


@pytest.mark.world(4)
def test_a_bridge_of_two_grids_sends_rows(world) -> None:
    world(check_two_grids, second=2, mapping=None, combined=True, ndim=2)


@pytest.mark.world(2)
def test_a_bridge_of_two_grids_on_the_same_ranks(world) -> None:
    world(check_two_grids, second=0, mapping={"s": 0, "b": 1, "h": 2}, combined=False)


def check_grid_errors() -> None:
    first, second = HyperCommGrid((1,), ("dp",)), HyperCommGrid((1,), ("dp",), 1)
    with pytest.raises(ValueError, match="must map 's', 'b' and 'h' to 0, 1 and 2, each once"):
        BridgeCommunicator(first, second, dim_mapping={"s": 0, "b": 0, "h": 2})
    with pytest.raises(ValueError, match="tensor_ndim=4 must be 3, or 2"):
        BridgeCommunicator(first, second, tensor_ndim=4)
    with pytest.raises(ValueError, match="cp=2 of the destination: to split sequences, build from BridgeEnd"):
        BridgeCommunicator(first, HyperCommGrid((2,), ("cp",)))
    with pytest.raises(ValueError, match="are for a bridge built from two grids"):
        BridgeCommunicator(BridgeEnd.of(first, last=True), BridgeEnd.of(second, last=False), {"s": 0, "b": 1, "h": 2})
    link = BridgeCommunicator(first, second, src_module_name="encoder", dest_module_name="decoder")
    if link.is_source:
        with pytest.raises(ValueError, match=r"rank 0 sends \(2, 3\) torch.float32; the bridge is for 3 dimensions"):
            link.send_forward(torch.zeros(2, 3))
        with pytest.raises(ValueError, match="rank 0 has sent no tensor that waits for its gradient"):
            link.recv_backward()
        with pytest.raises(ValueError, match=r"recv_forward is for the ranks of the decoder \[1\]"):
            link.recv_forward()
        with pytest.raises(ValueError, match="send_forward needs the BridgeBatch of its micro-batch"):
            BridgeCommunicator(BridgeEnd.of(first, last=True), BridgeEnd.of(second, last=False)).send_forward(torch.zeros(2, 3))
    three = BridgeCommunicator(first, HyperCommGrid((2,), ("dp",)))
    if three.is_source:
        with pytest.raises(ValueError, match="a batch of 3 in each of 1 source replicas does not divide among 2"):
            three.send_forward(torch.zeros(3, 2, 2))


@pytest.mark.world(2)
def test_what_a_bridge_of_two_grids_cannot_do_is_named(world) -> None:
    world(check_grid_errors)
