# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The memory of an engine: sizes, request slots, block tables, and the tensors of one step."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mcore_inference._capability import (
    EngineCapability,
    attention_backend,
    check_attention,
    check_weights,
    expands_latents,
    head_rotation,
    shares_prefixes,
)
from mcore_inference._stability import experimental_api, internal_api
from mcore_inference.adapters import adapter_bytes, check_slots
from mcore_inference.attention import HeadRotation, PageFormat
from mcore_inference.cache import (
    BlockAllocator,
    BlockKey,
    MambaInferenceStateConfig,
    PagedKVCache,
    RecurrentStateCache,
    block_bytes,
    get_mamba_inference_state_config_from_model,
)
from mcore_inference.context._config import InferenceConfig, MemorySizes, check_config, check_scaled, check_snapshots, with_free_buffer
from mcore_inference.context._step_builder import HostStep, StepBuilder, StepInputs
from mcore_inference.memory import cache_memory
from mcore_inference.requests import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)
from mcore_inference.scheduling import Limits
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig

__all__ = ["PENDING", "DynamicInferenceContext"]

PENDING = -1
"""Stands in a step for the token of a request that was sampled last and may not have reached the host."""


@experimental_api
class DynamicInferenceContext:
    """Cache blocks and request slots of one engine at a time: one that is made over it takes it over.

    All bookkeeping is on the host (numpy) and depends only on what requests were added and released, so that the tensor-parallel
    ranks of a model keep equal tables without talking.

    Args:
        model_config: architecture of the model.
        config: sizes.
        groups: tp is used: the cache holds this rank's key-value heads, or latents, which serve all heads.
        dtype: of the model's activations, and of keys and values without ``kv_cache_dtype``.
        device: of the cache.
        num_layers: layers of this pipeline stage, None for all. With pp > 1 all ranks of ``groups.pp`` call this, and agree on the smallest
            of their sizes.
        mamba_inference_state_config: states of recurrent layers, beside which only layers of attention have keys and values; None for a
            model without.
        attention_backend: of the model's ``PagedAttention``.
        rotation: turns heads in place of this package's kernel; ``for_model`` finds it where ``use_flashinfer_fused_rope`` asks for it.
        expands_latents: of latent attention, the cache holds keys and values of every head, as batch-invariant models need.
        adapter_bytes: memory of this rank that is left to the slots of adapters, where ``buffer_size_gb`` is None.

    Raises:
        UnifiedMemoryUnsupportedError: ``unified_memory_level`` is above 0 where no rank of the model has managed memory.
        ValueError: ``config`` is none; the memory does not hold two blocks beside the states, or tp does not divide the key-value heads;
            ``kv_cache_dtype`` beside ``expands_latents``, or where no layer has keys and values; ``use_flashinfer_fused_rope=True`` without
            a rotation; ``expands_latents`` without latent attention; ``enable_prefix_caching=True`` of recurrent layers without chunked
            prefill; ``prefix_caching_mamba_gb`` without recurrent layers, without ``enable_prefix_caching=True``, or less than one
            snapshot.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        config: InferenceConfig | None = None,
        *,
        groups: ProcessGroups | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_layers: int | None = None,
        mamba_inference_state_config: MambaInferenceStateConfig | None = None,
        attention_backend: str | None = None,
        rotation: HeadRotation | None = None,
        expands_latents: bool = False,
        adapter_bytes: int = 0,
    ) -> None:
        check_config(config)
        config = config or InferenceConfig()
        if config.use_flashinfer_fused_rope and rotation is None:
            raise ValueError(
                "use_flashinfer_fused_rope=True is for heads of a model, which a config does not show; use "
                "DynamicInferenceContext.for_model(model, config)"
            )
        self.device = torch.device(device)
        self.config = config = with_free_buffer(config, model_config, groups, self.device, dtype.itemsize, adapter_bytes)
        states = mamba_inference_state_config
        tp = 1 if groups is None else groups.tp.size
        if model_config.kv_heads % tp:
            raise ValueError(f"tp={tp} must divide num_query_groups={model_config.kv_heads}; lower tp")
        num_held, latent = model_config.num_layers if num_layers is None else num_layers, model_config.latent_attention
        num_kv_heads, head_dim = model_config.kv_heads, model_config.head_dim
        if expands_latents and latent is None:
            raise ValueError("expands_latents=True is for latent attention, and latent_attention is None; leave it out")
        if latent is not None and expands_latents:
            num_kv_heads, head_dim = model_config.num_attention_heads, latent.qk_head_dim
        entries = None if expands_latents else latent
        check_snapshots(config, states)
        if config.kv_cache_dtype is not None:
            check_scaled(config.kv_cache_dtype, expands_latents, states, model_config)
        # Rotary keys are not normalised, as latents are: they keep their dtype beside latents in fp8.
        rotary = None if entries is None or config.kv_cache_dtype is None else (entries.qk_rope_head_dim, dtype)
        sizes = {
            # Without attention one layer of pages stays: blocks count tokens.
            "num_layers": max(1, num_held) if states is None else max(1, len(states.attention_layers)),
            "block_size": config.block_size_tokens,
            "num_kv_heads": num_kv_heads // tp if entries is None else 1,
            "head_dim": head_dim if entries is None else entries.kv_lora_rank if rotary is not None else entries.cache_width,
            "dtype": dtype if config.kv_cache_dtype is None else torch.float8_e4m3fn,
            "parts": 2 if entries is None else 1,
            "rotary": rotary,
        }
        self.block_size: int = config.block_size_tokens
        self.max_sequence_length: int = config.max_sequence_length
        self.max_blocks_per_request = config.max_blocks_per_request
        held = MemorySizes.of(config, block_bytes(**sizes), 0 if states is None else states.bytes_per_request)
        if groups is not None and groups.pp.size > 1:
            held = held.agreed(groups.pp, self.device)
        self.max_tokens, self.max_requests = held.max_tokens, held.max_requests
        self.allocator = BlockAllocator(held.num_blocks, held.num_snapshots)
        layers = None if states is None else states.attention_layers
        self.memory = cache_memory(self.device, config.unified_memory_level, None if groups is None else groups.tp_pp)
        """Of keys, values and states."""
        rank = None if entries is None else entries.kv_lora_rank
        self.cache = PagedKVCache.allocate(
            num_blocks=held.num_blocks, device=self.device, layers=layers, memory=self.memory, latent_rank=rank,
            attention_backend=attention_backend, **sizes,
        )  # fmt: skip
        self.states = None if states is None else RecurrentStateCache(states, self.max_requests, self.memory, held.num_snapshots)
        """States of recurrent layers, by the slots of requests, and snapshots behind them; None for a model without."""
        with self.memory.step_tensors():
            self.builder = StepBuilder(
                self.cache,
                self.states,
                max_requests=self.max_requests,
                max_blocks=self.max_blocks_per_request,
                # All heads read one latent, and its kernel cuts tiles of tokens itself.
                group=1 if latent is not None else model_config.num_attention_heads // num_kv_heads,
                dtype=dtype,
                rotation=rotation,
                has_adapters=config.lora is not None,
            )
        self._owner = 0
        self._draft_pages: PagedKVCache | None = None
        """Of the engine that has the context."""
        self._new_draft_pages: PagedKVCache | None = None
        """Of one that is being made."""
        self.reset()

    @classmethod
    def for_model(cls, model: GPTModel, config: InferenceConfig | None = None) -> "DynamicInferenceContext":
        """A context with the model's heads, layers, groups, dtype and device.

        Raises:
            ValueError: the engine cannot serve the model (``EngineCapability``), or not with ``enable_prefix_caching``, ``weight_dtype``,
                ``lora`` or ``use_flashinfer_fused_rope``, or the backend of its attention cannot compute a layer, or ``config`` is none;
                nothing is allocated then.
            ModuleNotFoundError: ``use_flashinfer_fused_rope=True``, and flashinfer is not installed.
        """
        EngineCapability().check_model(model)
        check_config(config)
        slots = None if config is None else config.lora
        check_slots(model, slots)
        shares_prefixes(model, None if config is None else config.enable_prefix_caching)
        check_weights(model, None if config is None else config.weight_dtype)
        # Of another engine some may be in fp8.
        parameter = next(parameter for parameter in model.parameters() if parameter.dtype.itemsize > 1)
        sizes, latent, expands = config or InferenceConfig(), model.config.latent_attention, expands_latents(model)
        head_dim = model.config.head_dim if latent is None else latent.qk_head_dim
        pages = PageFormat(
            dtype=parameter.dtype if sizes.kv_cache_dtype is None else torch.float8_e4m3fn,
            device=parameter.device,
            block_size=sizes.block_size_tokens,
            latent=None if latent is None or expands else (latent.kv_lora_rank, latent.cache_width),
            head_dim=head_dim if latent is None or expands else None,
        )
        check_attention(model, pages, parameter.dtype)
        return cls(
            model.config,
            config,
            groups=model.groups,
            dtype=parameter.dtype,
            device=parameter.device,
            num_layers=len(model.stage_layers),
            mamba_inference_state_config=get_mamba_inference_state_config_from_model(model),
            attention_backend=attention_backend(model),
            rotation=head_rotation(model, sizes.use_flashinfer_fused_rope, parameter.dtype, parameter.device),
            expands_latents=expands,
            adapter_bytes=adapter_bytes(model, slots),
        )

    def reset(self) -> None:
        """No request, every block free."""
        self.allocator.reset()
        self._slots: dict[int, int] = {}
        self._free_slots = list(range(self.max_requests - 1, -1, -1))
        self._block_table = np.full((self.max_requests, self.max_blocks_per_request), -1, dtype=np.int64)
        self._num_blocks = np.zeros(self.max_requests, dtype=np.int64)
        self._num_cached = np.zeros(self.max_requests, dtype=np.int64)
        # Leading blocks whose contents are registered.
        self._num_known = np.zeros(self.max_requests, dtype=np.int64)
        self._adapters = np.full(self.max_requests, -1, dtype=np.int64)

    @internal_api
    def allocate_draft_pages(self, **sizes: Any) -> PagedKVCache:
        """Pages beside the cache, with as many blocks, for draft heads of an engine that takes the context over next, or is refused.

        Args:
            sizes: of a block and of layers, as of ``PagedKVCache.allocate``.
        """
        self.release_new_draft_pages()
        self._new_draft_pages = PagedKVCache.allocate(
            num_blocks=self.cache.pages.shape[2], block_size=self.block_size, device=self.device, memory=self.memory, **sizes
        )
        return self._new_draft_pages

    @internal_api
    def release_new_draft_pages(self) -> None:
        """Free those of an engine that was refused; nothing happens where it took the context over."""
        if self._new_draft_pages is not None:
            self._new_draft_pages.release(self.memory)
            self._new_draft_pages = None

    def take_over(self) -> int:
        """Begin to serve another engine: what the cache knows is of the last one's model, and is forgotten; pages of its draft heads are
        freed.

        Returns:
            The engine's number, for ``is_owner`` and ``check_owner``.

        Raises:
            ValueError: requests of the last engine hold slots.
        """
        if self._slots:
            raise ValueError(
                f"the context serves {len(self._slots)} requests of another engine; let that end or abort them, reset() the "
                "context of an engine that is gone, or make a context for each engine"
            )
        self.reset()
        if self._draft_pages is not None:
            self._draft_pages.release(self.memory)
        self._draft_pages, self._new_draft_pages = self._new_draft_pages, None
        self._owner += 1
        return self._owner

    def is_owner(self, number: int) -> bool:
        """Whether the engine with this number, that ``take_over`` returned, is the last one that took the context over."""
        return number == self._owner

    def check_owner(self, number: int) -> None:
        """See that no other engine has taken the context over.

        Args:
            number: that ``take_over`` returned.

        Raises:
            RuntimeError: one has.
        """
        if not self.is_owner(number):
            raise RuntimeError("the context of this engine was given to another one; make a context for each engine")

    # -- what fits ---------------------------------------------------------------------------------------------------

    @property
    def cache_tokens(self) -> int:
        """That the cache holds, of all requests together."""
        return self.allocator.usable_count * self.block_size

    def room(self, num_prompt_tokens: int) -> int:
        """New tokens that a prompt of this length can get at most; below 1 when there is no room."""
        # The last token is never fed back, so it takes no slot.
        in_cache = self.cache_tokens - num_prompt_tokens + 1
        return min(self.max_sequence_length - num_prompt_tokens, in_cache)

    def check_fits(self, num_prompt_tokens: int, budget: int, request_id: int | None = None) -> int:
        """Tokens a request may generate, at most ``budget``; nothing is allocated.

        Raises:
            MaxSequenceLengthOverflowError: prompt and one token exceed ``max_sequence_length``.
            TokenOverflowError: prompts are not chunked and this one exceeds ``max_tokens``.
            BlockOverflowError: the whole cache holds fewer blocks than the request grows to.
        """
        room = self.max_sequence_length - num_prompt_tokens
        if room < min(1, budget):
            raise MaxSequenceLengthOverflowError(
                request_id,
                f"the prompt has {num_prompt_tokens} tokens and max_sequence_length={self.max_sequence_length}; "
                "shorten the prompt or raise max_sequence_length",
            )
        if not self.config.enable_chunked_prefill and num_prompt_tokens > self.max_tokens:
            raise TokenOverflowError(
                request_id,
                f"the prompt has {num_prompt_tokens} tokens and a step max_tokens={self.max_tokens}; "
                "set enable_chunked_prefill or raise max_tokens",
                is_transient=False,
            )
        allowed = min(budget, room)
        # The last token is never fed back, so it takes no slot.
        blocks = -(-(num_prompt_tokens + max(allowed - 1, 0)) // self.block_size)
        if blocks > self.allocator.usable_count:
            raise BlockOverflowError(
                request_id,
                f"{num_prompt_tokens} prompt and {allowed} new tokens take {blocks} blocks of {self.block_size} tokens and the cache has "
                f"{self.allocator.usable_count}; shorten the request or give the cache more memory",
                is_transient=False,
            )
        return allowed

    def limits(self) -> Limits:
        """What the scheduler may use now."""
        return Limits(
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            block_size=self.block_size,
            free_blocks=self.allocator.total_avail,
            chunked_prefill=self.config.enable_chunked_prefill,
            reserve_blocks=math.ceil(self.config.watermark * self.allocator.usable_count),
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request_id: int, prefix: Sequence[int] = (), *, adapter: int = -1) -> None:
        """Give a request a slot; its blocks are those of its cached beginning, and its states those behind it.

        Args:
            request_id: without a slot.
            prefix: what ``match`` returned, of which the first ``num_resumable``.
            adapter: the slot of its adapter; -1 for none.

        Raises:
            RequestOverflowError: no slot is free.
            ValueError: the request has a slot already, or a block holds nothing that is known, or the states behind the last are not kept.
        """
        if request_id in self._slots:
            raise ValueError(f"request_id={request_id} has a slot already")
        if not self._free_slots:
            raise RequestOverflowError(request_id, f"all max_requests={self.max_requests} slots are taken; try again later")
        if self.num_resumable(prefix) < len(prefix):
            raise ValueError(f"no states are kept behind block {prefix[-1]}; give the first num_resumable(prefix) blocks")
        self.allocator.acquire(prefix)
        self._slots[request_id] = slot = self._free_slots.pop()
        if self.states is not None and prefix:
            self.states.copy(self.max_requests + self.allocator.snapshots.use(prefix[-1]), slot)
        self._block_table[slot, : len(prefix)] = prefix
        self._num_blocks[slot] = self._num_known[slot] = len(prefix)
        self._num_cached[slot] = len(prefix) * self.block_size
        self._adapters[slot] = adapter

    def match(self, keys: Sequence[BlockKey], num_tokens: int) -> list[int]:
        """Blocks that hold the beginning of a sequence; at least its last token stays to be computed.

        Args:
            keys: of its full blocks.
            num_tokens: its length.
        """
        return self.allocator.match(keys[: (num_tokens - 1) // self.block_size])

    def num_resumable(self, blocks: Sequence[int]) -> int:
        """Of blocks that ``match`` returned, those behind which a request goes on: all, or where layers keep states, up to the last
        snapshot of them."""
        if self.states is None:
            return len(blocks)
        return next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in self.allocator.snapshots), 0)

    def snapshot_ends(self, blocks: Sequence[int], num_resumable: int, num_tokens: int) -> tuple[int, ...]:
        """Lengths of a sequence behind which its states shall be kept: where it parts from others that the cache knows, and the end of the
        last full block before its last token.

        Args:
            blocks: that ``match`` returned.
            num_resumable: of these, those behind which it goes on.
            num_tokens: its length.
        """
        if not self.allocator.snapshots.total_count:
            return ()
        counts = {(num_tokens - 1) // self.block_size}
        if blocks and self.allocator.is_followed(blocks[-1]):
            counts.add(len(blocks))
        return tuple(count * self.block_size for count in sorted(counts) if count > num_resumable)

    def keep_states(self, request_id: int) -> None:
        """Keep the states behind a request's last token in the cache, which fills a block, for others that begin alike.

        Nothing happens where they are kept already, or ``register`` did not make the block known.
        """
        slot = self._slots[request_id]
        count, rest = divmod(int(self._num_cached[slot]), self.block_size)
        assert self.states is not None and not rest, "states are kept behind whole blocks"
        if self._num_known[slot] == count:
            place = self.allocator.snapshots.take(int(self._block_table[slot, count - 1]))
            if place is not None:
                self.states.copy(slot, self.max_requests + place)

    def register(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        """Let others find the full blocks of a request; a block that another one equals is given up for that one.

        Args:
            request_id: with a slot.
            keys: of the full blocks of its tokens, as many as are known.
        """
        slot = self._slots[request_id]
        table = self._block_table[slot]
        for index in range(self._num_known[slot], min(len(keys), int(self._num_cached[slot]) // self.block_size)):
            own = int(table[index])
            block = self.allocator.register(own, keys[index], int(table[index - 1]) if index else None)
            if block is None:
                return
            if block != own:
                self.allocator.acquire([block])
                self.allocator.release_memory_blocks([own])
                table[index] = block
            self._num_known[slot] = index + 1

    def extend(self, request_id: int, num_tokens: int) -> None:
        """Make room for the next tokens of a request.

        Raises:
            BlockOverflowError: too few blocks are free; nothing is taken.
        """
        slot = self._slots[request_id]
        held = int(self._num_blocks[slot])
        missing = -(-(int(self._num_cached[slot]) + num_tokens) // self.block_size) - held
        if missing <= 0:
            return
        blocks = self.allocator.allocate_memory_blocks(missing)
        if blocks is None:
            raise BlockOverflowError(request_id, f"{missing} blocks are needed and {self.allocator.total_avail} are free; try again later")
        self._block_table[slot, held : held + missing] = blocks
        self._num_blocks[slot] = held + missing

    def release(self, request_id: int) -> None:
        """Take a request's slot and blocks back."""
        slot = self._slots.pop(request_id)
        held = int(self._num_blocks[slot])
        self.allocator.release_memory_blocks(self._block_table[slot, :held].tolist())
        self._block_table[slot] = -1
        self._num_blocks[slot] = self._num_cached[slot] = self._num_known[slot] = 0
        self._free_slots.append(slot)

    def holds(self, request_id: int) -> bool:
        """Whether a request has a slot."""
        return request_id in self._slots

    def num_cached(self, request_id: int) -> int:
        """Tokens of a request that are in the cache; 0 without a slot."""
        return int(self._num_cached[self._slots[request_id]]) if request_id in self._slots else 0

    def num_blocks(self, request_id: int) -> int:
        """Blocks a request holds; 0 without a slot."""
        return int(self._num_blocks[self._slots[request_id]]) if request_id in self._slots else 0

    def block_table(self, request_id: int) -> list[int]:
        """Blocks of a request in the order of its tokens."""
        slot = self._slots[request_id]
        return self._block_table[slot, : self._num_blocks[slot]].tolist()

    def freed_by(self, request_ids: Sequence[int]) -> int:
        """Blocks that become free when all of these requests are released: those that no other request holds."""
        held = Counter(block for request_id in request_ids for block in self.block_table(request_id))
        return sum(count == self.allocator.num_holders(block) for block, count in held.items())

    def get_active_request_count(self) -> int:
        return len(self._slots)

    # -- one step ----------------------------------------------------------------------------------------------------

    def host_step(self, work: Sequence[tuple[int, Sequence[int]]]) -> HostStep:
        """A step that computes these tokens of these requests.

        Args:
            work: request and its next tokens (one of them may be ``PENDING``), those with one token first; ``extend`` made room for them.

        Raises:
            ActiveRequestCountOverflowError: more requests than ``max_requests``.
            TensorStateDeallocatedError: the memory of the cache was given up.
        """
        if len(work) > self.max_requests:
            raise ActiveRequestCountOverflowError(self.max_requests, len(work))
        lines_R = np.array([self._slots[request_id] for request_id, _ in work])
        lengths_R = np.array([len(tokens) for _, tokens in work])
        tokens_T = np.fromiter((token for _, tokens in work for token in tokens), dtype=np.int64, count=int(lengths_R.sum()))
        tokens_T = np.where(tokens_T == PENDING, -1 - np.repeat(lines_R, lengths_R), tokens_T)
        return self._host_step(tokens_T, lengths_R, lines_R)

    def step_from(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> HostStep:
        """A step over places of these requests that may be cached already, for pages with the same tables as these.

        Args:
            work: request, place of the first token and tokens, those with one token first; their places lie in blocks that it holds.

        Raises:
            TensorStateDeallocatedError: the memory of the cache was given up.
        """
        lines_R = np.array([self._slots[request_id] for request_id, _, _ in work])
        step = self._host_step(
            np.array([token for _, _, tokens in work for token in tokens]), np.array([len(tokens) for _, _, tokens in work]), lines_R
        )
        return replace(step, cached_R=np.array([first for _, first, _ in work]))

    def build_step(self, work: Sequence[tuple[int, Sequence[int]]]) -> StepInputs:
        """Tensors of ``host_step``."""
        return self.builder.build(self.host_step(work))

    def line(self, request_id: int) -> int:
        """Where ``builder.last_tokens`` holds the request's last token."""
        return self._slots[request_id]

    @internal_api
    def num_lacking(self, lines_R: np.ndarray) -> int:
        """Blocks that one more token of each of these lines takes."""
        return len(self._lacking(lines_R))

    def _lacking(self, lines_R: np.ndarray) -> np.ndarray:
        return lines_R[self._num_cached[lines_R] >= self._num_blocks[lines_R] * self.block_size]

    def extend_lines(self, lines_R: np.ndarray) -> bool:
        """Make room for one more token of each of these lines; False, and nothing is taken, where too few blocks are free."""
        lacking = self._lacking(lines_R)
        if len(lacking):
            blocks = self.allocator.allocate_memory_blocks(len(lacking))
            if blocks is None:
                return False
            self._block_table[lacking, self._num_blocks[lacking]] = blocks
            self._num_blocks[lacking] += 1
        return True

    def decode_step(self, lines_R: np.ndarray) -> HostStep:
        """A step that computes the last token of each of these lines, wherever it is.

        Raises:
            TensorStateDeallocatedError: the memory of the cache was given up.
        """
        return self._host_step(-1 - lines_R, np.ones(len(lines_R), dtype=np.int64), lines_R)

    def _host_step(self, tokens_T: np.ndarray, lengths_R: np.ndarray, lines_R: np.ndarray) -> HostStep:
        if not self.memory.is_allocated:
            raise TensorStateDeallocatedError(
                None, "the cache has no memory on the device while its engine is suspended; call resume() first"
            )
        cached_R, tables_RB = self._num_cached[lines_R], self._block_table[lines_R]
        adapters_R = None if self.config.lora is None else self._adapters[lines_R]
        return HostStep(
            tokens_T=tokens_T, lengths_R=lengths_R, cached_R=cached_R, tables_RB=tables_RB, lines_R=lines_R, adapters_R=adapters_R
        )

    def advance_lines(self, lines_R: np.ndarray) -> None:
        """Note that one more token of each of these lines is in the cache now."""
        self._num_cached[lines_R] += 1

    def advance(self, request_id: int, num_tokens: int) -> None:
        """Note that the next tokens of a request are in the cache now."""
        self._num_cached[self._slots[request_id]] += num_tokens

    def trim(self, request_id: int) -> None:
        """Give back the blocks behind the request's last token in the cache: what was written there counts no more."""
        slot = self._slots[request_id]
        kept, held = -(-int(self._num_cached[slot]) // self.block_size), int(self._num_blocks[slot])
        self.allocator.release_memory_blocks(self._block_table[slot, kept:held].tolist())
        self._block_table[slot, kept:held] = -1
        self._num_blocks[slot] = kept

    def get_kvcache_utilization_stats(self) -> dict[str, float]:
        """Counts of blocks, requests and tokens; ``utilization`` is the share of blocks in use."""
        used, usable = self.allocator.total_used, self.allocator.usable_count
        return {
            "total_blocks": usable,
            "used_blocks": used,
            "available_blocks": usable - used,
            "utilization": used / usable,
            "idle_blocks": self.allocator.num_idle,
            "evicted_blocks": self.allocator.num_evicted,
            "state_snapshots": len(self.allocator.snapshots),
            "evicted_snapshots": self.allocator.snapshots.num_evicted,
            "cached_tokens": int(self._num_cached.sum()),
            "active_requests": len(self._slots),
            "max_requests": self.max_requests,
            "max_tokens": self.max_tokens,
        }
