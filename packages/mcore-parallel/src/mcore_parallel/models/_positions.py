# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How the heads of a model turn, as its config asks."""

from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.nn import Llama3Scaling, RotaryConfig, YarnScaling, rotary_width


def rotary_config(config: TransformerConfig, *, window: bool = False) -> RotaryConfig | None:
    """How the heads of a model turn; None where they do not.

    Args:
        config: the architecture.
        window: of the layers with a window; None unless ``rotary_base_window`` gives them a base of their own. Scalings of the
            frequencies are for long contexts, and so not for them.

    Raises:
        ValueError: numbers out of range.
    """
    kind = config.position_embedding_type
    if kind not in ("rope", "yarn", "mrope") or (window and config.rotary_base_window is None):
        return None
    scaling: Llama3Scaling | YarnScaling | None = None
    if not window:
        scaling = config.yarn if kind == "yarn" else config.rope_scaling
    latent = config.latent_attention
    return RotaryConfig(
        width=rotary_width(config.head_dim, config.rotary_percent) if latent is None else latent.qk_rope_head_dim,
        base=config.rotary_base_window if window and config.rotary_base_window is not None else config.rotary_base,
        interleaved=config.rotary_interleaved,
        interpolation_factor=None if window else config.seq_len_interpolation_factor,
        scaling=scaling,
        sections=config.mrope_section if kind == "mrope" else None,
    )
