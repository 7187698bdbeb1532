# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A named grid of ranks and its process groups."""

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class HyperCommGrid:
    """An N-dimensional grid over the contiguous ranks [rank_offset, rank_offset + prod(shape)).

    The first name varies fastest: ``HyperCommGrid((2, 4), ("tp", "dp"))`` puts ranks 0 and 1 into one tp group.
    Further factorisations of the same ranks are views; groups over shared axes are created once, in the base view.

    Args:
        shape: size of each axis.
        dim_names: name of each axis, same length as ``shape``.
        rank_offset: first rank of the grid.
        backend: passed to ``torch.distributed.new_group``; None takes the default.
        world_size: ranks there are; None asks torch.distributed, or before it is initialised the variable WORLD_SIZE, which launchers set.
        timeout_s: time limit of every collective of the groups; None takes torch's.

    Raises:
        ValueError: lengths differ, a size below one, a repeated name, a negative offset.
        RuntimeError: the grid does not fit into the world, or the world size is unknown.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
        *,
        world_size: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        _check_axes(shape, dim_names)
        if rank_offset < 0:
            raise ValueError(f"rank_offset={rank_offset} must not be negative")
        if world_size is None:
            world_size = _world_size()
        self.shape = tuple(shape)
        self.dim_names = tuple(dim_names)
        self.rank_offset = rank_offset
        self.backend = backend
        self.size = math.prod(shape)
        if self.size > world_size - rank_offset:
            raise RuntimeError(
                f"grid of {dict(zip(dim_names, shape, strict=True))} = {self.size} ranks "
                f"from rank {rank_offset} exceeds world_size={world_size}"
            )
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._views: dict[str, tuple[dict[str, int], frozenset[str]]] = {}
        self._groups: dict[tuple[str, str], dist.ProcessGroup | None] = {}

    def register_view(self, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str] = ()) -> None:
        """Name a second factorisation of the same ranks; ``shared_dims`` must enumerate as in the base view.

        Raises:
            ValueError: bad axes as in the constructor, the product differs, or a shared axis enumerates differently.
            KeyError: the view exists, or a shared axis is not in both.
        """
        if name in self._views or not name:
            raise KeyError(f"view {name!r} exists already" if name else "a view needs a name")
        _check_axes(shape, dim_names)
        if math.prod(shape) != self.size:
            raise ValueError(f"view {name!r} has {math.prod(shape)} ranks, the grid has {self.size}")
        sizes = dict(zip(dim_names, shape, strict=True))
        shared = frozenset(shared_dims)
        for dims in [[dim] for dim in shared_dims] + ([list(shared_dims)] if len(shared) > 1 else []):
            if enumerate_ranks(sizes, dims, self.rank_offset) != self.get_rank_enum(dims):
                raise ValueError(
                    f"axes {dims} of view {name!r} hold other ranks than in the base view; make the faster axes multiply to the same size"
                )
        self._views[name] = (sizes, shared)

    def get_rank_enum(self, dims: str | Sequence[str], view: str | None = None) -> list[list[int]]:
        """All groups over ``dims``, ordered by the remaining axes; inside a group the first axis varies fastest."""
        return enumerate_ranks(self._sizes(view), _as_list(dims), self.rank_offset)

    def create_pg(self, dims: str | Sequence[str], view: str | None = None, **options: Any) -> dist.ProcessGroup | None:
        """Create the groups over ``dims`` (every rank of the world must call) and return this rank's, None outside the grid.

        Args:
            dims: axes of the groups.
            view: of a registered view; None for the base view.
            options: passed to ``torch.distributed.new_group``: ``timeout``, ``pg_options``, ``group_desc`` (the axes unless given).

        Raises:
            KeyError: the groups exist already, or an axis is unknown.
        """
        key = self._key(dims, view)
        if key in self._groups:
            raise KeyError(f"process groups over {key[1]!r} exist already; call get_pg")
        options.setdefault("group_desc", key[1])
        if self._timeout is not None:
            options.setdefault("timeout", self._timeout)
        mine = None
        for ranks in self.get_rank_enum(dims, view):
            group: Any = dist.new_group(ranks, backend=self.backend, **options)
            if dist.get_rank() in ranks:
                mine = group
        self._groups[key] = mine
        return mine

    def get_pg(self, dims: str | Sequence[str], view: str | None = None) -> dist.ProcessGroup | None:
        """This rank's group over ``dims``; never creates one.

        Raises:
            KeyError: the group was not created.
        """
        key = self._key(dims, view)
        if key not in self._groups:
            raise KeyError(f"no process group over {key[1]!r}; call create_pg on every rank first")
        return self._groups[key]

    def is_current_rank_in_grid(self) -> bool:
        """Whether this process is one of the grid's ranks; needs torch.distributed."""
        return self.rank_offset <= dist.get_rank() < self.rank_offset + self.size

    def destroy(self) -> None:
        """Destroy the groups this rank belongs to, each once."""
        for group in {id(g): g for g in self._groups.values() if g is not None}.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def _sizes(self, view: str | None) -> dict[str, int]:
        if not view:
            return dict(zip(self.dim_names, self.shape, strict=True))
        if view not in self._views:
            raise KeyError(f"unknown view {view!r}; registered: {sorted(self._views)}")
        return self._views[view][0]

    def _key(self, dims: str | Sequence[str], view: str | None) -> tuple[str, str]:
        names, sizes = _as_list(dims), self._sizes(view)
        _check_dims(names, sizes)
        if view and set(names) <= self._views[view][1]:
            view = None
        return view or "", "-".join(name for name in reversed(list(sizes)) if name in names)


def enumerate_ranks(sizes: dict[str, int], dims: Sequence[str], offset: int = 0) -> list[list[int]]:
    """Groups of ranks that vary over ``dims`` with the other axes fixed; ``sizes`` is ordered fastest axis first.

    rank = offset + sum(index * stride), stride = product of the sizes of the faster axes.

    Raises:
        KeyError: an axis that ``sizes`` does not have.
    """
    _check_dims(dims, sizes)

    def offsets(names: Sequence[str]) -> list[int]:
        ranks = [0]
        for name in names:
            stride = math.prod(size for other, size in _faster(sizes, name))
            ranks = [rank + index * stride for index in range(sizes[name]) for rank in ranks]
        return ranks

    inside = offsets([name for name in sizes if name in dims])
    outside = offsets([name for name in sizes if name not in dims])
    return [[offset + base + step for step in inside] for base in outside]


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    # As in Megatron: grids are laid out before the process group exists, under a launcher that sets the variable.
    launched = os.environ.get("WORLD_SIZE", "")
    if not launched.isdecimal():
        raise RuntimeError(
            "the world size is unknown; call torch.distributed.init_process_group first, pass world_size or set the variable WORLD_SIZE"
        )
    return int(launched)


def _check_axes(shape: Sequence[int], dim_names: Sequence[str]) -> None:
    if len(shape) != len(dim_names):
        raise ValueError(f"shape={tuple(shape)} and dim_names={tuple(dim_names)} must have the same length")
    if min(shape, default=1) < 1:
        raise ValueError(f"shape={tuple(shape)} must hold sizes of at least 1")
    if len(set(dim_names)) != len(dim_names) or any("-" in name for name in dim_names):
        raise ValueError(f"dim_names={tuple(dim_names)} must be distinct and without '-'")


def _faster(sizes: dict[str, int], name: str) -> list[tuple[str, int]]:
    items = list(sizes.items())
    return items[: list(sizes).index(name)]


def _as_list(dims: str | Sequence[str]) -> list[str]:
    return dims.split("-") if isinstance(dims, str) else list(dims)


def _check_dims(dims: Sequence[str], sizes: dict[str, int]) -> None:
    if unknown := [dim for dim in dims if dim not in sizes]:
        raise KeyError(f"unknown axes {unknown}; this grid has {list(sizes)}")
