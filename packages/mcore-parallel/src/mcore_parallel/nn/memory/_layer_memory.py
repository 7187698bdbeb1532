# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How a layer keeps, recomputes or offloads what its backward needs."""

import contextlib
from collections.abc import Collection
from typing import Any, cast

from torch import Tensor, nn

from mcore_parallel.nn._norm import LayerNorm, RMSNorm
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention import AttentionCore, SinkAttentionCore, follows_prefixes, takes_device_bounds
from mcore_parallel.nn.memory._offload import ActivationOffloader
from mcore_parallel.nn.memory._recompute import discard_output, recompute


class LayerMemory:
    """Runs the parts of one layer; with no argument it keeps everything.

    Args:
        recomputed: parts that run again: "attention", "mlp" and "norm", or of experts "moe_act" and "shared_experts".
        offloaded: parts whose saved tensors go to the host: those too, "layer", or of experts "expert_fc1" and "moe_act".
        offloader: where to; None for nowhere.
        preserve_rng_state: as in ``recompute``.
    """

    def __init__(
        self,
        *,
        recomputed: Collection[str] = (),
        offloaded: Collection[str] = (),
        offloader: ActivationOffloader | None = None,
        preserve_rng_state: bool = True,
    ) -> None:
        self.recomputed, self.offloaded = frozenset(recomputed), frozenset(offloaded)
        self.offloader = offloader
        self.preserve_rng_state = preserve_rng_state

    def branch(self, name: str, norm: nn.Module | None, module: nn.Module, x: Tensor, step: Step) -> tuple[Any, Tensor]:
        """``module(norm(x), step)``, where ``module`` is the part ``name``, or without a norm ``module(x, step)``; and x, to add it to."""
        if norm is None:
            return self._run(name, module, x, step), x

        def produce(x: Tensor) -> tuple[Tensor, Tensor]:
            with self.offloading("norm", norm):
                return norm(x, residual=True) if isinstance(norm, RMSNorm | LayerNorm) else (norm(x), x)

        def consume(y: Tensor) -> Any:
            return self._run(name, module, y, step)

        if "norm" in self.recomputed:
            return discard_output(produce, consume, x, preserve_rng_state=self.preserve_rng_state)
        y, x = produce(x)
        return consume(y), x

    def offloading(self, name: str, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Around a run of the part ``name``."""
        if self.offloader is None or name not in self.offloaded:
            return contextlib.nullcontext()
        return self.offloader.group(module.parameters(), name=name)

    def _run(self, name: str, module: nn.Module, *inputs: Any) -> Any:
        with self.offloading(name, module):
            if name in self.recomputed and name != "norm":
                return recompute(module, *inputs, preserve_rng_state=self.preserve_rng_state)
            return module(*inputs)


class ManagedCore:
    """An attention core that runs again in the backward, or whose saved tensors go to the host.

    Args:
        core: the attention.
        recomputed: run it again.
        offloader: where its tensors go; None for nowhere.
        offloaded_layers: of which layers of the stage.
        preserve_rng_state: as in ``recompute``.
    """

    def __init__(
        self,
        core: AttentionCore | SinkAttentionCore,
        *,
        recomputed: bool = False,
        offloader: ActivationOffloader | None = None,
        offloaded_layers: Collection[int] = (),
        preserve_rng_state: bool = True,
    ) -> None:
        self.core, self.recomputed, self.offloader = core, recomputed, offloader
        self.offloaded_layers, self.preserve_rng_state = frozenset(offloaded_layers), preserve_rng_state

    @property
    def follows_prefixes(self) -> bool:
        """Whether the core follows ``Step.prefixes``."""
        return follows_prefixes(self.core)

    @property
    def takes_device_bounds(self) -> bool:
        """Whether the core takes ``Step.max_seqlen``."""
        return takes_device_bounds(self.core)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        offload = self.offloader is not None and layer in self.offloaded_layers

        def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
            if sink is None:
                return self.core(q, k, v, layer, step)
            return cast(SinkAttentionCore, self.core)(q, k, v, layer, step, sink=sink)

        with self.offloader.group(name="core_attention") if offload and self.offloader is not None else contextlib.nullcontext():
            if self.recomputed:
                return recompute(run, q, k, v, sink, preserve_rng_state=self.preserve_rng_state)
            return run(q, k, v, sink)
