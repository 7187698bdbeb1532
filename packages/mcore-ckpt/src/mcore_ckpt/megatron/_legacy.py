# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The older form: a directory for each model-parallel rank, ``mp_rank_TT[_PPP][_EEE]``, with files of ``torch.save``. Read only."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core import DeferredTensor
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import read_objects
from mcore_ckpt._storage import Folder, StoredFile
from mcore_ckpt.megatron._flat import Domain, gathered_domain, is_gathered, read_flat_states
from mcore_ckpt.megatron._names import LAYERS, Cut, is_gated, join_cut, rule_of
from mcore_ckpt.megatron._source import MegatronSource, find_groups

__all__ = ["is_legacy", "open_legacy"]

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_MODEL_FILE = "model_optim_rng.pt"
_STATE_FILE = "distrib_optim.pt"
_LAYER = re.compile(re.escape(LAYERS) + r"(\d+)\.(.+)")
_ONE_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<one>\d+)\.(?P<fc>linear_fc[12]\.(?:weight|bias))|"
    r"(?P<fc_>linear_fc[12]\.(?:weight|bias))(?P<one_>\d+))"
)
_ALL_EXPERTS = re.compile(r"(?P<layer>.*mlp\.)experts\.weight(?P<product>[12])")


@dataclass(frozen=True)
class _Rank:
    """A directory: its place among the tensor, pipeline and expert ranks, and the weights of its chunks."""

    folder: Folder
    tp: int
    pp: int
    ep: int
    content: Mapping[str, Any]

    @property
    def chunks(self) -> list[Mapping[str, Any]]:
        if "model" in self.content:
            return [self.content["model"]]
        return [self.content[f"model{number}"] for number in range(len(self.content)) if f"model{number}" in self.content]


_Parts = dict[str, dict[tuple[int, int], Tensor]]
"""By whole key: the parts by expert (0 for none) and tensor-parallel rank."""


def is_legacy(folder: Folder) -> bool:
    """Whether directories of ranks lie there."""
    return any(_RANK.fullmatch(name) for name in folder.names())


def open_legacy(folder: Folder, config: Mapping[str, Any], *, optimizer: bool = True) -> MegatronSource:
    """Open all ranks' files; tensors are views of them.

    Raises:
        CheckpointingException: damaged, a rank is missing, or a form older than that of the GPT models of megatron-core.
    """
    ranks = _ranks(folder, config)
    common = {key: value for key, value in ranks[0].content.items() if not key.startswith("model") and key != "optimizer"}
    args = {**_args(common), **config}
    parts = _parts(folder, ranks)
    if args.get("untie_embeddings_and_output_weights") is False:
        parts.pop("output_layer.weight", None)
    gated = is_gated({key: next(iter(shards.values())).shape for key, shards in parts.items()})
    tensors = {key: _whole(key, shards, args, gated=gated) for key, shards in parts.items()}
    groups = [group for rank in ranks for group in find_groups(rank.content.get("optimizer"))]
    domains, left = _domains(ranks) if optimizer else ([], [])
    states = read_flat_states(domains, tensors, args) if domains else {}
    if optimizer and not domains and any("optimizer" in rank.content for rank in ranks):
        left = [*left, "optimizer"]
    return MegatronSource(tensors, common, states, tuple(groups), tuple(left))


def _ranks(folder: Folder, config: Mapping[str, Any]) -> list[_Rank]:
    """All directories, in the order of pipeline, tensor and expert rank; of a number that may be either, the settings say which."""
    ranks = []
    for name in folder.names():
        match = _RANK.fullmatch(name)
        if match is None:
            continue
        place = folder.child(name)
        content = read_objects(StoredFile(place, _MODEL_FILE))
        if not isinstance(content, dict) or not any(key.startswith("model") for key in content if isinstance(key, str)):
            raise CheckpointingException(f"{place}/{_MODEL_FILE} holds no model")
        settings = {**_args(content), **config}
        numbers = [int(number) for number in match.groups()[1:] if number is not None]
        if len(numbers) == 1:
            has_experts = (settings.get("expert_model_parallel_size") or 1) > 1
            staged = int(settings.get("pipeline_model_parallel_size") or (1 if has_experts else 2)) > 1
            numbers = [numbers[0], 0] if staged else [0, numbers[0]]
        pp, ep = numbers or (0, 0)
        ranks.append(_Rank(place, int(match[1]), pp, ep, content))
    ranks.sort(key=lambda rank: (rank.pp, rank.tp, rank.ep))
    for axis in ("tp", "pp", "ep"):
        there = {getattr(rank, axis) for rank in ranks}
        if missing := sorted(set(range(max(there))) - there):
            raise CheckpointingException(f"{folder}: no directory of {axis} rank {missing[0]}, though there is one of rank {max(there)}")
    if missing := sorted({(rank.tp, stage.pp) for rank in ranks for stage in ranks} - {(rank.tp, rank.pp) for rank in ranks}):
        raise CheckpointingException(f"{folder}: no directory of tensor-parallel rank {missing[0][0]} of stage {missing[0][1]}")
    return ranks


def _args(content: Mapping[str, Any]) -> Mapping[str, Any]:
    args = content.get("args")
    return args if isinstance(args, Mapping) else {}


def _parts(folder: Folder, ranks: Sequence[_Rank]) -> _Parts:
    """The parts of every weight, its layer counted over the stages, its expert over the expert ranks."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            if not isinstance(chunk, Mapping) or "language_model" in chunk:
                raise CheckpointingException(
                    f"{rank.folder}: a model of a release before megatron-core; load and save it with a later release first"
                )
            layers = [int(match[1]) for key in chunk if (match := _LAYER.fullmatch(str(key)))]
            counts[number, rank.pp] = 1 + max(layers, default=-1)
    firsts, total = {}, 0
    for place in sorted(counts):
        firsts[place], total = total, total + counts[place]
    chunks = {(place, number): _apart(chunk, ranks) for place, rank in enumerate(ranks) for number, chunk in enumerate(rank.chunks)}
    num_experts = 1 + max((_expert(str(key)) or 0 for chunk in chunks.values() for key in chunk), default=0)
    parts: _Parts = {}
    for place, rank in enumerate(ranks):
        for number in range(len(rank.chunks)):
            for key, value in chunks[place, number].items():
                if not isinstance(value, Tensor) or key.endswith("_extra_state"):
                    continue
                match, expert = _LAYER.fullmatch(key), _expert(key)
                if match is not None:
                    key = f"{LAYERS}{firsts[number, rank.pp] + int(match[1])}.{match[2]}"
                if expert is None:
                    parts.setdefault(key, {}).setdefault((0, rank.tp), value)
                    continue
                one = _ONE_EXPERT.search(key)
                assert one is not None
                key = f"{key[: one.start()]}mlp.experts.experts.{one['fc'] or one['fc_']}"
                parts.setdefault(key, {}).setdefault((rank.ep * num_experts + expert, rank.tp), value)
    if not parts:
        raise CheckpointingException(f"{folder} holds no weights")
    return parts


def _apart(chunk: Mapping[str, Any], ranks: Sequence[_Rank]) -> Mapping[str, Any]:
    """A chunk, of whose GroupedMLP, if it has one, each expert has a name: all of a rank's experts are one after another in a tensor there,
    ``weight1`` as [experts, D, W] and ``weight2`` as [experts, F, D], whatever its shape.

    Raises:
        CheckpointingException: no router says how many experts there are, or its number does not fit.
    """
    apart: dict[str, Any] = {}
    for key, value in chunk.items():
        match = _ALL_EXPERTS.fullmatch(str(key))
        if match is None or not isinstance(value, Tensor):
            apart[key] = value
            continue
        router, num_ranks = chunk.get(f"{match['layer']}router.weight"), 1 + max(rank.ep for rank in ranks)
        if not isinstance(router, Tensor):
            raise CheckpointingException(f"{key}: no {match['layer']}router.weight beside it says how many experts there are")
        count, hidden = router.shape[0] // num_ranks, router.shape[1]
        if count * num_ranks != router.shape[0] or value.numel() % (count * hidden):
            raise CheckpointingException(f"{key} of shape {list(value.shape)} are no {router.shape[0]} experts on {num_ranks} ranks")
        experts = value.reshape((count, hidden, -1) if match["product"] == "1" else (count, -1, hidden)).transpose(-1, -2)
        for expert, weight in enumerate(experts):
            apart[f"{match['layer']}experts.local_experts.{expert}.linear_fc{match['product']}.weight"] = weight
    return apart


def _expert(key: str) -> int | None:
    match = _ONE_EXPERT.search(key)
    return int(match["one"] or match["one_"] or 0) if match else None


def _whole(key: str, shards: Mapping[tuple[int, int], Tensor], args: Mapping[str, Any], *, gated: bool) -> DeferredTensor:
    """The tensor of all parts; made when it is asked for."""
    rule, stacked = rule_of(key, gated=gated), ".experts." in key
    how = Cut.WHOLE if rule is None or (stacked and args.get("expert_tensor_parallel_size") == 1) else rule.cut
    if how is Cut.LATENT and args.get("transformer_impl") == "local":
        how = Cut.ROWS
    experts: dict[int, list[Tensor]] = {}
    for (expert, _), part in sorted(shards.items(), key=lambda item: item[0]):
        experts.setdefault(expert, []).append(part)
    sketch = _joined({one: [torch.empty(part.shape, device="meta") for part in parts] for one, parts in experts.items()}, how, stacked)
    return DeferredTensor(next(iter(shards.values())).dtype, tuple(sketch.shape), partial(_joined, experts, how, stacked))


def _joined(experts: Mapping[int, Sequence[Tensor]], how: Cut, stacked: bool) -> Tensor:
    wholes = [join_cut(parts, how) for parts in experts.values()]
    return torch.stack(wholes) if stacked else wholes[0]


def _domains(ranks: Sequence[_Rank]) -> tuple[list[Domain], list[str]]:
    """The flat states of the distributed optimizer, where it wrote a file beside the weights."""
    domains, left = [], []
    num_tp = 1 + max(rank.tp for rank in ranks)
    for rank in ranks:
        if rank.folder.size(_STATE_FILE) is None or rank.ep:
            continue
        where = f"{rank.folder}/{_STATE_FILE}"
        content = read_objects(StoredFile(rank.folder, _STATE_FILE), deferred=True)
        if is_gathered(content):
            domains.append(gathered_domain(where, content, 0, rank.pp * num_tp + rank.tp))
        else:
            left.append(where)
    return domains, left
