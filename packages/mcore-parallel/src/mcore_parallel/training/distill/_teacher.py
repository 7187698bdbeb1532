# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The teacher model."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.comm import TensorSpec
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models import ModelOutput
from mcore_parallel.pipeline import ModelChunks, forward_only, plan_pipeline, run_schedule
from mcore_parallel.training._batch import Batch
from mcore_parallel.training.distill._capture import HiddenCapture

TEACHER_HIDDEN = "teacher_hidden"
"""The entry of ``Batch.extras`` with the teacher's last hidden states; those of a captured module are behind a dot."""


class Teacher:
    """Runs a frozen model over batches and hands its last hidden states to the objective, as extras of the batches.

    The model is built, loaded and placed like any other, with its own configuration, dtype and division into pipeline stages and chunks;
    its ranks are those of the student. Here its parameters stop needing gradients, and it goes into evaluation mode (no dropout, no heads
    that predict further tokens). It is in no gradient buffer, no optimizer and no checkpoint of the student. Auxiliary losses are
    dropped. What a batch carries is [tokens, width]; logits exist one micro-batch at a time, in the objective.

    Args:
        model: this rank's stage; ``ModelChunks`` when it has several chunks. One that is sharded, whose forwards gather it, is given with
            its parameters frozen.
        capture: names of modules whose outputs are handed over too; they lie in the chunk with the output.
        groups: the layout; None for the model's own.

    Raises:
        ValueError: the chunk with the output has no such module.
    """

    def __init__(self, model: nn.Module, *, capture: Sequence[str] = (), groups: ProcessGroups | None = None) -> None:
        self.chunks: list[nn.Module] = list(model) if isinstance(model, ModelChunks | nn.ModuleList) else [model]
        owner: Any = self.chunks[0]
        self.groups: ProcessGroups = owner.groups if groups is None else groups
        self._capture = HiddenCapture(model, capture)
        # Kept as one object, by which plans are found again.
        self._schedule = functools.partial(forward_only, num_chunks=len(self.chunks))
        self._pattern: ModelOutput | None = None
        for chunk in self.chunks:
            chunk.requires_grad_(False)
            chunk.eval()

    @torch.no_grad()
    def label(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with what the teacher makes of them, on the last pipeline stage; cut to this context-parallel rank's share.

        Every rank of the layout calls it with the batches that ``train_step`` or ``evaluate`` gets next.

        Raises:
            ValueError: no batch.
        """
        if not batches:
            raise ValueError("batches holds 0 micro-batches; give every rank at least one")
        shares = [batch.context_share(self.groups.cp) for batch in batches]
        plan = plan_pipeline(self._schedule, self.groups.pp.size, len(shares))
        forwards = [functools.partial(self._forward, shares, chunk) for chunk in range(len(self.chunks))]
        with self._capture:
            run_schedule(plan, forwards, self.groups.pp, hidden=self._hidden_spec(shares))
        return shares

    def output(self, batch: Batch) -> ModelOutput:
        """What the model returned for a labelled batch, on the last pipeline stage.

        Raises:
            ValueError: the batch was not labelled.
        """
        if self._pattern is None or TEACHER_HIDDEN not in batch.extras:
            raise ValueError(f"the batch has no extra {TEACHER_HIDDEN!r}; pass batches through Teacher.label before train_step or evaluate")
        return dataclasses.replace(self._pattern, hidden=batch.extras[TEACHER_HIDDEN])

    def _forward(self, batches: list[Batch], chunk: int, microbatch: int, hidden: Tensor | None) -> tuple[Tensor, None]:
        batch = batches[microbatch]
        output, _ = self.chunks[chunk](batch.tokens.flatten() if hidden is None else hidden, batch.step())
        if not (self.groups.pp.is_last and chunk == len(self.chunks) - 1):
            return output, None
        extras = {**batch.extras, TEACHER_HIDDEN: output.hidden}
        extras |= {f"{TEACHER_HIDDEN}.{name}": value for name, value in self._capture.take().items()}
        batches[microbatch] = dataclasses.replace(batch, extras=extras)
        if self._pattern is None:
            self._pattern = dataclasses.replace(output, hidden=output.hidden[:0])
        return output.hidden.new_zeros(()), None

    def _hidden_spec(self, batches: Sequence[Batch]) -> Any:
        """Per micro-batch, what travels between the teacher's stages; None for one stage."""
        if self.groups.pp.size == 1:
            return None
        owner: Any = self.chunks[0]
        share = self.groups.tp.size if self.groups.sequence_parallel else 1

        def spec(microbatch: int) -> TensorSpec:
            tokens = batches[microbatch].tokens
            return TensorSpec(shape=(tokens.numel() // share, owner.config.hidden_size), dtype=owner.dtype, device=tokens.device)

        return spec
