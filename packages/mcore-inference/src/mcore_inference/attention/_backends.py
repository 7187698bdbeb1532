# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who computes attention over a paged cache: this package's kernels, torch, or a library; and what each cannot do."""

from typing import Protocol

import torch
from torch import Tensor

from mcore_inference._extras import brought_by
from mcore_inference._kernels import has_kernels
from mcore_inference._stability import experimental_api
from mcore_inference.attention._page_format import PageFormat
from mcore_inference.attention._rotation import HeadRotation
from mcore_inference.attention._step import TableRows
from mcore_inference.attention._tiles import fits_latents, fits_tiles
from mcore_inference.cache import LayerSlots
from mcore_parallel.nn import AttentionSpec

LIBRARIES = ("flash_attn_3", "flashinfer")
BACKENDS = ("triton", "torch", *LIBRARIES)
# The fewest tokens of a block that the kernels take: one side of a matmul.
KERNEL_BLOCK = 16
_HALF = (torch.bfloat16, torch.float16)
_DEVICE_TYPES = ("cuda",)
"""Of devices that the libraries run on."""


@experimental_api
def has_attention_kernel(
    device: torch.device, dtype: torch.dtype, block_size: int, latent: tuple[int, int] | None = None, head_dim: int | None = None
) -> bool:
    """Whether steps of such a cache run by the kernels.

    Args:
        device: of the cache.
        dtype: of the model's activations.
        block_size: tokens of a block.
        latent: of a cache of latents, channels that are values and channels in all; up to 512 and 256 more in 16 bits, 128 and 64 more in
            float32.
        head_dim: of a cache of keys and values, channels of a head; up to 512 in 16 bits, 256 in float32.
    """
    fits = latent is None or fits_latents(*latent, dtype.itemsize)
    fits &= head_dim is None or fits_tiles(head_dim, dtype.itemsize)
    return fits and has_kernels(device, dtype) and block_size % KERNEL_BLOCK == 0


# T tokens of a step, A heads, d width of a head.
@experimental_api
class AttentionLibrary(Protocol):
    """A library that computes attention over the blocks of a cache; one object serves all layers of a model."""

    plans_on_host: bool
    """Whether each step is planned on the host, so that no graph can hold one."""

    def obstacle(self, spec: AttentionSpec, pages: PageFormat) -> str | None:
        """What of a layer or a cache it cannot compute; None for nothing."""
        ...

    def attend(self, q: Tensor, cached: LayerSlots, rows: TableRows, *, scale: float, window: int) -> Tensor:
        """[T, A, d] -> [T, A, d], the keys and values of the step being in their slots. ``window`` is -1 for none."""
        ...


def load_library(backend: str | None) -> AttentionLibrary | None:
    """The library of a backend; None for this package's kernels and torch.

    Raises:
        ValueError: no such backend; says what Transformer Engine lacks.
        ModuleNotFoundError: its library is not installed; names it and how it is installed.
    """
    if backend in ("te", "transformer_engine"):
        raise ValueError(
            f"backend={backend!r} cannot read this cache: Transformer Engine attends over pages that its InferenceParams allocates and "
            "numbers itself, one request a page and one token a step behind the first; "
            f"use one of {', '.join(map(repr, BACKENDS))}, or None"
        )
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} of PagedAttention is unknown; use one of {', '.join(map(repr, BACKENDS))}, or None")
    if backend == "flash_attn_3":
        try:
            from mcore_inference.attention._flash_attn_3 import FlashAttention3
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("flash_attn_interface", "flash_attn_3"):
                raise
            message = f"{error.name} is not installed: build FlashAttention 3, folder hopper of github.com/Dao-AILab/flash-attention"
            raise ModuleNotFoundError(message, name=error.name) from None
        return FlashAttention3()
    if backend == "flashinfer":
        with brought_by("flashinfer", "flashinfer"):
            from mcore_inference.attention._flashinfer import FlashInferAttention
        return FlashInferAttention()
    return None


@experimental_api
def load_rotation(*, required: bool) -> HeadRotation | None:
    """flashinfer's rotation; None where it is not installed and not required.

    Raises:
        ModuleNotFoundError: it is required and not installed; names the extra.
    """
    try:
        with brought_by("flashinfer", "flashinfer"):
            from mcore_inference.attention._flashinfer import FlashInferRotation
    except ModuleNotFoundError as error:
        if required or error.name != "flashinfer":
            raise
        return None
    return FlashInferRotation(required=required)


@experimental_api
def reads_tables(backend: str | None, pages: PageFormat, dtype: torch.dtype) -> bool:
    """Whether steps over a cache are ``TableRows``, and not ``GatheredRows``; ``dtype`` is that of the activations."""
    has_kernel = has_attention_kernel(pages.device, dtype, pages.block_size, pages.latent, pages.head_dim)
    # Latents in fp8 are read by pairs of channels.
    has_kernel &= pages.latent is None or pages.dtype != torch.float8_e4m3fn or pages.latent[0] % 2 == 0
    return backend in LIBRARIES or (backend != "torch" and has_kernel)


def backend_obstacle(backend: str | None, library: AttentionLibrary | None, spec: AttentionSpec, pages: PageFormat) -> str | None:
    """Why a backend cannot compute a layer over a cache; None where it can."""
    if library is not None:
        return _library_obstacle(spec, pages) or library.obstacle(spec, pages)
    if backend == "triton" and not reads_tables(backend, pages, spec.dtype):
        return (
            f"is in {spec.dtype} on {pages.device} with blocks of {pages.block_size} tokens and heads of {spec.head_dim} channels; the "
            "kernels take 16 or 32 bits on a GPU with Triton, blocks of a multiple of 16 tokens, up to 512 channels (256 in 32 bits), and "
            "latents of sizes that have kernels"
        )
    if backend == "torch" and spec.batch_invariant and pages.device.type == "cuda":
        return "has batch_invariant=True, whose bits on a GPU are those of the kernels"
    return None


def _library_obstacle(spec: AttentionSpec, pages: PageFormat) -> str | None:
    """What no library's interface has."""
    if pages.latent is not None:
        return "caches latents, and the library reads keys and values of each head"
    if spec.softmax_type != "vanilla":
        return f"has softmax_type={spec.softmax_type!r}, and the library's softmax has no sink"
    if spec.softcap is not None:
        return f"has attn_logit_softcapping={spec.softcap}, and the library is not asked to cap scores"
    if spec.batch_invariant:
        return "has batch_invariant=True, and the library chooses its order of sums by the shapes of a step"
    if pages.dtype == torch.float8_e4m3fn:
        return "has a cache with a scale for each head of a token (kv_cache_dtype='fp8'), and the library takes one scale for many tokens"
    if spec.dtype not in _HALF or pages.dtype != spec.dtype:
        return f"is in {spec.dtype} and its cache in {pages.dtype}; the library takes bfloat16 or float16, the same in both"
    if pages.device.type not in _DEVICE_TYPES:
        return f"is on {pages.device}, and the library needs a GPU"
    return None
