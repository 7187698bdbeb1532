# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a student minimises."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.comm import all_reduce, reduce_from_tensor_model_parallel_region
from mcore_parallel.models import ModelOutput
from mcore_parallel.tensor_parallel import vocab_parallel_cross_entropy
from mcore_parallel.training._batch import Batch
from mcore_parallel.training._objective import LossReport
from mcore_parallel.training.distill._balance import LossBalancer, LossParts, RatioBalancer
from mcore_parallel.training.distill._capture import HiddenCapture
from mcore_parallel.training.distill._divergence import vocab_parallel_kl_divergence, vocab_parallel_sparse_kl_divergence
from mcore_parallel.training.distill._hidden import HIDDEN_LOSSES, HiddenPair, HiddenProjection
from mcore_parallel.training.distill._store import LOG_PROBS, TOKEN_IDS
from mcore_parallel.training.distill._teacher import TEACHER_HIDDEN, Teacher

TARGETS = ("base", "mtp", "both")


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Which losses there are.

    Raises:
        ValueError: a number out of range, unknown targets.
    """

    targets: str = "base"
    """What of the student learns the teacher's distributions: "base" (its output), "mtp" (its heads that predict further tokens), or
    "both". A head that predicts the token k places further learns what the teacher says when it has read that far. In an evaluation, where
    the heads do not run, it is always the output."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean divergence over the heads; the output has 1."""

    temperature: float = 1.0
    """Of both distributions."""
    reverse: bool = False
    """KL(student || teacher) instead of KL(teacher || student)."""
    temperature_squared: bool = False
    """Multiply the divergence by the temperature's square, so that its gradient does not shrink with it."""
    pairs: tuple[HiddenPair, ...] = ()
    """Hidden states to be brought together; all modules lie in the chunks with the outputs."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0")
        if self.targets not in TARGETS:
            raise ValueError(f"targets={self.targets!r} must be one of {', '.join(TARGETS)}")
        if not self.mtp_loss_scaling_factor >= 0:
            raise ValueError(f"mtp_loss_scaling_factor={self.mtp_loss_scaling_factor} must be at least 0")

    @property
    def student_modules(self) -> tuple[str, ...]:
        """What a ``HiddenCapture`` of the student keeps."""
        return tuple(dict.fromkeys(pair.student for pair in self.pairs))

    @property
    def teacher_modules(self) -> tuple[str, ...]:
        """What a ``Teacher`` captures."""
        return tuple(dict.fromkeys(pair.teacher for pair in self.pairs))


@dataclass(frozen=True, kw_only=True)
class DistillationObjective:
    """Divergence from a teacher, differences of hidden states, and the cross entropy of the labels, weighed by a balancer.

    Batches come from ``Teacher.label``, or from ``LogProbStore.label`` with likeliest tokens that were written down before; then there
    is no teacher here. All losses are sums weighted by the loss mask; ``lm_loss``, ``logits_distillation_loss`` and
    ``intermediate_distillation_loss`` (a mean over the pairs) are reported apart, and ``mtp_K_distillation_loss`` of heads that learn (a
    mean over their own labels). All tp ranks return the same.

    Raises:
        ValueError: pairs without teacher or capture.
    """

    config: DistillationConfig = field(default_factory=DistillationConfig)
    teacher: Teacher | None = None
    """None for batches that carry log-probabilities."""
    capture: HiddenCapture | None = None
    """Of the student's ``config.student_modules``, open while it runs; not needed without pairs."""
    projection: HiddenProjection | None = None
    """For models of different widths: a module of the student, so that it is trained with it."""
    balancer: LossBalancer = field(default_factory=RatioBalancer)

    def __post_init__(self) -> None:
        if self.config.pairs and (self.teacher is None or self.capture is None):
            raise ValueError(
                f"pairs={len(self.config.pairs)} of hidden states need a teacher that runs and a HiddenCapture of the student; "
                "pass teacher= and capture=, or set pairs=()"
            )

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        """See the class.

        Raises:
            ValueError: a batch without the teacher's part, another vocabulary or layout, targets among heads that there are not, or
                with cp.
        """
        mask, layer = batch.loss_mask.flatten(), output.layer
        logits, theirs = output.logits(), self._theirs(output, batch)
        divergence, metrics, counts = self._further(output, batch, theirs)
        if self.config.targets != "mtp" or not output.depths:
            divergence = divergence + (self._divergence(logits, theirs, output) * mask).sum()
        if self.config.temperature_squared:
            divergence = divergence * self.config.temperature**2
        labels, trained = batch.labels.flatten(), self.balancer.trains_language
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            entropy = vocab_parallel_cross_entropy(logits, labels, group=layer.groups.tp, vocab_size=layer.unpadded_vocab_size)
        parts = LossParts(language=(entropy * mask).sum(), logits=divergence, intermediate=self._intermediate(output, batch, mask))
        weights = self.balancer.weights(_totals(parts, output))
        total = weights.logits * parts.logits
        if trained:
            total = total + weights.language * parts.language
        metrics |= {"lm_loss": parts.language.detach(), "logits_distillation_loss": parts.logits.detach()}
        if parts.intermediate is not None and weights.intermediate is not None:
            total = total + weights.intermediate * parts.intermediate
            metrics["intermediate_distillation_loss"] = parts.intermediate.detach()
        return LossReport(sum=total, count=batch.weight(), metrics=metrics, counts=counts)

    def _further(self, output: ModelOutput, batch: Batch, theirs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Weighted divergence of the heads that predict further tokens, and what is reported of each."""
        total, metrics, counts = batch.loss_mask.new_zeros(()), {}, {}
        if self.config.targets == "base":
            return total, metrics, counts
        if not output.depths and torch.is_grad_enabled():
            raise ValueError(f"targets={self.config.targets!r} needs heads that predict further tokens; set the student's mtp_num_layers")
        cp = output.layer.groups.cp
        if cp.size > 1:
            raise ValueError(f"targets={self.config.targets!r} reads the teacher further on, which cp={cp.size} keeps elsewhere; set cp=1")
        numbers = torch.arange(1, batch.tokens.numel() + 1, device=batch.tokens.device).view(batch.tokens.shape)
        for number, depth in enumerate(output.depths, 1):
            ahead = replace(batch, labels=numbers).ahead(number, cp)
            rows = (ahead.labels.flatten() - 1).clamp(min=0)
            losses = self._divergence(depth.logits(), [x[rows] for x in theirs], output) * ahead.loss_mask.flatten()
            total = total + self.config.mtp_loss_scaling_factor / len(output.depths) * losses.sum()
            name = f"mtp_{number}_distillation_loss"
            metrics[name], counts[name] = losses.detach().sum(), ahead.weight()
        return total, metrics, counts

    def _divergence(self, logits: Tensor, theirs: Sequence[Tensor], output: ModelOutput) -> Tensor:
        """Of every token, from what ``_theirs`` found."""
        config, layer = self.config, output.layer
        options: dict[str, Any] = {"group": layer.groups.tp, "temperature": config.temperature, "vocab_size": layer.unpadded_vocab_size}
        if self.teacher is None:
            return vocab_parallel_sparse_kl_divergence(logits, *theirs, **options)
        return vocab_parallel_kl_divergence(logits, *theirs, reverse=config.reverse, **options)

    def _theirs(self, output: ModelOutput, batch: Batch) -> Sequence[Tensor]:
        """What the teacher says of every token: its logits, or its likeliest tokens and their log-probabilities."""
        config, layer = self.config, output.layer
        if self.teacher is None:
            if LOG_PROBS not in batch.extras:
                raise ValueError(f"the batch has no extra {LOG_PROBS!r}; pass a teacher, or batches through LogProbStore.label")
            if config.reverse:
                raise ValueError("reverse=True needs the teacher's probability of every token, which a store lacks; pass a teacher")
            return [batch.extras[name].flatten(0, 1) for name in (LOG_PROBS, TOKEN_IDS)]
        outputs = self.teacher.output(batch)
        sizes = (outputs.layer.unpadded_vocab_size, outputs.layer.vocab_size, outputs.layer.groups.tp.size)
        mine = (layer.unpadded_vocab_size, layer.vocab_size, layer.groups.tp.size)
        if sizes != mine:
            raise ValueError(
                f"teacher and student differ in (vocabulary, padded vocabulary, tp): {sizes} and {mine}; "
                "give both one tokenizer, one padding and one tp, or write the teacher's log-probabilities down first (record)"
            )
        with torch.no_grad():
            return [outputs.logits()]

    def _intermediate(self, output: ModelOutput, batch: Batch, mask: Tensor) -> Tensor | None:
        pairs = self.config.pairs
        if not pairs or self.capture is None:
            return None
        mine, groups = self.capture.take(), output.layer.groups
        if groups.sequence_parallel:
            mask = mask.chunk(groups.tp.size)[groups.tp.rank]
        total = sum((self._pair(pair, mine[pair.student], output, batch, mask) for pair in pairs), start=mask.new_zeros(()))
        total = total / len(pairs)
        return reduce_from_tensor_model_parallel_region(total, groups.tp) if groups.sequence_parallel else total

    def _pair(self, pair: HiddenPair, hidden: Tensor, output: ModelOutput, batch: Batch, mask: Tensor) -> Tensor:
        if torch.is_grad_enabled() and output.hidden.requires_grad and not hidden.requires_grad:
            raise ValueError(f"the output of the student's {pair.student!r} has no gradient: it is frozen; leave the pair out")
        theirs = batch.extras.get(f"{TEACHER_HIDDEN}.{pair.teacher}")
        if theirs is None:
            raise ValueError(f"the teacher did not capture {pair.teacher!r}; make it with Teacher(model, capture=config.teacher_modules)")
        hidden = hidden if self.projection is None else self.projection(hidden)
        return (HIDDEN_LOSSES[pair.loss](hidden, theirs) * mask).sum()


def _totals(parts: LossParts, output: ModelOutput) -> LossParts:
    """Sums over the ranks that share sequences, without a gradient: so they weigh the same in every layout."""
    terms: Sequence[Tensor | None] = (parts.language, parts.logits, parts.intermediate)
    present = [value.detach().to(parts.logits.dtype) for value in terms if value is not None]
    language, logits, *rest = all_reduce(torch.stack(present), output.layer.groups.cp).unbind(0)
    return replace(parts, language=language, logits=logits, intermediate=rest[0] if rest else None)
