# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Proposals by small models that go on from the hidden states of the served one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor, nn

from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api
from mcore_parallel.comm import all_gather
from mcore_parallel.models import GPTModel
from mcore_parallel.models.eagle import EagleHead
from mcore_parallel.nn import LatentSelfAttention, SelfAttention, Step

__all__ = ["DraftHeads", "EagleHeads", "EagleSpeculation", "MtpHeads", "MtpSpeculation"]

_MIXERS = (SelfAttention, LatentSelfAttention)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class MtpSpeculation:
    """Verify several tokens a step, proposed by the model's own heads for further tokens (``TransformerConfig.mtp_num_layers``).

    Head k proposes the k-th token; tokens beyond the heads come from the last one, which goes on from its own states. Tokens are
    those of the engine without speculation as far as ``NgramSpeculation`` says.

    Raises:
        ValueError: a field is out of its range.
    """

    num_tokens: int | None = None
    """Tokens proposed for each request and step, at most; None for as many as there are heads."""

    def __post_init__(self) -> None:
        if self.num_tokens is not None:
            as_integer("num_tokens", self.num_tokens, 1, 64)


@experimental_api
@dataclass(frozen=True, kw_only=True, eq=False)
class EagleSpeculation:
    """Verify several tokens a step, proposed by a draft head of the EAGLE-3 kind. Tokens are as of ``NgramSpeculation``.

    Raises:
        ValueError: a field is out of its range, or the head is none.
    """

    head: EagleHead
    """Built with ``attention_core=PagedAttention()``, for the served model, in its layout and dtype and on its device."""
    num_tokens: int = 4
    """Tokens proposed for each request and step, at most."""

    def __post_init__(self) -> None:
        as_integer("num_tokens", self.num_tokens, 1, 64)
        if not isinstance(self.head, EagleHead):
            raise ValueError(f"head is a {type(self.head).__name__}; give an EagleHead(..., attention_core=PagedAttention())")


# T tokens, D model, R rows, V vocabulary.
@experimental_api
class DraftHeads(Protocol):
    """Heads of one model; head k (from 0) reads a state beside the token k + 1 places behind, and predicts the one after that."""

    modules: tuple[str, ...]
    """Of the served model, whose outputs ``begin`` reads."""
    mixers: Sequence[SelfAttention | LatentSelfAttention]
    """Attention of all heads."""
    num_heads: int

    def begin(self, states: Sequence[Tensor]) -> Tensor:
        """Outputs [T, D] of ``modules`` -> states [T, D] that head 0 reads."""
        ...

    def advance(self, head: int, hidden: Tensor, tokens: Tensor, step: Step) -> Tensor:
        """States [T, D] and tokens [T] -> states [T, D] of the next head, or of the same one a place further."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """States [R, D] of ``advance`` -> scores [R, V], the same on every tp rank; minus infinity for tokens that are never proposed."""
        ...


@experimental_api
class MtpHeads:
    """The heads of a model that predict further tokens, as ``DraftHeads``.

    Args:
        model: with them.

    Raises:
        ValueError: it has none, or they hold more than attention.
    """

    modules: tuple[str, ...] = ("final_norm",)

    def __init__(self, model: GPTModel) -> None:
        if model.mtp is None:
            raise ValueError(
                f"MtpSpeculation needs heads that predict further tokens, and the model has mtp_num_layers={model.config.mtp_num_layers}; "
                "train it with some, or use NgramSpeculation"
            )
        self._model, self.num_heads = model, len(model.mtp)
        self.mixers: Sequence[SelfAttention | LatentSelfAttention] = _mixers(model.mtp)

    def begin(self, states: Sequence[Tensor]) -> Tensor:
        return states[0]

    def advance(self, head: int, hidden: Tensor, tokens: Tensor, step: Step) -> Tensor:
        return self._model.predict_ahead(head, hidden, tokens, step)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return all_gather(self._model.output_of(hidden).logits(), self._model.groups.tp, dim=1)


@experimental_api
class EagleHeads:
    """A draft head as ``DraftHeads``.

    Args:
        head: of the model.
        model: that it was trained for.

    Raises:
        ValueError: another width, vocabulary, dtype, device or tp than the model's.
    """

    num_heads = 1

    def __init__(self, head: EagleHead, model: GPTModel) -> None:
        weight, own = next(head.parameters()), next(model.parameters())
        pairs = {
            "hidden_size": (head.config.hidden_size, model.config.hidden_size),
            "vocab_size": (head.config.vocab_size, model.config.vocab_size),
            "dtype": (weight.dtype, own.dtype),
            "device": (weight.device, own.device),
            "tp": (head.groups.tp.size, model.groups.tp.size),
        }
        for name, (theirs, wanted) in pairs.items():
            if theirs != wanted:
                raise ValueError(f"the draft head has {name}={theirs} and the model {wanted}; build it for this model")
        self._head, self._model = head, model
        self.modules: tuple[str, ...] = head.architecture.aux_modules
        self.mixers: Sequence[SelfAttention | LatentSelfAttention] = _mixers(head.layers)
        self._token_ids = None if head.vocabulary is None else head.vocabulary.token_ids.to(own.device)

    def begin(self, states: Sequence[Tensor]) -> Tensor:
        return self._head.fuse(states)

    def advance(self, head: int, hidden: Tensor, tokens: Tensor, step: Step) -> Tensor:
        embedded, factor = cast(Any, self._model.embedding)(tokens), self._model.config.embedding_multiplier
        # Without learned positions, as the head was trained.
        return self._head.draft(hidden, embedded if factor == 1.0 else embedded * factor, step)

    def logits(self, hidden: Tensor) -> Tensor:
        scores = all_gather(self._head.output(hidden).logits(), self._head.groups.tp, dim=1)
        if self._token_ids is None:
            return scores
        whole = scores.new_full((len(scores), self._model.config.vocab_size), float("-inf"))
        return whole.index_copy_(1, self._token_ids, scores)


def _mixers(module: nn.Module) -> list[SelfAttention | LatentSelfAttention]:
    """Attention of the layers, in their order.

    Raises:
        ValueError: a layer has another mixer.
    """
    mixers = [part for part in module.modules() if type(part) in _MIXERS]
    others = [part for part in module.modules() if getattr(part, "mixer", None) is not None and type(cast(Any, part).mixer) not in _MIXERS]
    if others or not mixers:
        kinds = ", ".join(sorted({type(cast(Any, part).mixer).__name__ for part in others})) or "none"
        raise ValueError(f"heads that propose tokens need attention, found {kinds}: a state cannot take refused tokens back")
    return cast(Any, mixers)
