# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""QK-clip: heads whose logits grew too large get smaller query and key weights after a step."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mcore_parallel.comm import all_gather, all_reduce
from mcore_parallel.context_parallel import Segment, segments, zigzag_inverse
from mcore_parallel.groups import ProcessGroups, ShardSpec, named_shards
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import AttentionSpec
from mcore_parallel.tensor_parallel import is_adapter

ROWS = 1024


# T tokens, A heads, K key-value heads, d width of a head, i queries and j keys of a block.
class LogitTracker:
    """The greatest attention logit of each head of this rank since ``reset``.

    It is computed by blocks from the queries and keys, beside the core: one product of the two more, and no matrix of all scores.

    Args:
        spec: bounds and scale of the scores.
        groups: cp is used: keys of the other ranks are gathered.
    """

    def __init__(self, spec: AttentionSpec, groups: ProcessGroups) -> None:
        self.spec, self.groups = spec, groups
        self.greatest: Tensor | None = None
        """[A] float32, or float64."""

    def reset(self) -> None:
        self.greatest = None

    @torch.no_grad()
    def see(self, q: Tensor, k: Tensor, step: Step) -> None:
        """Take in q [T, A, d] and k [T, K, d] of one micro-batch."""
        if step.prefixes is not None:
            raise ValueError("logits of sequences behind a prefix are not tracked for QK-clip; pack without prefixes")
        cp = self.groups.cp
        bounds = None if step.cu_seqlens is None else step.cu_seqlens.tolist()
        lengths = [step.seq_len * cp.size] * step.batch_size if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
        if cp.size > 1:
            k = all_gather(k.contiguous(), cp)[zigzag_inverse(lengths, cp.size).to(k.device)]
        held = segments(lengths, cp.size, cp.rank)
        maxima = max_attention_logits(q, k, held, segments(lengths, 1, 0), self.spec.bounds, self.spec.scale)
        self.greatest = maxima if self.greatest is None else torch.maximum(self.greatest, maxima)


def max_attention_logits(
    q: Tensor,
    k: Tensor,
    queries: Sequence[Sequence[Segment]],
    keys: Sequence[Sequence[Segment]],
    bounds: tuple[int, int],
    scale: float,
) -> Tensor:
    """[A] greatest ``scale * q k`` of every head over the keys its queries see; -inf where they see none.

    Products are rounded to the dtype of ``q``, which 16-bit tensor cores compute many times as fast as float32.

    Args:
        q: [T, A, d].
        k: [T', K, d].
        queries: of every sequence where the queries stand.
        keys: of every sequence its one segment of keys.
        bounds: (left, right) of what a query sees, -1 for no limit.
        scale: of the scores, above 0.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    greatest = torch.full((q.shape[1],), float("-inf"), dtype=wide, device=q.device)
    left, right = bounds
    for own, (theirs,) in zip(queries, keys, strict=True):
        for part in own:
            for start in range(0, part.length, ROWS):
                count = min(ROWS, part.length - start)
                place = part.position + start
                first = 0 if left < 0 else max(0, place - left)
                end = theirs.length if right < 0 else min(theirs.length, place + count + right)
                if end <= first:
                    continue
                q_iKgd = q[part.row + start :][:count].unflatten(1, (k.shape[1], -1))
                k_jKd = k[theirs.row + first : theirs.row + end]
                scores = torch.einsum("ikgd,jkd->kgij", q_iKgd, k_jKd).flatten(0, 1)
                ahead = torch.arange(first, end, device=q.device) - torch.arange(place, place + count, device=q.device)[:, None]
                hidden = (ahead < -left if left >= 0 else ahead < -end) | (ahead > right if right >= 0 else ahead > end)
                greatest = torch.maximum(greatest, scores.masked_fill_(hidden, float("-inf")).amax((1, 2)).to(wide))
    return greatest * scale


@runtime_checkable
class QKClipped(Protocol):
    """An attention whose logits are tracked and whose projections can be made smaller."""

    groups: ProcessGroups
    spec: AttentionSpec
    """What its core computes."""
    logits: LogitTracker | None

    def qk_clip_factors(self, gamma: Tensor, alpha: float) -> Mapping[str, Tensor]:
        """For each of its parameters that is to shrink, by local name, factors that broadcast against its global shape.

        ``gamma`` [A] in (0, 1]: by what each head's logits are to shrink.
        """
        ...


class PlacedState(Protocol):
    """A box of one tensor of an optimizer's state; without an offset it is this rank's part of the parameter."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def spec(self) -> ShardSpec: ...
    @property
    def offset(self) -> tuple[int, ...] | None: ...


class MasterHolder(Protocol):
    """An optimizer that keeps wider copies of parameters, as ``mcore_parallel.optim.MegatronOptimizer`` does."""

    @property
    def step_count(self) -> int: ...

    def load_step_count(self, count: int) -> None: ...

    def state_shards(self) -> Mapping[str, PlacedState | Sequence[PlacedState]]: ...


class ParameterGather(Protocol):
    """Who brings the slices of updated parameters together, as ``DistributedDataParallel`` does for a distributed optimizer."""

    def start_param_sync(self) -> None: ...

    def finish_param_sync(self) -> None: ...


@dataclass(frozen=True)
class ClipReport:
    """What ``clip_qk`` found on this pipeline stage."""

    max_logits: dict[str, Tensor]
    """[A] greatest logit of each head since the last call, by the name of the attention."""
    clipped: int
    """Heads above the threshold whose weights shrank."""


def shared_key_factors(gamma: Tensor, num_kv_heads: int, alpha: float) -> tuple[Tensor, Tensor]:
    """Factors of queries [K, A / K] and keys [K], whose product is ``gamma`` [A] for every head.

    Heads with a key of their own share it as ``gamma^alpha`` and ``gamma^(1 - alpha)``. A key that several heads read shrinks by what
    all of them need; the rest is left to each query, so that no head changes for its neighbour's sake and no weight grows.
    """
    by_group = gamma.unflatten(0, (num_kv_heads, -1))
    keys = by_group.amax(1) ** (1 - alpha)
    return by_group / keys[:, None], keys


def track_max_logits(model: nn.Module, enabled: bool = True) -> None:
    """Have every attention of a model note its greatest logits in training mode from now on, or no longer.

    Raises:
        ValueError: no attention of the model can.
    """
    attentions = _attentions(model)
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no attention whose logits can be tracked; give the model, or one pipeline stage of it"
        )
    for attention in attentions.values():
        attention.logits = LogitTracker(attention.spec, attention.groups) if enabled else None


@torch.no_grad()
def clip_qk(
    model: nn.Module,
    groups: ProcessGroups,
    *,
    threshold: float = 100.0,
    alpha: float = 0.5,
    optimizer: MasterHolder | None = None,
    sync: ParameterGather | None = None,
) -> ClipReport:
    """Shrink query and key weights of the heads whose logits exceeded a threshold (QK-clip of Kimi K2, 2025).

    A head whose greatest logit since the last call was m > threshold gets weights whose logits are threshold / m of what they were; other
    heads keep theirs, and so do attentions that are frozen. Call it on every rank after a step; ``track_max_logits`` must have been called
    before the steps.

    Args:
        model: the stage of this rank.
        groups: its layout; the greatest logits are those of all data and context-parallel ranks.
        threshold: of the logits.
        alpha: exponent of a head's factor that goes to its queries, the rest goes to its keys; of parts that heads share see
            ``shared_key_factors``.
        optimizer: whose masters are to shrink with the parameters; None if the parameters are all there is.
        sync: the ``DistributedDataParallel`` of the optimizer, so that all ranks hold what the owners of masters hold.

    Raises:
        ValueError: logits that are not tracked, or none on any rank since the last call, as in evaluation mode; a threshold that is not
            positive, alpha outside [0, 1], heads normalised behind the projection, adapters, an attention of which some weights of queries
            and keys are frozen and others are not.
    """
    if not threshold > 0 or not 0 <= alpha <= 1:
        raise ValueError(f"threshold={threshold} must be positive and alpha={alpha} in [0, 1]")
    if adapters := [name for name, _ in model.named_parameters() if is_adapter(name)]:
        raise ValueError(f"{adapters[0]} is of an adapter, which no factor reaches; call clip_qk where the weights are trained alone")
    greatest: dict[str, Tensor] = {}
    factors: dict[str, Tensor] = {}
    clipped = 0
    for name, attention in _attentions(model).items():
        if attention.logits is None:
            raise ValueError(f"the logits of {name!r} are not tracked; call track_max_logits(model) before the steps")
        greatest[name] = maxima = _of_all_ranks(attention.logits, attention, groups)
        attention.logits.reset()
        above = maxima > threshold
        gamma = torch.where(above, threshold / maxima, torch.ones_like(maxima))
        own = {f"{name}.{local}" if name else local: factor for local, factor in attention.qk_clip_factors(gamma, alpha).items()}
        frozen = [whole for whole in own if not model.get_parameter(whole).requires_grad]
        if len(frozen) == len(own):
            continue
        if frozen:
            raise ValueError(f"{frozen[0]} is frozen, and {min(own.keys() - frozen)} is not; freeze all or none of what QK-clip shrinks")
        clipped += int(above.sum())
        factors |= own
    if greatest and all(bool(torch.isneginf(maxima).all()) for maxima in greatest.values()):
        raise ValueError(
            "no logits were noted on any rank since the last call; attention notes them in training mode, and not where it is replayed "
            "from a CUDA graph: call model.train() before the steps, and clip_qk after each of them"
        )
    if clipped:
        _shrink(model, groups, factors, optimizer)
        if sync is not None:
            sync.start_param_sync()
            sync.finish_param_sync()
    return ClipReport(greatest, clipped)


def _attentions(model: nn.Module) -> dict[str, QKClipped]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QKClipped)}


def _of_all_ranks(logits: LogitTracker, attention: QKClipped, groups: ProcessGroups) -> Tensor:
    """[A] greatest logit of every head of all tp ranks, over all data."""
    mine = logits.greatest
    if mine is None:
        # A rank without data takes part.
        assert isinstance(attention, nn.Module)
        parameters = list(attention.parameters())
        wide = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
        mine = torch.full((attention.spec.num_heads,), float("-inf"), dtype=wide, device=parameters[0].device)
    return all_gather(all_reduce(mine, groups.dp_cp, op="max"), groups.tp)


def _shrink(model: nn.Module, groups: ProcessGroups, factors: Mapping[str, Tensor], optimizer: MasterHolder | None) -> None:
    # This waits for parameters that are still on their way, and reads masters that are stored as a difference to their parameter.
    state = {} if optimizer is None else optimizer.state_shards()
    for shard in named_shards(model):
        if shard.name in factors:
            _multiply(shard.parameter, factors[shard.name], shard.spec, shard.spec.offset(groups))
    for name, factor in factors.items():
        masters = state.get(f"optimizer.master.{name}", ())
        for part in masters if isinstance(masters, Sequence) else (masters,):
            _multiply(part.tensor, factor, part.spec, part.spec.offset(groups) if part.offset is None else part.offset)
    if optimizer is not None:
        optimizer.load_step_count(optimizer.step_count)


def _multiply(part: Tensor, factor: Tensor, spec: ShardSpec, offset: tuple[int, ...]) -> None:
    index = tuple(slice(begin, begin + size) for begin, size in zip(offset, part.shape, strict=True))
    part.mul_(factor.expand(spec.shape)[index].to(part.device))
