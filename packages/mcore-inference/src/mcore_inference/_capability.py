# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which models an engine can serve: it names what it holds, and refuses everything else."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mcore_inference._stability import experimental_api
from mcore_inference.attention import HeadRotation, PagedAttention, PageFormat, has_attention_kernel, load_rotation
from mcore_inference.cache import MambaInferenceStateConfig, PagedKVCache, get_mamba_inference_state_config_from_model
from mcore_parallel import Group
from mcore_parallel.backends import TorchBackend
from mcore_parallel.models import GPTModel, LayerPattern, TransformerLayer
from mcore_parallel.nn import MLP, GatedDeltaNet, LatentAttentionConfig, LatentSelfAttention, LinearMixer, MambaMixer, SelfAttention

__all__ = ["EngineCapability"]


@runtime_checkable
class _MayDropTokens(Protocol):
    """A feed-forward that may leave out tokens because of those beside them, as a mixture with a capacity does."""

    @property
    def drops_tokens(self) -> bool: ...


@runtime_checkable
class _MayRouteAtRandom(Protocol):
    """A feed-forward that may choose experts at random in every call, as a mixture does that a benchmark of training balances."""

    @property
    def routes_at_random(self) -> bool: ...


@experimental_api
class StoredWeight(Protocol):
    """How a parameter is kept in e4m3."""

    multiply: bool
    """As of ``decoder.Fp8Weight``."""
    dtype: torch.dtype
    """Of the weight before."""

    def store(self, weight: Tensor, wide: Tensor) -> None:
        """Round other values into it, in place."""
        ...


@runtime_checkable
class StoresExperts(Protocol):
    """A feed-forward whose experts' weights have an fp8 form, as a mixture does."""

    def fp8_obstacle(self) -> str | None:
        """Why they cannot be kept in fp8; None where they can, or are."""
        ...

    def store_in_fp8(self, *, multiply: bool) -> None:
        """Round them, in place; what is in fp8 already stays."""
        ...

    def fp8_weights(self) -> Mapping[nn.Parameter, StoredWeight]:
        """Those in fp8."""
        ...


@experimental_api
class ExpertSlots(Protocol):
    """Where the experts of one layer lie, and copies of them. Weights move where all ranks that share them call it between two steps."""

    loads: Tensor
    """[E], tokens of this rank that went to each expert; whoever reads it zeroes it."""

    def weights_changed(self) -> None:
        """The parameters hold new weights, and other copies do not."""
        ...

    def settle(self) -> None:
        """Bring new weights to all copies."""
        ...

    def rebalance(self, loads: Sequence[int]) -> tuple[float, float, int]:
        """Move experts by the loads of all ranks: the busiest rank's load over the mean before and after, and how many have moved."""
        ...


@runtime_checkable
class HoldsExperts(Protocol):
    """A feed-forward whose experts may lie on any of the ranks that share them, and on several, as those of a mixture."""

    @property
    def expert_slots(self) -> ExpertSlots | None:
        """Where they lie; None where each is at home."""
        ...

    def check_redundant_experts(self, num_redundant_experts: int) -> None:
        """Whether so many copies can be taken, but for memory; nothing changes."""
        ...

    def add_redundant_experts(self, num_redundant_experts: int) -> ExpertSlots:
        """Take memory for so many copies over all ranks."""
        ...


@experimental_api
@dataclass(frozen=True, kw_only=True)
class EngineCapability:
    """Parts of a model for which an engine keeps the state of every request.

    Classes are compared exactly: a subclass may keep state of its own. A part that is not listed is refused, so a new mixer, core or
    backend is not served before it is listed here. Feed-forwards keep no state between steps and may be of any class,
    unless they drop tokens (``drops_tokens``): a request's tokens would depend on its neighbours, and cached keys and values on those of
    another time. Nor are those served that route at random (``routes_at_random``): equal requests would get other tokens.

    Example:
        >>> [mixer.__name__ for mixer in EngineCapability().mixers]
        ['SelfAttention', 'LatentSelfAttention', 'MambaMixer', 'GatedDeltaNet']
    """

    mixers: tuple[type[nn.Module], ...] = (SelfAttention, LatentSelfAttention, MambaMixer, GatedDeltaNet)
    """Classes of the mixer slot; an empty slot is fine."""
    cores: tuple[type, ...] = (PagedAttention,)
    """Classes of attention cores."""
    backends: tuple[type, ...] = (TorchBackend,)
    """Classes of backends, without fp8: scales of a whole step would tie a request's tokens to its neighbours."""

    def check_model(self, model: nn.Module) -> None:
        """Look at every layer; nothing is allocated.

        Raises:
            ValueError: names the part, its class and the classes that are served.
        """
        if not isinstance(model, GPTModel):
            raise ValueError(f"model is a {type(model).__name__}; the engine serves a GPTModel")
        _check_class("the backend", model.backend, self.backends, "build the model with backend=None")
        fp8 = model.backend.fp8 if isinstance(model.backend, TorchBackend) else None
        if fp8 is not None:
            raise ValueError(f"fp8={fp8} of the backend scales a whole step at once; build the served model without fp8")
        if isinstance(model.backend, TorchBackend) and model.backend.batch_invariant and model.groups.tp.size > 1:
            raise ValueError(f"batch_invariant=True of the backend is served with tp=1, found tp={model.groups.tp.size}; set it")
        if isinstance(model.backend, TorchBackend) and model.backend.batch_invariant and shares_experts(model):
            raise ValueError(
                f"batch_invariant=True of the backend is served with ep=1, found ep={model.groups.ep.size}: engines that share experts "
                "add up what each gives; set it"
            )
        if model.config.mtp_num_layers and model.training:
            raise ValueError(
                f"mtp_num_layers={model.config.mtp_num_layers} predicts further tokens in training mode only; call model.eval() before"
            )
        for number, layer in model.layers.items():
            self._check_layer(f"layers.{number}", layer)
        # States of two kinds are refused there.
        get_mamba_inference_state_config_from_model(model)

    def _check_layer(self, name: str, layer: nn.Module) -> None:
        if not isinstance(layer, TransformerLayer):
            raise ValueError(f"{name} is a {type(layer).__name__}; the engine serves a TransformerLayer")
        if isinstance(layer.mlp, _MayDropTokens) and layer.mlp.drops_tokens:
            raise ValueError(
                f"{name}.mlp is a {type(layer.mlp).__name__} that drops tokens of a full step; build the served model without a capacity "
                "(moe_expert_capacity_factor=None)"
            )
        if isinstance(layer.mlp, _MayRouteAtRandom) and layer.mlp.routes_at_random:
            raise ValueError(
                f"{name}.mlp is a {type(layer.mlp).__name__} that routes at random (moe_router_force_load_balancing=True), for benchmarks "
                "of training; build the served model with moe_router_force_load_balancing=False"
            )
        if layer.mixer is None:
            return
        name = f"{name}.{layer.mixer_name}"
        _check_class(name, layer.mixer, self.mixers, "serve a model whose mixers are all of these")
        if isinstance(layer.mixer, LatentSelfAttention) and layer.mixer.spec.batch_invariant:
            # Where the layer is, which may not be where it was built.
            device = next(layer.mixer.parameters()).device.type
            check_expanded_latents(name, layer.mixer.latent, layer.mixer.local_heads, device)
        if isinstance(layer.mixer, (SelfAttention, LatentSelfAttention)):
            _check_class(f"{name}.core", layer.mixer.core, self.cores, "build the model with attention_core=PagedAttention()")


def check_expanded_latents(name: str, latent: LatentAttentionConfig, num_heads: int, device: str) -> None:
    """Whether a cache of keys and values can hold those of a layer of latent attention, in the bits of its trainer.

    Args:
        name: of the layer.
        latent: its sizes.
        num_heads: of this rank.
        device: its type.

    Raises:
        ValueError: values are wider than keys, or on a GPU the kernel would be compiled for the trainer's values and the cache's apart.
    """
    key, value = latent.qk_head_dim, latent.v_head_dim
    what = f"{name} has batch_invariant=True of the backend, and v_head_dim={value}"
    if value > key:
        raise ValueError(
            f"{what} is above the {key} channels of a key, which a cache of keys and values has room for; serve without batch_invariant"
        )
    # A trainer's values lie beside one another, those of a cache as far apart as keys.
    if device == "cuda" and (num_heads * value % 16 == 0) != (num_heads * key % 16 == 0):
        raise ValueError(
            f"{what} and {key} channels of a key over {num_heads} heads are not both a multiple of 16 channels a token, for which kernels "
            "are compiled; serve without batch_invariant"
        )


def expands_latents(model: GPTModel) -> bool:
    """Whether a cache holds the keys and values of every head in place of the latents that they are projected from: the bits of
    batch-invariant models are those of the projected ones."""
    exact = isinstance(model.backend, TorchBackend) and model.backend.batch_invariant
    return exact and model.config.latent_attention is not None


def graph_obstacle(model: GPTModel) -> str | None:
    """Why no graph can hold a decode step of the model, and the remedy; None where one can.

    No feed-forward reads numbers of the device, as some with experts do (their ``reads_device``) and those whose experts have a capacity,
    which rows of padding would take; single tokens of recurrent layers are one kernel; no stage waits for another, and attention plans
    nothing on the host.
    """
    if model.groups.pp.size > 1:
        return f"stages of pp={model.groups.pp.size} wait for each other; serve with pp=1"
    for name, mixer in _attention_layers(model):
        if isinstance(mixer.core, PagedAttention) and mixer.core.plans_on_host:
            return f'PagedAttention(backend="{mixer.core.backend}") of {name} plans each step on the host; use another backend, or None'
    for number, layer in model.layers.items():
        assert isinstance(layer, TransformerLayer)
        if not _is_recorded(layer.mixer):
            return (
                f"layers.{number} is a {type(layer.mixer).__name__} of sizes without a decode kernel; use fewer channels of a head's state"
            )
        if reads_rows(layer):
            return (
                f"layers.{number}.mlp is a {type(layer.mlp).__name__} that reads numbers of rows back to the host; build the model in "
                "bfloat16 on a GPU, with backend=None"
            )
    return None


def reads_rows(module: nn.Module) -> bool:
    """Whether a feed-forward in it reads numbers of rows back to the host, so that no graph can hold it."""
    layers = [part for part in module.modules() if isinstance(part, TransformerLayer)]
    return any(layer.mlp is not None and type(layer.mlp) is not MLP and not _stays_on_device(layer.mlp) for layer in layers)


def _is_recorded(mixer: nn.Module | None) -> bool:
    """Whether a decode step of a mixer reads nothing of the host, where attention has its kernel."""
    if isinstance(mixer, LinearMixer):
        return mixer.has_decode_kernel
    return mixer is None or type(mixer) in (SelfAttention, LatentSelfAttention)


def _stays_on_device(experts: nn.Module) -> bool:
    return getattr(experts, "reads_device", True) is False and getattr(experts, "drops_tokens", True) is False


def _attention_layers(model: GPTModel) -> Iterable[tuple[str, SelfAttention | LatentSelfAttention]]:
    for number, layer in model.layers.items():
        mixer = layer.mixer if isinstance(layer, TransformerLayer) else None
        if isinstance(mixer, (SelfAttention, LatentSelfAttention)):
            yield f"layers.{number}", mixer


def attention_backend(model: GPTModel) -> str | None:
    """Of the model's ``PagedAttention``.

    Raises:
        ValueError: layers have different ones.
    """
    backends = {mixer.core.backend: name for name, mixer in _attention_layers(model) if isinstance(mixer.core, PagedAttention)}
    if len(backends) > 1:
        places = ", ".join(f"{backend!r} in {name}" for backend, name in backends.items())
        raise ValueError(f"attention over one cache has one backend, found {places}; build the model with one PagedAttention(backend=...)")
    return next(iter(backends), None)


def check_attention(model: GPTModel, pages: PageFormat, dtype: torch.dtype) -> None:
    """Whether the backend of a model's attention computes every layer over a cache.

    Args:
        model: whose cores are ``PagedAttention``.
        pages: of the cache.
        dtype: of the activations.

    Raises:
        ValueError: layers have different backends, or one asks for what its backend does not have.
    """
    attention_backend(model)
    check_cores(_attention_layers(model), pages, dtype)


def check_cores(layers: Iterable[tuple[str, SelfAttention | LatentSelfAttention]], pages: PageFormat, dtype: torch.dtype) -> None:
    """The same of layers with their names."""
    for name, mixer in layers:
        core = mixer.core
        if not isinstance(core, PagedAttention):
            continue
        obstacle = core.obstacle(dataclasses.replace(mixer.spec, dtype=dtype, device=pages.device.type), pages)
        if obstacle is not None:
            raise ValueError(f'PagedAttention(backend="{core.backend}"): {name} {obstacle}; leave backend at None')


def head_rotation(model: GPTModel, wanted: bool | None, dtype: torch.dtype, device: torch.device) -> HeadRotation | None:
    """What turns a model's heads in place of this package's kernel.

    Args:
        model: one that is served.
        wanted: ``use_flashinfer_fused_rope``.
        dtype: of the activations.
        device: of the model.

    Raises:
        ValueError: it is wanted, and heads are turned otherwise.
        ModuleNotFoundError: it is wanted, and flashinfer is not installed.
    """
    if wanted is False:
        return None
    obstacle = _rotation_obstacle(model, dtype, device)
    if obstacle is None:
        return load_rotation(required=wanted is True)
    if wanted:
        raise ValueError(f"use_flashinfer_fused_rope=True: {obstacle}; leave it at None")
    return None


def _rotation_obstacle(model: GPTModel, dtype: torch.dtype, device: torch.device) -> str | None:
    config = model.config
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"the model is in {dtype} on {device}, and flashinfer turns bfloat16 or float16 on a GPU"
    if config.position_embedding_type not in ("rope", "yarn") or config.rotary_percent != 1.0 or config.rotary_interleaved:
        return (
            f"position_embedding_type={config.position_embedding_type!r}, rotary_percent={config.rotary_percent} and "
            f"rotary_interleaved={config.rotary_interleaved} are turned by the model's own forward"
        )
    for name, mixer in _attention_layers(model):
        if isinstance(mixer, LatentSelfAttention) or mixer.q_norm is not None:
            return f"{name} has latents, or norms of its heads, and flashinfer turns heads as they come from the projection"
    return None


def shares_prefixes(model: GPTModel, wanted: bool | None) -> bool:
    """Whether requests over a model share the cache blocks of equal beginnings.

    Args:
        model: one that is served.
        wanted: ``enable_prefix_caching``; None for where every layer is attention.

    Raises:
        ValueError: it is wanted, and a mixer keeps something of a sequence of which there are no snapshots.
    """
    by_snapshots = False
    for number, layer in model.layers.items():
        mixer = layer.mixer if isinstance(layer, TransformerLayer) else layer
        if mixer is None or type(mixer) in (SelfAttention, LatentSelfAttention):
            continue
        if wanted and type(mixer) not in (MambaMixer, GatedDeltaNet):
            raise ValueError(
                f"enable_prefix_caching=True: layers.{number} is a {type(mixer).__name__}, and the engine does not know what it keeps of a "
                "shared beginning; leave it at None"
            )
        by_snapshots = True
    if has_recurrent_layers(model) and model.groups.pp.size > 1:
        if wanted:
            raise ValueError(
                f"enable_prefix_caching=True and pp={model.groups.pp.size} exclude each other in a model with recurrent layers: each stage "
                "would keep snapshots of its own; leave it at None"
            )
        return False
    return wanted is True or (wanted is None and not by_snapshots)


def has_recurrent_layers(model: GPTModel) -> bool:
    """Whether a layer of the model keeps a state of each request, be it on another stage: what that excludes, all stages refuse alike."""
    pattern = model.config.hybrid_layer_pattern
    if pattern is not None:
        return not set(LayerPattern.parse(pattern).layers).isdisjoint("MG")
    return any(isinstance(layer, TransformerLayer) and isinstance(layer.mixer, LinearMixer) for layer in model.layers.values())


def check_weights(model: GPTModel, weight_dtype: str | None) -> None:
    """Whether the weights of a model can be kept in fp8.

    Raises:
        ValueError: feed-forwards without an fp8 form; fp8 activations in a batch-invariant mode, or on a GPU without units for them.
    """
    if weight_dtype is None:
        return
    for number, layer in model.layers.items():
        assert isinstance(layer, TransformerLayer)
        if layer.mlp is None or type(layer.mlp) is MLP:
            continue
        check_feed_forward(f"layers.{number}.mlp", layer.mlp, weight_dtype)
    # Behind the layers: its remedy is the other form, which these may not have.
    if weight_dtype == "fp8":
        _check_fp8_activations(model)


def check_feed_forward(name: str, module: object, weight_dtype: str) -> None:
    """Whether a feed-forward that is no MLP can keep its weights in fp8.

    Raises:
        ValueError: it has no such form, or says what is in the way.
    """
    obstacle = module.fp8_obstacle() if isinstance(module, StoresExperts) else "whose weights have no fp8 form; leave it at None"
    if obstacle is not None:
        raise ValueError(f"weight_dtype={weight_dtype!r}: {name} is a {type(module).__name__}, {obstacle}")


def _check_fp8_activations(model: GPTModel) -> None:
    if isinstance(model.backend, TorchBackend) and model.backend.batch_invariant:
        raise ValueError(
            'weight_dtype="fp8" rounds the activations of large steps only, and batch_invariant=True of the backend computes all alike; '
            'use weight_dtype="fp8_weight_only"'
        )
    device = next(model.parameters()).device
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (9, 0):
        raise ValueError(
            f'weight_dtype="fp8" multiplies with a scale for each row, which needs compute capability 9.0, and {device} has '
            f'{capability[0]}.{capability[1]}; use weight_dtype="fp8_weight_only"'
        )


def check_layout(model: GPTModel) -> None:
    """Whether engines can serve the model's layout.

    Raises:
        ValueError: context parallelism, experts over a part of the tp ranks and others, or sequence parallelism.
    """
    groups = model.groups
    if groups.cp.size > 1:
        raise ValueError(f"cp={groups.cp.size} is not available in the engine; serve with cp=1 (tp and pp may be larger)")
    if shares_experts(model) and (groups.tp_ep.size % groups.tp.size or not set(groups.tp.ranks) <= set(groups.tp_ep.ranks)):
        raise ValueError(
            f"ep={groups.ep.size} etp={groups.expt_tp.size} exchange tokens over ranks {sorted(groups.tp_ep.ranks)}, which cut the "
            f"tp={groups.tp.size} ranks {sorted(groups.tp.ranks)} of one engine; make ep*etp a multiple of tp"
        )
    if groups.sequence_parallel:
        raise ValueError("sequence_parallel=True cannot serve steps of any length; build the serving plan with sequence_parallel=False")


def peers_of(model: GPTModel) -> Group:
    """The ranks that hold the experts of a model, of all its stages: none of them steps without the others."""
    return model.groups.tp_ep_pp


def exchanges_tokens(layer: TransformerLayer) -> bool:
    """Whether a layer's feed-forward may ask other ranks for their experts."""
    return layer.mlp is not None and type(layer.mlp) is not MLP


def shares_experts(model: GPTModel) -> bool:
    """Whether ranks with other requests hold experts of the model: then no rank steps alone."""
    layers = [layer for layer in model.layers.values() if isinstance(layer, TransformerLayer)]
    spread = not set(model.groups.tp_ep.ranks) <= set(model.groups.tp.ranks)
    return spread and any(exchanges_tokens(layer) for layer in layers)


def check_states(model: GPTModel, held: MambaInferenceStateConfig | None) -> None:
    """Whether the states of a context are those of a model.

    Raises:
        ValueError: they are not.
    """
    wanted = get_mamba_inference_state_config_from_model(model)
    if held != wanted:
        raise ValueError(
            f"the context holds the states of mamba_inference_state_config={held} and the model keeps {wanted}; use "
            "DynamicInferenceContext.for_model(model)"
        )


def check_cache(model: GPTModel, cache: PagedKVCache, max_sequence_length: int) -> None:
    """Whether a cache, once made, holds a model's keys and values at every position.

    Raises:
        ValueError: another number of layers, heads or channels, another split of latents, another dtype of rotary keys beside them, or
            another backend of attention; sequences longer than the learned positions.
    """
    if isinstance(model.backend, TorchBackend) and model.backend.batch_invariant:
        check_batch_invariant(model.dtype, PageFormat.of(cache))
    if (backend := attention_backend(model)) != cache.attention_backend:
        raise ValueError(
            f"the context is made for attention_backend={cache.attention_backend!r}, and the model has "
            f"PagedAttention(backend={backend!r}); use DynamicInferenceContext.for_model(model)"
        )
    # Of another engine some may be in fp8.
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.dtype.itemsize > 1)
    check_attention(model, PageFormat.of(cache), dtype)
    if cache.rotary is not None and cache.rotary.dtype != dtype:
        raise ValueError(
            f"the cache holds rotary keys in dtype={cache.rotary.dtype} and the model is in {dtype}; use "
            "DynamicInferenceContext.for_model(model)"
        )
    num_layers, num_kv_heads, head_dim = cache.pages.shape[0], cache.pages.shape[-2], cache.width
    # Where layers keep states, check_states has seen which ones have pages.
    if cache.layers is None and num_layers < len(model.layers):
        raise ValueError(
            f"the cache has num_layers={num_layers} and the model {len(model.layers)}; use DynamicInferenceContext.for_model(model)"
        )
    for number, layer in model.layers.items():
        mixer = layer.mixer if isinstance(layer, TransformerLayer) else None
        keeps_latents = isinstance(mixer, LatentSelfAttention) and not mixer.spec.batch_invariant
        if isinstance(mixer, (SelfAttention, LatentSelfAttention)) and cache.holds_latents != keeps_latents:
            kind = "latents" if cache.holds_latents else "keys and values"
            raise ValueError(
                f"layers.{number} is a {type(mixer).__name__} and the cache holds {kind}; use DynamicInferenceContext.for_model(model), "
                "and one kind of attention for all layers"
            )
        if isinstance(mixer, LatentSelfAttention) and keeps_latents:
            rank, width = mixer.latent.kv_lora_rank, mixer.latent.cache_width
            if (rank, width) != (cache.latent_rank, head_dim):
                raise ValueError(
                    f"layers.{number} has latents of kv_lora_rank={rank} in {width} channels and the cache of {cache.latent_rank} in "
                    f"{head_dim}; use DynamicInferenceContext.for_model(model)"
                )
        heads = None
        if isinstance(mixer, SelfAttention):
            heads = mixer.local_kv_heads, mixer.head_dim
        elif isinstance(mixer, LatentSelfAttention) and not keeps_latents:
            heads = mixer.local_heads, mixer.latent.qk_head_dim
        if heads is not None and heads != (num_kv_heads, head_dim):
            raise ValueError(
                f"layers.{number} has {heads[0]} key-value heads of {heads[1]} channels and the cache {num_kv_heads} of "
                f"{head_dim}; use DynamicInferenceContext.for_model(model), and one size of heads for all layers"
            )
    positions = model.config.max_position_embeddings
    if model.config.position_embedding_type == "learned_absolute" and positions is not None and max_sequence_length > positions:
        raise ValueError(f"max_sequence_length={max_sequence_length} exceeds max_position_embeddings={positions}; lower it")


def check_batch_invariant(dtype: torch.dtype, pages: PageFormat) -> None:
    """Whether attention over a cache gives the bits of a trainer.

    Args:
        dtype: of the model.
        pages: of the cache.

    Raises:
        ValueError: the cache has another dtype, or is on a GPU and of sizes that the kernels do not take.
    """
    if pages.dtype != dtype:
        raise ValueError(
            f"batch_invariant=True of the backend keeps keys and values as they are, and the cache has {pages.dtype} for a model of "
            f"{dtype}; make the context with the model's dtype"
        )
    device, block_size = pages.device, pages.block_size
    if device.type != "cuda":
        return
    if not has_attention_kernel(device, dtype, block_size):
        raise ValueError(
            f"batch_invariant=True of the backend needs the kernels of attention on {device}, which read blocks of a multiple of 16 "
            f"tokens in 16 or 32 bits, and block_size_tokens={block_size} of {dtype}; set block_size_tokens=64"
        )
    if not has_attention_kernel(device, dtype, block_size, head_dim=pages.head_dim):
        raise ValueError(
            f"batch_invariant=True of the backend needs the kernels of attention on {device}, which take heads of up to 512 channels in 16 "
            f"bits and 256 in 32, and head_dim={pages.head_dim} of {dtype}; serve without batch_invariant"
        )


def _check_class(name: str, part: object, served: tuple[type, ...], remedy: str) -> None:
    if type(part) not in served:
        classes = ", ".join(sorted(cls.__name__ for cls in served))
        # A core may be a function, whose class says nothing.
        kind = getattr(part, "__name__", type(part).__name__)
        raise ValueError(f"{name} is {kind}; the engine serves {classes}: {remedy}")
