# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the policy's distribution is over the tokens that its engine draws."""

from typing import Protocol, runtime_checkable

from torch import nn

from mcore_parallel.models import OutputLayer


@runtime_checkable
class _Draws(Protocol):
    """An engine that says how many ids it draws from; those beyond are padding."""

    vocab_size: int


def num_drawn(engine: object) -> int | None:
    """Ids that an engine draws from; None for one that says nothing of it."""
    return engine.vocab_size if isinstance(engine, _Draws) else None


def num_trained(model: nn.Module) -> int | None:
    """Ids that the log-probabilities of a model are over; None on a pipeline stage without an output layer."""
    return next((module.unpadded_vocab_size for module in model.modules() if isinstance(module, OutputLayer)), None)


def check_vocabulary(drawn: int | None, trained: int | None) -> None:
    """Raises:
    ValueError: the numbers of ids are known, and differ.
    """
    if drawn is not None and trained is not None and drawn != trained:
        raise ValueError(
            f"the engine draws from vocab_size={drawn} ids, and log-probabilities of the policy are over unpadded_vocab_size={trained}, "
            f"which is another distribution; build the policy with unpadded_vocab_size={drawn}, or the engine with vocab_size={trained}"
        )
