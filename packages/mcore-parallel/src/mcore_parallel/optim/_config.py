# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Choices of the optimizer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

import torch

KINDS = ("adam", "lion", "muon", "sgd")
ENDS = ("embedding", "output")
"""First parts of the names of parameters at the ends of a model."""
MOMENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Exceptions for the parameters whose names match a pattern, or that a function chooses.

    Raises:
        ValueError: nothing that chooses, a number out of range, or an unknown optimizer.

    Example:
        >>> ParamGroup(patterns=("embedding.*", "output.*"), lr_mult=0.5).matches("output.weight", (8, 4))
        True
    """

    patterns: tuple[str, ...] = ()
    """fnmatch patterns of global parameter names; one that matches no parameter of the model is an error."""
    predicate: Callable[[str, tuple[int, ...]], bool] | None = None
    """Further parameters, by global name and global shape; must say the same on every rank."""
    max_lr: float | None = None
    min_lr: float | None = None
    """Limits of the schedule for these parameters; None for the schedule's own. They need ``step(lr=schedule.lr(n))``: under a plain
    rate ``max_lr`` scales it by max_lr / config.lr, and ``min_lr`` is an error."""
    lr_mult: float | None = None
    """Factor of the learning rate; None for 1."""
    wd_mult: float | None = None
    """Factor of the weight decay; None for 1, or 0 for biases and parameters of one dimension."""
    optimizer: str | None = None
    """Update rule; None for the config's."""
    grad_norm_group: str | None = None
    """Name under which the gradients of these parameters, with those of all groups of that name, have a norm of their own, by which they
    are clipped; None to be among the others."""

    def __post_init__(self) -> None:
        if isinstance(self.patterns, str) or not (self.patterns or self.predicate):
            raise ValueError(f"patterns={self.patterns!r} must be a tuple of name patterns, at least one unless there is a predicate")
        for name in ("max_lr", "min_lr", "lr_mult", "wd_mult"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise ValueError(f"{name}={value} must not be negative")
        if self.max_lr is not None and self.min_lr is not None and self.min_lr > self.max_lr:
            raise ValueError(f"min_lr={self.min_lr} must not exceed max_lr={self.max_lr}")
        if self.optimizer is not None and self.optimizer not in KINDS:
            raise ValueError(f"optimizer={self.optimizer!r} must be one of {', '.join(KINDS)}")

    def matches(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter of that global name and shape belongs to the group."""
        named = any(fnmatchcase(name, pattern) for pattern in self.patterns)
        return named or (self.predicate is not None and self.predicate(name, shape))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its constants.

    Raises:
        ValueError: a constant out of range, an unknown optimizer, or choices that do not go together.

    Example:
        >>> OptimizerConfig(lr=1e-3).decoupled_weight_decay
        True
    """

    optimizer: str = "adam"
    """"adam"; "lion"; "sgd" (momentum, L2 decay); or "muon" for the matrices between embedding and output and adam for the rest."""
    lr: float
    """Learning rate of a step that is not given another one."""
    min_lr: float = 0.0
    """Lowest learning rate of a schedule that is built from this config."""
    decoupled_lr: float | None = None
    """Largest learning rate of embedding and output; None for that of the others."""
    decoupled_min_lr: float | None = None
    """``max_lr`` and ``min_lr`` of a group of the parameters of embedding and output."""
    weight_decay: float = 0.01
    """Not applied to biases and parameters of one dimension (norms)."""
    decoupled_weight_decay: bool = True
    """True for AdamW: p shrinks by lr * weight_decay. False for L2: weight_decay * p joins the gradient, as it always does in sgd."""
    adam_beta1: float = 0.9
    """Decay of the first moment, a step."""
    adam_beta2: float = 0.999
    """Decay of the second moment, a step."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    lion_beta1: float = 0.9
    """Weight of the momentum in an update."""
    lion_beta2: float = 0.99
    """Decay of the momentum, a step."""
    sgd_momentum: float = 0.9
    """Decay of the momentum, a step."""
    muon_momentum: float = 0.95
    """Decay of the momentum, a step."""
    muon_nesterov: bool = True
    """Orthogonalise gradient and momentum together (Nesterov), not the momentum alone."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations of an update."""
    muon_scale_mode: str = "spectral"
    """Factor of an orthogonal update of an [r, c] matrix: "spectral" max(r, c)^0.5, "shape" max(1, r / c)^0.5."""
    muon_extra_scale: float = 1.0
    """One more factor; 0.2 with "spectral" gives updates about as large as Adam's."""
    muon_split_rows: tuple[tuple[str, int], ...] = ()
    """(name pattern, rows): matrices whose blocks of so many rows are orthogonalised one by one, for instance the heads of a QKV
    weight: ("*.attention.qkv.weight", head_dim)."""
    param_groups: tuple[ParamGroup, ...] = ()
    """Exceptions by name."""
    clip_grad: float = 1.0
    """Largest global gradient norm, and norm of each ``ParamGroup.grad_norm_group``; a larger one is scaled down to it. 0 switches
    clipping off."""
    grad_norm_type: float = 2.0
    """p of the norm: the p-th root of the sum of p-th powers; ``math.inf`` for the largest absolute value."""
    grad_norm_skip_threshold: float = math.inf
    """A step whose gradient norm, of all parameters together, exceeds this is skipped."""
    log_num_zeros_in_grad: bool = False
    """Count the zeros of the gradient, each parameter once (``StepResult.num_zeros``)."""
    fp16: bool = False
    """Scale the loss, with ``loss_scale`` or dynamically."""
    loss_scale: float | None = None
    """Constant scale of the sum over a micro-batch's tokens, which an optimizer without ``fp16`` refuses; None for a dynamic one. A scale
    of their mean, such as 2**16, is divided by their number."""
    initial_loss_scale: float = 2.0**32
    """First scale, where it is dynamic."""
    min_loss_scale: float = 1.0
    """Lowest scale, where it is dynamic."""
    loss_scale_window: int = 1000
    """Good steps after which a dynamic scale doubles."""
    hysteresis: int = 2
    """Overflows that are put up with before the scale halves."""
    hysteresis_rearms: bool = False
    """Every good step forgets overflows; otherwise only a full window of good steps does."""
    use_distributed_optimizer: bool = False
    """States exist for this rank's slices only; the data-parallel config must say the same."""
    use_precision_aware_optimizer: bool = False
    """Allow the narrow moments below."""
    store_param_remainders: bool = True
    """Of a bfloat16 parameter keep the low 16 bits of the float32 master only; the upper ones are the parameter. The updates and the saved
    state are those of a whole master (False), and so is the parameter, but that ties round away from zero in place of to even."""
    exp_avg_dtype: torch.dtype = torch.float32
    """Of the first moment; as ``exp_avg_sq_dtype``."""
    exp_avg_sq_dtype: torch.dtype = torch.float32
    """Of the moments: float32, bfloat16, or, with a scale for each 1024 elements, float16 or float8_e4m3fn."""
    optimizer_cpu_offload: bool = False
    """Keep states of Adam in host memory and update there."""
    optimizer_offload_fraction: float = 0.0
    """Share of this rank's elements whose states are in host memory, the first ones in the model's order; rounded up to 1024 elements."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copies to and from the host overlap its work. The result has the same bits as without."""
    pin_cpu_grads: bool = True
    """Page-locked host buffers for gradients on a GPU."""
    pin_cpu_params: bool = True
    """Page-locked host buffers, for parameters on a GPU only."""

    def __post_init__(self) -> None:
        if self.optimizer not in KINDS:
            raise ValueError(f"optimizer={self.optimizer!r} must be one of {', '.join(KINDS)}")
        for name in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad", "grad_norm_skip_threshold", "muon_extra_scale"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "sgd_momentum", "muon_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        for name in ("muon_num_ns_steps", "loss_scale_window", "hysteresis"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.grad_norm_type > 0.0:
            raise ValueError(f"grad_norm_type={self.grad_norm_type} must be positive; 2.0, 1.0 or math.inf are usual")
        if self.muon_scale_mode not in ("spectral", "shape"):
            raise ValueError(f"muon_scale_mode={self.muon_scale_mode!r} must be 'spectral' or 'shape'")
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            raise ValueError(f"decoupled_min_lr={self.decoupled_min_lr} needs decoupled_lr")
        self._check_states()

    def _check_states(self) -> None:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = getattr(self, name)
            if dtype not in MOMENT_DTYPES:
                raise ValueError(f"{name}={dtype} must be one of {', '.join(map(str, MOMENT_DTYPES))}")
            if dtype != torch.float32 and not self.use_precision_aware_optimizer:
                raise ValueError(f"{name}={dtype} needs use_precision_aware_optimizer=True")
            if dtype != torch.float32 and self.optimizer in ("lion", "sgd") and all(group.optimizer is None for group in self.param_groups):
                raise ValueError(
                    f"{name}={dtype} is of Adam's moments, and optimizer={self.optimizer!r} has none; leave it at torch.float32"
                )
        if not 0.0 <= self.optimizer_offload_fraction <= 1.0:
            raise ValueError(f"optimizer_offload_fraction={self.optimizer_offload_fraction} must lie in [0, 1]")
        offloads = self.optimizer_cpu_offload
        if offloads and self.optimizer in ("lion", "sgd"):
            raise ValueError(
                f"optimizer_cpu_offload=True keeps states of Adam in host memory, but optimizer={self.optimizer!r}; switch it off"
            )
        if not offloads and self.optimizer_offload_fraction:
            raise ValueError(f"optimizer_offload_fraction={self.optimizer_offload_fraction} needs optimizer_cpu_offload=True")
        if not offloads and self.overlap_cpu_optimizer_d2h_h2d:
            raise ValueError("overlap_cpu_optimizer_d2h_h2d=True needs optimizer_cpu_offload=True")
        if self.loss_scale is not None and not self.loss_scale > 0.0:
            raise ValueError(
                f"loss_scale={self.loss_scale} must be positive; 2**16 / tokens of a micro-batch is usual, or None for a dynamic one"
            )

    @property
    def all_groups(self) -> tuple[ParamGroup, ...]:
        """``param_groups`` and the one that ``decoupled_lr`` stands for."""
        if self.decoupled_lr is None:
            return self.param_groups
        ends = ParamGroup(patterns=tuple(f"{end}.*" for end in ENDS), max_lr=self.decoupled_lr, min_lr=self.decoupled_min_lr)
        return (*self.param_groups, ends)

    @property
    def norm_groups(self) -> tuple[str | None, ...]:
        """Parameters whose gradient norms are taken apart: None for those of no group, then the names."""
        return (None, *sorted({group.grad_norm_group for group in self.param_groups if group.grad_norm_group is not None}))

    def rule(self, name: str, shape: Sequence[int]) -> "Rule":
        """How the parameter of that global name and shape is updated.

        Raises:
            ValueError: two groups match it and differ.
        """
        chosen = [group for group in self.all_groups if group.matches(name, tuple(shape))]
        values: dict[str, float | str] = {}
        for field in fields(ParamGroup):
            if field.name in ("patterns", "predicate"):
                continue
            wanted = {value for group in chosen if (value := getattr(group, field.name)) is not None}
            if len(wanted) > 1:
                raise ValueError(f"param_groups give {name} the values {sorted(wanted)} of {field.name}; let one pattern match it")
            if wanted:
                values[field.name] = wanted.pop()
        parts = name.split(".")
        vector = len(shape) <= 1 or parts[-1].endswith("bias")
        default = "adam" if self.optimizer == "muon" and (vector or parts[0] in ENDS) else self.optimizer
        limits = tuple(None if (value := values.get(key)) is None else float(value) for key in ("max_lr", "min_lr"))
        return Rule(
            kind=str(values.get("optimizer", default)),
            lr_mult=float(values.get("lr_mult", 1.0)),
            wd_mult=float(values.get("wd_mult", 0.0 if vector else 1.0)),
            limits=(limits[0], limits[1]),
            norm_group=None if (group := values.get("grad_norm_group")) is None else str(group),
        )


@dataclass(frozen=True, kw_only=True)
class AdamOptimizerConfig(OptimizerConfig):
    """An ``OptimizerConfig`` of Adam or AdamW: the same fields, and no other update rule for any parameter.

    Raises:
        ValueError: another optimizer, also in a group, and what ``OptimizerConfig`` raises.

    Example:
        >>> AdamOptimizerConfig(lr=1e-3, decoupled_weight_decay=False).optimizer
        'adam'
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (self.optimizer, *(group.optimizer for group in self.param_groups if group.optimizer is not None)):
            if name != "adam":
                raise ValueError(f"optimizer={name!r} is not Adam; use OptimizerConfig")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one parameter is updated."""

    kind: str
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    limits: tuple[float | None, float | None] = (None, None)
    """(max_lr, min_lr) of its schedule, None for the schedule's own."""
    norm_group: str | None = None
    """As ``ParamGroup.grad_norm_group``."""
