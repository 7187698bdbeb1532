# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a block must not have to be replayed from graphs."""

from torch import nn

from mcore_parallel.graphs._capture import CaptureError
from mcore_parallel.nn import LayerMemory, LogitTracker, ManagedCore
from mcore_parallel.tensor_parallel import WeightGradientQueue

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def check_inside(module: nn.Module) -> None:
    """Refuse what would happen once, at the capture, and never again, and what no graph can hold.

    Raises:
        CaptureError: hooks inside the block, deferred weight gradients, offloading, random states that are copied, tracked logits.
    """
    for name, part in module.named_modules():
        where = name or "the block"
        if name and (hooks := [kind for kind in _HOOKS if getattr(part, kind)]):
            kind = hooks[0].strip("_").replace("_", " ")
            raise CaptureError(f"{where} has {kind}, which a replay does not run; hang hooks on the block itself")
        for key, value in vars(part).items():
            if isinstance(value, WeightGradientQueue):
                raise CaptureError(f"{where} defers its weight gradients ({key}), but a graph computes them at once; leave that off")
            if isinstance(value, LogitTracker):
                raise CaptureError(f"{where} tracks its largest logits ({key}) on the host's side; leave QK-clip or these graphs out")
            if isinstance(value, LayerMemory | ManagedCore):
                _check_memory(value)


def _check_memory(memory: LayerMemory | ManagedCore) -> None:
    offloaded = memory.offloaded if isinstance(memory, LayerMemory) else memory.offloaded_layers
    if offloaded:
        raise CaptureError(f"activations are offloaded ({sorted(offloaded)}), but a graph keeps its own; leave offloading out")
    if memory.recomputed and memory.preserve_rng_state:
        raise CaptureError("recomputation copies random states, which no graph can; set RecomputeConfig.preserve_rng_state=False")
