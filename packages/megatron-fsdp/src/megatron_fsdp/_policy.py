# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What is sharded, in which precision, and where parameters may be cut."""

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from megatron_fsdp._stability import experimental_api


class Strategy(enum.IntEnum):
    """What each rank keeps a shard of instead of a whole copy; the integer values are Megatron's."""

    no_shard = 0
    """Nothing: gradients are all-reduced."""
    optim = 1
    """Main parameters and optimizer state; gradients live in a whole buffer, which is kept between steps."""
    optim_grads = 2
    """Also gradients: their whole buffer lives from a unit's backward to its reduction."""
    optim_grads_params = 3
    """Also parameters: whole ones live while their unit computes."""

    @classmethod
    def parse(cls, value: "str | int | Strategy", field: str = "zero_dp_strategy") -> "Strategy":
        """Read a strategy from its name or number; ``field`` is what messages call it.

        Raises:
            ValueError: neither a name nor a number of a strategy.
        """
        if isinstance(value, str) and value in cls.__members__:
            return cls[value]
        if isinstance(value, int) and not isinstance(value, bool) and value in {int(member) for member in cls}:
            return cls(value)
        known = ", ".join(f"{member.name} ({int(member)})" for member in cls)
        raise ValueError(f"{field}={value!r} is unknown; choose one of {known}")


@runtime_checkable
class KeepsFloat32(Protocol):
    """A module with parameters that compute in float32 where the rest of the model computes in fewer bits.

    Example:
        >>> class Decay(torch.nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.rate = torch.nn.Parameter(torch.ones(4))
        ...
        ...     def float32_parameters(self) -> Collection[str]:
        ...         return ("rate",)
        >>> isinstance(Decay(), KeepsFloat32)
        True
    """

    def float32_parameters(self) -> Collection[str]:
        """Their names, of the module's own parameters and not of its children's; others are refused (``ValueError``)."""
        ...


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionPolicy:
    """Dtypes of compute parameters, main parameters, gradients and gradient communication.

    Only floating-point parameters are affected. The defaults compute in the module's own dtypes and keep
    main parameters and gradients in float32 (float64 for float64 modules). Of the parameters that a module keeps in float32
    (``float32_parameters()``) a narrower ``param_dtype``, ``main_params_dtype`` or ``main_grads_dtype`` means float32.

    Example:
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16).main_dtype(torch.float32, trainable=True)
        torch.float32
    """

    param_dtype: torch.dtype | None = None
    """Dtype of gathered parameters, in which forward and backward compute; None keeps the module's own."""
    main_params_dtype: torch.dtype | None = None
    """Dtype of the shards that the optimizer steps; None means float32, or float64 for float64 parameters.
    Frozen parameters keep their own dtype."""
    main_grads_dtype: torch.dtype | None = None
    """Dtype in which gradients accumulate over micro-batches; None means that of the main parameters. A wider one is for optimizers
    that step ``flat_shards()``: those of torch want one dtype."""
    grad_comm_dtype: torch.dtype | None = None
    """Dtype in which gradients cross ranks; None means that in which they accumulate."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of the root module to ``param_dtype`` when that is set."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name}={dtype!r} must be a floating-point torch.dtype or None")

    def in_float32(self) -> "MixedPrecisionPolicy":
        """The policy of parameters that a module keeps in float32: dtypes that are set are float32 or wider."""
        names = ("param_dtype", "main_params_dtype", "main_grads_dtype")
        dtypes = {name: getattr(self, name) for name in names}
        # By their bytes: torch promotes no dtype of 8 bits.
        return replace(self, **{name: torch.float32 if dtype and dtype.itemsize < 4 else dtype for name, dtype in dtypes.items()})

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a parameter created as ``dtype`` computes."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def main_dtype(self, dtype: torch.dtype, *, trainable: bool) -> torch.dtype:
        """Dtype of the main shard of a parameter created as ``dtype``."""
        if not trainable or not dtype.is_floating_point:
            return dtype
        return self.main_params_dtype or torch.promote_types(dtype, torch.float32)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the gradient of a parameter created as ``dtype`` accumulates.

        Raises:
            ValueError: ``main_grads_dtype`` is narrower than the main parameters.
        """
        main_dtype = self.main_dtype(dtype, trainable=True)
        gradient_dtype = self.main_grads_dtype or main_dtype
        if torch.promote_types(main_dtype, gradient_dtype) != gradient_dtype:
            raise ValueError(f"main_grads_dtype={gradient_dtype} is narrower than the main parameters' {main_dtype}; leave it None")
        return gradient_dtype


@experimental_api
@dataclass(frozen=True)
class TensorAtomic:
    """Nowhere: one rank holds the whole parameter, its gradient and its optimizer state; ranks share parameters out by their bytes.

    For optimizers that look at whole matrices. Other ranks have an empty shard [0, ...].
    """


@experimental_api
@dataclass(frozen=True)
class BlockAtomic:
    """Between blocks of rows: every shard is whole blocks, but for the rows that the parameter has beyond its last whole block.

    Example:
        >>> BlockAtomic(32).block_size
        32
    """

    block_size: int
    """Rows of dimension 0 in a block: 32 for formats that scale blocks of 32."""

    def __post_init__(self) -> None:
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"block_size={self.block_size!r} must be a positive number of rows, for instance 32")


ShardPlacement = TensorAtomic | BlockAtomic
