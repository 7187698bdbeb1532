# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether a model can compute packed sequences that go on behind another one, or whose bounds lie on the device."""

from collections.abc import Iterator

from torch import nn

from mcore_parallel._stability import experimental_api
from mcore_parallel.models._gpt import GPTModel
from mcore_parallel.models._layer import TransformerLayer
from mcore_parallel.nn import LatentSelfAttention, SelfAttention
from mcore_parallel.nn.attention import check_device_bounds, check_prefixes


@experimental_api
def check_follows_prefixes(model: nn.Module) -> None:
    """Whether the layers that a rank holds follow ``Step.prefixes``, before a step has any.

    Args:
        model: a ``GPTModel``, bare or wrapped.

    Raises:
        ValueError: another model, context parallelism, heads that predict further tokens, a mixer that is not attention or whose logits
            are tracked, an attention core that does not follow prefixes; names it.
    """
    for part in _models(model, "follow prefixes"):
        if (cp := part.groups.cp.size) > 1:
            raise ValueError(f"sequences behind a prefix cannot be split over cp={cp} ranks; set cp=1")
        if depths := part.config.mtp_num_layers:
            raise ValueError(f"mtp_num_layers={depths}: behind a prefix there are several next tokens; set mtp_num_layers=0")
        for mixer in _attentions(part, "does not follow prefixes", "sees none behind a prefix"):
            check_prefixes(mixer.core)


@experimental_api
def check_takes_device_bounds(model: nn.Module) -> None:
    """Whether the layers that a rank holds take ``Step.max_seqlen``, before a step has any.

    Args:
        model: a ``GPTModel``, bare or wrapped.

    Raises:
        ValueError: another model, heads that predict further tokens, a mixer that is not attention or whose logits are tracked, an
            attention core that reads bounds on the host; names it.
    """
    for part in _models(model, "take bounds of packed sequences on the device"):
        if depths := part.config.mtp_num_layers:
            raise ValueError(f"mtp_num_layers={depths} reads the bounds of packed sequences on the host; set mtp_num_layers=0")
        for mixer in _attentions(part, "reads bounds on the host", "reads bounds on the host"):
            check_device_bounds(mixer.core)


def _models(model: nn.Module, can: str) -> list[GPTModel]:
    parts = [module for module in model.modules() if isinstance(module, GPTModel)]
    if not parts:
        raise ValueError(f"{type(model).__name__} holds no GPTModel, the only model whose layers are known to {can}")
    return parts


def _attentions(model: GPTModel, other: str, tracked: str) -> Iterator[SelfAttention | LatentSelfAttention]:
    """The mixers of the layers; what is said of one that is not attention, and of one whose logits are tracked, ends the refusal."""
    for number, layer in model.layers.items():
        mixer = layer.mixer if isinstance(layer, TransformerLayer) else layer
        if mixer is None:
            continue
        if not isinstance(mixer, SelfAttention | LatentSelfAttention):
            raise ValueError(f"layer {number} mixes tokens by {type(mixer).__name__}, which {other}; use attention")
        if mixer.logits is not None:
            raise ValueError(f"layer {number} tracks its logits for QK-clip, which {tracked}; leave one of them out")
        yield mixer
