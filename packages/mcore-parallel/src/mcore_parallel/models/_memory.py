# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The activation memory of a stage: what its layers recompute and offload."""

from collections.abc import Callable, Sequence

from torch import Tensor

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models._aux import Aux
from mcore_parallel.nn import (
    EXPERT_PARTS,
    ActivationOffloader,
    AttentionCore,
    LayerMemory,
    ManagedCore,
    OffloadConfig,
    RecomputeConfig,
    Step,
    recompute,
)

RunLayer = Callable[[Tensor, Step], tuple[Tensor, Aux | None]]

_LINEAR_PARTS = ("attention", "mlp", "shared_experts")
"""Parts of layers that hold linear layers."""


class StageMemory:
    """Carries out a ``RecomputeConfig`` and an ``OffloadConfig`` on the layers of one stage.

    Args:
        recompute: None to compute nothing again.
        offload: None to keep everything on the device.
        num_layers: of the stage.
        groups: the layout.
        own_core: whether attention is the model's own, around a core it was given.
        dense: no feed-forward has experts.
        noise_fields: of the feed-forwards, as of ``DrawsNoise``.

    Raises:
        ValueError: choices that exclude one another, or name parts of experts where there are none.
    """

    def __init__(
        self,
        recompute: RecomputeConfig | None,
        offload: OffloadConfig | None,
        num_layers: int,
        groups: ProcessGroups,
        *,
        own_core: bool,
        dense: bool,
        noise_fields: str = "",
    ) -> None:
        if dense:
            _check_dense("recompute", [] if recompute is None else recompute.expert_parts)
            _check_dense("offload", [] if offload is None else sorted({*EXPERT_PARTS} & {*offload.modules}))
        self.recompute, self.offload, self.num_layers, self.groups = recompute, offload, num_layers, groups
        self.offloader = None if offload is None else ActivationOffloader(offload)
        if recompute is not None:
            recompute.check_noise(noise_fields, ("mlp",))
        recomputed = frozenset() if recompute is None else recompute.parts
        offloaded = frozenset() if offload is None else frozenset(offload.modules)
        if "core_attention" in recomputed | offloaded and not own_core:
            raise ValueError(
                "modules holds 'core_attention', which a mixer of your own hides; wrap its core in ManagedCore, or name 'attention'"
            )
        if recompute is not None and recompute.granularity == "full" and offloaded - {"layer"}:
            raise ValueError(f"offload.modules={sorted(offloaded)} lie inside layers that run again as a whole; offload 'layer'")
        if recompute is not None and recompute.num_microbatches_with_partial_activation_checkpoints is not None and offloaded:
            raise ValueError(
                f"offload.modules={sorted(offloaded)} and num_microbatches_with_partial_activation_checkpoints exclude one another: "
                "which layers run again differs between micro-batches; leave one of the two out"
            )
        inside = {"core_attention": "attention", **dict.fromkeys(EXPERT_PARTS, "mlp")}
        if clash := {part for part in offloaded if part in recomputed or inside.get(part) in recomputed}:
            raise ValueError(f"{sorted(clash)} is recomputed and offloaded; choose one of the two for it")
        if recompute is not None and recompute.distribute_saved_activations and groups.sequence_parallel:
            raise ValueError(
                "distribute_saved_activations=True has nothing to share: sequence_parallel=True splits the activations already"
            )

    def core(self, core: AttentionCore) -> AttentionCore:
        """The attention core with its share of the work done."""
        again = self.recompute is not None and "core_attention" in self.recompute.parts
        away = [layer for layer in range(self.num_layers) if self._offloads("core_attention", layer)]
        if not again and not away:
            return core
        return ManagedCore(core, recomputed=again, offloader=self.offloader, offloaded_layers=away, preserve_rng_state=self._keeps_random())

    def layer(self, number: int) -> LayerMemory:
        """Of layer ``number`` of the stage."""
        recomputed = frozenset() if self.recompute is None else self.recompute.parts
        away = [part for part in ("attention", "mlp", "norm", *EXPERT_PARTS) if self._offloads(part, number)]
        # A layer that runs again as a whole has its input offloaded, not what the second run saves.
        if self._offloads("layer", number) and not self._runs_again(number):
            away.append("layer")
        return LayerMemory(recomputed=recomputed, offloaded=away, offloader=self.offloader, preserve_rng_state=self._keeps_random())

    def run(self, layers: Sequence[RunLayer], x: Tensor, step: Step) -> tuple[Tensor, Aux | None]:
        """All layers in order; hidden states and what the layers return beside."""
        parts: list[Aux | None] = []
        spans = [(0, len(layers), False)] if self.recompute is None else self.recompute.spans(len(layers), step.slot)
        for first, end, again in spans:
            x, aux = self._run_again(layers, first, end, x, step) if again else _run(layers[first:end], x, step)
            parts.append(aux)
        return x, Aux.merged(parts)

    def _run_again(self, layers: Sequence[RunLayer], first: int, end: int, x: Tensor, step: Step) -> tuple[Tensor, Aux | None]:
        assert self.recompute is not None
        share = self.groups.tp if self.recompute.distribute_saved_activations else None

        def run(x: Tensor) -> tuple[Tensor, Aux | None]:
            return _run(layers[first:end], x, step)

        if self.offloader is not None and self._offloads("layer", first):
            with self.offloader.group(name="layer"):
                return recompute(run, x, preserve_rng_state=self.recompute.preserve_rng_state, share=share)
        return recompute(run, x, preserve_rng_state=self.recompute.preserve_rng_state, share=share)

    def check_noise(self, noise_fields: str) -> None:
        """As of ``mcore_parallel.tensor_parallel.RecomputedModel``."""
        if self.recompute is not None:
            self.recompute.check_noise(noise_fields, _LINEAR_PARTS)

    def _runs_again(self, layer: int) -> bool:
        spans = [] if self.recompute is None else self.recompute.spans(self.num_layers)
        return any(first <= layer < end and again for first, end, again in spans)

    def _offloads(self, part: str, layer: int) -> bool:
        return self.offload is not None and part in self.offload.modules and self.offload.covers(layer, self.num_layers)

    def _keeps_random(self) -> bool:
        return self.recompute is None or self.recompute.preserve_rng_state


def _check_dense(field: str, parts: list[str]) -> None:
    if parts:
        raise ValueError(f"{field}.modules holds {parts}, which lie inside experts; this model has none, name 'mlp'")


def _run(layers: Sequence[RunLayer], x: Tensor, step: Step) -> tuple[Tensor, Aux | None]:
    parts: list[Aux | None] = []
    for layer in layers:
        x, aux = layer(x, step)
        parts.append(aux)
    return x, Aux.merged(parts)
