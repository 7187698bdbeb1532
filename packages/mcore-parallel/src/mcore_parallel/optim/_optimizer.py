# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Updates from main gradients, with float32 masters and clipping by the global norm."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import Piece, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.optim._adam import Numbers, adam, lion, sgd
from mcore_parallel.optim._config import OptimizerConfig, Rule
from mcore_parallel.optim._loss_scale import DynamicLossScale
from mcore_parallel.optim._muon import LayerwiseMuon
from mcore_parallel.optim._norm import GradientNorm, joint_norm
from mcore_parallel.optim._offload import HostUpdates, ParkedTensors, split_for_host
from mcore_parallel.optim._piece_state import PieceState, Placement, whole_piece
from mcore_parallel.optim._rate import Limits, Rate, group_rates


class GradientSource(Protocol):
    """What hands complete gradients to an optimizer (``DistributedDataParallel`` does)."""

    @property
    def module(self) -> nn.Module: ...

    def gradients(self) -> dict[str, Tensor]: ...


_FINGERPRINT_CHUNK = 1 << 22
"""Elements whose bits are widened at a time."""


@runtime_checkable
class PieceSource(Protocol):
    """A source that may give a rank slices only, and gathers the parameters that others updated."""

    @property
    def is_sliced(self) -> bool: ...

    def pieces(self) -> list[Piece]: ...

    def start_param_sync(self) -> None: ...

    def finish_param_sync(self) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What a step did; the numbers are on the device until they are looked at."""

    grad_norm: Tensor
    """Scalar: norm of the scaled gradients before clipping, the same on every rank."""
    skip: Tensor
    """Boolean scalar: nothing was updated, because the norm is not finite or above the threshold."""
    num_zeros: Tensor | None = None
    """Elements of the whole model's gradient that are exactly zero, if the config asks for them."""
    group_norms: Mapping[str, Tensor] = field(default_factory=dict)
    """The same norm of each ``ParamGroup.grad_norm_group``, by name."""

    @property
    def skipped(self) -> bool:
        """``skip`` on the host, which waits for the device."""
        return bool(self.skip)


@dataclass(frozen=True)
class StateShard:
    """One tensor of the optimizer's state, placed like its parameter, or one box of it."""

    name: str
    tensor: Tensor
    spec: ShardSpec
    offset: tuple[int, ...] | None = None
    """Where the tensor begins in the global one; None for where the parameter begins."""
    replica: int | None = None
    """Number of this copy; None for the parameter's."""


class MegatronOptimizer:
    """Updates the trained parameters of a model from the main gradients of its gradient source.

    Parameters of 16 bits have a float32 master that is updated and rounded back; float32 and float64 parameters are
    updated in place. From a source in slices (the distributed optimizer) this rank updates its pieces and the source gathers the
    rest. On a GPU the decision to skip, the clipping and the update stay on the device: a step of Adam without offload never waits
    for it.

    Args:
        config: the update rule.
        ddp: where gradients come from; its ``module`` holds the parameters, whose storage must stay where it is from now on.
        groups: the process groups of the model.

    Raises:
        ValueError: the source is in slices and the config is not, or the other way round; a rule that cannot update a parameter;
            a ``loss_scale`` without ``fp16``; parameter groups that contradict each other or match nothing, on every rank,
            wherever the parameter lies.
    """

    def __init__(self, config: OptimizerConfig, ddp: GradientSource, groups: ProcessGroups) -> None:
        self.config, self.groups = config, groups
        self._source, self._place = ddp, Placement(groups)
        self._sliced = ddp if isinstance(ddp, PieceSource) else None
        everything = {shard.name: shard for shard in named_shards(ddp.module)}
        shards = {name: shard for name, shard in everything.items() if shard.parameter.requires_grad}
        if self._sliced is not None:
            self._pieces = self._sliced.pieces()
        else:
            gradients = ddp.gradients()
            self._pieces = [whole_piece(name, s.spec, s.parameter, gradients[name], groups) for name, s in shards.items()]
        self._check_slices()
        # A rank with nothing to update has its part in the collectives too, on the device that the others use.
        devices = [piece.parameter.device for piece in self._pieces] or [shard.parameter.device for shard in everything.values()]
        self._device = devices[0] if devices else torch.device("cpu")
        self.rules = _rules(config, {name: shard.spec.shape for name, shard in everything.items()}, groups, self._device)
        """How each parameter of this rank is updated, by name."""
        rules, parts = self.rules, config.norm_groups
        self._norm = GradientNorm(
            self._pieces,
            groups,
            self._device,
            norm_type=config.grad_norm_type,
            parts={name: parts.index(rule.norm_group) for name, rule in rules.items()},
            num_parts=len(parts),
        )
        self._muon = LayerwiseMuon([piece for piece in self._pieces if rules[piece.name].kind == "muon"], groups, config)
        owned = {piece.name for piece in self._muon.owned()}
        mine = [piece for piece in self._pieces if rules[piece.name].kind != "muon" or piece.name in owned]
        self._units = [PieceState(piece, rules[piece.name], config, on_host=on_host) for piece, on_host in self._placed(mine)]
        self._limits = {unit.rule.limits for unit in self._units} - {(None, None)}
        self._owned = owned
        self._host = HostUpdates([unit for unit in self._units if unit.on_host], config)
        self._resident = [unit for unit in self._units if not unit.on_host]
        self._updates = _DeviceUpdates.of(self._resident, config)
        self._streamed: list[_DeviceUpdates] = []
        self._count = torch.zeros((), dtype=torch.float64, device=self._device)
        self._loss_scale_rule = _loss_scale_rule(config)
        self._loss_scale = self._loss_scale_rule.start(self._device) if self._loss_scale_rule else None
        self._loaded: list[tuple[PieceState, str, Tensor, Tensor]] = []
        self._parked = ParkedTensors([[holder.data for _, holder in unit.storages()] for unit in self._resident])

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of moments and masters that are not the parameters themselves, in "device" and "host" memory."""
        num_bytes = {"device": 0, "host": 0}
        for unit in self._units:
            num_bytes["host" if unit.on_host else "device"] += sum(holder.num_bytes for _, holder in unit.storages())
        return num_bytes

    @property
    def step_count(self) -> int:
        """Updates made so far (skipped steps do not count); waits for the device."""
        return int(self._count)

    @property
    def loss_scale(self) -> Tensor | None:
        """Scalar by which losses must be multiplied before their backward, and by which ``step`` divides; None without fp16."""
        return None if self._loss_scale is None else self._loss_scale[0]

    @property
    def can_lower_loss_scale(self) -> bool:
        """Whether overflows lower the loss scale from where it is now; waits for the device."""
        rule, state = self._loss_scale_rule, self._loss_scale
        return rule is not None and state is not None and not rule.constant and state[0].item() > rule.minimum

    def load_step_count(self, count: int) -> None:
        """Continue after ``count`` updates, with the state that was loaded.

        The tensors of the last ``state_shards()`` are filled by whoever loads them, as are the model's parameters. Those that are
        not live are taken over here; those that nobody filled are not, lest old masters replace parameters that were loaded alone.
        """
        self._count.fill_(count)
        filled = [(unit, kind, values) for unit, kind, values, before in self._loaded if _fingerprint(values) != before]
        if filled:
            self._bring_back()
        for unit, kind, values in filled:
            dict(unit.storages())[kind].write(values)
        self._loaded = []
        for unit in self._units:
            if unit.on_host:
                unit.refresh_image()

    def state_shards(self) -> dict[str, "StateShard | list[StateShard]"]:
        """The state as named tensors: ``optimizer.exp_avg.<parameter>``, ``optimizer.exp_avg_sq.<parameter>`` (``optimizer.momentum``
        of other rules) and, of a 16-bit parameter, ``optimizer.master.<parameter>``. Fill them in place to load.

        A slice of a parameter of three or more dims, or a part that is on the host, can be more than one box of it; then the value is a
        list. Values are float32 (or
        float64) whatever the stored dtype: where that is narrower they are copies, kept until the next step, which
        ``load_step_count`` takes over. State that was offloaded stays in host memory, and so are its tensors; hold none of these beyond
        the next step, ``offload_to_cpu`` or ``restore_from_cpu``.
        """
        self._parked.wait()
        images = self._parked.host_images()
        if self._sliced is not None:
            self._sliced.finish_param_sync()
        self._loaded = []
        shards: dict[str, list[StateShard]] = {}
        for unit in self._units:
            piece = unit.piece
            owned = piece.name in self._owned
            for kind, holder in unit.storages():
                data = images.get(id(holder.data), holder.data)
                values = holder.read_image(data)
                if values is not data:
                    self._loaded.append((unit, kind, values, _fingerprint(values)))
                name = f"optimizer.{kind}.{piece.name}"
                if piece.is_whole and not owned and len(values) == math.prod(piece.shape):
                    shards[name] = [StateShard(name, values.view(piece.shape), piece.spec)]
                    continue
                replica = self._place.replica(piece, owned=owned)
                parts = [StateShard(name, view, piece.spec, place, replica) for view, place in self._place.parts(piece, values)]
                # A piece whose state is partly on the host is two units.
                shards.setdefault(name, []).extend(parts)
        if self._loss_scale is not None:
            # Every rank of every stage has a copy.
            copy = self.groups.world.rank
            shards["optimizer.loss_scale"] = [StateShard("optimizer.loss_scale", self._loss_scale, ShardSpec(shape=(3,)), replica=copy)]
        return {name: parts[0] if len(parts) == 1 else parts for name, parts in shards.items()}

    def offload_to_cpu(self, keep_bytes: int = 0) -> None:
        """Move the state to host memory and give its device memory back, between two steps; generation may use it meanwhile.

        The host memory, page-locked for a GPU, is taken at the first call and kept. The copies travel beside what is queued next; neither
        host nor device waits, but for an allocation that needs the memory.

        A step that finds the state there brings it to the device in windows, updates it and sends it back: about 1 GB of device memory,
        or three times the state of the largest parameter, and the time of two copies that go at once.

        Args:
            keep_bytes: so much of the state, in whole windows of up to 256 MiB, stays on the device or comes back there; steps update it
                without a copy.

        Raises:
            torch.OutOfMemoryError: as of ``restore_from_cpu``.
        """
        self._parked.park(keep_bytes)

    def restore_from_cpu(self) -> None:
        """Undo ``offload_to_cpu``. On a GPU the copies travel beside what is queued until the next step or save.

        Raises:
            torch.OutOfMemoryError: there is too little; the state is in host memory still.
        """
        self._parked.restore()

    def _bring_back(self) -> None:
        self._parked.restore()
        self._parked.wait()

    def reload_model_params(self) -> None:
        """Take the masters from the model's parameters; call after weights were loaded into the model without optimizer state."""
        self._bring_back()
        if self._sliced is not None:
            self._sliced.finish_param_sync()
        for unit in self._units:
            unit.reload()

    @torch.no_grad()
    def step(self, *, grad_scale: float | Tensor = 1.0, lr: float | Tensor | None = None, weight_decay: float | None = None) -> StepResult:
        """Scale, clip and apply the gradients; the main gradients keep the values they had.

        Args:
            grad_scale: factor of the gradients, one over the global number of tokens for a mean. The loss scale is divided out on top.
            lr: learning rate of this step; None for ``config.lr``. Groups with limits of their own want the rate of a schedule,
                ``schedule.lr(n)``.
            weight_decay: of this step; None for that of the rate, if it carries one, or ``config.weight_decay``.

        Raises:
            ValueError: a plain rate, and a group with a ``min_lr``.
        """
        self._parked.wait()
        self._loaded = []
        config = self.config
        rates = group_rates(self._limits, lr, config.lr)
        if weight_decay is None:
            carried = lr.weight_decay if isinstance(lr, Rate) else None
            weight_decay = config.weight_decay if carried is None else carried
        self._refresh_gradients()
        self._host.fetch()
        norms_G, zeros = self._norm.totals(count_zeros=config.log_num_zeros_in_grad)
        scale = _scalar(grad_scale, norms_G.device)
        if self._loss_scale is not None:
            scale = scale / self._loss_scale[0]
        norms_G = norms_G * scale
        norm = joint_norm(norms_G, config.grad_norm_type)
        overflow = ~torch.isfinite(norm)
        skip = overflow | (norm > config.grad_norm_skip_threshold)
        factors_G = scale * (config.clip_grad / (norms_G + 1e-6)).clamp(max=1.0) if config.clip_grad else scale.expand(len(norms_G))
        self._count += (~skip).to(self._count.dtype)
        rate = _scalar(config.lr if lr is None else lr, norms_G.device)
        # max(1): the corrections of a first step that is skipped must not divide by zero.
        count = self._count.clamp(min=1.0)
        roots = (1.0 - config.adam_beta1**count, (1.0 - config.adam_beta2**count).sqrt())
        decay = _scalar(weight_decay, norms_G.device)
        self._update(torch.stack([rate, *roots, skip.to(torch.float64), decay]), factors_G, rates)
        if self._loss_scale_rule is not None and self._loss_scale is not None:
            self._loss_scale_rule.update(self._loss_scale, overflow)
        by_group = {name: norms_G[part] for part, name in enumerate(config.norm_groups) if name is not None}
        return StepResult(norm, skip, zeros if config.log_num_zeros_in_grad else None, by_group)

    def _update(self, numbers: Tensor, factors_G: Tensor, rates: Mapping[Limits, tuple[float, float]]) -> None:
        on_host = None
        if self._updates.plain or self._host.units:
            *factors, rate, correction1, root2, skip, decay = torch.cat((factors_G, numbers)).tolist()
            by_group = dict(zip(self.config.norm_groups, factors, strict=True))
            on_host = Numbers(by_group, rate, correction1, root2, bool(skip), decay, rates)
        if self._parked.are_parked:
            if not self._streamed:
                windows = [[self._resident[number] for number in numbers] for numbers in self._parked.windows]
                self._streamed = [_DeviceUpdates.of(units, self.config) for units in windows]
            self._parked.stream(lambda number: self._run(self._streamed[number], numbers, factors_G, on_host, rates))
        else:
            self._run(self._updates, numbers, factors_G, on_host, rates)
        if on_host is not None:
            self._host.run(on_host)
        self._muon.share()
        if self._sliced is not None:
            self._sliced.start_param_sync()

    def _run(
        self,
        updates: "_DeviceUpdates",
        numbers: Tensor,
        factors_G: Tensor,
        on_host: Numbers | None,
        rates: Mapping[Limits, tuple[float, float]],
    ) -> None:
        if updates.fused is not None and len(factors_G) == 1:
            updates.fused.run(torch.cat((factors_G, numbers)), rates)
        elif updates.fused is not None:
            updates.fused.run(torch.cat((factors_G.new_ones(1), numbers)), rates, factors_G)
        if on_host is None or on_host.skip:
            return
        for unit in updates.plain:
            if unit.rule.kind == "muon":
                self._muon.update(unit, on_host)
            else:
                {"adam": adam, "lion": lion, "sgd": sgd}[unit.rule.kind](unit, unit.piece.gradient, self.config, on_host)

    def _refresh_gradients(self) -> None:
        """A source without pieces may hand out other tensors every time."""
        if self._sliced is not None:
            return
        gradients = self._source.gradients()
        for piece in self._pieces:
            fresh = gradients[piece.name].reshape(-1)
            if fresh.data_ptr() != piece.gradient.data_ptr():
                piece.gradient.copy_(fresh)

    def _check_slices(self) -> None:
        sliced = self._sliced is not None and self._sliced.is_sliced
        if sliced != self.config.use_distributed_optimizer:
            raise ValueError(
                f"use_distributed_optimizer={self.config.use_distributed_optimizer} of the optimizer, but its gradients are "
                f"{'sliced' if sliced else 'whole'}; set it alike in OptimizerConfig and DistributedDataParallelConfig"
            )

    def _placed(self, pieces: Sequence[Piece]) -> list[tuple[Piece, bool]]:
        """Pieces with whether their state is on the host; the one in which the hosted share ends is cut in two."""
        config = self.config
        if not config.optimizer_cpu_offload:
            return [(piece, False) for piece in pieces]
        adam_pieces = [piece for piece in pieces if self.rules[piece.name].kind == "adam"]
        rest = [(piece, False) for piece in pieces if self.rules[piece.name].kind != "adam"]
        return split_for_host(adam_pieces, config.optimizer_offload_fraction) + rest


def _fingerprint(values: Tensor) -> Tensor:
    """A number, on the device, that another content has by a chance of 2**-64: a sum of each element's bits mixed with its place."""
    bits = values.view({4: torch.int32, 8: torch.int64}[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for first in range(0, len(bits), _FINGERPRINT_CHUNK):
        part = bits[first : first + _FINGERPRINT_CHUNK]
        places = torch.arange(first, first + len(part), dtype=torch.int64, device=values.device)
        # Products wrap around. The factors are odd; those of SplitMix64 (Steele et al. 2014).
        mixed = places.mul_(-0x61C8864680B583EB).add_(part)
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total += mixed.sum()
    return total


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """On the device without a copy from the host, which would wait and could not be captured."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return torch.full((), value, dtype=torch.float64, device=device)


class _DeviceAdam(Protocol):
    def run(self, numbers: Tensor, rates: Mapping[Limits, tuple[float, float]], factors_G: Tensor | None = None) -> None: ...


@dataclass(frozen=True)
class _DeviceUpdates:
    """Pieces whose state is on the device: in one kernel, or one by one."""

    fused: _DeviceAdam | None
    plain: list[PieceState]

    @classmethod
    def of(cls, units: Sequence[PieceState], config: OptimizerConfig) -> "_DeviceUpdates":
        adam_units = [unit for unit in units if unit.rule.kind == "adam"]
        fusable = [unit for unit in adam_units if unit.piece.parameter.is_cuda and unit.piece.parameter.dtype != torch.float64]
        fused = {id(unit) for unit in fusable}
        return cls(_fused(fusable, config), [unit for unit in units if id(unit) not in fused])


def _rules(config: OptimizerConfig, shapes: Mapping[str, tuple[int, ...]], groups: ProcessGroups, device: torch.device) -> dict[str, Rule]:
    """The rule of each parameter; what is wrong with the groups is an error on every rank, also where the parameters are not."""
    rules, error = {}, None
    try:
        rules = {name: config.rule(name, shape) for name, shape in shapes.items()}
    except ValueError as found:
        error = found
    if not config.all_groups:
        return rules
    patterns = [pattern for group in config.param_groups for pattern in group.patterns]
    matched = [any(fnmatchcase(name, pattern) for name in shapes) for pattern in patterns]
    *known, failed = all_reduce(torch.tensor([*matched, error is not None], dtype=torch.int32, device=device), groups.world, "max").tolist()
    if error is not None:
        raise error
    if failed:
        raise ValueError("param_groups contradict each other for a parameter of another rank, whose error names it")
    if unmatched := [pattern for pattern, known_somewhere in zip(patterns, known, strict=True) if not known_somewhere]:
        raise ValueError(f"patterns {unmatched} of param_groups match no parameter of the model; correct or remove them")
    return rules


def _fused(units: list[PieceState], config: OptimizerConfig) -> _DeviceAdam | None:
    if not units:
        return None
    from mcore_parallel.optim._fused import FusedAdam

    return FusedAdam(units, config)


def _loss_scale_rule(config: OptimizerConfig) -> DynamicLossScale | None:
    if not config.fp16:
        if config.loss_scale is not None:
            raise ValueError(f"loss_scale={config.loss_scale} needs fp16=True; set it, or leave loss_scale at None")
        return None
    if config.loss_scale is not None:
        return DynamicLossScale(initial=config.loss_scale, minimum=config.loss_scale, constant=True)
    return DynamicLossScale(
        initial=config.initial_loss_scale, minimum=config.min_loss_scale, window=config.loss_scale_window,
        hysteresis=config.hysteresis, rearms=config.hysteresis_rearms,
    )  # fmt: skip
