# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Products and sums whose bits do not depend on the tensor-parallel degree.

What tensor parallelism cuts is cut into a fixed number of blocks instead, which every degree that divides it shares out evenly. Each block
has a GEMM of its own, always of the same shapes, so that a library picks the same way to compute it; and sums over blocks are taken
one block after the other on every rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel.comm import all_gather, all_reduce
from mcore_parallel.groups import Group, named_shards
from mcore_parallel.tensor_parallel._product import ProductLayer, Route
from mcore_parallel.tensor_parallel._vocab import check_ids, owned_rows

# T tokens, B blocks of all ranks, b = B / R of this rank, I and O input and output features of this rank, V vocabulary


def make_tp_invariant(model: nn.Module, blocks: int) -> None:
    """Give the results of a model of cut linear layers the same bits for every tp that divides ``blocks``.

    For comparisons of layouts, not for speed: GEMMs are cut into ``blocks``, and their sums gathered whole. Outputs, losses
    (``ModelOutput.token_losses``, ``loss_sum``, ``log_probs``), and the gradients of all parameters of dense layers with grouped-query
    attention then do not depend on tp. What sums over the heads or channels of a rank in its own way (latent attention, norms across
    heads, linear mixers, experts) does, and so does the gradient norm: compare with ``clip_grad=0``. On a CPU, blocks of queries, keys
    and values and of the feed-forward must be multiples of 32 channels: what is left over goes through other instructions there.

    Args:
        model: its ``ColumnParallelLinear``, ``RowParallelLinear`` and output layers are changed in place; call it in every layout
            with the same ``blocks``.
        blocks: B; a multiple of every tp to compare that divides key-value heads, feed-forward width and vocabulary.

    Raises:
        ValueError: blocks that tp does not divide or that do not divide a weight, sequence parallelism (whose sums over tokens follow
            tp), parameters that are whole but used by each rank's heads, a layer whose GEMMs something else computes.

    Example:
        >>> layer = RowParallelLinear(8, 2, ProcessGroups.single())
        >>> make_tp_invariant(layer, blocks=4)
        >>> layer(torch.ones(3, 8)).shape
        torch.Size([3, 2])
    """
    made: list[tuple[ProductLayer, InvariantProducts]] = []
    for name, layer in model.named_modules():
        # Weights that are whole on each rank give the same bits anyway.
        if not isinstance(layer, ProductLayer) or "tp" not in layer.weight_spec.shards:
            continue
        groups, shape, dim = layer.groups, layer.weight_spec.shape, layer.weight_spec.shards["tp"]
        if groups.sequence_parallel:
            raise ValueError("sequence_parallel=True sums over the tokens of each tp rank; compare with sequence_parallel=False")
        if layer.products is not None:
            raise ValueError(f"{name}: {type(layer.products).__name__} computes its products; build the model with the plain backend")
        if isinstance(getattr(layer, "lora", None), nn.Module):
            raise ValueError(f"{name} has an adapter, whose sums follow tp; compare after merge_lora")
        local_blocks(blocks, groups.tp)
        if shape[dim] % blocks:
            raise ValueError(f"blocks={blocks} must divide dim {dim} of {name}.weight {shape}; choose fewer")
        made.append((layer, InvariantProducts(blocks, shape[:-1], dim, groups.tp)))
    for shard in named_shards(model):
        if "tp" in shard.spec.partial:
            raise ValueError(f"the gradient of {shard.name} is a sum over what each tp rank has of it (qk_layernorm, say); leave it out")
    for layer, products in made:
        layer.products = products


class InvariantProducts:
    """Products of one layer in blocks; conforms to ``LinearProducts``.

    Args:
        blocks: B.
        rows: the global weight's shape but for its last dim.
        shard_dim: which dim of the weight is cut.
        group: tp.
    """

    def __init__(self, blocks: int, rows: tuple[int, ...], shard_dim: int, group: Group) -> None:
        self.blocks, self.shard_dim, self.group = blocks, shard_dim, group
        self._rows = tuple(size // group.size if dim == shard_dim else size for dim, size in enumerate(rows))

    def column(self, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        return invariant_column_product(x, weight_OI.unflatten(0, self._rows), self.shard_dim, route.group, self.blocks)

    def row(self, x_TI: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        return invariant_row_product(x_TI, weight_OI, route.group, self.blocks)

    def cross_entropy(self, logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
        """As ``vocab_parallel_cross_entropy`` of the layer's logits, without smoothing."""
        return invariant_cross_entropy(logits, target, self.group, self.blocks, vocab_size)

    def weight_changed(self) -> None:
        """Nothing is kept."""


def local_blocks(blocks: int, group: Group) -> int:
    """b.

    Raises:
        ValueError: the group does not divide B.
    """
    if blocks % group.size:
        raise ValueError(f"tp={group.size} must divide blocks={blocks}; choose a multiple of every tp to compare")
    return blocks // group.size


def cut(x: Tensor, dim: int, count: int, what: str) -> list[Tensor]:
    """Even contiguous pieces, each in memory of its own: also the alignment of a piece is the same everywhere.

    Raises:
        ValueError: uneven ones.
    """
    if x.shape[dim] % count:
        raise ValueError(f"{count} blocks of a rank must divide dim {dim} of {what} {tuple(x.shape)}; choose fewer blocks")
    return [piece.clone(memory_format=torch.contiguous_format) for piece in x.chunk(count, dim)]


def sum_blocks(parts: list[Tensor], group: Group) -> Tensor:
    """Sum of the b parts of each rank, in the order of the blocks, in float32 or wider."""
    whole_B = all_gather(torch.stack(parts), group)
    total = whole_B[0].to(torch.promote_types(whole_B.dtype, torch.float32), copy=True)
    for part in whole_B[1:]:
        total += part
    return total.to(whole_B.dtype)


def invariant_column_product(x: Tensor, weight: Tensor, shard_dim: int, group: Group, blocks: int) -> Tensor:
    """x W^T of replicated x [T, I]; the gradient of x is summed over the group.

    Args:
        x: the input.
        weight: [*out, I], cut over the group along ``shard_dim``.
        shard_dim: of the weight.
        group: tp.
        blocks: B.

    Returns:
        [T, O], as ``F.linear`` with the flattened weight.
    """
    return _InvariantColumn.apply(x, weight, shard_dim, group, local_blocks(blocks, group))


def invariant_row_product(x: Tensor, weight: Tensor, group: Group, blocks: int) -> Tensor:
    """Sum over the group of x W^T, for x [T, I] and the weight [O, I] cut along I."""
    return _InvariantRow.apply(x, weight, group, local_blocks(blocks, group))


class _InvariantColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shard_dim: int, group: Group, count: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shard_dim, ctx.group, ctx.count = shard_dim, group, count
        rows = cut(weight, shard_dim, count, "a weight")
        parts = [F.linear(x, part.flatten(0, -2)).unflatten(-1, part.shape[:-1]) for part in rows]
        return torch.cat(parts, x.dim() - 1 + shard_dim).flatten(x.dim() - 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        lead = x.dim() - 1
        grad = grads[0].unflatten(-1, weight.shape[:-1])
        grad_parts = [part.flatten(lead) for part in cut(grad, lead + ctx.shard_dim, ctx.count, "a gradient")]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            rows = cut(weight, ctx.shard_dim, ctx.count, "a weight")
            grad_x = sum_blocks([part @ row.flatten(0, -2) for part, row in zip(grad_parts, rows, strict=True)], ctx.group)
        if ctx.needs_input_grad[1]:
            shape = list(weight.shape)
            shape[ctx.shard_dim] //= ctx.count
            flat_x = x.reshape(-1, x.shape[-1])
            weight_grads = [(part.flatten(0, -2).T @ flat_x).view(shape) for part in grad_parts]
            grad_weight = torch.cat(weight_grads, ctx.shard_dim)
        return grad_x, grad_weight, None, None, None


class _InvariantRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, count: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.count = group, count
        pairs = zip(cut(x, -1, count, "an input"), cut(weight, -1, count, "a weight"), strict=True)
        return sum_blocks([F.linear(part, columns) for part, columns in pairs], group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        grad = grad.contiguous()
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.cat([grad @ columns for columns in cut(weight, -1, ctx.count, "a weight")], -1)
        if ctx.needs_input_grad[1]:
            flat = grad.reshape(-1, grad.shape[-1])
            grad_weight = torch.cat([flat.T @ part.reshape(-1, part.shape[-1]) for part in cut(x, -1, ctx.count, "an input")], -1)
        return grad_x, grad_weight, None, None


def invariant_cross_entropy(logits_Tv: Tensor, target_T: Tensor, group: Group, blocks: int, vocab_size: int) -> Tensor:
    """As ``vocab_parallel_cross_entropy`` without smoothing."""
    check_ids(target_T, "target", vocab_size, lowest=None)
    return _InvariantCrossEntropy.apply(logits_Tv, target_T, group, local_blocks(blocks, group), vocab_size)


class _InvariantCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, target_T: Tensor, group: Group, count: int, vocab_size: int) -> Tensor:
        z_Tv = logits_Tv.to(torch.promote_types(logits_Tv.dtype, torch.float32))
        columns = torch.arange(z_Tv.shape[-1], device=z_Tv.device) + group.rank * z_Tv.shape[-1]
        z_Tv = z_Tv.masked_fill(columns >= vocab_size, float("-inf"))
        max_T = all_reduce(z_Tv.amax(-1), group, "max")
        column_T, owned_T = owned_rows(target_T, z_Tv.shape[-1], group)
        picked_T = torch.where(owned_T, z_Tv.gather(-1, column_T.unsqueeze(-1)).squeeze(-1) - max_T, 0.0)
        parts = [(part - max_T.unsqueeze(-1)).exp().sum(-1) for part in cut(z_Tv, -1, count, "logits")]
        log_norm_T = sum_blocks(parts, group).log()
        counted_T = (target_T >= 0) & (target_T < vocab_size)
        ctx.save_for_backward(z_Tv, max_T + log_norm_T, column_T, owned_T & counted_T, counted_T)
        ctx.count, ctx.dtype = count, logits_Tv.dtype
        # All addends but one are zero, so the order of this sum does not matter.
        return torch.where(counted_T, log_norm_T - all_reduce(picked_T, group), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z_Tv, log_norm_T, column_T, owned_T, counted_T = ctx.saved_tensors
        grad_T = torch.where(counted_T, grads[0], 0.0).unsqueeze(-1)
        parts = [(part - log_norm_T.unsqueeze(-1)).exp() for part in cut(z_Tv, -1, ctx.count, "logits")]
        grad_Tv = torch.cat(parts, -1)
        grad_Tv.scatter_add_(-1, column_T.unsqueeze(-1), -owned_T.to(grad_Tv.dtype).unsqueeze(-1))
        return (grad_Tv * grad_T).to(ctx.dtype), None, None, None, None
