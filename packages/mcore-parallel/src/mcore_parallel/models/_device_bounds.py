# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether a model can compute packed sequences whose bounds lie on the device."""

from torch import nn

from mcore_parallel._stability import experimental_api
from mcore_parallel.models._gpt import GPTModel
from mcore_parallel.models._layer import TransformerLayer
from mcore_parallel.nn import LatentSelfAttention, SelfAttention
from mcore_parallel.nn.attention import check_device_bounds


@experimental_api
def check_takes_device_bounds(model: nn.Module) -> None:
    """Whether the layers that a rank holds take ``Step.max_seqlen``, before a step has any.

    Args:
        model: a ``GPTModel``, bare or wrapped.

    Raises:
        ValueError: heads that predict further tokens, a mixer that is not attention or whose logits are tracked, an attention core that
            reads bounds on the host; names it.
    """
    for part in model.modules():
        if isinstance(part, GPTModel):
            _check(part)


def _check(model: GPTModel) -> None:
    if depths := model.config.mtp_num_layers:
        raise ValueError(f"mtp_num_layers={depths} reads the bounds of packed sequences on the host; set mtp_num_layers=0")
    for number, layer in model.layers.items():
        mixer = layer.mixer if isinstance(layer, TransformerLayer) else layer
        if mixer is None:
            continue
        if not isinstance(mixer, SelfAttention | LatentSelfAttention):
            raise ValueError(f"layer {number} mixes tokens by {type(mixer).__name__}, which reads bounds on the host; use attention")
        if mixer.logits is not None:
            raise ValueError(f"layer {number} tracks its logits for QK-clip, which reads bounds on the host; leave one of them out")
        check_device_bounds(mixer.core)
