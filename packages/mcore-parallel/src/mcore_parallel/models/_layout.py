# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether a layout can divide a model, asked before its first tensor."""

import functools
import importlib.util
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch

from mcore_parallel.context_parallel import ContextParallelAttention, HeadSplitError, LayeredAttention, exchange_size
from mcore_parallel.groups import ParallelPlan, ProcessGroups
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._layer import dense_feed_forward
from mcore_parallel.models._slots import FeedForwardBuilder
from mcore_parallel.nn import ContextParallelBuilder
from mcore_parallel.nn.kernels import WIDEST_STATE

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@runtime_checkable
class LayoutChecked(Protocol):
    """A builder of feed-forwards that says before it builds whether a layout can divide them."""

    def check_layout(self, config: TransformerConfig, plan: ParallelPlan, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Raises:
        ValueError: names the field, its value and what to change.
        """
        ...


@runtime_checkable
class BatchInvariantChecked(Protocol):
    """A builder of feed-forwards that follow ``Site.batch_invariant``, and says before it builds whether they can."""

    def check_batch_invariant(
        self, config: TransformerConfig, plan: ParallelPlan, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Raises:
        ValueError: names the field, its value and what to change.
        """
        ...


def check_layout(
    config: TransformerConfig,
    plan: ParallelPlan,
    *,
    feed_forward: FeedForwardBuilder = dense_feed_forward,
    attention_core: object = None,
    own_mixer: bool = False,
    ends: bool = True,
    layer_configs: Iterable[TransformerConfig] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Whether the degrees of a plan divide the sizes of a model; it costs no tensor and no process group.

    ``GPTModel``, ``MambaModel``, ``BertModel`` and ``EagleHead`` call it before they allocate; a launcher may call it before ranks start.

    Args:
        config: the architecture.
        plan: tp, cp, ep and etp are read.
        feed_forward: as of ``GPTModel``; one that is ``LayoutChecked`` is asked.
        attention_core: as of ``GPTModel``; where it exchanges tokens for heads, these must suffice.
        own_mixer: attention is not this package's, so nothing is asked of its heads.
        ends: the vocabulary is divided, too.
        layer_configs: of layers that differ from the others.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: the first size that a degree does not divide, with both values and what to change.

    Example:
        >>> config = TransformerConfig(num_layers=2, hidden_size=12, num_attention_heads=3, vocab_size=16)
        >>> check_layout(config, ParallelPlan(tp=2))
        Traceback (most recent call last):
        ValueError: tp=2 must divide num_attention_heads=3; lower tp or change num_attention_heads
    """
    exchange = head_exchange(attention_core, plan)
    for part in (config, *layer_configs):
        symbols = set(part.hybrid_layer_pattern or "")
        plain = part.hybrid_layer_pattern is None
        if not own_mixer and (plain or symbols & {"*", "+"}):
            _check_attention(part, plan, exchange)
        if "M" in symbols and part.mamba is not None:
            heads = part.mamba.heads(part.hidden_size)
            _check_groups("mamba.num_groups", part.mamba.num_groups, heads, plan)
        if "G" in symbols and part.delta_net is not None:
            _check_groups("delta_net.num_key_heads", part.delta_net.num_key_heads, part.delta_net.num_value_heads, plan)
        if "-" in symbols or (plain and is_dense(feed_forward)):
            _divides("tp", plan.tp, "ffn_hidden_size", part.ffn_size, "lower tp or round ffn_hidden_size up")
        if isinstance(feed_forward, LayoutChecked) and (plain or "E" in symbols):
            feed_forward.check_layout(part, plan, dtype=dtype, device=device)
    if ends:
        _divides("tp", plan.tp, "vocab_size", config.vocab_size, "pad it with pad_vocab_size, or lower tp")


def check_batch_invariant(
    config: TransformerConfig,
    groups: ProcessGroups,
    *,
    feed_forward: FeedForwardBuilder,
    own_core: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Whether the bits of a model's tokens can be those of their own sequences (``TorchBackend(batch_invariant=True)``).

    Raises:
        ValueError: names the part that cannot, and what to change.
    """
    symbols = set(config.hybrid_layer_pattern or "")
    state = config.mamba.state_dim if "M" in symbols and config.mamba is not None else 0
    key = config.delta_net.key_head_dim if "G" in symbols and config.delta_net is not None else 0
    # A pattern without E builds none.
    has_feed_forward = config.hybrid_layer_pattern is None or "E" in symbols
    kv_heads_cut = config.kv_heads % groups.tp.size != 0
    gpu = torch.device(device).type == "cuda"
    follows = not has_feed_forward or is_dense(feed_forward) or isinstance(feed_forward, BatchInvariantChecked)
    narrow_store = isinstance(feed_forward, functools.partial) and bool(feed_forward.keywords.get("fp8_input_store"))
    refused = {
        f"device={str(device)!r} without Triton": gpu and importlib.util.find_spec("triton") is None,
        f"device={str(device)!r} with dtype={str(dtype).removeprefix('torch.')}": gpu and dtype not in _KERNEL_DTYPES,
        f"device={str(device)!r} with mamba.state_dim={state} above {WIDEST_STATE}": gpu and state > WIDEST_STATE,
        f"device={str(device)!r} with delta_net.key_head_dim={key} above {WIDEST_STATE}": gpu and key > WIDEST_STATE,
        f"device={str(device)!r} with fp8_input_store=True": gpu and narrow_store,
        f"tp={groups.tp.size}, whose sums of more than two parts depend on the step,": groups.tp.size > 2,
        f"tp={groups.tp.size} with num_query_groups={config.kv_heads}": kv_heads_cut,
        f"cp={groups.cp.size}": groups.cp.size > 1,
        f"tp={groups.tp.size} with qk_layernorm_across_heads=True": groups.tp.size > 1 and config.qk_layernorm_across_heads,
        "feed_forward of its own": not follows,
        "attention_core or mixer of its own": own_core,
    }
    for what, wrong in refused.items():
        if wrong:
            raise ValueError(f"batch_invariant=True of the backend has no path for {what}; leave that or batch_invariant out")
    if has_feed_forward and isinstance(feed_forward, BatchInvariantChecked):
        feed_forward.check_batch_invariant(config, groups.plan, dtype=dtype, device=device)


def is_dense(feed_forward: FeedForwardBuilder) -> bool:
    """Whether that is ``dense_feed_forward``, perhaps with options."""
    return (feed_forward.func if isinstance(feed_forward, functools.partial) else feed_forward) is dense_feed_forward


def head_exchange(core: object, plan: ParallelPlan) -> int:
    """Ranks among which an attention core exchanges tokens for heads; 1 for none."""
    if isinstance(core, ContextParallelBuilder):
        names = (core.cp_comm_type,) if isinstance(core.cp_comm_type, str) else core.cp_comm_type
        return max(exchange_size(name, plan) for name in names)
    cores = core.cores if isinstance(core, LayeredAttention) else (core,)
    return max(one.heads.size if isinstance(one, ContextParallelAttention) else 1 for one in cores)


def _check_attention(config: TransformerConfig, plan: ParallelPlan, exchange: int) -> None:
    tp, heads, groups = plan.tp, config.num_attention_heads, config.kv_heads
    _divides("tp", tp, "num_attention_heads", heads, "lower tp or change num_attention_heads")
    if heads // tp % exchange:
        raise HeadSplitError(
            f"cp_comm_type exchanges tokens for heads among {exchange} ranks, but a tp rank has num_attention_heads/tp={heads}/{tp}="
            f"{heads // tp}; use cp_comm_type='p2p' or 'all_gather', 'a2a+p2p' with a smaller first size, or lower tp"
        )
    if config.latent_attention is not None or groups % tp == 0:
        return
    if tp % groups:
        raise ValueError(
            f"tp={tp} must divide num_query_groups={groups} (key-value heads) or be a multiple of it; change tp or num_query_groups"
        )
    if config.qk_layernorm_across_heads:
        raise ValueError(f"tp={tp} must divide num_query_groups={groups} with qk_layernorm_across_heads=True; lower tp")
    rows = (heads // groups + 2) * config.head_dim
    what = f"the rows of a key-value head, (num_attention_heads/num_query_groups + 2) * kv_channels = {rows},"
    if rows % tp:
        raise ValueError(f"tp={tp} must divide {what} which that many ranks share; lower tp or change kv_channels")


def _check_groups(field: str, count: int, heads: int, plan: ParallelPlan) -> None:
    """Of a linear mixer: groups are divided over tp, the heads of a tp rank over cp."""
    if count % plan.tp:
        raise HeadSplitError(f"tp={plan.tp} must divide {field}={count}; lower tp or change {field}")
    if heads // plan.tp % plan.cp:
        raise HeadSplitError(f"cp={plan.cp} must divide the {heads // plan.tp} heads of a tp rank (of {field}={count}); lower cp or tp")


def _divides(degree: str, ranks: int, field: str, size: int, remedy: str) -> None:
    if size % ranks:
        raise ValueError(f"{degree}={ranks} must divide {field}={size}; {remedy}")
