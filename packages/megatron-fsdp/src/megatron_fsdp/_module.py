# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The sharded module."""

import collections
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from megatron_fsdp._gradients import BorrowedGradBuffer
from megatron_fsdp._group import clip_gradients
from megatron_fsdp._parameters import FlatShard, local
from megatron_fsdp._runtime import InitialStates, Runtime
from megatron_fsdp._state_dict import (
    full_state,
    initialize_optimizer_state,
    load_optimizer_state,
    load_parameter,
    model_state_dict,
    optimizer_state_dict,
    safetensors_header,
    write_safetensors,
)


class MegatronFSDP(nn.Module):
    """A module whose parameters, gradients and optimizer state are divided among ranks.

    Call it as the module it wraps (``.module``). Outside of forward and backward the registered parameters are this rank's
    shards in the main dtype: DTensors divided along dimension 0 at whole rows (plain tensors under ``no_shard`` or without a
    process group). The root's stay whole after a forward, for callers that compute with them (a loss from hidden states), until its
    backward is over, main parameters change, the next forward, or ``reshard()``.

    All state lives in this object; nothing is attached to parameters, so re-registering or tying them later loses none.
    """

    def __init__(self, module: nn.Module, runtime: Runtime, *, is_first: bool = True) -> None:
        super().__init__()
        self.module = module
        self._is_first = is_first
        # Not a module, and kept out of attribute look-up on the wrapped module.
        object.__setattr__(self, "runtime", runtime)
        self.plain_shards: dict[str, nn.Parameter] = runtime.plain_shards
        """What an optimizer steps that knows no DTensor, by name; see ``fully_shard_optimizer``."""
        self.initial_states: InitialStates = runtime.initial_states

    runtime: Runtime
    """The machinery below; not part of the stable interface."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self.runtime.reset()
            raise

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MegatronFSDP":
        raise TypeError("a sharded model cannot be copied; copy the module before fully_shard, or keep a copy.deepcopy of state_dict()")

    # Gradients

    @contextlib.contextmanager
    def no_sync(self, scope: Literal["all", "outer"] = "all") -> Iterator[None]:
        """Backwards inside leave a sum for later: to the next one outside, or to ``finish_grad_sync``.

        Args:
            scope: ``all`` keeps whole gradients on this rank and communicates nothing; ``outer`` sums over the shard ranks and adds up
                shards, and leaves the sum over ``dp_outer_dim``.

        Raises:
            ValueError: another scope.
        """
        if scope not in ("all", "outer"):
            raise ValueError(f"scope={scope!r} must be 'all' or 'outer'")
        runtime = self.runtime
        before = runtime.sync, runtime.outer_sync
        runtime.sync, runtime.outer_sync = (False, runtime.outer_sync) if scope == "all" else (runtime.sync, False)
        try:
            yield
        finally:
            runtime.sync, runtime.outer_sync = before

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Backwards inside reduce their gradients and all that was left, whatever ``no_sync`` and ``set_model_auto_sync`` say."""
        runtime = self.runtime
        before = runtime.sync, runtime.outer_sync
        runtime.sync = runtime.outer_sync = True
        try:
            yield
        finally:
            runtime.sync, runtime.outer_sync = before

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether a backward reduces its gradients when no context says otherwise."""
        self.runtime.sync = sync_model

    def finish_grad_sync(self) -> None:
        """Reduce gradients that are left from ``no_sync``; a backward outside of it has done so by itself."""
        with self.sync():
            self.runtime.finish_grad_sync()

    def start_grad_sync(self) -> None:
        """Start reducing gradients that are left from ``no_sync``; ``synchronize_gradient_reduce`` ends it."""
        with self.sync():
            self.runtime.start_grad_sync()

    def synchronize_gradient_reduce(self) -> None:
        """Let reductions that were started arrive in the gradients."""
        self.runtime.wait_for_reductions()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient, those included that are left from ``no_sync``."""
        self.finish_grad_sync()
        for gradient in self.gradients().values():
            rows = local(gradient)
            rows.mul_(factor.to(rows.device) if isinstance(factor, torch.Tensor) else factor)

    def set_prefetch(self, forward: Mapping[str, Sequence[str]] | None = None, backward: Mapping[str, Sequence[str]] | None = None) -> None:
        """Say which units to gather ahead when a unit begins, in its forward or backward, in place of ``num_prefetch_units``.

        Every rank says the same. ``prefetch_bytes`` remains the most that is gathered ahead at a time, and with ``fsdp_double_buffer`` a
        unit still waits for its buffer.

        Args:
            forward: by the name of a unit ("" for the root), names of other units in the order in which to gather them.
            backward: the same. Units that neither names go on by ``num_prefetch_units``; without arguments all do.

        Raises:
            ValueError: a name of no unit, or of the unit itself or the root among those to gather ahead.
        """
        self.runtime.order.choose(forward or {}, backward or {})

    def zero_grad_buffer(self) -> None:
        """Drop every gradient, reduced or not."""
        for group in self.runtime.groups:
            group.gradients.drop()
        self.runtime.drop_unreduced()

    def offload_grad_buffers(self) -> None:
        """Drop every gradient and give their memory back, between two steps; something else may use it until ``restore_grad_buffers``.

        Raises:
            RuntimeError: the memory is registered (``nccl_ub``), or in the host already (``cpu_offload``).
        """
        self.runtime.check_gradients_can_leave()
        self.zero_grad_buffer()
        for group in self.runtime.groups:
            group.gradients.offload()

    def restore_grad_buffers(self) -> None:
        """Undo ``offload_grad_buffers``: gradients that stay where they are, ``flat_shards()``, have memory there again, and are zero."""
        for group in self.runtime.groups:
            group.gradients.take_memory()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, reduced or not."""
        self.zero_grad_buffer()
        super().zero_grad(set_to_none)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Reduced gradients by parameter name, divided as the parameters are."""
        return {item.name: item.sharded.grad for item in self.runtime.parameters if item.sharded.grad is not None}

    def gradient_loans(self) -> dict[str, BorrowedGradBuffer]:
        """For layers that compute a weight gradient into memory by themselves, and give autograd none: where to, by parameter name.

        Inside a backward ``with loans[name]() as (total, fresh):`` gives memory of the whole parameter's shape, in the dtype of gradients:
        write the gradient into it if ``fresh``, else add to it. What is left there at the end of the block will be reduced. Parameters that
        are tied, frozen or DTensors of the module's own are left out.
        """
        return self.runtime.gradient_loans()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that the norm of all of them is at most ``max_norm``; return the norm before. A collective."""
        self.finish_grad_sync()
        return clip_gradients(list(self.runtime.groups), max_norm, norm_type)

    # Parameters

    def install_optimized_model_weights(self) -> None:
        """Let the next forward use main parameters that were changed by hand; an optimizer given to ``fully_shard`` does it."""
        self.runtime.mark_stale()

    def start_param_sync(self) -> None:
        """Start gathering parameters that are whole on every rank and have changed; the next forward would, and waits for them."""
        self.runtime.start_param_sync()

    def synchronize_param_gather(self) -> None:
        """Wait for gathers that were started."""
        for group in self.runtime.groups:
            group.finish_gather()

    def broadcast_params(self) -> None:
        """Overwrite main parameters by those of the first copy; ranks that were started alike hold equal ones already."""
        for group in self.runtime.groups:
            group.broadcast_main()
        self.runtime.mark_stale()

    def reshard(self) -> None:
        """Give back what the last forward left gathered; not between a forward and its backward."""
        self.runtime.reshard()

    def close(self) -> None:
        """Deregister memory that ``nccl_ub`` registered; call it before the process group is destroyed. The model stays usable."""
        self.runtime.close()

    def flat_shards(self) -> dict[str, FlatShard]:
        """This rank's range of each parameter by name, for optimizers that step flat memory; a parameter without one is left out.

        The tensors are live and stay where they are (without this call gradients have no memory between ``zero_grad`` and the next
        reduction). Call ``install_optimized_model_weights()`` after changing them.
        """
        return {name: shard for group in self.runtime.groups for name, shard in group.flat_shards().items()}

    def sharded_parameters(self) -> dict[str, nn.Parameter]:
        """What an optimizer steps, by name, at any time."""
        return {item.name: item.sharded for item in self.runtime.parameters}

    def _apply(self, fn: Any, recurse: bool = True) -> "MegatronFSDP":
        for group in self.runtime.groups:
            probe = torch.empty(0, dtype=group.main.dtype, device=group.device)
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise RuntimeError(
                    f"cannot move sharded parameters from {probe.dtype} on {probe.device} to {moved.dtype} on {moved.device}; "
                    "call .to() on the module before fully_shard, and set dtypes by MixedPrecisionPolicy"
                )
        return self

    # State

    def state_dict(self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Main parameters as shards, and buffers, under the names of the wrapped module.

        Shards share memory with the parameters. Torch's distributed checkpoint saves and loads them in any layout.
        """
        state = self.module.state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)
        return model_state_dict(self.runtime, state, prefix)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load shards, any DTensors or whole plain tensors, by the names of the wrapped module.

        Raises:
            ValueError: names do not match while ``strict``, a shape differs, or ``assign`` is set.
        """
        if assign:
            raise ValueError("assign=True would replace the flat buffers; leave it False")
        managed = {name: item for item in self.runtime.parameters for name in item.names}
        # Buffers go the ordinary way.
        others = {name: value for name, value in state_dict.items() if name not in managed}
        missing, unexpected = self.module.load_state_dict(others, strict=False)
        missing = [name for name in missing if name not in managed] + [name for name in managed if name not in state_dict]
        if strict and (missing or unexpected):
            raise ValueError(
                f"state dict does not match the module: missing {missing}, unexpected {unexpected}; pass strict=False to load the rest"
            )
        self.runtime.settle()
        with torch.no_grad():
            for name, item in managed.items():
                if name in state_dict:
                    load_parameter(item, state_dict[name], name)
        self.runtime.mark_stale()
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def full_state_dict(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, whole main parameter on the CPU), then buffers. A collective: every rank must exhaust it.

        Args:
            dtype: cast floating-point parameters to it.
        """
        yield from full_state(self.runtime, dtype=dtype)
        managed = {name for item in self.runtime.parameters for name in item.names}
        for name, value in self.module.state_dict().items():
            if name not in managed and isinstance(value, torch.Tensor):
                yield name, value.detach().cpu()

    def save_full_state_dict(self, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """Write what ``full_state_dict`` streams into one safetensors file; no rank ever holds more than one whole parameter.

        A collective. The first rank writes, and the file is there when it returns. A tied parameter is written under each of its names.

        Args:
            path: of the file; its folder exists.
            dtype: cast floating-point parameters to it.

        Raises:
            ValueError: a dtype that safetensors lacks.
        """
        named = {name: item for item in self.runtime.parameters for name in item.names}
        entries = [
            (name, item.sharded.dtype if dtype is None or not item.sharded.is_floating_point() else dtype, tuple(item.place.shape))
            for name, item in named.items()
        ]
        others = ((name, value) for name, value in self.module.state_dict().items() if name not in named)
        entries += [(name, value.dtype, tuple(value.shape)) for name, value in others if isinstance(value, torch.Tensor)]
        # Known on every rank, so that none waits for one that has failed.
        safetensors_header(entries)
        stream = self.full_state_dict(dtype=dtype)
        try:
            if self._is_first:
                write_safetensors(Path(path), entries, stream)
        finally:
            # The others wait for every tensor, written or not.
            collections.deque(stream, maxlen=0)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """State by parameter name, as shards, made to exist if the optimizer has not stepped; see ``load_optimizer_state_dict``."""
        if not optimizer.state:
            self.finish_grad_sync()
            initialize_optimizer_state(self.runtime, optimizer)
        return optimizer_state_dict(self.runtime, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load what ``optimizer_state_dict`` returned."""
        load_optimizer_state(self.runtime, optimizer, state)
