# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Collectives against the same arithmetic on one rank."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from mcore_parallel import Group, comm

REGIONS = {
    "copy": comm.copy_to_tensor_model_parallel_region,
    "reduce": comm.reduce_from_tensor_model_parallel_region,
    "scatter_last": comm.scatter_to_tensor_model_parallel_region,
    "gather_last": comm.gather_from_tensor_model_parallel_region,
    "scatter_tokens": comm.scatter_to_sequence_parallel_region,
    "gather_tokens": comm.gather_from_sequence_parallel_region,
    "gather_tokens_replicated": lambda x, group: comm.gather_from_sequence_parallel_region(x, group, tensor_parallel_output_grad=False),
    "reduce_scatter_tokens": comm.reduce_scatter_to_sequence_parallel_region,
    "all_gather_last": comm.all_gather_last_dim_from_tensor_parallel_region,
    "reduce_scatter_last": comm.reduce_scatter_last_dim_to_tensor_parallel_region,
    "sp2hp": comm.all_to_all_sp2hp,
    "hp2sp": comm.all_to_all_hp2sp,
}


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """The same values on every rank, others for every name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def whole_group() -> Group:
    return Group.of(dist.group.WORLD)


def check_plain_collectives() -> None:
    group = whole_group()
    n, r = group.size, group.rank
    parts = drawn("plain", (n, 4 * n, 2 * n))
    mine = parts[r].clone()
    for x in (mine, mine.T.contiguous().T):  # the second is not contiguous
        torch.testing.assert_close(comm.all_reduce(x, group), parts.sum(0), rtol=1e-14, atol=1e-14)
        assert torch.equal(comm.all_reduce(x, group, "max"), parts.amax(0))
        assert torch.equal(comm.all_reduce(x, group, "min"), parts.amin(0))
        for dim in (0, 1, -1):
            assert torch.equal(comm.all_gather(x, group, dim), torch.cat(list(parts), dim))
            expected = parts.sum(0).chunk(n, dim)[r]
            torch.testing.assert_close(comm.reduce_scatter(x, group, dim), expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(x, parts[r]), "a collective changed its input"
    even = comm.all_to_all(mine, None, None, group)
    assert torch.equal(even, torch.cat([parts[other].chunk(n)[r] for other in range(n)]))
    # Rank i sends i + j rows to rank j, so some splits are empty.
    sends = [[i + j for j in range(n)] for i in range(n)]
    rows = [drawn(f"rows{i}", (sum(sends[i]), 3)) for i in range(n)]
    got = comm.all_to_all(rows[r], [sends[i][r] for i in range(n)], sends[r], group)
    assert torch.equal(got, torch.cat([rows[i].split(sends[i])[r] for i in range(n)]))


@pytest.mark.world(2)
def test_collectives_equal_their_definition_on_two_ranks(world) -> None:
    world(check_plain_collectives)


@pytest.mark.world(4)
def test_collectives_equal_their_definition_on_four_ranks(world) -> None:
    world(check_plain_collectives)


def serial(name: str, inputs: list[Tensor], n: int) -> list[Tensor]:
    """What each rank's output is, as a function of what each rank holds; replicated tensors appear once per list."""
    total = sum(inputs[1:], inputs[0])
    replicated = inputs[0]
    return {
        "copy": lambda: [replicated] * n,
        "reduce": lambda: [total],
        "scatter_last": lambda: list(replicated.chunk(n, -1)),
        "gather_last": lambda: [torch.cat(inputs, -1)],
        "scatter_tokens": lambda: list(replicated.chunk(n)),
        "gather_tokens": lambda: [torch.cat(inputs)] * n,
        "gather_tokens_replicated": lambda: [torch.cat(inputs)],
        "reduce_scatter_tokens": lambda: list(total.chunk(n)),
        "all_gather_last": lambda: [torch.cat(inputs, -1)] * n,
        "reduce_scatter_last": lambda: list(total.chunk(n, -1)),
        "sp2hp": lambda: list(torch.cat(inputs).chunk(n, -1)),
        "hp2sp": lambda: list(torch.cat(inputs, -1).chunk(n)),
    }[name]()


def check_regions() -> None:
    group = whole_group()
    n, r = group.size, group.rank
    for name, region in REGIONS.items():
        replicated_input = name.startswith(("copy", "scatter"))
        leaves = [drawn(f"{name}-in{0 if replicated_input else i}", (2 * n, 3 * n)).requires_grad_() for i in range(n)]
        if replicated_input:
            leaves = leaves[:1] * n
        outputs = serial(name, leaves, n)
        # A replicated output meets the same gradient on every rank and counts once.
        grads = [drawn(f"{name}-out{i}", tuple(y.shape)) for i, y in enumerate(outputs)]
        torch.autograd.backward(outputs, grads)

        x = leaves[r].detach().clone().requires_grad_()
        y = region(x, group)
        mine = r if len(outputs) == n else 0
        torch.testing.assert_close(y, outputs[mine], rtol=1e-14, atol=1e-14)
        grad = grads[mine].mT.contiguous().mT  # not contiguous
        y.backward(grad)
        torch.testing.assert_close(x.grad, leaves[r].grad, rtol=1e-14, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.world(2)
def test_region_gradients_equal_serial_autograd_on_two_ranks(world) -> None:
    world(check_regions)


@pytest.mark.world(4)
def test_region_gradients_equal_serial_autograd_on_four_ranks(world) -> None:
    world(check_regions)


def check_gradcheck() -> None:
    group = whole_group()
    n, r = group.size, group.rank
    weight = drawn(f"weight{r}", (n, n))  # differs between the ranks

    def mixed(x: Tensor) -> Tensor:
        return comm.reduce_from_tensor_model_parallel_region(weight * comm.copy_to_tensor_model_parallel_region(x, group).sin(), group)

    def last_dim(x: Tensor) -> Tensor:
        part = comm.scatter_to_tensor_model_parallel_region(comm.copy_to_tensor_model_parallel_region(x, group) * 2, group)
        return comm.gather_from_tensor_model_parallel_region(part.exp(), group)

    def last_dim_replicated(x: Tensor) -> Tensor:
        return comm.gather_from_tensor_model_parallel_region(comm.scatter_to_tensor_model_parallel_region(x, group).exp(), group)

    def tokens(x: Tensor) -> Tensor:
        part = comm.scatter_to_sequence_parallel_region(x, group).sin()
        full = weight * comm.gather_from_sequence_parallel_region(part, group)
        part = comm.reduce_scatter_to_sequence_parallel_region(full, group).cos()
        return comm.gather_from_sequence_parallel_region(part, group, tensor_parallel_output_grad=False)

    def last_dim_partial(x: Tensor) -> Tensor:
        part = comm.scatter_to_tensor_model_parallel_region(x, group).sin()
        full = comm.all_gather_last_dim_from_tensor_parallel_region(part, group) @ weight
        part = comm.reduce_scatter_last_dim_to_tensor_parallel_region(full, group).cos()
        return comm.gather_from_tensor_model_parallel_region(part, group)

    def turned(x: Tensor) -> Tensor:
        part = comm.all_to_all_sp2hp(comm.scatter_to_sequence_parallel_region(x, group).sin(), group)
        part = comm.all_to_all_hp2sp(part.exp(), group)
        return comm.gather_from_sequence_parallel_region(part, group, tensor_parallel_output_grad=False)

    # Rank i owns i rows, so the first owns none.
    sizes = list(range(n))

    def ragged(x: Tensor) -> Tensor:
        part = comm.reduce_scatter_to_sequence_parallel_region(drawn(f"r{r}", (sum(sizes), n)) @ x, group, sizes).sin()
        part = comm.gather_from_sequence_parallel_region(part, group, True, sizes) @ weight
        part = comm.reduce_scatter_to_sequence_parallel_region(part, group, sizes).cos()
        return comm.gather_from_sequence_parallel_region(part, group, False, sizes)

    def ragged_from_copy(x: Tensor) -> Tensor:
        return ragged(comm.copy_to_tensor_model_parallel_region(x, group))

    def exchange(x: Tensor) -> Tensor:
        part = comm.scatter_to_sequence_parallel_region(x, group)
        part = comm.all_to_all_autograd(part.flatten(), None, None, group).sin()
        return comm.gather_from_sequence_parallel_region(part, group, tensor_parallel_output_grad=False)

    for function in (mixed, last_dim_replicated, last_dim_partial, tokens, turned, ragged_from_copy, exchange):
        x = drawn("x", (n, n)).requires_grad_()
        assert torch.autograd.gradcheck(function, (x,), nondet_tol=1e-15), function.__name__
    # A wrong pairing must not pass: copy sums n equal gradients of a replicated input.
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(last_dim, (drawn("x", (n, n)).requires_grad_(),), nondet_tol=1e-15)


@pytest.mark.world(2)
def test_compositions_pass_gradcheck_on_two_ranks(world) -> None:
    world(check_gradcheck)


@pytest.mark.journey
@pytest.mark.world(3)
def test_compositions_pass_gradcheck_on_three_ranks(world) -> None:
    world(check_gradcheck)


def check_ragged() -> None:
    group = whole_group()
    n, r = group.size, group.rank
    sizes = [(3 * i + 2) % 5 for i in range(n)]  # the second owns none
    parts = [drawn(f"ragged{i}", (sizes[i], 3)) for i in range(n)]
    x = parts[r].clone().requires_grad_()
    y = comm.gather_from_sequence_parallel_region(x, group, output_split_sizes=sizes)
    assert torch.equal(y, torch.cat(parts))
    grads = [drawn(f"raggedg{i}", (sum(sizes), 3)) for i in range(n)]
    y.backward(grads[r].T.contiguous().T)  # a gradient that is not contiguous
    torch.testing.assert_close(x.grad, sum(grads[1:], grads[0]).split(sizes)[r], rtol=1e-14, atol=1e-14)
    # There and back: the sum of equal copies is n times one.
    back = comm.reduce_scatter_to_sequence_parallel_region(y.detach().requires_grad_(), group, sizes)
    torch.testing.assert_close(back, n * x.detach(), rtol=1e-14, atol=1e-14)
    z = grads[r].clone().requires_grad_()
    comm.reduce_scatter_to_sequence_parallel_region(z, group, sizes).backward(parts[r].T.contiguous().T)
    assert torch.equal(z.grad, torch.cat(parts))
    # Sixteen bits add in float32 and round once.
    narrow = [g.bfloat16() for g in grads]
    found = comm.reduce_scatter_to_sequence_parallel_region(narrow[r], group, sizes)
    exact = sum((g.double() for g in narrow[1:]), narrow[0].double()).split(sizes)[r]
    assert torch.equal(found, exact.bfloat16())
    for wrong in (sizes[:-1], [-1, *sizes[1:]]):
        with pytest.raises(ValueError, match=f"one number of rows for each of {n} ranks"):
            comm.gather_from_sequence_parallel_region(x, group, output_split_sizes=wrong)
    with pytest.raises(ValueError, match=rf"give rank {r} of the group {sizes[r] + 1} rows, but x has {sizes[r]}"):
        comm.gather_from_sequence_parallel_region(x, group, output_split_sizes=[size + 1 for size in sizes])
    with pytest.raises(ValueError, match=f"but dim 0 of x has size {sum(sizes)}"):
        comm.reduce_scatter_to_sequence_parallel_region(z, group, [size + 1 for size in sizes])


@pytest.mark.world(2)
def test_ranks_may_hold_different_numbers_of_tokens_on_two_ranks(world) -> None:
    world(check_ragged)


@pytest.mark.world(4)
def test_ranks_may_hold_different_numbers_of_tokens_on_four_ranks(world) -> None:
    world(check_ragged)


def check_inverses() -> None:
    group = whole_group()
    x = drawn(f"inv{group.rank}", (3, 2, 2 * group.size))
    assert torch.equal(comm.all_to_all_hp2sp(comm.all_to_all_sp2hp(x, group), group), x)
    whole = drawn("inv", (2 * group.size, 3 * group.size))
    assert torch.equal(
        comm.gather_from_tensor_model_parallel_region(comm.scatter_to_tensor_model_parallel_region(whole, group), group), whole
    )
    assert torch.equal(comm.gather_from_sequence_parallel_region(comm.scatter_to_sequence_parallel_region(whole, group), group), whole)


@pytest.mark.world(2)
def test_regions_that_undo_each_other(world) -> None:
    world(check_inverses)


def check_all_to_all_gradient() -> None:
    group = whole_group()
    n, r = group.size, group.rank
    sends = [[(2 * i + 3 * j) % 4 for j in range(n)] for i in range(n)]
    leaves = [drawn(f"a2a{i}", (sum(sends[i]), 2)).requires_grad_() for i in range(n)]
    outputs = [torch.cat([leaves[i].split(sends[i])[j] for i in range(n)]) for j in range(n)]
    grads = [drawn(f"a2ag{i}", tuple(y.shape)) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)
    x = leaves[r].detach().clone().requires_grad_()
    y = comm.all_to_all_autograd(x, [sends[i][r] for i in range(n)], sends[r], group)
    assert torch.equal(y, outputs[r])
    y.backward(grads[r])
    assert torch.equal(x.grad, leaves[r].grad)


@pytest.mark.world(4)
def test_uneven_all_to_all_sends_gradients_back(world) -> None:
    world(check_all_to_all_gradient)


def check_errors() -> None:
    group = whole_group()
    x = torch.ones(3, 5)
    for cut in (
        lambda: comm.reduce_scatter(x, group),
        lambda: comm.scatter_to_sequence_parallel_region(x, group),
        lambda: comm.reduce_scatter_to_sequence_parallel_region(x, group),
        lambda: comm.all_to_all(x, None, None, group),
    ):
        with pytest.raises(ValueError, match="dim 0 of size 3 must be a multiple of the group size 2"):
            cut()
    with pytest.raises(ValueError, match="dim 1 of size 5 must be a multiple of the group size 2"):
        comm.scatter_to_tensor_model_parallel_region(x, group)
    with pytest.raises(ValueError, match="dim 1 of size 5"):
        comm.reduce_scatter_last_dim_to_tensor_parallel_region(x, group)
    with pytest.raises(ValueError, match="dim 1 of size 5"):
        comm.all_to_all_sp2hp(x, group)
    with pytest.raises(ValueError, match="dim 0 of size 3"):
        comm.all_to_all_hp2sp(x, group)
    with pytest.raises(ValueError, match="one entry for each of 2 ranks"):
        comm.all_to_all(x, [1, 1, 1], [1, 1, 1], group)
    with pytest.raises(ValueError, match="add up to 2, but dim 0 of x has size 3"):
        comm.all_to_all(x, [1, 1], [1, 1], group)
    with pytest.raises(ValueError, match="op='mean'"):
        comm.all_reduce(x, group, "mean")
    with pytest.raises(ValueError, match="dim=2"):
        comm.all_gather(x, group, 2)


@pytest.mark.world(2)
def test_bad_shapes_are_named(world) -> None:
    world(check_errors)


def test_group_of_one_is_the_identity() -> None:
    group = Group.single()
    x = torch.randn(3, 5, requires_grad=True)
    for region in REGIONS.values():
        assert region(x, group) is x
    assert comm.all_reduce(x, group) is x
    assert comm.all_gather(x, group, 1) is x
    assert comm.all_to_all_autograd(x, [3], [3], group) is x
    with pytest.raises(ValueError, match="add up to 2"):
        comm.all_to_all(x, [2], [2], group)


def check_compiled() -> None:
    group = whole_group()

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        y = comm.gather_from_sequence_parallel_region(x, group) @ weight
        return comm.reduce_scatter_to_sequence_parallel_region(y.relu(), group).sum()

    def gradients(function) -> list[Tensor]:
        x = drawn(f"cx{group.rank}", (2, 4)).requires_grad_()
        weight = drawn(f"cw{group.rank}", (4, 4)).requires_grad_()
        loss = function(x, weight)
        loss.backward()
        return [loss.detach(), x.grad, weight.grad]

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for ours, expected in zip(gradients(compiled), gradients(layer), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.world(2)
def test_regions_compile_without_a_graph_break(world) -> None:
    world(check_compiled)


def check_ring() -> float:
    group = whole_group()
    here = torch.full((2,), float(group.rank), dtype=torch.float64)
    spec = comm.TensorSpec(shape=(2,), dtype=torch.float64)
    if group.rank == 0:
        comm.send(here, group, 1)
        return comm.recv(spec, group, group.size - 1)[0].item()
    received = comm.recv(spec, group, group.rank - 1)
    comm.send(received + here, group, (group.rank + 1) % group.size)
    with pytest.raises(ValueError, match=f"peer index {group.rank}"):
        comm.send(here, group, group.rank)
    return received[0].item()


@pytest.mark.world(4)
def test_send_and_recv_pass_a_sum_around(world) -> None:
    assert world(check_ring) == [6.0, 0.0, 1.0, 3.0]


def check_neighbours() -> None:
    group = whole_group()
    link = comm.P2PCommunicator(group)
    spec = comm.TensorSpec(shape=(3, 2), dtype=torch.float64)
    # Every rank sends both ways at once, many times: nothing may block and no message may overtake another.
    for turn in range(20):
        mine = torch.full((3, 2), float(100 * turn + group.rank), dtype=torch.float64).T.contiguous().T
        up, down = not group.is_last, not group.is_first
        before, after = link.exchange(
            send_next=mine if up else None,
            recv_next=spec if up else None,
            send_previous=-mine if down else None,
            recv_previous=spec if down else None,
        )
        assert before is None or torch.equal(before, mine - 1)
        assert after is None or torch.equal(after, -mine - 1)
    link.finish()
    # The single and the paired calls name the same transfers.
    if group.is_first:
        link.send_forward(mine)
        assert torch.equal(link.recv_backward(spec), 2 * (mine + 1))
        with pytest.raises(ValueError, match=r"stage 0 of .* has no previous stage"):
            link.send_backward(mine)
    elif group.rank == 1:
        link.send_backward(2 * (link.recv_forward(spec) + 1))
    link.finish()


@pytest.mark.world(2)
def test_two_neighbours_exchange_both_ways(world) -> None:
    world(check_neighbours)


@pytest.mark.world(4)
def test_four_neighbours_exchange_both_ways(world) -> None:
    world(check_neighbours)


def check_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    used: set[str] = set()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            used.add(str(func))
            return func(*args, **(kwargs or {}))

    group = whole_group()
    x = drawn("operators", (4, 4, 4)).requires_grad_()
    with Operators():
        for region in REGIONS.values():
            region(x, group).sum().backward()
        comm.all_gather(x, group, 1)
    assert "_c10d_functional.all_gather_into_tensor_out.default" in used
    assert "_c10d_functional.all_gather_into_tensor.default" not in used
    assert not any("coalesced" in name for name in used)


@pytest.mark.world(2)
def test_collectives_use_no_operator_that_damages_the_heap_on_gloo(world) -> None:
    """Its worker threads store the name of what they finished without a lock; names of 16 characters and more are freed twice."""
    world(check_operators)


META = """
import torch, torch.distributed as dist
from mcore_parallel import Group, comm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
of_two = Group((0, 1), 0, dist.group.WORLD, dist.group.WORLD.group_name)
print(*comm.reduce_scatter(torch.ones(4, 3, device="meta"), of_two).shape)
"""


@pytest.mark.journey
def test_tensors_without_data_go_through_collectives_in_a_new_process() -> None:
    """Nothing else has loaded what torch makes of them."""
    done = subprocess.run([sys.executable, "-c", META], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2", "3"], done.stderr
