# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a draft head minimises."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.comm import all_gather
from mcore_parallel.models.eagle import EagleDraft
from mcore_parallel.training._batch import Batch
from mcore_parallel.training._objective import LossReport
from mcore_parallel.training.distill import TEACHER_HIDDEN, vocab_parallel_kl_divergence
from mcore_parallel.training.eagle._ends import TargetEnds, vocab_parallel_argmax


# T tokens, D model, v tokens of the head.
@dataclass(frozen=True, kw_only=True)
class EagleObjective:
    """Divergence of the target's distributions from those of a head that goes on from every token for a few steps (the training-time test
    of EAGLE-3, Li et al., 2025, arXiv:2503.01840).

    Batches come from ``Teacher.label`` (a target that runs, made with ``capture=head.architecture.aux_modules``) or from a
    ``FeatureStore``; the loss is the same. In step k (from 1) the row of token t is compared with the target at token t + k, over the
    tokens that both have; rows where the target's favourite is none of the head's do not count, nor those whose label is masked there.
    The sum weighs step k by ``decay ** (k - 1)``, and is divided by the rows of the first step.

    Reported beside: ``draft_K_loss``; ``draft_K_accuracy``, the share of rows where both have the same favourite; and
    ``accepted_tokens``, how many drafts in a row agree, from the first on. A row that goes on reads the text, not its own drafts: where
    the text is what the target itself would have said, ``accepted_tokens + 1`` is the acceptance length of greedy decoding, on
    other text it is an estimate.

    Raises:
        ValueError: numbers out of range.
    """

    target: TargetEnds
    num_steps: int = 7
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} must be at least 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must lie above 0 and not above 1")

    def __call__(self, output: EagleDraft, batch: Batch) -> LossReport:
        """See the class.

        Raises:
            ValueError: a batch without features, a head of another vocabulary or layout than the target's ends.
        """
        target, head, groups = self.target, output.head, output.head.groups
        sizes = head.output_layer.vocab_size // groups.tp.size, len(target.draft_output)
        if sizes[0] != sizes[1] or head.vocabulary is not target.vocabulary:
            raise ValueError(f"the head has {sizes[0]} tokens on this rank, the target's ends {sizes[1]}; give both one vocabulary")
        states, hidden = self._features(output, batch)
        logits_Tv = target.logits(hidden)
        best_T = target.best(hidden)
        known_T = torch.ones_like(best_T, dtype=torch.bool) if head.vocabulary is None else head.vocabulary.t2d.to(best_T.device)[best_T]
        count = every = None
        accepted = streak = best_T.new_ones(())
        total, metrics, counts = hidden.new_zeros(()), {}, {}
        numbers = torch.arange(1, len(best_T) + 1, device=best_T.device)
        for step, drafted in enumerate(output.unroll(states, target.embed, self.num_steps), 1):
            place = output.ahead(numbers, step)
            weight = output.ahead(batch.loss_mask.flatten(), step) * (place > 0)
            rows = (place - 1).clamp(min=0)
            student = drafted.logits()
            divergence = vocab_parallel_kl_divergence(student, logits_Tv[rows], group=groups.tp, vocab_size=target.draft_unpadded)
            loss = (divergence * (counted := weight * known_T[rows])).sum()
            total = total + self.decay ** (step - 1) * loss
            favourite = vocab_parallel_argmax(student.detach(), groups.tp, vocab_size=target.draft_unpadded)
            agrees = head.target_ids(favourite) == best_T[rows]
            metrics |= {f"draft_{step}_loss": loss.detach(), f"draft_{step}_accuracy": (agrees * weight).sum()}
            counts |= {f"draft_{step}_loss": _sum(counted), f"draft_{step}_accuracy": _sum(weight)}
            count = _sum(weight) if count is None else count
            every = weight > 0 if every is None else every & (weight > 0)
            streak = agrees * streak
            accepted = streak if step == 1 else accepted + streak
        assert count is not None and every is not None
        metrics["accepted_tokens"], counts["accepted_tokens"] = (accepted * every).sum().to(total.dtype), _sum(every)
        return LossReport(sum=total, count=count, metrics=metrics, counts=counts)

    def _features(self, output: EagleDraft, batch: Batch) -> tuple[Sequence[Tensor], Tensor]:
        """States of the modules that the head reads, and the last ones of all T tokens."""
        names = [f"{TEACHER_HIDDEN}.{name}" for name in output.head.architecture.aux_modules]
        if missing := [name for name in (TEACHER_HIDDEN, *names) if name not in batch.extras]:
            raise ValueError(
                f"the batch has no extra {missing[0]!r}; take batches from a FeatureStore, or through Teacher.label of a teacher "
                "with capture=head.architecture.aux_modules"
            )
        hidden, groups = batch.extras[TEACHER_HIDDEN], output.head.groups
        return [batch.extras[name] for name in names], all_gather(hidden, groups.tp) if groups.sequence_parallel else hidden


def _sum(weights: Tensor) -> Tensor:
    return weights.sum(dtype=torch.float64)
