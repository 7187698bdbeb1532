# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Log-probabilities of the policy before an update, and of a frozen reference."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups, named_buffer_shards
from mcore_parallel.data_parallel import finish_param_gathers
from mcore_parallel.training import Batch, score, score_and_route
from mcore_rl._packing._trajectories import routed_afresh
from mcore_rl._stability import experimental_api


@runtime_checkable
class _Sharded(Protocol):
    """A model whose weights are divided among its replicas, and gathered when a forward needs them."""

    def parameter_shards(self) -> Mapping[str, Sequence[Any]]:
        """This rank's boxes of each weight, each with its live ``tensor``."""
        ...

    def start_param_sync(self) -> None:
        """The next forward gathers the boxes anew."""
        ...


@experimental_api
class FrozenWeights:
    """A model's parameters, and its untrained state (the expert bias of routers), as they are now, kept on the host.

    They are the reference of a policy that goes on learning, until ``refresh``.

    In ``swapped`` the model's parameters hold the frozen values, and then their own again, which a copy beside them keeps meanwhile. They
    stay where they are, so that CUDA graphs that read them by their addresses give what the reference gives.

    Of a model that fully sharded data parallelism divides, each rank keeps its boxes of the weights. In ``swapped``, on all ranks
    together, they hold the frozen values, and what is gathered for a forward is of these.

    Args:
        model: of plain parameters, or one with ``parameter_shards`` and ``start_param_sync``, between two steps.

    Raises:
        ValueError: a parameter of another kind.

    Example:
        >>> reference = FrozenWeights(model)
        >>> with reference.swapped():
        ...     logits = model(tokens, step)
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        if not isinstance(model, _Sharded):
            for name, parameter in model.named_parameters():
                if type(parameter) is not nn.Parameter or not parameter.numel():
                    raise ValueError(f"parameter {name!r} is a {type(parameter).__name__} of size {parameter.numel()}; pass a second model")
        self._values = [self._kept(tensor) for tensor in _tensors(model)]

    @staticmethod
    def _kept(tensor: Tensor) -> Tensor:
        value = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return value.copy_(tensor.detach())

    @torch.no_grad()
    def refresh(self, mixup_alpha: float = 1.0) -> None:
        """Go on to (1 - mixup_alpha) times these values and mixup_alpha times the model's as they are now; on all ranks, between two steps.

        With 1 the reference is the policy from now on. The mixture is computed in float32, and wider where the model is.

        Raises:
            ValueError: a share that does not lie above 0 and up to 1.
        """
        if not 0 < mixup_alpha <= 1:
            raise ValueError(f"mixup_alpha={mixup_alpha} must lie above 0 and up to 1; 1 takes the model's weights over")
        for value, tensor in zip(self._values, _tensors(self.model), strict=True):
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            value.copy_(torch.lerp(value.to(tensor.device, wide), tensor.to(wide), mixup_alpha))

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """The model with the frozen values; its own come back however the block ends."""
        tensors = _tensors(self.model)
        own = [tensor.detach().clone() for tensor in tensors]
        try:
            _fill(self.model, tensors, self._values)
            yield self.model
        finally:
            _fill(self.model, tensors, own)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and persistent buffers, complete; of a sharded model this rank's boxes of them."""
    if isinstance(model, _Sharded):
        return [box.tensor.detach() for boxes in model.parameter_shards().values() for box in boxes]
    # A gather that ends later would write over what is filled in, and what is read before it is of the last step.
    finish_param_gathers(model)
    return [*model.parameters(), *(buffer.tensor for buffer in named_buffer_shards(model))]


@torch.no_grad()
def _fill(model: nn.Module, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """In place, where optimizer, collectives and recordings find them; it raises the versions by which layers that keep copies of a weight,
    as in fp8, see that they are old."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value, non_blocking=True)
    if isinstance(model, _Sharded):
        model.start_param_sync()


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


def logprobs_and_routing(
    policy: nn.Module, batches: Sequence[Batch], groups: ProcessGroups, *, temperature: float = 1.0
) -> tuple[list[Tensor], list[Tensor | None]]:
    """``token_logprobs``, and the ``routed_experts`` of the pass that computed them, as of ``score_and_route``."""
    return score_and_route(policy, batches, lambda output, batch: output.log_probs(batch.labels.flatten(), temperature), groups=groups)


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
