# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The DTensor whose rows are divided as a flat layout divides them. Importing it imports torch's DTensors, which is slow."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def spec_of(mesh: "DeviceMesh", placements: "Sequence[Placement]", shape: torch.Size, dtype: torch.dtype) -> "DTensorSpec":
    """What a contiguous DTensor is, whatever its local part."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype))


def dtensor_of(local: torch.Tensor, spec: "DTensorSpec", cls: type[DTensor] = DTensor) -> DTensor:
    """A DTensor around this rank's part, which stays where it is: on the device of the mesh or on the host; ``cls`` is its type."""
    # `from_local` would move it to the device of the mesh, and takes ten times as long. The outside of a tensor that is built on an offset
    # has an address, and is then taken for one with memory by whoever copies it.
    outside = local.as_strided(local.size(), local.stride(), 0) if local.storage_offset() else local
    tensor = cls(outside, spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


_UNKNOWN = (
    "an operation on a shard of fully_shard moved or reshaped its rows, which torch believes to be divided evenly; "
    "take full_tensor() before it, or work on to_local()"
)

# Operators over lists that belong together element by element.
_ELEMENTWISE = ("_foreach_", "_fused_", "_amp_foreach_")

# Operators that leave every element where it is, beside those that torch marks as pointwise.
_UNMOVED = frozenset({"clone", "detach", "copy_", "zero_", "fill_", "_to_copy", "empty_like", "zeros_like", "ones_like", "full_like"})


# Operators along dimensions that torch computes from the rows of all ranks, which it would gather as even chunks.
_OF_ALL_ROWS = frozenset(
    {
        *("select", "slice", "split", "split_with_sizes", "unbind", "index_select", "gather", "flip", "roll", "sort", "topk", "kthvalue"),
        *("argmax", "argmin", "median", "nanmedian", "mode", "var", "std", "var_mean", "std_mean", "logsumexp", "_softmax", "_log_softmax"),
        *(
            "cumsum",
            "cumprod",
            "cummax",
            "cummin",
            "logcumsumexp",
            "aminmax",
            "histc",
            "index",
            "masked_select",
            "nonzero",
            "take",
            "tril",
            "triu",
        ),
    }
)
# Reductions that refuse to look at nothing: a rank without rows puts something in.
_LARGEST, _SMALLEST, _NORMS = ("max", "amax", "_foreach_max"), ("min", "amin"), ("linalg_vector_norm", "_foreach_norm")


class RowPlace(Protocol):
    """What a ``ShardTensor`` asks of the place of its rows."""

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor from every rank's rows. A collective."""
        ...

    def global_boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], torch.Size]]:
        """Blocks (offsets in the whole tensor, sizes, first element and count in the local one) that cover this rank's rows."""
        ...


class ShardTensor(DTensor):
    """A DTensor that knows the place of its rows: torch's own arithmetic assumes even chunks.

    Operations that leave rows where they are (copies, casts, arithmetic among shards of one place) return a ``ShardTensor`` of the same
    place; reductions return ordinary partial sums. What needs the rows of all ranks in their order (an index, a slice, a sort along
    them) is refused on every rank. A result whose rows were moved has no place: its local part can be used, and whatever needs to know
    where it lies refuses.
    """

    place: RowPlace | None
    _plain: DTensor
    """The same memory as torch's own type, in which its operators are called."""

    @classmethod
    def of(cls, plain: DTensor, place: RowPlace | None) -> "ShardTensor":
        """What torch takes for an evenly divided tensor, with the place of its rows."""
        tensor = cast("ShardTensor", dtensor_of(plain._local_tensor, plain._spec, cls))
        tensor.place, tensor._plain = place, plain
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for local_rule in (_new_like, _on_rows, _mean):
            result = local_rule(func, args, kwargs or {})
            if result is not None:
                return result
        args = _reducible(func, args, kwargs or {})
        values = [*args, *(kwargs or {}).values()]
        lists = [value for value in values if isinstance(value, (list, tuple)) and value]
        if func.overloadpacket.__name__.startswith(_ELEMENTWISE):
            rest = [value for value in values if isinstance(value, torch.Tensor)]
            sources = [_sources([*each, *rest]) for each in zip(*lists, strict=False)]
        else:
            sources = itertools.repeat(_sources(itertools.chain(values, *lists)))
        result = func(*map(_plain, args), **{key: _plain(value) for key, value in (kwargs or {}).items()})
        if type(result) in (list, tuple):
            return type(result)(map(_placed, result, sources))
        return None if result is None else _placed(result, next(iter(sources)))

    def full_tensor(self, *, grad_placements: "Sequence[Placement] | None" = None) -> torch.Tensor:
        return self._known_place.gather(self.to_local())

    def redistribute(
        self, device_mesh: "DeviceMesh | None" = None, placements: "Sequence[Placement] | None" = None, **options: Any
    ) -> DTensor:
        return distribute_tensor(self.full_tensor().detach(), device_mesh or self.device_mesh, placements, src_data_rank=None)

    @property
    def _known_place(self) -> RowPlace:
        if self.place is None:
            raise RuntimeError(_UNKNOWN)
        return self.place

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach().clone()
        copy = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a shard knows its ranks and cannot be pickled; save it by torch.distributed.checkpoint or mcore_ckpt, "
            "or save the whole tensors of full_state_dict()"
        )

    # What torch's checkpointer asks a tensor.

    def __create_write_items__(self, fqn: str, object: Any) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        # Torch's checkpoint package is slow to import, and loaded by whoever calls this.
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        boxes = self._known_place.global_boxes()
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)) for offsets, sizes, _ in boxes]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        for offsets, sizes, (start, numel) in self._known_place.global_boxes():
            if index.offset is None or tuple(index.offset) == offsets:
                return self.to_local().detach().view(-1)[start : start + numel].view(sizes)
        raise ValueError(f"{index.fqn!r} has no block at {index.offset} on this rank")


# Torch's optimizers and its clipping choose kernels over lists by exact type, from lists that its own DTensor joins when it is imported.
for _types in (_optimizer_types, _clipping_types):
    cast("list[type[torch.Tensor]]", _types).append(ShardTensor)

# Torch 2.11 computes the operators of DTensor's subclasses in C++, as DTensor's own, and never calls their `__torch_dispatch__`. Rules for
# single operators come before that; in a later torch they would change nothing.
if torch.__version__ < "2.12":
    _aten = torch.library.Library("aten", "FRAGMENT")
    for _operator in torch._C._dispatch_get_all_op_names():
        if _operator.startswith("aten::"):
            torch.library.register_torch_dispatch(_operator, ShardTensor, ShardTensor.__torch_dispatch__.__func__, lib=_aten)


def _plain(value: Any) -> Any:
    if isinstance(value, ShardTensor):
        return value._plain
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor | None:
    """``new_empty`` and its like with the shape of a shard: divided as the shard is, and not evenly."""
    if func.overloadpacket.__name__ not in ("new_empty", "new_zeros", "new_ones", "new_full") or tuple(args[1]) != tuple(args[0].shape):
        return None
    shard: ShardTensor = args[0]
    local = func(shard._local_tensor, shard._local_tensor.shape, *args[2:], **kwargs)
    return ShardTensor.of(dtensor_of(local, shard._spec), shard.place)


def _on_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor | None:
    """An operation element by element on shards that are divided alike: each rank's rows alone say its result.

    It is called on the local parts. Torch's own way to find out how a result is divided takes milliseconds for each new shape.
    """
    if func.overloadpacket.__name__ not in _UNMOVED and torch.Tag.pointwise not in func.tags:
        return None
    first = args[0]
    if torch.Tag.nondeterministic_seeded in func.tags or "out" in kwargs or not isinstance(first, ShardTensor):
        return None
    if any(placement.is_partial() for placement in first._spec.placements):
        return None
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and not _lies_alike(value, first)):
            return None
    local = func(*map(_local, args), **{key: _local(value) for key, value in kwargs.items()})
    if local is first._local_tensor:
        return first
    spec = first._spec if local.dtype == first.dtype else spec_of(first._spec.mesh, first._spec.placements, first.shape, local.dtype)
    return ShardTensor.of(dtensor_of(local, spec), first.place)


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Of a shard, the sum divided by the number of elements: torch takes the mean of the means of ranks, as if all had equally many."""
    if func.overloadpacket.__name__ != "mean" or not isinstance(args[0], ShardTensor):
        return None
    first, values = args[0], _named(func, args, kwargs)
    # Torch's own, which refuses integers.
    dtype = torch.empty((), dtype=first.dtype, device="meta").mean(dtype=values.get("dtype")).dtype
    dims = _dims(values.get("dim"), first.dim())
    count = math.prod(first.shape[dim] for dim in dims)
    # A sum may be beyond the range of 16 bits where the mean is not.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return (torch.sum(first, list(dims), bool(values.get("keepdim")), dtype=wide) / count).to(dtype)


def _reducible(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of an operation, with something to reduce on a rank without rows.

    Raises:
        RuntimeError: it needs the rows of all ranks in their order; the same on every rank, before any communication.
    """
    first, name = args[0] if args else None, func.overloadpacket.__name__
    is_filled = name in _LARGEST or name in _SMALLEST or name in _NORMS
    if is_filled and isinstance(first, (list, tuple)):
        order = _named(func, args, kwargs).get("ord")
        return ([_filled(value, name, order) for value in first], *args[1:])
    if not isinstance(first, ShardTensor) or (name not in _OF_ALL_ROWS and not is_filled):
        return args
    divided = {
        placement.dim
        for axis, placement in enumerate(first.placements)
        if isinstance(placement, Shard) and first.device_mesh.size(axis) > 1
    }
    values = _named(func, args, kwargs)
    dims = _dims(values.get("dim", values.get("dims")), first.dim())
    if name == "index":
        dims = frozenset(dim for dim, index in enumerate(values["indices"]) if index is not None)
    elif name == "slice" and (values["start"] or 0) == 0 and (values["end"] is None or values["end"] >= first.shape[min(dims)]):
        dims = dims if values["step"] != 1 else frozenset()
    if not divided & dims:
        return args
    if name in _OF_ALL_ROWS or func._overloadname == "dim":
        raise RuntimeError(_UNKNOWN)
    return (_filled(first, name, values.get("ord")), *args[1:])


def _filled(value: Any, name: str, order: float | None) -> Any:
    """A shard without rows on this rank with what changes no result of a reduction; ``order`` is that of a norm."""
    if not isinstance(value, ShardTensor) or value._local_tensor.numel() or not value.numel():
        return value
    local = value._local_tensor
    if name in _NORMS:
        neutral = math.inf if order is not None and order < 0 else 0.0
    elif local.is_floating_point() or local.is_complex():
        neutral = math.inf if name in _SMALLEST else -math.inf
    elif local.dtype == torch.bool:
        neutral = name in _SMALLEST
    else:
        limits = torch.iinfo(local.dtype)
        neutral = limits.max if name in _SMALLEST else limits.min
    return dtensor_of(local.new_full([max(1, size) for size in local.shape], neutral), value._spec)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, with its defaults."""
    declared = func._schema.arguments
    given = {argument.name: value for argument, value in zip(declared, args, strict=False)} | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in declared}


def _dims(dim: Any, num_dims: int) -> frozenset[int]:
    """Dimensions from 0 up; all of them for None, or an empty list."""
    chosen = [dim] if isinstance(dim, int) else list(dim or range(num_dims))
    return frozenset(one % max(1, num_dims) for one in chosen)


def _lies_alike(value: torch.Tensor, first: ShardTensor) -> bool:
    """Whether ranks hold the same rows of both."""
    if not isinstance(value, ShardTensor) or value.shape != first.shape or value._local_tensor.shape != first._local_tensor.shape:
        return False
    return value.place == first.place and value._spec.mesh == first._spec.mesh and value._spec.placements == first._spec.placements


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, ShardTensor) else value


def _sources(values: Iterable[Any]) -> list[ShardTensor]:
    """The shards among the arguments of one operation, which must be divided alike."""
    tensors = [value for value in values if isinstance(value, DTensor)]
    shards = [tensor for tensor in tensors if isinstance(tensor, ShardTensor)]
    for tensor in tensors if shards else ():
        first = shards[0]
        if isinstance(tensor, ShardTensor):
            if tensor.place is first.place:
                continue
            alike = tensor.place == first.place
        else:
            alike = tensor.shape != first.shape or tensor._local_tensor.shape == first._local_tensor.shape
        if not alike:
            raise RuntimeError(
                f"a shard of fully_shard with shape {tuple(first.shape)} meets a DTensor with shape {tuple(tensor.shape)} that is divided "
                "otherwise; take full_tensor() of both, or work on to_local()"
            )
    return shards


def _placed(result: Any, sources: list[ShardTensor]) -> Any:
    """What an operation on shards returned, with the place of its rows."""
    if not isinstance(result, DTensor) or not sources or isinstance(result, ShardTensor):
        return result
    for source in sources:
        if result is source._plain:
            return source
    source, spec = sources[0], result._spec
    partial = {axis: placement for axis, placement in enumerate(spec.placements) if isinstance(placement, Partial)}
    if any(placement.reduce_op == "avg" and spec.mesh.size(axis) > 1 for axis, placement in partial.items()):
        # A mean of the means of ranks, as if all had equally many rows.
        raise RuntimeError(_UNKNOWN)
    if partial:
        return result
    lies_alike = spec.mesh == source._spec.mesh and spec.placements == source._spec.placements and result.shape == source.shape
    if lies_alike and result._local_tensor.shape == source._local_tensor.shape:
        return ShardTensor.of(result, source.place)
    if all(isinstance(placement, Replicate) for placement in spec.placements):
        raise RuntimeError(_UNKNOWN)
    return ShardTensor.of(result, None)
