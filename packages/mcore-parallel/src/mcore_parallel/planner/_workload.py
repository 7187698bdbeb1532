# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What is trained, and in which layout."""

from dataclasses import dataclass, field

import torch

from mcore_parallel.data_parallel import DistributedDataParallelConfig
from mcore_parallel.groups import ParallelPlan
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.planner._errors import PlannerError
from mcore_parallel.planner._model import ModelSizes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training that a layout has to carry.

    Raises:
        PlannerError: a size below one, a batch that does not divide, another dtype, experts with ``latent_size``.
    """

    model: ModelSizes
    sequence: int
    """Tokens of a sequence, before context parallelism cuts it."""
    global_batch: int
    """Sequences of one optimizer step."""
    micro_batch: int = 1
    """Sequences that a replica works on at once."""
    dtype: torch.dtype = torch.bfloat16
    """Of parameters and activations."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4))
    """Says in which dtypes states are stored; whether they are sliced is the layout's."""

    def __post_init__(self) -> None:
        for name in ("sequence", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise PlannerError(f"{name}={getattr(self, name)} must be at least 1")
        if self.global_batch % self.micro_batch:
            raise PlannerError(f"micro_batch={self.micro_batch} must divide global_batch={self.global_batch}; choose a divisor")
        if self.model.experts is not None and self.model.experts.latent_size:
            latent = self.model.experts.latent_size
            raise PlannerError(f"latent_size={latent} of the experts: time and memory are not estimated; set it to 0")
        if self.dtype not in _DTYPES:
            raise PlannerError(f"dtype={self.dtype} must be one of {', '.join(map(str, _DTYPES))}")

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.sequence * self.global_batch


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, and what decides memory beside them."""

    plan: ParallelPlan
    recompute: RecomputeConfig | None = None
    sync: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    zero_dp_strategy: str | None = None
    """Sharded by ``megatron_fsdp`` with this strategy; None: by ``DistributedDataParallel``, as ``sync`` says."""

    def __post_init__(self) -> None:
        if self.zero_dp_strategy not in (None, *_STRATEGIES):
            raise PlannerError(f"zero_dp_strategy={self.zero_dp_strategy!r} must be None or one of {', '.join(_STRATEGIES)}")

    @property
    def divides_params(self) -> bool:
        """Whether whole parameters exist only while their unit computes."""
        return self.zero_dp_strategy == "optim_grads_params"

    @property
    def divides_grads(self) -> bool:
        """Whether gradients are summed over replicas, and whole ones given back, in every backward."""
        return self.zero_dp_strategy in ("optim_grads", "optim_grads_params")

    @property
    def fuses_weight_gradients(self) -> bool:
        """Whether layers write weight gradients where they are summed; schedules of a pipeline may compute them when nothing is lent."""
        return self.sync.gradient_accumulation_fusion if self.zero_dp_strategy is None else self.plan.pp == 1

    def num_microbatches(self, workload: Workload) -> int:
        """Micro-batches of a replica in one step.

        Raises:
            PlannerError: the replicas do not divide the global batch.
        """
        share = self.plan.dp * workload.micro_batch
        if workload.global_batch % share:
            raise PlannerError(
                f"dp*micro_batch={self.plan.dp}*{workload.micro_batch} must divide global_batch={workload.global_batch}; "
                "change global_batch or the number of GPUs"
            )
        return workload.global_batch // share

    @property
    def sequence_parallel(self) -> bool:
        return self.plan.sequence_parallel and self.plan.tp > 1
