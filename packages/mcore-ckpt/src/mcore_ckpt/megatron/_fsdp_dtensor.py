# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``fsdp_dtensor`` as Megatron-FSDP writes it: a weight of 32 bits is parameter and master, plain values are entries of their own."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core import CheckpointReader, DeferredTensor
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import Place, read_objects, read_places, write_objects
from mcore_ckpt._storage import Folder, dtype_of
from mcore_ckpt.chunks import Box
from mcore_ckpt.megatron._names import LAYERS, Cut, our_name, rule_of, their_shape
from mcore_ckpt.megatron._source import MegatronSource

__all__ = [
    "META",
    "STATE",
    "WEIGHT",
    "FsdpPiece",
    "fsdp_groups",
    "fsdp_tensors",
    "is_fsdp",
    "open_fsdp",
    "piece_box",
    "piece_name",
    "piece_of",
    "pieces_of",
    "precision_of",
    "write_values",
]

WEIGHT = "model.module."
"""Before a weight: its modules are the module that shards, and what is inside of the one that rounds to 16 bits."""
STATE = "optimizer.state.module.module.module."
"""Before a weight whose optimizer state it is; here all modules around the model count."""
META = "optimizer.param_to_group_meta.module.module.module."
"""Before a whole weight (of experts: of one) whose parameter group it is."""
_EXPERT = re.compile(
    r"(?P<layer>decoder\.layers\.\d+\.mlp\.)experts\."
    r"(?:(?P<grouped>linear_fc[12]\.(?:weight|bias))(?P<at>\d+)|local_experts\.(?P<number>\d+)\.(?P<alone>linear_fc[12]\.(?:weight|bias)))"
    r"(?:_(?P<half>[wv]))?"
)
_HALF = re.compile(r"(?P<key>.+\.linear_fc1\.(?:weight|bias))_(?P<half>[wv])")
_EXPERTS = ".mlp.experts.experts."
_HALVES = "wv"


@dataclass(frozen=True)
class FsdpPiece:
    """Which part of a whole tensor of a layer one stored tensor is; None where it is not cut that way."""

    expert: int | None = None
    half: int | None = None
    """0 for the rows of the gate, 1 for those of the values."""


def is_fsdp(names: Iterable[str]) -> bool:
    """Whether tensors of these names are of such a checkpoint."""
    return any(name.startswith((WEIGHT, "optimizer.state.module.")) for name in names)


def piece_of(name: str) -> tuple[str, FsdpPiece]:
    """The whole, per-layer key of a stored name without what precedes it, and which part of that it is.

    Example:
        >>> piece_of("decoder.layers.3.mlp.experts.linear_fc1.weight5_v")
        ('decoder.layers.3.mlp.experts.experts.linear_fc1.weight', Piece(expert=5, half=1))
    """
    match = _EXPERT.fullmatch(name)
    if match is not None:
        half = None if match["half"] is None else _HALVES.index(match["half"])
        return f"{match['layer']}experts.experts.{match['grouped'] or match['alone']}", FsdpPiece(
            int(match["at"] or match["number"] or 0), half
        )
    match = _HALF.fullmatch(name)
    return (name, FsdpPiece()) if match is None else (match["key"], FsdpPiece(half=_HALVES.index(match["half"])))


def piece_name(key: str, piece: FsdpPiece) -> str:
    """Inverse of `piece_of`; experts get the names of the grouped product."""
    if piece.expert is not None:
        key = f"{key.replace(_EXPERTS, '.mlp.experts.')}{piece.expert}"
    return key if piece.half is None else f"{key}_{_HALVES[piece.half]}"


def pieces_of(key: str, shape: Sequence[int], *, gated: bool) -> list[FsdpPiece]:
    """The parts in which the tensor of a whole, per-layer key is stored.

    Args:
        shape: ours: experts first, then a gate and its values where there are some.
        gated: the tensor has a dim of gate and values.
    """
    halves = (0, 1) if gated and (rule := rule_of(key, gated=True)) is not None and rule.cut is Cut.GATED else (None,)
    experts = range(shape[0]) if _EXPERTS in key else (None,)
    return [FsdpPiece(expert, half) for expert in experts for half in halves]


def piece_box(shape: Sequence[int], piece: FsdpPiece) -> Box:
    """Where a part lies in the tensor of our shape, [experts, 2, rows, ...] without the dims that it does not have."""
    chosen = [place for place in (piece.expert, piece.half) if place is not None]
    rest = tuple(shape[len(chosen) :])
    return Box((*chosen, *(0 for _ in rest)), (*(1 for _ in chosen), *rest))


_WEIGHT = re.compile(r"model\.(?:module\.)+(?P<name>.+)")
_STATE = re.compile(r"optimizer\.(?:\d+\.)?state\.(?:module\.)+(?P<name>.+)\.(?P<kind>\w+)")
_META = re.compile(r"optimizer\.(?:\d+\.)?param_to_group_meta\.(?:module\.)+(?P<name>.+)\.(?P<field>\w+)")
_SCHEDULER = "opt_param_scheduler."
_KINDS = ("exp_avg", "exp_avg_sq")
_COMMON = ("args", "checkpoint_version", "iteration")
_ENDS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
_ATTENTION = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")
_LATENT = tuple(f"self_attention.linear_{name}.weight" for name in ("kv_down_proj", "kv_up_proj", "proj"))
_LATENT_QUERIES = ("self_attention.linear_q_proj.weight",)
_LOW_RANK_QUERIES = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_q_up_proj.weight")
_DENSE = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
_MIXTURE = ("mlp.router.weight", "mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight")

_Pieces = dict[FsdpPiece, str]
"""Of one whole tensor: the name under which each part is stored."""


def open_fsdp(folder: Folder, config: Mapping[str, Any], *, optimizer: bool = True) -> MegatronSource:
    """Open a checkpoint; only its metadata and plain values are read.

    Args:
        config: takes precedence over what its args say. ``bf16`` or ``fp16`` make weights of 16 bits and masters of those of 32.

    Raises:
        CheckpointingException: damaged; weights or parts of them are missing, by their names there.
    """
    reader = CheckpointReader(folder)
    weights: dict[str, _Pieces] = {}
    states: dict[tuple[str, str], _Pieces] = {}
    left, step = [], None
    for name in reader.manifest.tensors:
        weight, state = _WEIGHT.fullmatch(name), _STATE.fullmatch(name)
        if weight is not None and not name.endswith("_extra_state"):
            key, piece = piece_of(weight["name"])
            weights.setdefault(key, {})[piece] = name
        elif state is not None and state["kind"] in _KINDS:
            key, piece = piece_of(state["name"])
            states.setdefault((state["kind"], key), {})[piece] = name
        elif state is not None and state["kind"] == "step":
            step = step or name
        else:
            left.append(name)
    common, groups, others = _values(folder, optimizer=optimizer)
    if step is not None and optimizer:
        count = int(reader.read(step))
        groups = [{"step": count, **group} for group in groups]
    args = common.get("args")
    args = {**(args if isinstance(args, Mapping) else {}), **config}
    missing = {*_missing_weights(weights, args), *_missing_parts(weights, states, args)}
    if missing:
        raise CheckpointingException(f"{folder} lacks {list_names(missing)}; a checkpoint with all weights of the model is needed")
    tensors = {key: _joined(reader, pieces) for key, pieces in weights.items()}
    states_by_key = {place: _joined(reader, pieces) for place, pieces in states.items()} if optimizer else {}
    narrow = torch.bfloat16 if args.get("bf16") else torch.float16 if args.get("fp16") else torch.float32
    masters = {key: tensor for key, tensor in tensors.items() if tensor.dtype == torch.float32 != narrow}
    tensors |= {key: DeferredTensor(narrow, tensor.global_shape, partial(_rounded, tensor, narrow)) for key, tensor in masters.items()}
    if optimizer:
        states_by_key |= {("param", key): tensor for key, tensor in masters.items()}
    return MegatronSource(tensors, common, states_by_key, tuple(groups), (*left, *others))


def _missing_weights(weights: Collection[str], args: Mapping[str, Any]) -> Iterator[str]:
    """What a GPT model needs, what layers of the same kind have, and layers between others."""
    layers: dict[int, set[str]] = {number: set() for number in range(int(args.get("num_layers") or 0))}
    for key in weights:
        number, _, part = key.removeprefix(LAYERS).partition(".")
        if key.startswith(LAYERS) and number.isdigit():
            layers.setdefault(int(number), set()).add(part)
    layers = {number: layers.get(number, set()) for number in range(1 + max(layers, default=-1))}
    output = ("output_layer.weight",) if args.get("untie_embeddings_and_output_weights") else ()
    yield from (WEIGHT + key for key in (*_ENDS, *output) if key not in weights)
    mixtures = {number for number, parts in layers.items() if any(part in _MIXTURE for part in parts)}
    for number, parts in layers.items():
        alike = [those for other, those in layers.items() if (other in mixtures) == (number in mixtures)]
        needed = set().union(*alike)
        # Another attention or feed-forward, which the import refuses by name, needs other weights.
        if all(our_name(f"{LAYERS}{number}.{part}") for part in parts):
            needed |= {*_attention(needed), *(_MIXTURE if number in mixtures else _DENSE)}
        yield from (f"{WEIGHT}{LAYERS}{number}.{part}" for part in needed - parts)


def _attention(parts: Collection[str]) -> tuple[str, ...]:
    """What the attention needs of which these are parts."""
    if not any(part in parts for part in (*_LATENT[:2], *_LATENT_QUERIES, *_LOW_RANK_QUERIES)):
        return _ATTENTION
    return (*_LATENT, *(_LATENT_QUERIES if _LATENT_QUERIES[0] in parts else _LOW_RANK_QUERIES))


def _missing_parts(weights: Mapping[str, _Pieces], states: Mapping[tuple[str, str], _Pieces], args: Mapping[str, Any]) -> Iterator[str]:
    """Experts and halves of which others are there, weights of which only optimizer state is, and one of two moments."""
    for (kind, key), pieces in [*((("", key), pieces) for key, pieces in weights.items()), *states.items()]:
        experts = [piece.expert for piece in pieces if piece.expert is not None]
        count = max(1 + max(experts), int(args.get("num_experts") or 0)) if experts else 0
        halves = (0, 1) if any(piece.half is not None for piece in pieces) else (None,)
        for expert in range(count) if experts else (None,):
            for half in halves:
                if FsdpPiece(expert, half) not in pieces:
                    name = piece_name(key, FsdpPiece(expert, half))
                    yield f"{STATE}{name}.{kind}" if kind else WEIGHT + name
        if kind and key not in weights:
            yield WEIGHT + key
    kinds = {kind for kind, _ in states}
    yield from (f"{STATE}{key}.{kind}" for _, key in states for kind in kinds if (kind, key) not in states)


def _values(folder: Folder, *, optimizer: bool) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Common values, the group of each weight, and the names of entries that are not carried over."""
    common: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    left = []
    for name, place in read_places(folder).items():
        meta = _META.fullmatch(name)
        if name in _COMMON:
            common[name] = read_objects(*place)
        elif name.startswith(_SCHEDULER):
            scheduler[name.removeprefix(_SCHEDULER)] = read_objects(*place)
        elif meta is not None:
            # The experts of a layer are one tensor here, and of one group.
            if optimizer and not piece_of(meta["name"])[1].expert:
                groups.setdefault(meta["name"], {})[meta["field"]] = read_objects(*place)
        else:
            left.append(name)
    if scheduler:
        common["opt_param_scheduler"] = scheduler
    return common, list(groups.values()), left


def _joined(reader: CheckpointReader, pieces: Mapping[FsdpPiece, str]) -> DeferredTensor:
    """One tensor of parts alike: experts first, a gate's rows above its values'."""
    names = [pieces[piece] for piece in sorted(pieces, key=lambda piece: (piece.expert or 0, piece.half or 0))]
    records = [reader.record(name) for name in names]
    first = records[0]
    if any((record.shape, record.dtype) != (first.shape, first.dtype) for record in records):
        raise CheckpointingException(
            f"{reader.folder}: the parts {list_names(names)} differ in shape or dtype; they are those of one tensor"
        )
    if len({(piece.expert is None, piece.half is None) for piece in pieces}) > 1:
        raise CheckpointingException(f"{reader.folder}: {list_names(names)} are a whole tensor and parts of it; keep one or the other")
    dtype, piece = dtype_of(first.dtype), next(iter(pieces))
    if piece == FsdpPiece():
        return DeferredTensor(dtype, first.shape, partial(reader.read, names[0]))
    experts = () if piece.expert is None else (1 + max(one.expert or 0 for one in pieces),)
    halves = () if piece.half is None else (2,)
    apart = (*experts, *halves, *first.shape)
    shape = (*experts, (2 if halves else 1) * first.shape[0], *first.shape[1:])
    return DeferredTensor(dtype, shape, partial(_join, reader, dict(pieces), dtype, apart, shape))


def _join(
    reader: CheckpointReader, pieces: Mapping[FsdpPiece, str], dtype: torch.dtype, apart: Sequence[int], shape: Sequence[int]
) -> Tensor:
    whole = torch.empty(tuple(apart), dtype=dtype)
    for piece, name in pieces.items():
        whole[piece_box(apart, piece).slices()] = reader.read(name)
    return whole.reshape(tuple(shape))


def _rounded(tensor: DeferredTensor, dtype: torch.dtype) -> Tensor:
    return tensor.read().to(dtype)


_VALUES_FILE = "values.distcp"
_DECOUPLED_LR = ("embedding.word_embeddings.weight", "output_layer.weight")


def fsdp_tensors(
    reader: CheckpointReader, weights: Mapping[str, str], states: Mapping[tuple[str, str], str], step: int
) -> dict[str, DeferredTensor]:
    """What is stored of the model and its optimizer; a master, where there is one, in the place of its weight.

    Args:
        weights: our name by whole, per-layer key.
        states: our name by kind ("param" for masters, "exp_avg", "exp_avg_sq") and key.
        step: updates that the optimizer made, which is stored for each weight.

    Raises:
        CheckpointingException: optimizer state without its weight.
    """
    state: dict[str, DeferredTensor] = {}
    for key, name in weights.items():
        state |= _pieces(reader, key, states.get(("param", key), name), WEIGHT, "")
    for (kind, key), name in states.items():
        if key not in weights:
            raise CheckpointingException(f"{reader.folder}: {name} is there and its weight is not; drop it, or export the whole model")
        if kind != "param":
            state |= _pieces(reader, key, name, STATE, f".{kind}")
        if kind == "exp_avg":
            count = DeferredTensor(torch.float32, (), partial(torch.tensor, float(step)))
            state |= dict.fromkeys(_pieces(reader, key, name, STATE, ".step"), count)
    return state


def fsdp_groups(groups: Sequence[Mapping[str, Any]], weights: Mapping[str, tuple[int, ...]], step: int) -> dict[str, Any]:
    """The parameter group of each weight, an entry for each of its settings.

    Groups do not list their weights; which one is meant follows from what they differ in: biases and norms do not decay, experts are
    apart, and so may be the embedding and the output. Settings of one group there must be alike, also of its experts.

    Args:
        weights: our shape by whole, per-layer key.

    Raises:
        CheckpointingException: no group or several fit a weight.
    """
    values: dict[str, Any] = {}
    for key, shape in weights.items():
        fields = {**_group_of(groups, key, len(their_shape(key, shape))), "step": step}
        # Once sharded, a parameter of an expert is no longer marked as one.
        if "is_expert_parallel" in fields:
            fields["is_expert_parallel"] = False
        if "betas" in fields:
            fields["betas"] = tuple(fields["betas"])
        # A gate and its values are one parameter there; only their tensors are stored apart.
        for piece in pieces_of(key, shape, gated=False):
            values |= {f"{META}{piece_name(key, piece)}.{field}": value for field, value in fields.items()}
    return values


def _group_of(groups: Sequence[Mapping[str, Any]], key: str, num_dims: int) -> Mapping[str, Any]:
    traits = {"is_expert_parallel": ".mlp.experts." in key, "is_decoupled_lr": key in _DECOUPLED_LR}
    traits["wd_mult"] = num_dims > 1 and not key.endswith(".bias")
    candidates = list(groups)
    for trait, wanted in traits.items():
        if len({bool(group.get(trait)) for group in candidates}) > 1:
            candidates = [group for group in candidates if bool(group.get(trait)) == wanted]
    if len(candidates) != 1:
        raise CheckpointingException(
            f"optimizer_param_groups: {len(candidates)} of {len(groups)} groups fit {key}; give optimizer_config, which makes them anew"
        )
    return candidates[0]


def precision_of(reader: CheckpointReader, names: Sequence[str]) -> dict[str, bool]:
    """Their settings of the element type in which the weights of these names are used."""
    dtypes = {reader.record(name).dtype for name in names}
    return {"bf16": "BF16" in dtypes, "fp16": "F16" in dtypes and "BF16" not in dtypes}


def write_values(folder: Folder, values: Mapping[str, Any]) -> dict[str, Place]:
    """Write the entries that are no tensors into a file of the folder; returns where each lies.

    Equal values share their bytes.
    """
    places: dict[str, Place] = {}
    written: dict[bytes, Place] = {}
    end = 0
    for name, value in values.items():
        content = write_objects(value)
        if content not in written:
            written[content] = (_VALUES_FILE, end, len(content))
            end += len(content)
        places[name] = written[content]
    folder.write(_VALUES_FILE, [memoryview(content) for content in written])
    return places


def _pieces(reader: CheckpointReader, key: str, name: str, before: str, after: str) -> dict[str, DeferredTensor]:
    record = reader.record(name)
    # A gate and its values are one dim in their shape of the whole, and one above the other.
    gated = len(record.shape) > len(their_shape(name, record.shape)) and ".linear_fc1." in key
    whole = record.shape if gated else their_shape(name, record.shape)
    tensors = {}
    for piece in pieces_of(key, whole, gated=gated):
        box = piece_box(whole, piece)
        shape = tuple(box.shape[sum(place is not None for place in (piece.expert, piece.half)) :])
        read = partial(_read, reader, name, None if piece == FsdpPiece() else box, shape)
        tensors[f"{before}{piece_name(key, piece)}{after}"] = DeferredTensor(dtype_of(record.dtype), shape, read)
    return tensors


def _read(reader: CheckpointReader, name: str, box: Box | None, shape: tuple[int, ...]) -> Tensor:
    return reader.read(name, box).reshape(shape)
