# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What happens around the forward and backward of each unit."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from megatron_fsdp._agreement import Agreement
from megatron_fsdp._dtensor import as_dtensor
from megatron_fsdp._gradients import GradientLoan
from megatron_fsdp._graphs import in_backward, outside
from megatron_fsdp._group import ParameterGroup
from megatron_fsdp._managed import ManagedParameter
from megatron_fsdp._prefetch import GatherOrder
from megatron_fsdp._ranks import Ranks
from megatron_fsdp._reductions import Reductions
from megatron_fsdp._registered import RegisteredMemory
from megatron_fsdp._setting import Setting
from megatron_fsdp._trees import cast_floats, tensors_in
from megatron_fsdp._unit import Unit


class Runtime:
    """Gathers, releases and reduces as forward and backward pass through the units.

    Collectives are issued in one order on every rank, whatever parameters a rank's data reaches: gathers follow the calls
    of units, which ranks share, and a unit's reduction starts when the gradients of its inputs are there (if those of its
    parameters are not, just before whatever comes next), or at the end of the backward. A gradient that comes after that is
    reduced at the end too, which the ranks agree upon in their first backward. In the first forward and backward the ranks
    compare every call before they communicate, so that ranks that differ get an error instead of waiting for each other; later
    each rank compares what it starts with the ``CallPlan``.

    The hooks run outside of what torch.compile makes of a unit, so that each unit is one graph.
    """

    def __init__(
        self,
        units: list[Unit],
        setting: Setting,
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
        self._setting, self._memory = setting, memory
        self._names = [unit.name or "the root" for unit in units]
        self.order = GatherOrder(
            num_prefetch_units, [unit.name for unit in units], num_bytes=[unit.num_bytes for unit in units], budget=prefetch_bytes
        )
        self._agreement: Agreement | None = Agreement(all_ranks, next(self.groups).device)
        """Until the first forward and backward are over."""
        self._reductions = Reductions(units, setting.lanes.reduce)
        self._due: Unit | None = None
        """A unit whose gradients were not all there after its backward, which the next event reduces."""
        self._stale = False
        self._unreduced = self._outer_unreduced = False
        self._in_backward = False
        self._root_in_graph = False
        """Whether the root was last gathered by a forward that builds a graph."""
        self._known = frozenset(id(form) for parameter in self.parameters for form in (parameter.sharded, parameter.full))
        self._late_units: frozenset[int] | None = None
        self._root_is_early = False
        """Whether all gradients of the root come before the backward of any other unit, on all ranks."""
        self._root_was_early: bool | None = None
        """Whether it is so in this backward; None until another unit begins."""
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

    def gradient_loans(self) -> dict[str, GradientLoan]:
        """As ``MegatronFSDP.gradient_loans``."""
        return {
            parameter.name: functools.partial(self.lend_gradient, unit, group, index)
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
        if not self._root_in_graph:
            self.units[0].close()

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
        self._setting.calls.drop()
        self._due = None
        for group in self.groups:
            if self._in_backward:
                # Sums of units that came before the failure are in there, and cannot be taken out again.
                group.gradients.drop()
        self._unreduced = self._outer_unreduced = self._in_backward = self._root_in_graph = False
        for unit in self.units:
            unit.depth = unit.open_calls = 0
            unit.close()

    def finish_grad_sync(self) -> None:
        """Reduce what ``no_sync`` backwards left."""
        self.start_grad_sync()
        self.wait_for_reductions()

    def start_grad_sync(self) -> None:
        """Start reducing what ``no_sync`` backwards left; ``wait_for_reductions`` ends it."""
        if self._unreduced:
            for unit in reversed(self.units):
                self._start_reduce(unit)
        elif self._outer_unreduced:
            for unit in reversed(self.units):
                for group in unit.groups:
                    if group.trainable:
                        group.gradients.start_outer_reduce()
        if self.outer_sync and (self._unreduced or self._outer_unreduced):
            self._reductions.close()
        self._unreduced = self._outer_unreduced = False

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
        self._unreduced = self._outer_unreduced = False
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
        if unit.is_root and self._setting.policy.param_dtype is not None and self._setting.policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), self._setting.policy.param_dtype)
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
            unit.kept = True
        if unit.is_root:
            # It stays gathered, because callers may compute with its parameters after it returned (logits from hidden states).
            self._root_in_graph = torch.is_grad_enabled()
            self._end_forward()
        elif not unit.kept:
            unit.close()

    def _begin_forward(self) -> None:
        self._setting.lanes.computation.begin()
        if self._in_backward:
            self.reset()
        self._setting.calls.begin(("forward", torch.is_grad_enabled(), self._stale))
        if not self.order.frozen:
            self.order.restart()
        if torch.is_grad_enabled():
            self._refuse_strangers()
        for unit in self.units:
            unit.open_calls = 0
            if unit.kept:
                unit.close()

    def _end_forward(self) -> None:
        # A unit that was gathered ahead and not called.
        for unit in self.units[1:]:
            if not unit.kept:
                unit.close()
        learning = not self.order.frozen
        if learning:
            self._agree("forward of", len(self.units))
            self.order.freeze()
        self._setting.calls.end(agreed=learning)

    def _refuse_strangers(self) -> None:
        root = self.units[0].module
        found = (parameter for module in root.modules() for parameter in module._parameters.values())
        strange = next((each for each in found if each is not None and each.requires_grad and id(each) not in self._known), None)
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
            with self._setting.lanes.computation.joined():
                self._begin_backward()
                group.gradients.add(index)
                self._gradient_came(unit, parameter)

        if parameter.full.dtype.is_floating_point:
            wanted = parameter.full.requires_grad
            parameter.full.requires_grad_(True).register_post_accumulate_grad_hook(on_gradient)
            parameter.full.requires_grad_(wanted)

    @contextlib.contextmanager
    def lend_gradient(self, unit: Unit, group: ParameterGroup, index: int) -> Iterator[tuple[torch.Tensor, bool]]:
        """Inside a backward: where the whole gradient of a parameter is summed, and whether it is to be overwritten."""
        self._begin_backward()
        yield group.gradients.lend(index)
        self._gradient_came(unit, group.parameters[index])

    def _gradient_came(self, unit: Unit, parameter: ManagedParameter) -> None:
        if unit.is_root and self._root_was_early:
            self._root_was_early = False
        if unit.evicted:
            raise RuntimeError(
                f"the gradient of {parameter.name!r} came after another unit took the buffer of unit {unit.name!r}; "
                "set fsdp_double_buffer=False, or leave this module out of fsdp_unit_modules"
            )
        if unit.reduced and self._late_units is not None and unit.index not in self._late_units:
            raise RuntimeError(
                f"the gradient of {parameter.name!r} came after unit {unit.name!r} was reduced, unlike in the first backward; "
                "leave this module out of fsdp_unit_modules so that its parent owns the parameter"
            )

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward, self._root_was_early = True, None
            self._setting.calls.begin(("backward", self.sync, self.outer_sync))
            for unit in self.units:
                unit.reduced = unit.evicted = False
                for group in unit.groups:
                    group.gradients.arrived.clear()
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
        unit.busy = False
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
        if self.sync and not unit.reduced and not (self._late_units and unit.index in self._late_units):
            self._start_reduce(unit)
        # Parameters without a gradient yet may still be read by the rest of this backward.
        if unit.complete:
            unit.close()

    def _finish_root(self) -> None:
        """Reduce and close the root if it is over before any other unit, as with an output layer that no unit owns."""
        root = self.units[0]
        if self._root_was_early is None:
            self._root_was_early = root.complete
        if self._root_is_early and self.sync and not root.reduced:
            self._start_reduce(root)
            # Frozen parameters give no sign of when they are read no more.
            if root.complete and all(parameter.sharded.requires_grad for group in root.groups for parameter in group.parameters):
                root.close()

    def _start_reduce(self, unit: Unit) -> None:
        self._agree("reduction of", unit.index)
        self._reductions.start(unit, outer=self.outer_sync)

    def _end_backward(self) -> None:
        self._finish_due()
        self._in_backward = self._root_in_graph = False
        if self.sync:
            if self._late_units is None:
                self._late_units, self._root_is_early = self._agree_on_late_units()
            for unit in reversed(self.units):
                if not unit.reduced or unit.index in self._late_units:
                    self._start_reduce(unit)
            self._setting.calls.end(agreed=self._agreement is not None)
            if self.outer_sync:
                self._reductions.close()
            self.wait_for_reductions()
            self._unreduced, self._outer_unreduced = False, not self.outer_sync
            if self.refresh_after_backward:
                self.mark_stale()
        else:
            self._setting.calls.end(agreed=self._agreement is not None)
            self._unreduced = True
        for unit in self.units:
            unit.close()
        self.settle()
        if self._agreement is not None:
            self._agreement = None
            if self._memory is not None:
                self._memory.register()

    def _agree_on_late_units(self) -> tuple[frozenset[int], bool]:
        """Units that got gradients after their reduction on some rank, and whether the root was over first on all of them."""
        late = [unit.reduced and any(group.gradients.has_unreduced for group in unit.groups) for unit in self.units]
        trainable = any(group.trainable for group in self.units[0].groups)
        flags = torch.tensor([*late, not (trainable and self._root_was_early)], dtype=torch.int32, device=next(self.groups).device)
        for ranks in self._all_ranks:
            flags = ranks.all_reduce(flags, "max")
        *late, root = flags.tolist()
        return frozenset(index for index, flag in enumerate(late) if flag), not root

    def wait_for_reductions(self) -> None:
        """Let reductions that were started arrive in the gradients."""
        self._reductions.finish()
        self.settle()

    def settle(self) -> None:
        """Let the host see what was copied to it, and change what is copied from it."""
        if self._setting.cpu_offload:
            self._setting.lanes.synchronize()
