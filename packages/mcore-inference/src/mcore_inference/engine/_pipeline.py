# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A step through the stages of a pipeline: hidden states go from stage to stage, and what the last one drew to all."""

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference.context import StepInputs
from mcore_parallel import named_buffer_shards, named_shards
from mcore_parallel.comm import Arrival, P2PCommunicator, TensorSpec, all_gather
from mcore_parallel.models import GPTModel, ModelOutput


class BrokenPassError(RuntimeError):
    """A stage that left a pass half-way is asked for another one."""


class Pipeline:
    """The stages of a model, of which this rank holds one. All ranks run the same steps.

    Several steps may be on their way: a stage begins the next one while others compute those before.

    Args:
        model: one stage.
    """

    def __init__(self, model: GPTModel) -> None:
        self._model, self._group = model, model.groups.pp
        self._neighbours = P2PCommunicator(self._group)
        self.is_broken = False
        """Whether a pass ended half-way here: what comes next is not of the step that is computed next."""

    def logits(self, inputs: StepInputs, rows_N: Tensor) -> Tensor | None:
        """Compute this stage's part of a step: [N, V] of these tokens, over the whole vocabulary, on the last stage; None on others.

        Raises:
            BrokenPassError: a pass before raised here, after which the stages are not in step.
            Exception: what the model raised.
        """
        if self.is_broken:
            stage = f"stage {self._group.rank} of {self._group.size}"
            raise BrokenPassError(f"a pass through the model failed on {stage}, where others wait for it; end the processes of this engine")
        self.is_broken = True
        logits_NV = self._pass_through(inputs, rows_N)
        self.is_broken = False
        return logits_NV

    def _pass_through(self, inputs: StepInputs, rows_N: Tensor) -> Tensor | None:
        model, x = self._model, inputs.tokens_T
        if not model.is_first:
            shape = len(inputs.tokens_T), model.config.hidden_size
            x = self._neighbours.recv_forward(TensorSpec(shape=shape, dtype=model.dtype, device=x.device))
        output, _ = model(x, inputs.step)
        if isinstance(output, ModelOutput):
            return all_gather(output.logits(rows_N), model.groups.tp, dim=1)
        self._neighbours.send_forward(output)
        return None

    def broadcast(self, numbers_M: Tensor) -> Arrival:
        """Send numbers of the last stage to the others, where they overwrite ``numbers_M``; all stages call this in one order."""
        if not len(numbers_M):
            return Arrival(numbers_M, ())
        work = dist.broadcast(numbers_M, self._group.ranks[-1], group=self._group.pg, async_op=True)
        assert work is not None, "this rank is one of the group"
        return Arrival(numbers_M, (work,))


def names_elsewhere(model: GPTModel) -> frozenset[str]:
    """Parameters and buffers that only other stages of the pipeline hold; all its ranks call this."""
    group = model.groups.pp
    if group.size == 1:
        return frozenset()
    own = [shard.name for shard in (*named_shards(model), *named_buffer_shards(model))]
    device = next(model.parameters()).device
    data = torch.frombuffer(bytearray("\n".join(own).encode()), dtype=torch.uint8).to(device)
    sizes = all_gather(torch.tensor([len(data)], device=device), group).tolist()
    rows = torch.nn.functional.pad(data, (0, max(sizes) - len(data))).unsqueeze(0)
    texts = [bytes(row[:size]).decode() for row, size in zip(all_gather(rows, group).tolist(), sizes, strict=True)]
    return frozenset(name for text in texts for name in text.split("\n")) - set(own)
