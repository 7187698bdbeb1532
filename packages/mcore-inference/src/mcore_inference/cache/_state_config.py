# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes of what recurrent layers keep of each request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_inference._stability import experimental_api
from mcore_parallel.models import GPTModel, LayerPattern, TransformerLayer, layer_maps_by_symbol
from mcore_parallel.nn import GatedDeltaNet, LatentSelfAttention, LinearMixer

__all__ = ["MambaInferenceStateConfig", "get_mamba_inference_state_config_from_model"]

_RECURRENT = ("M", "G")
_ATTENTION = ("*", "+")


# K taps of the convolution, G groups, W channels of a group, H heads, P channels of a head, N channels of a state; all of this tp rank.
@experimental_api
@dataclass(frozen=True, kw_only=True)
class MambaInferenceStateConfig:
    """Which layers keep a state of each request, and its shapes: Mamba-2 layers, or gated delta nets.

    The first three fields may be given by position, as in Megatron-LM.

    Example:
        >>> shapes = {"mamba_conv_states_shape": (3, 2, 80), "mamba_ssm_states_shape": (8, 64, 16)}
        >>> sizes = MambaInferenceStateConfig(layer_type_list=["M", "-", "M", "*"], **shapes)
        >>> sizes.recurrent_layers, sizes.attention_layers, sizes.bytes_per_request
        ((0, 2), (3,), 69376)

    Raises:
        ValueError: an unknown symbol, no recurrent layer or both kinds, a size below 1, a dtype that is not floating-point.
    """

    layer_type_list: Sequence[str]
    """Symbol of each layer of this stage, as in ``hybrid_layer_pattern``; a layer with a mixer and a feed-forward has the mixer's."""
    mamba_conv_states_shape: tuple[int, ...]
    """[K - 1, G, W] of one request in one layer."""
    mamba_ssm_states_shape: tuple[int, ...]
    """[H, P, N] of one request in one layer; of a delta net [H, width of keys, width of values]."""
    mamba_conv_states_dtype: torch.dtype = torch.float32
    """That of the model."""
    mamba_ssm_states_dtype: torch.dtype = torch.float32
    """float32, or float64 for a model in it."""

    # The order of the first three is a promise, that of further fields is none.
    def __init__(
        self,
        layer_type_list: Sequence[str],
        mamba_conv_states_shape: tuple[int, ...],
        mamba_ssm_states_shape: tuple[int, ...],
        *,
        mamba_conv_states_dtype: torch.dtype = torch.float32,
        mamba_ssm_states_dtype: torch.dtype = torch.float32,
    ) -> None:
        values = {
            "layer_type_list": layer_type_list,
            "mamba_conv_states_shape": mamba_conv_states_shape,
            "mamba_ssm_states_shape": mamba_ssm_states_shape,
            "mamba_conv_states_dtype": mamba_conv_states_dtype,
            "mamba_ssm_states_dtype": mamba_ssm_states_dtype,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        maps = layer_maps_by_symbol(self.layer_type_list)
        kinds = [symbol for symbol in _RECURRENT if maps[symbol]]
        if len(kinds) != 1:
            layers = "both 'M' and 'G', whose states differ in shape" if kinds else "neither 'M' nor 'G'"
            raise ValueError(f"layer_type_list holds {layers}; the engine keeps the states of one kind of recurrent layer")
        # A convolution of one tap keeps nothing.
        for name, least in (("mamba_conv_states_shape", 0), ("mamba_ssm_states_shape", 1)):
            if min(getattr(self, name), default=0) < least:
                raise ValueError(f"{name}={getattr(self, name)} must hold sizes of at least {least}")
        for name in ("mamba_conv_states_dtype", "mamba_ssm_states_dtype"):
            if not getattr(self, name).is_floating_point:
                raise ValueError(f"{name}={getattr(self, name)} must be a floating-point dtype")
        object.__setattr__(self, "layer_type_list", tuple(self.layer_type_list))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with states, within the stage."""
        return tuple(number for number, symbol in enumerate(self.layer_type_list) if symbol in _RECURRENT)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with keys and values or latents, within the stage."""
        return tuple(number for number, symbol in enumerate(self.layer_type_list) if symbol in _ATTENTION)

    @property
    def bytes_per_request(self) -> int:
        """Of the states of one request in all layers."""
        conv = math.prod(self.mamba_conv_states_shape) * self.mamba_conv_states_dtype.itemsize
        return len(self.recurrent_layers) * (conv + math.prod(self.mamba_ssm_states_shape) * self.mamba_ssm_states_dtype.itemsize)


@experimental_api
def get_mamba_inference_state_config_from_model(model: GPTModel) -> MambaInferenceStateConfig | None:
    """The states that a model's layers of this stage keep of each request, on this tp rank; None where none does.

    Raises:
        ValueError: Mamba-2 layers and gated delta nets in one model, be it on several stages.
    """
    pattern = model.config.hybrid_layer_pattern
    if pattern is not None and {"M", "G"} <= set(LayerPattern.parse(pattern).layers):
        raise ValueError(
            f"hybrid_layer_pattern={pattern!r} holds both 'M' and 'G', whose states differ in shape; the engine keeps the states of one "
            "kind of recurrent layer"
        )
    mixers = [layer.mixer if isinstance(layer, TransformerLayer) else None for layer in model.layers.values()]
    recurrent = [mixer for mixer in mixers if isinstance(mixer, LinearMixer)]
    if not recurrent:
        return None
    one = recurrent[0].empty_state(1)
    return MambaInferenceStateConfig(
        layer_type_list=[_symbol(mixer) for mixer in mixers],
        mamba_conv_states_shape=tuple(one.conv.shape[1:]),
        mamba_ssm_states_shape=tuple(one.memory.shape[1:]),
        mamba_conv_states_dtype=one.conv.dtype,
        mamba_ssm_states_dtype=one.memory.dtype,
    )


def _symbol(mixer: object) -> str:
    if mixer is None:
        return "-"
    if isinstance(mixer, LinearMixer):
        return "G" if isinstance(mixer, GatedDeltaNet) else "M"
    return "+" if isinstance(mixer, LatentSelfAttention) else "*"
