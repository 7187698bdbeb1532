# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Activations that wait in host memory between forward and backward."""

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

EXPERT_PARTS = ("expert_fc1", "moe_act")
"""Inside a feed-forward with experts."""
_PARTS = ("attention", "core_attention", "layer", "mlp", "norm", *EXPERT_PARTS)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Which saved activations go to the host.

    Raises:
        ValueError: an unknown or no module, a value out of range.

    Example:
        >>> [OffloadConfig(fraction=0.5).covers(layer, 5) for layer in range(5)]
        [True, True, False, False, False]
    """

    modules: tuple[str, ...] = ("layer",)
    """Whose saved tensors: "layer" (all of a layer), or among "norm", "attention", "core_attention", "mlp"; of experts also "expert_fc1"
    (the rows that they get) and "moe_act" (the input of their activation)."""
    min_offloaded_tensor_size: int = 1_048_576
    """Elements below which a tensor stays."""
    fraction: float = 1.0
    """Share of the layers of a stage, the first ones: they wait longest."""
    keep_last_layers: int = 1
    """Layers at the end of a stage that stay: their backward comes at once."""
    keep_bytes: int = 0
    """Device bytes of this rank that stay all the same, of the first modules to ask. Later pipeline stages hold fewer micro-batches:
    rank * delta gives each stage what it has room for."""
    max_inflight: int | None = None
    """Runs of one part whose copies to the host may be under way: one more makes the device wait for the oldest, whose memory it can use
    from then on. 0 waits at once; None for never, memory then comes back when the copy happens to be over."""
    prefetch: int = 1
    """Modules whose tensors are on their way back while the backward of another runs."""
    on_cpu: bool = False
    """Treat tensors in host memory the same way: slower and of no use but to check the bookkeeping without a GPU."""

    def __post_init__(self) -> None:
        if not self.modules:
            raise ValueError("modules is empty; name a part, or pass no config")
        if unknown := set(self.modules) - set(_PARTS):
            raise ValueError(f"modules holds {sorted(unknown)}, choose among {', '.join(_PARTS)}")
        if "layer" in self.modules and len(self.modules) > 1:
            raise ValueError(f"modules={self.modules} holds 'layer' and parts of it; 'layer' alone covers them")
        if {"attention", "core_attention"} <= set(self.modules):
            raise ValueError("modules holds 'attention' and the 'core_attention' inside it; drop one")
        if "mlp" in self.modules and (parts := sorted(set(EXPERT_PARTS) & set(self.modules))):
            raise ValueError(f"modules holds 'mlp' and {parts} inside it; drop one")
        if not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"fraction={self.fraction} must lie in [0, 1]")
        for name in ("min_offloaded_tensor_size", "keep_last_layers", "keep_bytes", "prefetch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.max_inflight is not None and self.max_inflight < 0:
            raise ValueError(f"max_inflight={self.max_inflight} must not be negative; None for no bound")

    def covers(self, layer: int, num_layers: int) -> bool:
        """Whether layer number ``layer`` of a stage's ``num_layers`` is offloaded."""
        eligible = max(0, num_layers - self.keep_last_layers)
        return layer < eligible - int(eligible * (1 - self.fraction))


class ActivationOffloader:
    """Moves what is saved inside ``group(...)`` to pinned host memory, and back before the backward asks for it.

    The copies run on two streams of their own, out when the group is left and back while the backward of the group after it runs.
    Views of one storage are one copy. Host memory is kept in size classes and used again.

    Args:
        config: see there.

    Example:
        >>> offloader = ActivationOffloader(OffloadConfig(min_offloaded_tensor_size=1, on_cpu=True))
        >>> x = torch.ones(4, requires_grad=True)
        >>> with offloader.group():
        ...     y = x.exp()
        >>> z = y.sum()
        >>> offloader.bytes_out
        16
        >>> del y
        >>> z.backward()
        >>> del z
        >>> offloader.bytes_out
        0
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self._pool = _HostPool()
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._newest: weakref.ref[_Group] | None = None
        self._bytes_kept = 0
        self._inflight: dict[str, deque[weakref.ref[_Group]]] = defaultdict(deque)
        self.num_joins = 0
        """Times that the device was made to wait because of ``max_inflight``."""

    @property
    def bytes_out(self) -> int:
        """Host bytes that hold activations now."""
        return self._pool.bytes_out

    @property
    def bytes_kept(self) -> int:
        """Device bytes that would be out but for ``keep_bytes``."""
        return self._bytes_kept

    @property
    def num_allocations(self) -> int:
        """Host buffers ever made; it stands still once shapes repeat."""
        return self._pool.num_allocations

    @contextlib.contextmanager
    def group(self, parameters: Iterable[Tensor] = (), *, name: str = "") -> Iterator[None]:
        """What is saved inside goes out when the block is left; ``parameters`` and views of them stay.

        Args:
            parameters: they stay.
            name: of the part; ``max_inflight`` counts runs of one name.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            yield
            return
        group = _Group(self, frozenset(parameter.untyped_storage().data_ptr() for parameter in parameters))
        with saved_tensors_hooks(group.pack, _unpack):
            yield
        if group.copies and not self.keeps(group.copies.values()):
            group.previous, self._newest = self._newest, weakref.ref(group)
            group.send()
            self._bound(name, group)

    def _bound(self, name: str, group: "_Group") -> None:
        """Join the oldest offloads of the part that are one too many."""
        if self.config.max_inflight is None:
            return
        waiting = self._inflight[name]
        waiting.append(weakref.ref(group))
        while len(waiting) > self.config.max_inflight:
            oldest = waiting.popleft()()
            # One whose backward came first needs no bound any more.
            if oldest is not None and oldest.join():
                self.num_joins += 1

    def keeps(self, copies: Collection["_Copy"]) -> bool:
        """Whether these copies still fit into ``keep_bytes``; if so they are counted until the graph lets them go."""
        size = sum(copy.num_bytes for copy in copies)
        if self._bytes_kept + size > self.config.keep_bytes:
            return False
        for copy in copies:
            self._bytes_kept += copy.num_bytes
            weakref.finalize(copy, self._let_go, copy.num_bytes).atexit = False
        return True

    def _let_go(self, num_bytes: int) -> None:
        self._bytes_kept -= num_bytes

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Out and back."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


@dataclass(frozen=True, eq=False)
class _Saved:
    """What the graph holds instead of a tensor."""

    group: "_Group"
    copy: "_Copy"
    layout: tuple[Any, ...]


class _Group:
    """One run of one module."""

    def __init__(self, owner: ActivationOffloader, stay: frozenset[int]) -> None:
        self.owner, self.stay = owner, stay
        self.copies: dict[int, _Copy] = {}
        self.previous: weakref.ref[_Group] | None = None
        self.back = False

    def pack(self, tensor: Tensor) -> Any:
        config, storage = self.owner.config, tensor.untyped_storage()
        if tensor.numel() < config.min_offloaded_tensor_size or not (tensor.is_cuda or (config.on_cpu and tensor.device.type == "cpu")):
            return tensor
        if storage.data_ptr() in self.stay or tensor.layout is not torch.strided:
            return tensor
        layout = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        if 2 * tensor.nbytes < storage.nbytes():
            # A small part of a large storage goes alone; rows of it are contiguous already, and still in the large storage.
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            layout = (tensor.dtype, tensor.size(), tensor.stride(), 0)
            storage = tensor.untyped_storage()
        # The copy holds the storage until the group is sent, so within a group an address means one storage.
        copy = self.copies.get(storage.data_ptr())
        if copy is None:
            copy = self.copies[storage.data_ptr()] = _Copy(self.owner, tensor)
        copy.num_uses += 1
        return _Saved(self, copy, layout)

    def send(self) -> None:
        for copy in self.copies.values():
            copy.send()

    def join(self) -> bool:
        """Let go of what was held until the copies are over; False if nothing is."""
        return sum(copy.join() for copy in self.copies.values()) > 0

    def fetch(self) -> None:
        if not self.back:
            self.back = True
            for copy in self.copies.values():
                copy.fetch()

    def fetch_ahead(self) -> None:
        group: _Group | None = self
        for _ in range(self.owner.config.prefetch):
            group = None if group is None or group.previous is None else group.previous()
            if group is None:
                return
            group.fetch()


class _Copy:
    """The bytes of one storage, on the device, on the host, or on the way."""

    def __init__(self, owner: ActivationOffloader, tensor: Tensor) -> None:
        self.owner = owner
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.place, self.num_bytes = tensor.device, self.device.numel()
        self.host: _HostBuffer | None = None
        self.num_uses = self.num_used = 0
        self.arrived: torch.cuda.Event | None = None
        self.held: Tensor | None = None
        """The device's bytes until the copy to the host is joined, when their number in flight is bounded."""
        self.left: torch.cuda.Event | None = None

    def send(self) -> None:
        assert self.device is not None
        pool = self.owner._pool
        self.host = pool.take(self.device.numel(), pinned=self.device.is_cuda)
        weakref.finalize(self, pool.give_back, self.host).atexit = False
        if self.device.is_cuda:
            out, _ = self.owner.streams(self.place)
            out.wait_stream(torch.cuda.current_stream(self.place))
            if self.host.last_read is not None:
                out.wait_event(self.host.last_read)
            with torch.cuda.stream(out):
                self.host.data.copy_(self.device, non_blocking=True)
                if self.owner.config.max_inflight is not None:
                    self.left = torch.cuda.Event()
                    self.left.record(out)
            if self.left is None:
                self.device.record_stream(out)
        else:
            self.host.data.copy_(self.device)
        if self.owner.config.max_inflight is not None:
            self.held = self.device
        self.device = None

    def join(self) -> bool:
        """Make the compute stream wait for the copy to the host, so that it may use the memory; False if that is done."""
        if self.held is None:
            return False
        if self.left is not None:
            torch.cuda.current_stream(self.place).wait_event(self.left)
        self.held = self.left = None
        return True

    def fetch(self) -> None:
        if self.device is not None:
            return
        if self.held is not None:
            # It never left, and need not come back.
            self.device, self.held = self.held, None
            if self.left is not None:
                self.device.record_stream(self.owner.streams(self.place)[0])
                self.left = None
            return
        assert self.host is not None
        self.device = torch.empty(self.host.data.numel(), dtype=torch.uint8, device=self.place)
        if self.place.type == "cpu":
            self.device.copy_(self.host.data)
            return
        out, back = self.owner.streams(self.place)
        # The new memory may still be read by earlier work of the compute stream, and the bytes may not be out yet.
        back.wait_stream(torch.cuda.current_stream(self.place))
        back.wait_stream(out)
        with torch.cuda.stream(back):
            self.device.copy_(self.host.data, non_blocking=True)
            self.arrived = self.host.last_read = torch.cuda.Event()
            self.arrived.record(back)

    def __del__(self) -> None:
        # Whoever uses the bytes waits for them, so their memory is free with the last use; of those that nobody used, when they are here.
        if self.device is not None and self.arrived is not None and not self.num_used:
            self.device.record_stream(self.owner.streams(self.place)[1])

    def use(self, layout: tuple[Any, ...]) -> Tensor:
        assert self.device is not None
        if self.arrived is not None:
            torch.cuda.current_stream(self.place).wait_event(self.arrived)
        dtype, size, stride, offset = layout
        result = self.device.view(dtype).as_strided(size, stride, offset)
        self.num_used += 1
        if self.num_used == self.num_uses and self.host is not None:
            # The graph has its tensors; a second backward of a retained graph fetches again.
            self.device, self.arrived, self.num_used = None, None, 0
        return result


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    saved.group.fetch()
    saved.copy.fetch()
    saved.group.fetch_ahead()
    return saved.copy.use(saved.layout)


class _HostBuffer:
    """A block of host memory; ``data`` is the part in use."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.data = self.block
        self.pinned = pinned
        self.last_read: torch.cuda.Event | None = None


class _HostPool:
    """Host memory in size classes of an eighth of a power of two."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[_HostBuffer]] = defaultdict(list)
        self.bytes_out = self.num_allocations = 0

    def take(self, size: int, *, pinned: bool) -> _HostBuffer:
        step = max(512, 1 << max(0, size.bit_length() - 4))
        rounded = -(-size // step) * step
        free = self._free[rounded, pinned]
        if not free:
            self.num_allocations += 1
        buffer = free.pop() if free else _HostBuffer(rounded, pinned)
        buffer.data = buffer.block[:size]
        self.bytes_out += size
        return buffer

    def give_back(self, buffer: _HostBuffer) -> None:
        self.bytes_out -= buffer.data.numel()
        self._free[buffer.block.numel(), buffer.pinned].append(buffer)
