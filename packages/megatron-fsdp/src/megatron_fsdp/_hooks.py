# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What happens around the forward and backward of each unit."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from megatron_fsdp._group import ManagedParameter, ParameterGroup
from megatron_fsdp._policy import MixedPrecisionPolicy, Strategy
from megatron_fsdp._prefetch import GatherOrder
from megatron_fsdp._ranks import Topology


class Unit:
    """A module whose parameter groups are gathered together."""

    def __init__(self, index: int, name: str, module: nn.Module, groups: list[ParameterGroup]) -> None:
        self.index, self.name, self.module, self.groups = index, name, module, groups
        self.depth = 0
        """Calls in progress, above one when the module calls itself."""
        self.open_calls = 0
        """Calls of the current forward whose backward is not over."""
        self.reduced = False
        """Whether this backward has started its reduction."""
        self.gathered = False
        """Whether the whole parameters are registered and readable."""

    @property
    def is_root(self) -> bool:
        return self.index == 0

    def start_gather(self) -> None:
        for group in self.groups:
            if group.reshards and not group.gathering:
                group.start_gather()

    def open(self) -> None:
        """Make the whole parameters readable and register them."""
        self.start_gather()
        for group in self.groups:
            group.finish_gather()
        if not self.gathered:
            self.gathered = True
            for group in self.groups:
                for parameter in group.parameters:
                    parameter.register(full=True)

    def close(self) -> None:
        """Register the sharded parameters and give gathered memory back."""
        for group in self.groups:
            group.release()
        if self.gathered:
            self.gathered = False
            for group in self.groups:
                for parameter in group.parameters:
                    parameter.register(full=False)


class Runtime:
    """Gathers, releases and reduces as forward and backward pass through the units.

    Collectives are issued in one order on every rank, whatever parameters a rank's data reaches: gathers follow the calls
    of units, which ranks share, and a unit's reduction starts when the gradients of its inputs are there, or at the end
    of the backward. A gradient that comes after that is reduced at the end too, which the ranks agree upon in their
    first backward.
    """

    def __init__(
        self, units: list[Unit], strategy: Strategy, policy: MixedPrecisionPolicy, topology: Topology, *, num_prefetch_units: int
    ) -> None:
        self.units, self.topology = units, topology
        self.sync = True
        """Whether a backward reduces its gradients."""
        self.refresh_after_backward = strategy in (Strategy.no_shard, Strategy.optim, Strategy.optim_grads)
        """Replicated parameters are gathered again after a backward, unless an optimizer says when they change."""
        self._policy = policy
        self._order = GatherOrder(num_prefetch_units)
        self._stale = False
        self._unreduced = False
        self._in_backward = False
        self._root_in_graph = False
        """Whether the root was last gathered by a forward that builds a graph."""
        self._late_units: frozenset[int] | None = None
        for unit in units:
            unit.module.register_forward_pre_hook(_bind(self._before_forward, unit), with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(_bind(self._after_forward, unit), with_kwargs=True)
            for group in unit.groups:
                for index, parameter in enumerate(group.parameters):
                    self._watch(unit, group, index, parameter)

    @property
    def groups(self) -> Iterator[ParameterGroup]:
        return (group for unit in self.units for group in unit.groups)

    @property
    def parameters(self) -> Iterator[ManagedParameter]:
        return (parameter for group in self.groups for parameter in group.parameters)

    def mark_stale(self) -> None:
        """Main parameters have changed: replicated parameters are gathered before the next forward."""
        self._stale = True
        if not self._root_in_graph:
            self.units[0].close()

    def reshard(self) -> None:
        """Give back what a forward left gathered."""
        for unit in self.units:
            unit.close()

    def reset(self) -> None:
        """Return to the state between steps after a forward or backward failed; its gradients are dropped."""
        for group in self.groups:
            if self._in_backward:
                group.drop_unreduced()
        self._in_backward = self._root_in_graph = False
        for unit in self.units:
            unit.depth = unit.open_calls = 0
            unit.close()

    def finish_grad_sync(self) -> None:
        """Reduce what ``no_sync`` backwards left."""
        if self._unreduced:
            for unit in reversed(self.units):
                self._start_reduce(unit)
            self._finish_reduce()

    def drop_unreduced(self) -> None:
        """Forget gradients that were not reduced."""
        self._unreduced = False
        for group in self.groups:
            group.drop_unreduced()

    # Forward

    def _before_forward(
        self, unit: Unit, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        replaying = _graph_task() != -1
        if unit.is_root and not replaying and unit.depth == 0:
            self._begin_forward()
        if self._stale and not replaying and unit.depth == 0:
            self._stale = False
            for group in self.groups:
                if not group.reshards:
                    group.start_gather()
        unit.depth += 1
        self._order.visit(unit.index)
        if unit.is_root and not replaying:
            for group in unit.groups:
                # The root stays gathered after a forward, and an optimizer may have stepped since.
                if group.reshards:
                    group.finish_gather()
                    group.start_gather()
        unit.open()
        if not replaying:
            for ahead in self._order.following(unit.index):
                self.units[ahead].start_gather()
        if unit.is_root and self._policy.param_dtype is not None and self._policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), self._policy.param_dtype)
        if torch.is_grad_enabled() and not unit.is_root:
            inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
            if inputs:
                if not replaying:
                    unit.open_calls += 1
                register_multi_grad_hook(inputs, lambda _: self._after_backward(unit), mode="all")
        return args, kwargs

    def _after_forward(self, unit: Unit, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        unit.depth -= 1
        if torch.is_grad_enabled():
            outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            if outputs:
                register_multi_grad_hook(outputs, lambda _: self._before_backward(unit), mode="any")
        if _graph_task() != -1 or unit.depth > 0:
            return
        if unit.is_root:
            # It stays gathered, because callers may compute with its parameters after it returned (logits from hidden states).
            self._root_in_graph = torch.is_grad_enabled()
            self._end_forward()
        else:
            unit.close()

    def _begin_forward(self) -> None:
        if self._in_backward:
            self.reset()
        if not self._order.frozen:
            self._order.restart()
        for unit in self.units:
            unit.open_calls = 0

    def _end_forward(self) -> None:
        # A unit that was gathered ahead and not called.
        for unit in self.units[1:]:
            unit.close()
        if self._order.frozen:
            return
        self._order.freeze()
        digest = torch.tensor([self._order.digest()], dtype=torch.int64, device=next(self.groups).device)
        for ranks in self.topology.all_ranks:
            if len(ranks.all_gather(digest).unique()) != 1:
                raise RuntimeError(
                    "ranks called the units of fsdp_unit_modules in different orders; every rank must call the same units in the same order"
                )

    # Backward

    def _watch(self, unit: Unit, group: ParameterGroup, index: int, parameter: ManagedParameter) -> None:
        def on_gradient(_: torch.Tensor) -> None:
            self._begin_backward()
            group.add_gradient(index)
            if unit.reduced and self._late_units is not None and unit.index not in self._late_units:
                raise RuntimeError(
                    f"the gradient of {parameter.name!r} came after unit {unit.name!r} was reduced, unlike in the first backward; "
                    "leave this module out of fsdp_unit_modules so that its parent owns the parameter"
                )

        if parameter.full.dtype.is_floating_point:
            wanted = parameter.full.requires_grad
            parameter.full.requires_grad_(True).register_post_accumulate_grad_hook(on_gradient)
            parameter.full.requires_grad_(wanted)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            for unit in self.units:
                unit.reduced = False
                for group in unit.groups:
                    group.arrived.clear()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, unit: Unit) -> None:
        self._begin_backward()
        unit.open()
        for ahead in self._order.preceding(unit.index):
            self.units[ahead].start_gather()

    def _after_backward(self, unit: Unit) -> None:
        self._begin_backward()
        unit.open_calls -= 1
        if unit.open_calls > 0:
            return
        complete = all(group.complete for group in unit.groups)
        if self.sync and not unit.reduced and not (self._late_units and unit.index in self._late_units):
            self._start_reduce(unit)
        # Parameters without a gradient yet may still be read by the rest of this backward.
        if complete:
            unit.close()

    def _start_reduce(self, unit: Unit) -> None:
        unit.reduced = True
        for group in unit.groups:
            if group.trainable:
                group.start_reduce()

    def _end_backward(self) -> None:
        self._in_backward = self._root_in_graph = False
        if self.sync:
            if self._late_units is None:
                self._late_units = self._agree_on_late_units()
            for unit in reversed(self.units):
                if not unit.reduced or unit.index in self._late_units:
                    self._start_reduce(unit)
            self._finish_reduce()
            self._stale |= self.refresh_after_backward
        else:
            self._unreduced = True
        for unit in self.units:
            unit.close()

    def _agree_on_late_units(self) -> frozenset[int]:
        late = [unit.reduced and any(group.has_unreduced for group in unit.groups) for unit in self.units]
        flags = torch.tensor(late, dtype=torch.int32, device=next(self.groups).device)
        for ranks in self.topology.all_ranks:
            flags = ranks.all_reduce(flags, "max")
        return frozenset(torch.nonzero(flags).flatten().tolist())

    def _finish_reduce(self) -> None:
        self._unreduced = False
        for unit in reversed(self.units):
            for group in unit.groups:
                group.finish_reduce()


def _graph_task() -> int:
    """Number of the running backward, -1 outside: tells a forward that recomputes activations from one that begins."""
    return torch._C._current_graph_task_id()


def _bind(hook: Callable[..., Any], unit: Unit) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return hook(unit, *args)

    return call


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside containers, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _tensors(getattr(value, item.name, None))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors inside lists, tuples and dictionaries; leave everything else."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
