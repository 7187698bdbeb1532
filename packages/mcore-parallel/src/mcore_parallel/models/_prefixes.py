# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether a model can compute packed sequences that go on behind another one."""

from torch import nn

from mcore_parallel._stability import experimental_api
from mcore_parallel.models._gpt import GPTModel
from mcore_parallel.models._layer import TransformerLayer
from mcore_parallel.nn import LatentSelfAttention, SelfAttention
from mcore_parallel.nn.attention import check_prefixes


@experimental_api
def check_follows_prefixes(model: nn.Module) -> None:
    """Whether the layers that a rank holds follow ``Step.prefixes``, before a step has any.

    Args:
        model: a ``GPTModel``, bare or wrapped.

    Raises:
        ValueError: another model, context parallelism, heads that predict further tokens, a mixer that is not attention or whose logits
            are tracked, an attention core that does not follow prefixes; names it.
    """
    parts = [module for module in model.modules() if isinstance(module, GPTModel)]
    if not parts:
        raise ValueError(f"{type(model).__name__} holds no GPTModel, the only model whose layers are known to follow prefixes")
    for part in parts:
        _check(part)


def _check(model: GPTModel) -> None:
    if (cp := model.groups.cp.size) > 1:
        raise ValueError(f"sequences behind a prefix cannot be split over cp={cp} ranks; set cp=1")
    if depths := model.config.mtp_num_layers:
        raise ValueError(f"mtp_num_layers={depths}: behind a prefix there are several next tokens; set mtp_num_layers=0")
    for number, layer in model.layers.items():
        mixer = layer.mixer if isinstance(layer, TransformerLayer) else layer
        if mixer is None:
            continue
        if not isinstance(mixer, SelfAttention | LatentSelfAttention):
            raise ValueError(f"layer {number} mixes tokens by {type(mixer).__name__}, which does not follow prefixes; use attention")
        if mixer.logits is not None:
            raise ValueError(f"layer {number} tracks its logits for QK-clip, which sees none behind a prefix; leave one of them out")
        check_prefixes(mixer.core)
