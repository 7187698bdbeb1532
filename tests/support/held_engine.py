# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine in its thread, whose steps a test lets go."""

import threading
from typing import Any

import torch

from mcore_inference import SamplingParams

__all__ = ["LONG", "TEN", "Output", "engine_threads"]

TEN = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True, top_n_logprobs=1)
LONG = SamplingParams(num_tokens_to_generate=400, ignore_eos=True)


class Output(torch.nn.Module):
    """The model's output layer. While ``held`` each step waits in it for a permit, so that a test decides when the engine advances."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.error, self.held, self.once = inner, None, False, False
        self.entered, self.permits = threading.Event(), threading.Semaphore(0)

    def forward(self, *arguments: Any) -> Any:
        if self.held:
            self.entered.set()
            assert self.permits.acquire(timeout=30)
        if error := self.error:
            self.error = None if self.once else error
            raise error
        return self.inner(*arguments)

    def let_go(self) -> None:
        """End the step that waits, if one does, and all later ones at once."""
        self.held = False
        self.permits.release()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mcore-engine"]
