# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameter gathers that run while the forward does."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mcore_parallel.comm import Pending
from mcore_parallel.data_parallel._buffer import GradBuffer

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ParamGather:
    """Gathers of all sliced buffers, in the order in which a forward needs the parameters.

    Args:
        module: the model.
        buffers: its gradient buffers, which know the parameters.
    """

    def __init__(self, module: nn.Module, buffers: Sequence[GradBuffer]) -> None:
        self._module = module
        # The forward meets the last bucket of the backward first.
        queue = [(bucket.position, number, index) for number, buffer in enumerate(buffers) for index, bucket in enumerate(buffer.buckets)]
        self._queue = [(buffers[number], index) for _, number, index in sorted(queue, reverse=True) if buffers[number].params is not None]
        self._works: list[Pending | None] = [None] * len(self._queue)
        places = {id(buffer.buckets[index]): place for place, (buffer, index) in enumerate(self._queue)}
        named = {name: places.get(id(bucket)) for buffer in buffers for name, bucket in buffer.bucket_of.items()}
        self._place_of = {id(shard.parameter): named[shard.name] for buffer in buffers for shard in buffer.shards}
        self._hooks: list[RemovableHandle] = []
        self._mark: RemovableHandle | None = None

    @property
    def has_hooks(self) -> bool:
        return bool(self._hooks)

    def start(self) -> None:
        """Start all gathers."""
        self.finish()
        for place, (buffer, index) in enumerate(self._queue):
            self._works[place] = buffer.start_gather(index)

    def finish(self) -> None:
        """Wait for all gathers (on the compute stream, when there is one)."""
        for place in range(len(self._works)):
            self._finish_one(place)
        self._drop_mark()

    def add_hooks(self) -> None:
        """Make every module wait for its parameters before its forward, and the model for all after its own.

        A module waits for its whole subtree, because it may use the parameters of a child without calling it; one that holds
        a list of modules, like the model itself, waits for its own parameters only and leaves the rest to the list's members.
        """
        if self._hooks:
            return
        for module, parameters in _owners(self._module, root=True):
            places = sorted({place for p in parameters if (place := self._place_of.get(id(p))) is not None})
            if places:
                self._hooks.append(module.register_forward_pre_hook(self._waiter(places)))
        self._mark = self._mark or self._module.register_forward_hook(_FinishBehind(self), always_call=True)

    def remove_hooks(self) -> None:
        """Nobody waits from now on. Gathers that are on their way are found by their mark until ``finish``."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if all(work is None for work in self._works):
            self._drop_mark()

    def _drop_mark(self) -> None:
        if self._mark is not None and not self._hooks:
            self._mark.remove()
            self._mark = None

    def _waiter(self, places: list[int]) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            for place in places:
                self._finish_one(place)

        # A compiled module runs its hooks inside the compiled region, which cannot wait for a handle.
        outside: Any = torch.compiler.disable(wait)
        return outside

    def _finish_one(self, place: int) -> None:
        work = self._works[place]
        if work is not None:
            self._works[place] = None
            work.wait()


class _FinishBehind:
    """Hook of a model behind its forward, by which its gathers are found; where modules do not wait, it does not either."""

    def __init__(self, gather: ParamGather) -> None:
        self.gather = gather

    def __call__(self, *_: Any) -> None:
        if self.gather.has_hooks:
            self.gather.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_FinishBehind":
        """Copies of a model share it, as they share functions."""
        return self


def finish_param_gathers(model: nn.Module) -> None:
    """Wait until the parameters of a model are complete: for whoever reads or replaces them outside a forward, and has the model alone.

    ``DistributedDataParallel.finish_param_sync`` of each that takes part in the model with ``overlap_param_gather``; no collective begins.

    Args:
        model: any; it may hold the modules that are replicated.
    """
    for part in model.modules():
        for hook in part._forward_hooks.values():
            if isinstance(hook, _FinishBehind):
                hook.gather.finish()


def _owners(module: nn.Module, *, root: bool = False) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules and the parameters each of them waits for."""
    if not root and not any(isinstance(child, _CONTAINERS) for child in module.modules()):
        yield module, list(module.parameters())
        return
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        yield from _owners(child)
