# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How many ranks work along each parallel axis."""

import math
from dataclasses import dataclass

from mcore_parallel._field_types import check_field_types

AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Degrees of parallelism, validated together.

    The same ranks are factored twice: the dense view is tp x cp x dp x pp, the expert view is
    etp x ep x edp x pp. ``order`` names the axes from the fastest-varying rank stride to the slowest;
    an axis of degree one may be left out.

    Args:
        tp: tensor-parallel degree of dense layers.
        pp: pipeline stages.
        vpp: model chunks per pipeline stage (virtual stages).
        cp: context-parallel degree (the sequence is split).
        ep: expert-parallel degree.
        etp: tensor-parallel degree inside one expert; None means 1.
        dp: data-parallel replicas of the dense view.
        order: rank order, for instance ``"tp-cp-ep-dp-pp"``.
        sequence_parallel: between tensor-parallel layers each tp rank holds its share of the tokens.
            Only has an effect when tp > 1.
        hierarchical_cp: sizes of nested context-parallel groups, neighbours first; their product is cp. Empty for none.
        optimizer_instances: the replicas of dense and of expert parameters are cut into this many sets of neighbours, each of which
            holds the distributed optimizer's state once.
        tp_comm_overlap: cut the transfers between tensor-parallel layers into pieces, each beside the GEMM of another one. True
            wherever pieces are even, False nowhere, None on CUDA where they are large enough to gain. Results differ by rounding at most.

    Raises:
        ValueError: a degree below one or that is no integer, an unknown or missing axis, degrees that do not divide the world.

    Example:
        >>> ParallelPlan(tp=2, ep=2, dp=4).world_size
        8
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    order: str = "tp-cp-ep-dp-pp"
    sequence_parallel: bool = True
    hierarchical_cp: tuple[int, ...] = ()
    optimizer_instances: int = 1
    tp_comm_overlap: bool | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("tp", "pp", "vpp", "cp", "ep", "dp", "optimizer_instances"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.etp is not None and self.etp < 1:
            raise ValueError(f"etp={self.etp} must be at least 1, or None for 1")
        axes = self.order.split("-")
        if len(set(axes)) != len(axes) or (unknown := set(axes) - set(AXES)):
            unknown = set(axes) - set(AXES)
            raise ValueError(f"order={self.order!r} must name each of {'-'.join(AXES)} at most once, found {sorted(unknown) or 'a repeat'}")
        for axis in AXES:
            if axis not in axes and getattr(self, axis) > 1:
                raise ValueError(f"order={self.order!r} leaves out {axis}={getattr(self, axis)}; add {axis} to order")
        inside = self.tp * self.cp * self.dp
        if inside % (self.expert_tp * self.ep):
            raise ValueError(
                f"etp*ep={self.expert_tp}*{self.ep} must divide tp*cp*dp={self.tp}*{self.cp}*{self.dp}={inside}; lower ep or raise dp"
            )
        if self.pp > 1 and axes[-1] != "pp" and self.dp != self.edp:
            raise ValueError(f"order={self.order!r} does not end in pp, which needs dp={self.dp} equal to edp={self.edp}; put pp last")

        if self.hierarchical_cp and (min(self.hierarchical_cp) < 1 or math.prod(self.hierarchical_cp) != self.cp):
            raise ValueError(f"hierarchical_cp={self.hierarchical_cp} must hold sizes that multiply to cp={self.cp}")
        for name, replicas in (("dp*cp", self.dp * self.cp), ("edp", self.edp)):
            if replicas % self.optimizer_instances:
                raise ValueError(f"optimizer_instances={self.optimizer_instances} must divide {name}={replicas}; choose a divisor of both")

    @classmethod
    def for_world(cls, world_size: int, **degrees: object) -> "ParallelPlan":
        """The plan in which dp takes all ranks the other degrees leave.

        Raises:
            ValueError: tp*cp*pp does not divide ``world_size``.
        """
        tp, cp, pp = (int(degrees.get(axis, 1)) for axis in ("tp", "cp", "pp"))  # type: ignore[call-overload]
        if world_size % (tp * cp * pp):
            raise ValueError(
                f"tp*cp*pp={tp}*{cp}*{pp}={tp * cp * pp} must divide world_size={world_size}; lower a degree or start more ranks"
            )
        return cls(dp=world_size // (tp * cp * pp), **degrees)  # type: ignore[arg-type]

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree inside an expert."""
        return self.etp or 1

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def world_size(self) -> int:
        return math.prod((self.tp, self.cp, self.dp, self.pp))

    def dense_shape(self) -> dict[str, int]:
        """Axis -> degree of the dense view in rank order (first varies fastest)."""
        return self._shape({"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})

    def expert_shape(self) -> dict[str, int]:
        """Axis -> degree of the expert view in rank order; ``tp`` and ``dp`` there are etp and edp."""
        return self._shape({"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp})

    def _shape(self, degrees: dict[str, int]) -> dict[str, int]:
        axes = self.order.split("-")
        axes += [axis for axis in AXES if axis not in axes]
        return {axis: degrees[axis] for axis in axes}
