# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The verbs of the command, by name."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One verb: what it does, and where its program is."""

    summary: str
    module: str = ""
    """Of this package, with a ``main(arguments)`` that returns the exit code."""
    script: str = ""
    """A command that a wheel brings, of which this verb is another name."""

    def load(self) -> Callable[[Sequence[str]], int]:
        """Import the program."""
        if self.module:
            return importlib.import_module(self.module).main
        from importlib.metadata import entry_points

        (script,) = entry_points(group="console_scripts", name=self.script)
        return script.load()


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "quickstart": Verb(
            summary="walk the whole journey on a small model: text to a model post-trained with RL", module="mcore_tools.quickstart"
        ),
        "preprocess": Verb(summary="write text as the indexed corpus that a run reads", script="mcore-preprocess"),
        "train": Verb(summary="train a recipe, on this process or on every rank that torchrun starts", module="mcore_tools.train"),
        "sft": Verb(summary="fine-tune a Hugging Face model or a checkpoint on conversations, and export it", module="mcore_tools.sft"),
        "distill": Verb(summary="train a student against the checkpoint of a teacher", module="mcore_tools.distill"),
        "rl": Verb(summary="post-train a model with RL: answers are drawn, judged and learnt from", module="mcore_tools.reinforce"),
        "eagle": Verb(summary="train, measure and export a speculative draft head", module="mcore_tools.eagle"),
        "eval": Verb(
            summary="measure a model: perplexity of text, multiple choice, tasks of lm-evaluation-harness", module="mcore_tools.evaluate"
        ),
        "generate": Verb(summary="continue prompts with the model of a checkpoint", module="mcore_tools.generate"),
        "chat": Verb(summary="chat at the terminal with the model of a run, or with a server", module="mcore_tools.converse"),
        "serve": Verb(summary="serve the model of a checkpoint over HTTP", module="mcore_tools.serve"),
        "convert": Verb(summary="import, export, inspect and verify checkpoints: Hugging Face, Megatron, torch", script="mcore-ckpt"),
        "plan": Verb(summary="find layouts for a model and a number of GPUs", script="mcore-plan"),
        "doctor": Verb(summary="show which path each operation takes on this machine, and why", script="mcore-doctor"),
        "completion": Verb(summary="print a script that completes this command in bash, zsh or fish", module="mcore_tools.completion"),
        "compare": Verb(summary="find the first layer whose tensors differ between two recorded runs", script="mcore-compare"),
    }
)
