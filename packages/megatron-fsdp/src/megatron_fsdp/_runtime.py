# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What happens around the forward and backward of each unit.

The life of a unit in one step, under ``optim_grads_params``::

                forward                                     backward
                -------                                     --------
     sharded --> gathering --> whole --> sharded ... --> gathering --> whole --> spent --> sharded
                    |            |                           |           |         |
        all-gather, started      |              all-gather, as before    |   reduce-scatter of its
        while the unit before    |              in the reverse order     |   gradients, beside the
        computes                 |                                       |   backward of the next
                        its forward computes                   its backward computes

1. ``fully_shard`` builds it: each group of its parameters gets a flat buffer, whose storage is empty while the unit is ``sharded``,
   a main shard [shard_numel], which the optimizer steps, and buffers of gradients when these come.
2. ``_before_forward`` opens it (``Unit.open``): the gather ends, views of the flat buffer take the place of the shards in the module.
   Units that come next start their gathers (``GatherOrder``).
3. ``_after_forward`` closes it: the storage is empty again, and autograd keeps views of it. The unit that the backward begins with is
   ``retained``; the root stays ``whole``, for callers that compute with its parameters.
4. ``_before_backward`` opens it again, at the gradients of its outputs, and starts gathers ahead.
5. Autograd finishes gradients one by one: ``Gradients.add`` moves each into the whole buffer of its group.
6. ``_after_backward``, at the gradients of its inputs, makes it ``spent`` and due: the next event starts its reduction
   (``Reductions.start``) and closes it. One that has missing gradients stays open to the end of the backward.
7. ``_end_backward`` reduces what is left, asks which parameters have a gradient on any rank, waits, and closes all units. Inside
   ``no_sync`` nothing is reduced, and whole gradients stay for a later reduction.
8. The optimizer steps main shards; the next gather sends the new values.
"""

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from megatron_fsdp._collectives import Ranks
from megatron_fsdp._context import RegisteredMemory, ShardContext
from megatron_fsdp._gradients import BorrowedGradBuffer
from megatron_fsdp._group import ParameterGroup
from megatron_fsdp._module_calls import cast_floats, in_backward, outside, tensors_in
from megatron_fsdp._order import Agreement, GatherOrder
from megatron_fsdp._parameters import ManagedParameter, as_dtensor
from megatron_fsdp._unit import Reductions, Unit, UnitState

InitialStates = weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[torch.Tensor, dict[str, Any]]]
"""Of optimizers that have not stepped: what the state of each parameter is unless somebody loads it."""


class Phase(enum.Enum):
    """Where the model is in a step: ``rest`` -> ``graph`` (a forward with gradients ended) -> ``backward`` -> ``rest``.

    A forward without gradients, or a failure, leads to ``rest`` from anywhere.
    """

    rest = enum.auto()
    """No backward is to come through the last forward."""
    graph = enum.auto()
    """A backward may begin: the root stays whole."""
    backward = enum.auto()


class Unreduced(enum.Enum):
    """Which sums of gradients backwards left for later. A backward that reduces leads to ``nothing``; within ``no_sync("outer")`` one leads
    to ``outer``, within ``no_sync()`` to ``everything``; a reduction of what is left, or dropping it, to ``nothing``.
    """

    nothing = enum.auto()
    outer = enum.auto()
    """Those over the outer axis."""
    everything = enum.auto()


@dataclass(frozen=True)
class BackwardOrder:
    """What ranks agree upon in their first backward that reduces."""

    late_units: frozenset[int]
    """Units that got gradients after their reduction on some rank: they are reduced at the end too."""
    root_is_early: bool
    """Whether all gradients of the root come before the backward of any other unit, on all ranks."""


class Runtime:
    """Gathers, releases and reduces as forward and backward pass through the units.

    Collectives are issued in one order on every rank, whatever parameters a rank's data reaches: gathers follow the calls
    of units, which ranks share, and a unit's reduction starts when the gradients of its inputs are there (if those of its
    parameters are not, just before whatever comes next), or at the end of the backward. A gradient that comes after that is
    reduced at the end too, which the ranks agree upon in their first backward. In the first forward and backward the ranks
    compare every call before they communicate, so that ranks that differ get an error instead of waiting for each other; later
    each rank compares what it starts with the ``CollectiveOrder``.

    The hooks run outside of what torch.compile makes of a unit, so that each unit is one graph.
    """

    def __init__(
        self,
        units: list[Unit],
        context: ShardContext,
        all_ranks: Sequence[Ranks],
        *,
        num_prefetch_units: int,
        prefetch_bytes: int | None = None,
        memory: RegisteredMemory | None = None,
    ) -> None:
        self.units, self._all_ranks = units, all_ranks
        self.sync = True
        """Whether a backward reduces its gradients."""
        self.outer_sync = True
        """Whether it also reduces them over the outer axis."""
        self.refresh_after_backward = any(group.remembers for group in self.groups)
        """Replicated parameters are gathered again after a backward, unless an optimizer says when they change."""
        self._context, self._memory = context, memory
        self._names = [unit.name or "the root" for unit in units]
        self.order = GatherOrder(
            num_prefetch_units, [unit.name for unit in units], num_bytes=[unit.num_bytes for unit in units], budget=prefetch_bytes
        )
        self._agreement: Agreement | None = Agreement(all_ranks, next(self.groups).device)
        """Until the first forward and backward are over."""
        self._reductions = Reductions(units, context.streams.reduce)
        self._phase = Phase.rest
        self._unreduced = Unreduced.nothing
        self._stale = False
        """Whether replicated parameters are to be gathered before the next forward."""
        self._due: Unit | None = None
        """A unit whose backward is over, which the next event reduces."""
        self._known = frozenset(id(form) for parameter in self.parameters for form in (parameter.sharded, parameter.full))
        self._backward_order: BackwardOrder | None = None
        self._root_was_early: bool | None = None
        """Whether all gradients of the root came first in this backward; None until another unit begins."""
        self.plain_shards: dict[str, nn.Parameter] = {}
        """What an optimizer steps that knows no DTensor, by name; see ``fully_shard_optimizer``."""
        self.initial_states: InitialStates = weakref.WeakKeyDictionary()
        for unit in units:
            unit.module.register_forward_pre_hook(outside(self._before_forward, unit), with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(outside(self._after_forward, unit), with_kwargs=True)
            for group in unit.groups:
                for index, parameter in enumerate(group.parameters):
                    self._watch(unit, group, index, parameter)

    @property
    def groups(self) -> Iterator[ParameterGroup]:
        return (group for unit in self.units for group in unit.groups)

    @property
    def parameters(self) -> Iterator[ManagedParameter]:
        return (parameter for group in self.groups for parameter in group.parameters)

    def gradient_loans(self) -> dict[str, BorrowedGradBuffer]:
        """As ``MegatronFSDP.gradient_loans``."""
        return {
            parameter.name: functools.partial(self.borrow_gradient, unit, group, index)
            for unit in self.units
            for group in unit.groups
            for index, parameter in enumerate(group.parameters)
            if parameter.sharded.requires_grad and len(parameter.names) == 1 and as_dtensor(parameter.full) is None
        }

    def mark_stale(self) -> None:
        """Main parameters have changed: replicated parameters are gathered before the next forward."""
        self._stale = True
        for group in self.groups:
            group.main_changed()
        if self._phase is Phase.rest:
            self.units[0].close()

    def check_gradients_can_leave(self) -> None:
        """Raises:
        RuntimeError: their memory is registered, or in the host.
        """
        if self._memory is not None and self._memory.active:
            raise RuntimeError("nccl_ub=True keeps gradients in registered memory, which cannot be given back; set nccl_ub=False")
        if self._context.cpu_offload:
            raise RuntimeError("cpu_offload=True keeps gradients in host memory, where they take none of the device; leave them there")

    def close(self) -> None:
        """Deregister the memory of collectives."""
        if self._memory is not None:
            self._memory.close()

    def reshard(self) -> None:
        """Give back what a forward left gathered."""
        for unit in self.units:
            unit.close()

    def reset(self) -> None:
        """Return to the state between steps after a forward or backward failed; the latter drops all gradients."""
        self._reductions.clear()
        self._context.calls.drop()
        self._due = None
        for group in self.groups:
            if self._phase is Phase.backward:
                # Sums of units that came before the failure are in there, and cannot be taken out again.
                group.gradients.drop()
        self._phase, self._unreduced = Phase.rest, Unreduced.nothing
        for unit in self.units:
            unit.depth = unit.open_calls = 0
            unit.close()

    def finish_grad_sync(self) -> None:
        """Reduce what ``no_sync`` backwards left."""
        self.start_grad_sync()
        self.wait_for_reductions()

    def start_grad_sync(self) -> None:
        """Start reducing what ``no_sync`` backwards left; ``wait_for_reductions`` ends it."""
        if self._unreduced is Unreduced.everything:
            for unit in reversed(self.units):
                self._start_reduce(unit)
        elif self._unreduced is Unreduced.outer:
            for unit in reversed(self.units):
                for group in unit.groups:
                    if group.trainable:
                        group.gradients.start_outer_reduce()
        if self._unreduced is not Unreduced.nothing and self.outer_sync:
            self._reductions.close()
        self._unreduced = Unreduced.nothing

    def start_param_sync(self) -> None:
        """Start gathering replicated parameters that are stale."""
        if self._stale:
            self._start_stale_gathers()

    def _start_stale_gathers(self) -> None:
        self._stale = False
        for group in self.groups:
            if not group.reshards:
                group.start_gather()

    def drop_unreduced(self) -> None:
        """Forget gradients that were not reduced."""
        self._unreduced = Unreduced.nothing
        for group in self.groups:
            group.gradients.drop_unreduced()

    # Forward

    def _before_forward(
        self, unit: Unit, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        replaying = in_backward()
        if unit.is_root and not replaying and unit.depth == 0:
            self._begin_forward()
        if self._stale and not replaying and unit.depth == 0:
            self._start_stale_gathers()
        if not (self.order.frozen or replaying) and unit.depth == 0:
            self._agree("forward of", unit.index)
        if replaying:
            self._finish_due()
        else:
            unit.depth += 1
        self.order.visit(unit.index)
        if unit.is_root and not replaying:
            for group in unit.groups:
                # The root stays gathered after a forward, and an optimizer may have stepped since.
                if group.reshards:
                    group.finish_gather()
                    group.start_gather()
        unit.open()
        if not replaying:
            for ahead in self.order.following(unit.index):
                self.units[ahead].gather_ahead()
        if unit.is_root and self._context.policy.param_dtype is not None and self._context.policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), self._context.policy.param_dtype)
        if torch.is_grad_enabled() and not unit.is_root:
            inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            # A replay whose own forward built a graph has its hooks in there.
            if inputs and not (replaying and unit.open_calls > 0):
                unit.open_calls += 1
                register_multi_grad_hook(inputs, lambda _: self._after_backward(unit), mode="all")
        return args, kwargs

    def _after_forward(self, unit: Unit, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        replaying = in_backward()
        if not replaying:
            # A replay may be left by an exception, once it has what it is for.
            unit.depth -= 1
        if torch.is_grad_enabled():
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if outputs:
                register_multi_grad_hook(outputs, lambda _: self._before_backward(unit), mode="any")
        if replaying or unit.depth > 0:
            return
        if self.order.is_last(unit.index) and not unit.is_root and torch.is_grad_enabled():
            unit.retain()
        if unit.is_root:
            # It stays gathered, because callers may compute with its parameters after it returned (logits from hidden states).
            self._phase = Phase.graph if torch.is_grad_enabled() else Phase.rest
            self._end_forward()
        elif unit.state is not UnitState.retained:
            unit.close()

    def _begin_forward(self) -> None:
        self._context.streams.computation.begin()
        if self._phase is Phase.backward:
            self.reset()
        self._context.calls.begin(("forward", torch.is_grad_enabled(), self._stale))
        if not self.order.frozen:
            self.order.restart()
        if torch.is_grad_enabled():
            self._refuse_strangers()
        for unit in self.units:
            unit.open_calls = 0
            if unit.state is UnitState.retained:
                unit.close()

    def _end_forward(self) -> None:
        # A unit that was gathered ahead and not called.
        for unit in self.units[1:]:
            if unit.state is not UnitState.retained:
                unit.close()
        learning = not self.order.frozen
        if learning:
            self._agree("forward of", len(self.units))
            self.order.freeze()
        self._context.calls.end(agreed=learning)

    def _refuse_strangers(self) -> None:
        root = self.units[0].module
        registered = (parameter for module in root.modules() for parameter in module._parameters.values())
        strange = next((each for each in registered if each is not None and each.requires_grad and id(each) not in self._known), None)
        if strange is not None:
            name = next(name for name, parameter in root.named_parameters() if parameter is strange)
            raise RuntimeError(
                f"{name!r} was added after fully_shard, so that it is neither sharded nor summed over ranks; "
                "add adapters before, or freeze it"
            )

    def _agree(self, what: str, unit: int) -> None:
        if self._agreement is not None:
            self._agreement.check(what, unit, self._names)

    # Backward

    def _watch(self, unit: Unit, group: ParameterGroup, index: int, parameter: ManagedParameter) -> None:
        def on_gradient(_: torch.Tensor) -> None:
            with self._context.streams.computation.joined():
                self._begin_backward()
                group.gradients.add(index)
                self._gradient_came(unit, parameter)

        if parameter.full.dtype.is_floating_point:
            wanted = parameter.full.requires_grad
            parameter.full.requires_grad_(True).register_post_accumulate_grad_hook(on_gradient)
            parameter.full.requires_grad_(wanted)

    @contextlib.contextmanager
    def borrow_gradient(self, unit: Unit, group: ParameterGroup, index: int) -> Iterator[tuple[torch.Tensor, bool]]:
        """Inside a backward: where the whole gradient of a parameter is summed, and whether it is to be overwritten."""
        self._begin_backward()
        yield group.gradients.borrow(index)
        self._gradient_came(unit, group.parameters[index])

    def _gradient_came(self, unit: Unit, parameter: ManagedParameter) -> None:
        if unit.is_root and self._root_was_early:
            self._root_was_early = False
        if unit.state is UnitState.evicted:
            raise RuntimeError(
                f"the gradient of {parameter.name!r} came after another unit took the buffer of unit {unit.name!r}; "
                "set fsdp_double_buffer=False, or leave this module out of fsdp_unit_modules"
            )
        if unit.reduced and self._backward_order is not None and unit.index not in self._backward_order.late_units:
            raise RuntimeError(
                f"the gradient of {parameter.name!r} came after unit {unit.name!r} was reduced, unlike in the first backward; "
                "leave this module out of fsdp_unit_modules so that its parent owns the parameter"
            )

    def _begin_backward(self) -> None:
        if self._phase is not Phase.backward:
            self._phase, self._root_was_early = Phase.backward, None
            self._context.calls.begin(("backward", self.sync, self.outer_sync))
            for unit in self.units:
                unit.begin_backward()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, unit: Unit) -> None:
        self._begin_backward()
        self._finish_due()
        self._agree("backward of", unit.index)
        if not unit.is_root:
            self._finish_root()
        unit.open()
        for ahead in self.order.preceding(unit.index):
            # The root was gathered by the forward, and what of it is over stays released.
            if not self.units[ahead].is_root:
                self.units[ahead].gather_ahead()

    def _after_backward(self, unit: Unit) -> None:
        self._begin_backward()
        self._finish_due()
        unit.open_calls -= 1
        unit.end_turn()
        if unit.open_calls > 0:
            return
        # Where activations are recomputed inputs may have their gradients before parameters do.
        self._due = unit
        if unit.complete:
            self._finish_due()

    def _finish_due(self) -> None:
        """Reduce and close the unit that had its backward before this event."""
        unit, self._due = self._due, None
        if unit is None:
            return
        is_late = self._backward_order is not None and unit.index in self._backward_order.late_units
        if self.sync and not unit.reduced and not is_late:
            self._start_reduce(unit)
        # Parameters without a gradient yet may still be read by the rest of this backward.
        if unit.complete:
            unit.close()

    def _finish_root(self) -> None:
        """Reduce and close the root if it is over before any other unit, as with an output layer that no unit owns."""
        root = self.units[0]
        if self._root_was_early is None:
            self._root_was_early = root.complete
        if self._backward_order is not None and self._backward_order.root_is_early and self.sync and not root.reduced:
            self._start_reduce(root)
            # Frozen parameters give no sign of when they are read no more.
            if root.complete and all(parameter.sharded.requires_grad for group in root.groups for parameter in group.parameters):
                root.close()

    def _start_reduce(self, unit: Unit) -> None:
        self._agree("reduction of", unit.index)
        self._reductions.start(unit, outer=self.outer_sync)

    def _end_backward(self) -> None:
        self._finish_due()
        self._phase = Phase.rest
        if self.sync:
            if self._backward_order is None:
                self._backward_order = self._agree_on_backward_order()
            for unit in reversed(self.units):
                if not unit.reduced or unit.index in self._backward_order.late_units:
                    self._start_reduce(unit)
            self._context.calls.end(agreed=self._agreement is not None)
            if self.outer_sync:
                self._reductions.close()
            self.wait_for_reductions()
            self._unreduced = Unreduced.nothing if self.outer_sync else Unreduced.outer
            if self.refresh_after_backward:
                self.mark_stale()
        else:
            self._context.calls.end(agreed=self._agreement is not None)
            self._unreduced = Unreduced.everything
        for unit in self.units:
            unit.close()
        self.settle()
        if self._agreement is not None:
            self._agreement = None
            if self._memory is not None:
                self._memory.register()

    def _agree_on_backward_order(self) -> BackwardOrder:
        late = [unit.reduced and any(group.gradients.has_unreduced for group in unit.groups) for unit in self.units]
        trainable = any(group.trainable for group in self.units[0].groups)
        flags = torch.tensor([*late, not (trainable and self._root_was_early)], dtype=torch.int32, device=next(self.groups).device)
        for ranks in self._all_ranks:
            flags = ranks.all_reduce(flags, "max")
        *late, root = flags.tolist()
        return BackwardOrder(frozenset(index for index, flag in enumerate(late) if flag), not root)

    def wait_for_reductions(self) -> None:
        """Let reductions that were started arrive in the gradients."""
        self._reductions.finish()
        self.settle()

    def settle(self) -> None:
        """Let the host see what was copied to it, and change what is copied from it."""
        if self._context.cpu_offload:
            self._context.streams.synchronize()
