# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The choice of a backend, and what this machine allows."""

import importlib.util
from typing import Literal

import torch

from mcore_parallel.backends._batch_invariant_mode import is_batch_invariant_mode_enabled
from mcore_parallel.backends._fp8_config import Fp8Config
from mcore_parallel.backends._protocol import Backend, BackendLayers
from mcore_parallel.backends._torch import RECIPES_OF_TORCH, TorchBackend
from mcore_parallel.nn import LayerFactory

_LEAST_CAPABILITY = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "delayed": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
_GENERATIONS = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


def choose_backend(name: Literal["torch", "te"] = "torch", *, fp8: Fp8Config | None = None, batch_invariant: bool | None = None) -> Backend:
    """The backend of a model (``GPTModel(backend=...)``).

    Args:
        name: "torch", or "te" for Transformer Engine (extra ``te``), which is imported here and nowhere else.
        fp8: recipe of fp8 GEMMs; None for the model's dtype.
        batch_invariant: as of ``TorchBackend``; None for what ``set_batch_invariant_mode`` says.

    Raises:
        ValueError: an unknown name, a recipe that the backend does not have or that this machine's GPU has no units for,
            batch_invariant with fp8 or with Transformer Engine.
        RuntimeError: Transformer Engine is not installed, or there is no GPU for it.

    Example:
        >>> type(choose_backend("torch", fp8=Fp8Config(recipe="rowwise"))).__name__
        'TorchBackend'
    """
    batch_invariant = is_batch_invariant_mode_enabled() if batch_invariant is None else batch_invariant
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if name not in ("torch", "te"):
        raise ValueError(f'backend={name!r} is unknown; use "torch" or "te"')
    if fp8 is not None and (reason := missing_units(fp8, capability)):
        raise ValueError(reason)
    if name == "torch":
        return TorchBackend(fp8, batch_invariant=batch_invariant)
    if batch_invariant:
        raise ValueError('batch_invariant=True needs the matmuls of backend="torch"; use "torch"')
    if importlib.util.find_spec("transformer_engine") is None:
        raise RuntimeError(
            'backend="te" needs transformer_engine, which is not installed: pip install "mcore-parallel[te]", or use "torch"'
        )
    if capability is None:
        raise RuntimeError('backend="te" needs a CUDA device, and torch finds none; use "torch"')
    from mcore_parallel.backends._transformer_engine import TransformerEngineBackend

    return TransformerEngineBackend(fp8)


def quantization(layers: LayerFactory | None) -> Fp8Config | None:
    """The recipe in which layers of this factory multiply; None for the dtype of the weights.

    Example:
        >>> quantization(choose_backend("torch", fp8=Fp8Config(recipe="rowwise")).layers(0, 1)).recipe
        'rowwise'
    """
    return layers.fp8 if isinstance(layers, BackendLayers) else None


def missing_units(fp8: Fp8Config, capability: tuple[int, int] | None) -> str | None:
    """Why a GPU of this compute capability cannot run a recipe; None if it can.

    Without a GPU (None) "tensorwise" and "rowwise" run all the same: the fp8 values are exact, and multiplied in float32.
    """
    least = _LEAST_CAPABILITY[fp8.recipe]
    if capability is None:
        if fp8.recipe in RECIPES_OF_TORCH:
            return None
        return f'recipe={fp8.recipe!r} needs a CUDA device; without one use "tensorwise" or "rowwise"'
    if capability >= least:
        return None
    able = [name for name, needed in _LEAST_CAPABILITY.items() if capability >= needed]
    remedy = f"use {' or '.join(repr(name) for name in able)}" if able else "use no fp8"
    return (
        f"recipe={fp8.recipe!r} needs compute capability {least[0]}.{least[1]} ({_GENERATIONS[least]}) or newer, "
        f"this GPU has {capability[0]}.{capability[1]}; {remedy}"
    )
