# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the cache of an engine holds, between its steps."""

import torch

from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._admission import Admission
from mcore_inference.engine._executor import Executor
from mcore_inference.engine._step_loop import StepLoop


class EngineCache:
    """Keys, values and states of requests in flight and of cached beginnings; whatever goes is computed again from tokens.

    Args:
        context: that has the memory.
        loop: whose steps in flight write to it.
        admission: of the requests.
        executor: whose recordings have its addresses.
    """

    def __init__(self, context: DynamicInferenceContext, loop: StepLoop, admission: Admission, executor: Executor) -> None:
        self._context, self._loop, self._admission, self._executor = context, loop, admission, executor

    @torch.no_grad()
    def free(self) -> None:
        """Give its memory on the device back, which it has."""
        memory = self._context.memory
        self._loop.read_results()
        self._admission.note_pause(self._admission.running)
        self._loop.forget_batch()
        self._executor.draws.adjusted.clear()
        if not memory.keeps_contents:
            self.forget()
        if not memory.keeps_addresses:
            self._executor.clear_graphs()
        memory.free()

    def forget(self) -> None:
        """Forget all that it holds."""
        self._loop.read_results()
        self._loop.forget_batch()
        self._admission.drop_cache()
