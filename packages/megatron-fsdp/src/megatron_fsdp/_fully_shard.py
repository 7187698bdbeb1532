# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The public entry: sharding a module and its optimizer."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import _state_dict as _state
from megatron_fsdp._flat_shard import FlatShard
from megatron_fsdp._group import ParameterGroup
from megatron_fsdp._hooks import Runtime, Unit
from megatron_fsdp._materialize import ResetParameters, materialize
from megatron_fsdp._optimizer import clip_gradients, fully_shard_optimizer
from megatron_fsdp._policy import MixedPrecisionPolicy, Strategy
from megatron_fsdp._ranks import Topology
from megatron_fsdp._units import ParameterSite, UnitMatcher, UnitPlan, plan_units


class MegatronFSDP(nn.Module):
    """A module whose parameters, gradients and optimizer state are divided among ranks.

    Call it as the module it wraps (``.module``). Outside of forward and backward the registered parameters are this rank's
    shards in the main dtype: DTensors divided along dimension 0 at whole rows (plain tensors under ``no_shard`` or without a
    process group). The root's stay whole after a forward, for callers that compute with them (a loss from hidden states), until its
    backward is over, main parameters change, the next forward, or ``reshard()``.

    All state lives in this object; nothing is attached to parameters, so re-registering or tying them later loses none.
    """

    def __init__(self, module: nn.Module, runtime: Runtime) -> None:
        super().__init__()
        self.module = module
        # Not a module, and kept out of attribute look-up on the wrapped module.
        object.__setattr__(self, "runtime", runtime)

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

    # Gradients

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole gradients on this rank; the next one outside, or ``finish_grad_sync``, reduces them."""
        before, self.runtime.sync = self.runtime.sync, False
        try:
            yield
        finally:
            self.runtime.sync = before

    def finish_grad_sync(self) -> None:
        """Reduce gradients that are left from ``no_sync``; a backward outside of it has done so by itself."""
        self.runtime.finish_grad_sync()

    def zero_grad_buffer(self) -> None:
        """Drop every gradient, reduced or not."""
        for group in self.runtime.groups:
            group.drop_gradients()
        self.runtime.drop_unreduced()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, reduced or not."""
        self.zero_grad_buffer()
        super().zero_grad(set_to_none)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Reduced gradients by parameter name, divided as the parameters are."""
        return {item.name: item.sharded.grad for item in self.runtime.parameters if item.sharded.grad is not None}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that the norm of all of them is at most ``max_norm``; return the norm before. A collective."""
        self.finish_grad_sync()
        return clip_gradients(self, max_norm, norm_type)

    # Parameters

    def install_optimized_model_weights(self) -> None:
        """Let the next forward use main parameters that were changed by hand; an optimizer given to ``fully_shard`` does it."""
        self.runtime.mark_stale()

    def reshard(self) -> None:
        """Give back what the last forward left gathered; not between a forward and its backward."""
        self.runtime.reshard()

    def flat_shards(self) -> dict[str, FlatShard]:
        """This rank's range of each parameter by name, for optimizers that step flat memory; a parameter without one is left out.

        The tensors are live and stay where they are. Call ``install_optimized_model_weights()`` after changing them.
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
        return _state.model_state_dict(self, state, prefix)

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
        with torch.no_grad():
            for name, item in managed.items():
                if name in state_dict:
                    _state.load_parameter(item, state_dict[name], name)
        self.runtime.mark_stale()
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def full_state_dict(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, whole main parameter on the CPU), then buffers. A collective: every rank must exhaust it.

        Args:
            dtype: cast floating-point parameters to it.
        """
        yield from _state.full_state(self, dtype=dtype)
        managed = {name for item in self.runtime.parameters for name in item.names}
        for name, value in self.module.state_dict().items():
            if name not in managed and isinstance(value, torch.Tensor):
                yield name, value.detach().cpu()

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """State by parameter name, as shards, made to exist if the optimizer has not stepped; see ``load_optimizer_state_dict``."""
        _state.initialize_optimizer_state(self, optimizer)
        return _state.optimizer_state_dict(self, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load what ``optimizer_state_dict`` returned."""
        _state.load_optimizer_state(self, optimizer, state)


def fully_shard_model(
    module: nn.Module,
    *,
    zero_dp_strategy: str | int | Strategy = "optim_grads_params",
    fsdp_unit_modules: Sequence[UnitMatcher] | UnitMatcher = (),
    device_mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    gradient_reduce: Literal["mean", "sum"] = "mean",
    num_prefetch_units: int = 1,
    device: torch.device | str | None = None,
    reset_parameters: ResetParameters | None = None,
) -> MegatronFSDP:
    """Shard a module; the same arguments as ``fully_shard``, without the optimizer."""
    strategy = Strategy.parse(zero_dp_strategy)
    if gradient_reduce not in ("mean", "sum"):
        raise ValueError(f"gradient_reduce={gradient_reduce!r} must be 'mean' or 'sum'")
    if num_prefetch_units < 0:
        raise ValueError(f"num_prefetch_units={num_prefetch_units} must not be negative; 0 gathers nothing ahead")
    if isinstance(module, MegatronFSDP):
        raise ValueError("module is sharded already; pass the plain module")
    policy = mixed_precision or MixedPrecisionPolicy()
    originals = dict(module.named_parameters(remove_duplicate=False))
    if any(parameter.is_meta for parameter in originals.values()):
        materialize(module, torch.device(device or "cpu"), reset_parameters)
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(f"module has parameters on {sorted(map(str, devices))}; move it to one device first")
    plans = plan_units(module, fsdp_unit_modules)
    topology = Topology.build(strategy, devices.pop(), device_mesh, process_group)
    _check_same_model(plans, topology)
    units = []
    for index, plan in enumerate(plans):
        groups = []
        for sites in _by_kind(plan.sites):
            # A scalar has no dimension to divide.
            mine = topology.replicated() if sites[0].parameter.ndim == 0 else topology
            groups.append(ParameterGroup(sites, strategy, policy, mine, mean=gradient_reduce == "mean"))
        for group in groups:
            for item in group.parameters:
                item.original = originals[item.name]
                item.register(full=False)
        units.append(Unit(index, plan.name, plan.module, groups))
    for buffer in module.buffers():
        for ranks in topology.all_ranks:
            ranks.broadcast(buffer)
    runtime = Runtime(units, strategy, policy, topology, num_prefetch_units=num_prefetch_units)
    return MegatronFSDP(module, runtime)


def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    zero_dp_strategy: str | int | Strategy = "optim_grads_params",
    fsdp_unit_modules: Sequence[UnitMatcher] | UnitMatcher = (),
    device_mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    gradient_reduce: Literal["mean", "sum"] = "mean",
    num_prefetch_units: int = 1,
    device: torch.device | str | None = None,
    reset_parameters: ResetParameters | None = None,
) -> tuple[MegatronFSDP, torch.optim.Optimizer | None]:
    """Divide parameters, gradients and optimizer state of a module among data-parallel ranks.

    Training equals replicated data parallelism. Every rank starts from the first rank's values.

    Args:
        module: any module, on its final device, or built on the meta device.
        optimizer: elementwise torch optimizer over ``module.parameters()``, not stepped yet. Its groups are kept.
        zero_dp_strategy: ``no_shard`` (0), ``optim`` (1), ``optim_grads`` (2) or ``optim_grads_params`` (3).
        fsdp_unit_modules: which submodules are gathered and released as one: classes, ``fnmatch`` patterns for qualified or
            class names, predicates ``(name, module) -> bool``. The rest belongs to the root, which is one unit.
        device_mesh: the data axes: (shard,), or (replicate, shard) to shard within nodes and replicate across them.
        process_group: the ranks to shard over instead of a mesh. Default: all, or one rank if torch.distributed is not set up.
        mixed_precision: dtypes; by default the module's own for compute, float32 for main parameters and gradients.
        gradient_reduce: ``mean`` over ranks, or ``sum`` for callers who divide by a global count themselves.
        num_prefetch_units: units gathered ahead of the running one; the bound on memory is that many plus the running one
            and the root.
        device: where a module from the meta device goes; default is the CPU.
        reset_parameters: initialises one module from the meta device; default is its own ``reset_parameters()``.

    Returns:
        The sharded module, and the same optimizer (None if none was given).

    Raises:
        ValueError: an argument is wrong, ranks hold different models, or the module has no parameters; the message says what to do.

    Example:
        >>> layer = nn.Linear(4, 2)
        >>> model, optimizer = fully_shard(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """
    model = fully_shard_model(
        module,
        zero_dp_strategy=zero_dp_strategy,
        fsdp_unit_modules=fsdp_unit_modules,
        device_mesh=device_mesh,
        process_group=process_group,
        mixed_precision=mixed_precision,
        gradient_reduce=gradient_reduce,
        num_prefetch_units=num_prefetch_units,
        device=device,
        reset_parameters=reset_parameters,
    )
    return model, None if optimizer is None else fully_shard_optimizer(optimizer, model)


def _by_kind(sites: Sequence[ParameterSite]) -> list[list[ParameterSite]]:
    """Parameters that can share a buffer: one dtype, all trainable or all frozen, all scalar or none."""
    kinds: dict[tuple[torch.dtype, bool, bool], list[ParameterSite]] = {}
    for site in sites:
        kinds.setdefault((site.parameter.dtype, site.parameter.requires_grad, site.parameter.ndim == 0), []).append(site)
    return list(kinds.values())


def _check_same_model(plans: Sequence[UnitPlan], topology: Topology) -> None:
    """Refuse models that differ between ranks: their buffers would be cut and summed without a word."""
    text = repr(
        [
            (
                plan.name,
                [(site.names, tuple(site.parameter.shape), str(site.parameter.dtype), site.parameter.requires_grad) for site in plan.sites],
            )
            for plan in plans
        ]
    )
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    device = next(site.parameter.device for plan in plans for site in plan.sites)
    mine = torch.tensor([digest], dtype=torch.int64, device=device)
    for ranks in topology.all_ranks:
        if len(ranks.all_gather(mine).unique()) != 1:
            raise ValueError("ranks hold modules with different parameters; build the same module with the same units on every rank")
