# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The sizes of an engine's memory, as they are asked for and as they come out."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from mcore_inference._fields import as_flag, as_integer, as_number
from mcore_inference._stability import experimental_api
from mcore_inference.adapters import LoraSlots
from mcore_inference.cache import MambaInferenceStateConfig, num_blocks_for_bytes
from mcore_parallel import ProcessGroups
from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import Group
from mcore_parallel.models import LayerPattern, TransformerConfig

__all__ = ["InferenceConfig", "MemorySizes", "check_scaled", "check_snapshots", "with_free_buffer"]

_DEFAULT_BUFFER_GB = 20.0
_DEFAULT_MAX_TOKENS = 16384
_DEFAULT_REQUESTS = 512
"""That draw in one step, where nothing is asked for."""
_SNAPSHOT_SHARE = 0.25
"""Of the buffer, at most, for snapshots of recurrent states, where nothing is asked for."""
_MARGIN = 0.1
"""Of a GPU's memory, for recorded steps, compiled kernels and what allocators round up."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Sizes of a ``DynamicInferenceContext``.

    Raises:
        ValueError: a field is out of its range, or ``buffer_size_gb`` is given beside ``num_blocks``.
    """

    max_sequence_length: int = 2560
    """Longest prompt and output together."""
    max_requests: int | None = None
    """Requests in one step; None for the number of usable blocks (at most ``max_tokens``), or for those that fit with a full sequence each
    where layers keep states."""
    max_tokens: int | None = None
    """Tokens in one step; None for 16384 (at least ``max_requests``)."""
    block_size_tokens: int = 256
    """Tokens of one cache block."""
    buffer_size_gb: float | None = _DEFAULT_BUFFER_GB
    """Memory of the cache and of recurrent states in 2**30 bytes, when ``num_blocks`` is None; no more is taken than ``max_requests`` can
    fill. None for what a GPU has left when the context is made, less a tenth of its memory and what the largest step takes; ranks that
    share a model take the least of theirs."""
    num_blocks: int | None = None
    """Cache blocks that requests can hold."""
    enable_chunked_prefill: bool = True
    """Whether a long prompt is computed over several steps, beside other requests' tokens."""
    enable_prefix_caching: bool | None = None
    """Whether requests share the blocks of equal beginnings, and blocks stay known after their request; None for where every layer is
    attention. With True, models with recurrent layers keep snapshots of their states at block boundaries, which need chunked prefill and
    pp=1."""
    prefix_caching_mamba_gb: float | None = None
    """Memory of these snapshots in 2**30 bytes, a part of ``buffer_size_gb`` where that counts; None for as many as ``max_requests``, in a
    quarter of ``buffer_size_gb`` at most."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """"fp8": keys and values as e4m3 with a scale for each head of a token, half the memory of bfloat16; of latent attention latents with a
    scale a token, beside rotary keys in the model's dtype. None for the model's dtype."""
    weight_dtype: Literal["fp8", "fp8_weight_only"] | None = None
    """Of the linear layers and experts of the blocks; embedding, output layer, routers and the weight that latent attention absorbs into
    queries keep the model's dtype, and None keeps it everywhere. "fp8": e4m3 with a scale for each output feature, half the memory of
    bfloat16; a step of more than 32 tokens (for experts, of more than 64 rows an expert on average) multiplies in fp8, with a scale for
    each token's activations, so that log-probabilities depend a little on the size of a step. "fp8_weight_only": activations keep their
    dtype, and what is computed is the model with rounded weights. The engine rounds its model's weights when it is made, in place; one with
    None refuses a model that another has rounded."""
    unified_memory_level: Literal[0, 1, 2] = 0
    """0: a suspended engine gives the memory of its cache back, and computes again what was there. 1: the cache is managed memory, and a
    suspended engine's moves to the host with what it holds. 2: the tensors of steps are managed memory too. 1 and 2 need a GPU and a C
    compiler, and as much host memory as the cache takes; where some ranks of a model lack them, all have 0, with a warning."""
    track_paused_request_events: bool = False
    """Whether requests record an event ``PAUSE`` each time that they stop: before they give up their blocks to others, and when the engine
    is suspended."""
    use_flashinfer_fused_rope: bool | None = False
    """True: queries and keys of every step are turned by flashinfer (extra ``flashinfer``), and then written and read by other kernels;
    refused where it is not installed or cannot turn the model's heads. None: those of steps with prompts, where it is installed and can.
    False: by kernels of this package, which write keys and values as they turn, and in steps of single tokens attend too."""
    watermark: float = 0.01
    """Share of the blocks that an admission leaves to running requests."""
    lora: LoraSlots | None = None
    """Memory for adapters (LoRA) beside the model's weights, of which each request chooses one or none; None for the model alone."""

    def __post_init__(self) -> None:
        for name in ("max_sequence_length", "block_size_tokens", "max_requests", "max_tokens", "num_blocks"):
            value = getattr(self, name)
            if value is not None or name in ("max_sequence_length", "block_size_tokens"):
                object.__setattr__(self, name, as_integer(name, value, 1, 2**48))
        if self.buffer_size_gb is not None:
            as_number("buffer_size_gb", self.buffer_size_gb, 2**-30, 2**30)
        if self.prefix_caching_mamba_gb is not None:
            as_number("prefix_caching_mamba_gb", self.prefix_caching_mamba_gb, 2**-30, 2**30)
        as_flag("enable_chunked_prefill", self.enable_chunked_prefill)
        as_flag("track_paused_request_events", self.track_paused_request_events)
        for name in ("enable_prefix_caching", "use_flashinfer_fused_rope"):
            if getattr(self, name) is not None:
                as_flag(name, getattr(self, name))
        if self.kv_cache_dtype not in (None, "fp8"):
            raise ValueError(f'kv_cache_dtype={self.kv_cache_dtype!r} is unknown; choose "fp8", or None for the dtype of the model')
        if self.weight_dtype not in (None, "fp8", "fp8_weight_only"):
            raise ValueError(f'weight_dtype={self.weight_dtype!r} is unknown; choose "fp8", "fp8_weight_only", or None for the model\'s')
        object.__setattr__(self, "unified_memory_level", as_integer("unified_memory_level", self.unified_memory_level, 0, 2))
        as_number("watermark", self.watermark, 0, 1)
        if self.lora is not None and not isinstance(self.lora, LoraSlots):
            raise ValueError(f"lora is a {type(self.lora).__name__}; give LoraSlots(...), or None")
        if self.watermark == 1:
            raise ValueError("watermark=1 leaves no block to admissions; it must be below 1")
        if self.num_blocks is not None and self.buffer_size_gb not in (None, _DEFAULT_BUFFER_GB):
            raise ValueError(
                f"num_blocks={self.num_blocks} and buffer_size_gb={self.buffer_size_gb} are two sizes of one cache; leave one of them out"
            )
        if self.max_requests is not None and self.max_tokens is not None and self.max_tokens < self.max_requests:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least max_requests={self.max_requests}; raise max_tokens")

    @property
    def max_blocks_per_request(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_sequence_length // self.block_size_tokens)


@dataclass(frozen=True, kw_only=True)
class MemorySizes:
    """What an engine's memory holds."""

    num_blocks: int
    """The sink included."""
    max_requests: int
    max_tokens: int
    num_snapshots: int = 0
    """Of recurrent states."""

    @classmethod
    def of(cls, config: InferenceConfig, bytes_per_block: int, bytes_per_request: int = 0) -> "MemorySizes":
        """The blocks and requests of a config.

        Args:
            config: what is asked for.
            bytes_per_block: over all layers.
            bytes_per_request: of the recurrent states of one request, or of one snapshot, which lie beside the blocks; without
                ``num_blocks`` all share ``buffer_size_gb``, and without ``max_requests`` as many requests are held as fit there with a full
                sequence each.

        Raises:
            ValueError: the buffer does not hold two blocks, or not beside the states; ``prefix_caching_mamba_gb`` holds no snapshot.
        """
        requests, max_tokens = config.max_requests, config.max_tokens or max(_DEFAULT_MAX_TOKENS, config.max_requests or 1)
        snapshots = _num_snapshots(config, bytes_per_request)
        if config.num_blocks is not None:
            requests = requests or min(config.num_blocks, max_tokens)
            snapshots = requests if snapshots is None else snapshots
            # One block more than requests can hold: the sink.
            return cls(num_blocks=config.num_blocks + 1, max_requests=requests, max_tokens=max_tokens, num_snapshots=snapshots)
        assert config.buffer_size_gb is not None, "filled in by with_free_buffer"
        buffer = int(config.buffer_size_gb * 2**30)
        full = bytes_per_request + config.max_blocks_per_request * bytes_per_block
        if snapshots is None:
            most = int(_SNAPSHOT_SHARE * buffer) // bytes_per_request
            # As many requests as fit with a snapshot each.
            paired = min(max_tokens, (buffer - bytes_per_block) // (full + bytes_per_request))
            snapshots = max(1, min(most, requests or paired))
        snapshot_bytes = snapshots * bytes_per_request
        if bytes_per_request and requests is None:
            requests = max(1, min(max_tokens, (buffer - snapshot_bytes - bytes_per_block) // full))
        states = (requests or 0) * bytes_per_request + snapshot_bytes
        if states and buffer - states < 2 * bytes_per_block:
            beside = f" and of {snapshots} snapshots (prefix_caching_mamba_gb)" if snapshots else ""
            raise ValueError(
                f"buffer_size_gb={config.buffer_size_gb} is {buffer} bytes; recurrent states of max_requests={requests}{beside} take "
                f"{states} of them and two blocks {2 * bytes_per_block}; lower max_requests or raise buffer_size_gb"
            )
        total = num_blocks_for_bytes(buffer - states, bytes_per_block)
        if requests is not None:
            total = min(total, requests * config.max_blocks_per_request + 1)
        return cls(num_blocks=total, max_requests=requests or min(total - 1, max_tokens), max_tokens=max_tokens, num_snapshots=snapshots)

    def agreed(self, ranks: Group, device: torch.device) -> "MemorySizes":
        """The smallest sizes of ranks that share a model, and schedule alike."""
        own = torch.tensor([self.num_blocks, self.max_requests, self.max_tokens, self.num_snapshots], device=device)
        num_blocks, max_requests, max_tokens, num_snapshots = all_reduce(own, ranks, op="min").tolist()
        return MemorySizes(num_blocks=num_blocks, max_requests=max_requests, max_tokens=max_tokens, num_snapshots=num_snapshots)


def _num_snapshots(config: InferenceConfig, num_bytes: int) -> int | None:
    """Snapshots of recurrent states of so many bytes each; None for as many as requests, as far as the buffer allows."""
    if not num_bytes or not config.enable_prefix_caching:
        return 0
    if config.prefix_caching_mamba_gb is None:
        return None
    memory = int(config.prefix_caching_mamba_gb * 2**30)
    if memory < num_bytes:
        raise ValueError(
            f"prefix_caching_mamba_gb={config.prefix_caching_mamba_gb} is {memory} bytes and one snapshot of the recurrent states takes "
            f"{num_bytes}; raise it, or leave it at None"
        )
    return memory // num_bytes


def with_free_buffer(
    config: InferenceConfig,
    model: TransformerConfig,
    groups: ProcessGroups | None,
    device: torch.device,
    itemsize: int,
    adapter_bytes: int = 0,
) -> InferenceConfig:
    """The config with a number for ``buffer_size_gb``: for None what the device has left, the least of the ranks that share the model.

    Args:
        config: how large steps get.
        model: whose weights are on the device.
        groups: of the model; None for this process alone.
        device: that of the cache.
        itemsize: bytes of an activation.
        adapter_bytes: that the slots of adapters will take.

    Raises:
        ValueError: the device is no GPU, or one of them has nothing left.
    """
    if config.buffer_size_gb is not None or config.num_blocks is not None:
        return config
    if device.type != "cuda":
        raise ValueError(f"buffer_size_gb=None takes what a GPU has left, and the cache is on a {device.type}; give a number or num_blocks")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free -= adapter_bytes
    max_tokens = config.max_tokens or _DEFAULT_MAX_TOKENS
    # The stream, its norm, heads and what attention gives; gate, value and their product.
    step = max_tokens * (8 * model.hidden_size + 3 * model.ffn_size) * itemsize
    # Logits of all tokens of a prompt whose log-probabilities are asked for, or of a draw, in float32 too.
    step += model.vocab_size * max(max_tokens * itemsize, (config.max_requests or _DEFAULT_REQUESTS) * (itemsize + 8))
    least = torch.tensor(free, device=device)
    if groups is not None and groups.tp_pp.size > 1:
        least = all_reduce(least, groups.tp_pp, op="min")
    buffer = int(least) - step - int(_MARGIN * total)
    if buffer <= 0:
        raise ValueError(
            f"buffer_size_gb=None: {int(least) / 2**30:.1f} of {total / 2**30:.1f} GiB are free, where a rank of the model has least; a "
            f"step of max_tokens={max_tokens} takes about {step / 2**30:.1f}, and {_MARGIN:.0%} of all stay free; lower max_tokens or "
            "max_requests, split the model, or give a number"
        )
    return replace(config, buffer_size_gb=buffer / 2**30)


def check_config(config: object) -> None:
    """See that the sizes of a context are an ``InferenceConfig``, or None.

    Raises:
        ValueError: something else.
    """
    if config is not None and not isinstance(config, InferenceConfig):
        raise ValueError(f"config is a {type(config).__name__}; give InferenceConfig(...), or None for the defaults")


def check_scaled(name: str, expands_latents: bool, states: MambaInferenceStateConfig | None, model: TransformerConfig) -> None:
    """Whether a cache keeps keys and values, or latents, with scales.

    Args:
        name: ``kv_cache_dtype``.
        expands_latents: whether it keeps keys and values that are made of latents, for a batch-invariant model.
        states: of this stage.
        model: whose other stages may have attention.

    Raises:
        ValueError: it keeps none, or those of a batch-invariant model.
    """
    if expands_latents:
        raise ValueError(
            f"kv_cache_dtype={name!r}: the cache of latent attention holds keys and values of every head for a batch-invariant model, "
            "which keep the model's dtype; leave it at None"
        )
    # Of a stage without attention another one may have some.
    symbols = LayerPattern.parse(model.hybrid_layer_pattern).layers if model.hybrid_layer_pattern is not None else ""
    if states is not None and not states.attention_layers and set(symbols).isdisjoint("*+"):
        raise ValueError(f"kv_cache_dtype={name!r}: every layer keeps a state, which stays in its own dtype; leave it at None")


def check_snapshots(config: InferenceConfig, states: MambaInferenceStateConfig | None) -> None:
    """Whether the layers of this stage can have the snapshots that are asked for.

    Raises:
        ValueError: ``prefix_caching_mamba_gb`` without recurrent layers or ``enable_prefix_caching=True``, or that without chunked prefill
            where layers are recurrent.
    """
    memory = config.prefix_caching_mamba_gb
    if states is None and memory is not None:
        raise ValueError(f"prefix_caching_mamba_gb={memory} is for states of recurrent layers, and no layer keeps one; leave it at None")
    if memory is not None and not config.enable_prefix_caching:
        raise ValueError(
            f"prefix_caching_mamba_gb={memory} is memory of prefix caching, and enable_prefix_caching={config.enable_prefix_caching} means "
            "none where layers keep states; set enable_prefix_caching=True, or leave prefix_caching_mamba_gb at None"
        )
    if states is not None and config.enable_prefix_caching and not config.enable_chunked_prefill:
        raise ValueError(
            "enable_chunked_prefill=False and enable_prefix_caching=True exclude each other where layers keep states: a prompt is computed "
            "up to a block boundary, where its states are kept, and then the rest; leave one of them out"
        )
