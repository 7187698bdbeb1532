# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that communicate, and how their communicator is made."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_log = logging.getLogger(__name__)
_NETS = ("IB", "Socket")


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, seen from one of them.

    A group of one rank has no communicator, so every collective over it is the identity and
    single-rank work needs no ``torch.distributed`` set-up.

    Example:
        >>> Group.single().size
        1
    """

    ranks: tuple[int, ...]
    rank: int
    """Position of this process in ``ranks``."""
    pg: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    name: str = ""
    """Name under which functional collectives find the communicator; empty for a group of one."""
    timeout_s: float | None = field(default=None, compare=False, repr=False)
    """Time limit the communicator was made with, so that groups cut from this one get it too; None for torch's."""

    def __post_init__(self) -> None:
        if self.pg is not None:
            # What its operators make of tensors without data; whoever has no communicator need not wait for it.
            import torch.distributed._functional_collectives  # noqa: F401

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @classmethod
    def single(cls, rank: int = 0) -> "Group":
        return cls((rank,), 0)

    @classmethod
    def of(cls, pg: dist.ProcessGroup) -> "Group":
        """Wrap a torch process group this process belongs to."""
        ranks = tuple(dist.get_process_group_ranks(pg))
        return cls(ranks, ranks.index(dist.get_rank()), pg, pg.group_name)


@dataclass(frozen=True, kw_only=True)
class CommunicatorOptions:
    """NCCL's choices for one communicator; None leaves a choice to NCCL. Without effect on other backends.

    Raises:
        ValueError: a negative count, ``min_ctas`` above ``max_ctas``, an unknown net.

    Example:
        >>> CommunicatorOptions(max_ctas=8, is_high_priority_stream=True).max_ctas
        8
    """

    min_ctas: int | None = None
    """Fewest thread blocks of one collective."""
    max_ctas: int | None = None
    """Most thread blocks of one collective: what it may take from a GEMM that runs beside it."""
    cga_cluster_size: int | None = None
    """Thread blocks of one cluster, 0 to 8."""
    net_name: str | None = None
    """"IB" or "Socket"."""
    is_high_priority_stream: bool = False
    """Run the collectives on a stream that goes before the compute stream."""
    use_sharp: bool = False
    """Let the switches of the network add (SHARP, NCCL's CollNet). Where torch, NCCL or the network cannot, NCCL adds as ever."""

    def __post_init__(self) -> None:
        for name, low in (("min_ctas", 1), ("max_ctas", 1), ("cga_cluster_size", 0)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= low):
                raise ValueError(f"{name}={value!r} must be an integer of at least {low}, or None")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ValueError(f"min_ctas={self.min_ctas} must not exceed max_ctas={self.max_ctas}")
        if self.cga_cluster_size is not None and self.cga_cluster_size > 8:
            raise ValueError(f"cga_cluster_size={self.cga_cluster_size} must be at most 8")
        if self.net_name is not None and self.net_name not in _NETS:
            raise ValueError(f"net_name={self.net_name!r} must be one of {', '.join(_NETS)}, or None")


def load_communicator_options(path: str | Path) -> dict[str, CommunicatorOptions]:
    """Options by group name, from a .json or .toml file that holds a table a group.

    Raises:
        ValueError: another suffix, an entry that is no table, an unknown or impossible option.

    Example:
        A TOML file::

            [dp_cp]
            max_ctas = 16

            [tp]
            is_high_priority_stream = true
    """
    import tomllib

    path = Path(path)
    readers = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix not in readers:
        raise ValueError(f"{path.name} must end in {' or '.join(readers)}")
    tables: Any = readers[path.suffix](path.read_text(encoding="utf-8"))
    known = {item.name for item in fields(CommunicatorOptions)}
    options_by_group = {}
    if not isinstance(tables, Mapping):
        raise ValueError(f"{path.name} must hold a table of groups, found {type(tables).__name__}")
    for group, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"{group} in {path.name} must be a table of options, found {table!r}")
        if unknown := set(table) - known:
            raise ValueError(f"{group} in {path.name} has unknown options {sorted(unknown)}; known: {sorted(known)}")
        try:
            options_by_group[group] = CommunicatorOptions(**table)
        except ValueError as error:
            raise ValueError(f"{group} in {path.name}: {error}") from None
    return options_by_group


def connect(
    ranks: tuple[int, ...],
    me: int,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    options: CommunicatorOptions | None = None,
    name: str = "",
    local: bool = False,
) -> Group:
    """Make a communicator; the group's ``rank`` is -1 in a process that is no member.

    Args:
        ranks: members, ascending.
        me: this process.
        backend: None for the default one.
        timeout_s: time limit of each collective, None for torch's.
        options: for NCCL.
        name: what torch's logs and traces call it.
        local: only members call this; otherwise every process of the world does.
    """
    if len(ranks) == 1:
        return Group(ranks, 0, timeout_s=timeout_s)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    pg_options = None if options is None else _nccl_options(options, backend or dist.get_backend_config(), timeout)
    if local:
        pg: Any = _connect_members(ranks, me, backend or dist.get_backend_config(), timeout, pg_options, name)
    else:
        pg = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=pg_options, group_desc=name or None)
    if me not in ranks:
        return Group(ranks, -1)
    assert isinstance(pg, dist.ProcessGroup)
    return Group(ranks, ranks.index(me), pg, pg.group_name, timeout_s)


def _connect_members(
    ranks: tuple[int, ...], me: int, backend: str, timeout: timedelta | None, pg_options: Any, name: str
) -> dist.ProcessGroup:
    """As ``dist.new_group(use_local_synchronization=True)``, under a name that never comes again.

    torch names such a group after its ranks and the number of groups that this process is in. The name of a destroyed group comes again,
    and the rank that is first then reads the addresses of that group from the store; members of different numbers of groups wait under
    different names. Here each member counts the groups of these ranks in the store, which keeps counts as long as addresses.
    """
    c10d: Any = dist.distributed_c10d
    store, backend = c10d._get_default_store(), dist.Backend(backend)
    key = f"mcore/groups/{_digest(name, ranks)}/{me}"
    group_name = _digest(name, ranks, store.add(key, 0))
    with made_by_members():
        pg, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(me),
            list(ranks),
            backend,
            store,
            group_name,
            backend_options=pg_options,
            timeout=c10d._get_default_timeout(backend) if timeout is None else timeout,
            group_desc=name or None,
        )
    store.add(key, 1)
    c10d._world.pg_group_ranks[pg] = {rank: place for place, rank in enumerate(ranks)}
    return pg


def _digest(*parts: object) -> str:
    # As long as torch's own names.
    return hashlib.sha1(repr(parts).encode(), usedforsecurity=False).hexdigest()


@contextmanager
def made_by_members() -> Iterator[None]:
    """Inside, ranks may make a group that others are no members of, and do not make.

    The communicator of a world that is bound to a device would be split for it, and all ranks of the world would be waited for.
    """
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def uses_nccl(pg: dist.ProcessGroup | None) -> bool:
    """Whether a group moves GPU tensors by NCCL, also one of several backends (as ``init_process_group()`` makes unless told)."""
    return "nccl" in dist.get_backend_config(pg)


def _nccl_options(options: CommunicatorOptions, backend: str, timeout: timedelta | None) -> Any:
    if "nccl" not in backend:
        return None
    made: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.is_high_priority_stream)
    if timeout is not None:
        made._timeout = timeout  # torch warns when the two differ
    for name in ("min_ctas", "max_ctas", "cga_cluster_size", "net_name"):
        value = getattr(options, name)
        if value is not None:
            setattr(made.config, name, value)
    if options.use_sharp:
        try:
            made.config.collnet_enable = 1
        except AttributeError:
            _log.warning(
                "use_sharp=True has no effect: this build of torch cannot choose SHARP for one communicator; start all processes with "
                "NCCL_COLLNET_ENABLE=1 to choose it for each, or leave use_sharp out"
            )
    return made
