# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Log-probabilities of the policy before an update, and of a frozen reference."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.training import Batch, score
from mcore_rl._stability import experimental_api
from mcore_rl._trajectories import routed_afresh


@experimental_api
class FrozenWeights:
    """Parameters of a model as they are now, kept on the host; the reference of a policy that goes on learning.

    The policy is never copied: in ``swapped`` its parameters point at the frozen values, and then at their own again. On a GPU these are
    there only meanwhile. Graphs that were captured hold the addresses of the policy; they must not be replayed inside.

    Args:
        model: of plain parameters; those of fully sharded data parallelism move, and need a second model.

    Raises:
        ValueError: a parameter that is divided among data-parallel ranks.

    Example:
        >>> reference = FrozenWeights(model)
        >>> with reference.swapped():
        ...     logits = model(tokens, step)
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        for name, parameter in model.named_parameters():
            if type(parameter) is not nn.Parameter or not parameter.numel():
                raise ValueError(f"parameter {name!r} is a {type(parameter).__name__} of size {parameter.numel()}; pass a second model")
        self._values = [self._kept(parameter) for parameter in model.parameters()]

    @staticmethod
    def _kept(parameter: Tensor) -> Tensor:
        value = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
        return value.copy_(parameter.detach())

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """The model with the frozen values; its own come back however the block ends."""
        parameters = list(self.model.parameters())
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, value in zip(parameters, self._values, strict=True):
                parameter.data = value.to(parameter.device, non_blocking=True)
            yield self.model
        finally:
            for parameter, value in zip(parameters, own, strict=True):
                parameter.data = value


def token_logprobs(
    model: nn.Module | FrozenWeights, batches: Sequence[Batch], groups: ProcessGroups, *, temperature: float = 1.0
) -> list[Tensor]:
    """Log-probabilities [B, S] of the labels of each micro-batch, from a forward pass alone; the same on all ranks of a replica.

    Args:
        model: in evaluation mode meanwhile.
        batches: all ranks of a replica the same, whole ones.
        groups: the layout.
        temperature: logits are divided by it, as the policy's are.
    """
    with model.swapped() if isinstance(model, FrozenWeights) else contextlib.nullcontext(model) as scored:
        return score(scored, batches, lambda output, batch: output.log_probs(batch.labels.flatten(), temperature), groups=groups)


@experimental_api
def with_ref_logprobs(
    reference: nn.Module | FrozenWeights, batches: Sequence[Batch], groups: ProcessGroups, *, temperature: float = 1.0
) -> list[Batch]:
    """The batches with ``ref_logprobs`` [B, S] of their labels in ``extras``; arguments as of ``token_logprobs``.

    The reference routes its tokens itself, whatever routing of the policy the batches hold.
    """
    return _with(batches, "ref_logprobs", token_logprobs(reference, routed_afresh(batches), groups, temperature=temperature))


@experimental_api
def with_old_logprobs(policy: nn.Module, batches: Sequence[Batch], groups: ProcessGroups, *, temperature: float = 1.0) -> list[Batch]:
    """The batches with ``old_logprobs`` [B, S], those of the policy before it is updated; arguments as of ``with_ref_logprobs``."""
    return _with(batches, "old_logprobs", token_logprobs(policy, batches, groups, temperature=temperature))


def _with(batches: Sequence[Batch], name: str, values: Sequence[Tensor]) -> list[Batch]:
    return [dataclasses.replace(batch, extras={**batch.extras, name: value}) for batch, value in zip(batches, values, strict=True)]
