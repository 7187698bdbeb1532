# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The embedding and the output of the model that drafts are made for."""

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel.comm import all_gather
from mcore_parallel.groups import Group
from mcore_parallel.models.eagle import DraftVocabulary
from mcore_parallel.nn import soft_cap

_CHUNK = 1 << 26
"""Logits of this rank that exist at a time."""


# T tokens, D model, V vocabulary of the target, v of the head.
class TargetEnds:
    """What training a head needs of its target beside features: frozen embedding and output weights, on every rank its tp shard.

    Any decoder of this wheel has them; one without layers is enough (``GPTModel(config, groups, layers=range(0))``, filled from the
    target's checkpoint). The whole output weight exists for a moment when a vocabulary is picked out of it.

    Args:
        model: the target, or its ends, in one pipeline stage; it stops needing gradients.
        vocabulary: of the head; None for all tokens.

    Raises:
        ValueError: a stage without embedding or output.
    """

    def __init__(self, model: nn.Module, vocabulary: DraftVocabulary | None = None) -> None:
        owner: Any = model.requires_grad_(False).eval()
        self.groups, self._multiplier, self._softcap = owner.groups, owner.config.embedding_multiplier, owner.config.final_logit_softcapping
        if owner.embedding is None or owner.output is None:
            raise ValueError(f"pp={self.groups.pp.size} puts embedding and output of the target on different stages; set pp=1")
        self._embedding, self.vocabulary = owner.embedding, vocabulary
        tied = owner.output.weight is None
        self._output: Tensor = (owner.embedding if tied else owner.output).weight.detach()
        self.vocab_size, self.unpadded_vocab_size = owner.output.vocab_size, owner.output.unpadded_vocab_size
        self.draft_output = self._pick()
        """[v / tp, D]: rows of the head's tokens."""
        self.draft_unpadded = self.unpadded_vocab_size if vocabulary is None else len(vocabulary)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [T] -> [T or T / tp, D], without learned positions and without gradient."""
        with torch.no_grad():
            x = self._embedding(tokens)
        return x if self._multiplier == 1.0 else x * self._multiplier

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[T, v / tp] of states [T, D] behind the final norm, those of the head's tokens, capped as the target caps them."""
        logits = F.linear(hidden, self.draft_output)
        return logits if self._softcap is None else soft_cap(logits, self._softcap)

    @torch.no_grad()
    def best(self, hidden: Tensor) -> Tensor:
        """Likeliest token of each state [T, D] behind the final norm: ids [T] in the target."""
        rows = max(1, _CHUNK // len(self._output))
        parts = [
            vocab_parallel_argmax(F.linear(part, self._output), self.groups.tp, vocab_size=self.unpadded_vocab_size)
            for part in hidden.split(rows)
        ]
        return torch.cat(parts)

    def digest(self) -> str:
        """SHA-256 of embedding and output weights, the same in every layout; every rank calls it."""
        digest = hashlib.sha256()
        for weight in (self._embedding.weight.detach(), self._output):
            digest.update(f"{weight.dtype} {self.vocab_size} {weight.shape[1]}".encode())
            whole = all_gather(weight, self.groups.tp) if self.groups.tp.size > 1 else weight
            digest.update(whole.contiguous().cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _pick(self) -> Tensor:
        if self.vocabulary is None:
            return self._output
        size, tp = len(self.vocabulary), self.groups.tp
        if self.vocabulary.vocab_size != self.vocab_size:
            raise ValueError(f"a draft vocabulary of {self.vocabulary.vocab_size} tokens does not fit the target's {self.vocab_size}")
        if size % tp.size:
            raise ValueError(f"tp={tp.size} must divide draft_vocab_size={size}; lower tp or choose another size")
        mine = self.vocabulary.token_ids.chunk(tp.size)[tp.rank].to(self._output.device)
        whole = all_gather(self._output, tp) if tp.size > 1 else self._output
        return whole[mine]


@torch.no_grad()
def vocab_parallel_argmax(logits: Tensor, group: Group, *, vocab_size: int) -> Tensor:
    """Number of the largest logit of each token, the lowest of equal ones, on every rank.

    Args:
        logits: [T, V / group.size] of this rank.
        group: ranks that share the vocabulary.
        vocab_size: columns that take part; those after it are padding.

    Returns:
        [T] int64.
    """
    first = group.rank * logits.shape[-1]
    columns = max(0, min(logits.shape[-1], vocab_size - first))
    if not columns:
        value, place = logits.new_full(logits.shape[:1], float("-inf")), logits.new_zeros(logits.shape[:1], dtype=torch.int64)
    else:
        value, place = logits[:, :columns].max(-1)
    if group.size == 1:
        return place
    values, places = all_gather(value[None], group), all_gather(place[None] + first, group)
    return places.gather(0, values.argmax(0, keepdim=True))[0]
