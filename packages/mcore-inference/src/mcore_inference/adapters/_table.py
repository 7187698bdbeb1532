# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The adapters of one engine: which are loaded, where they lie, and the steps in which they take part."""

import contextlib
import difflib
import hashlib
import json
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.adapters._config import LoraSlots
from mcore_inference.adapters._stacked import Chosen, StackedAdapters
from mcore_inference.adapters._weights import LoraWeights
from mcore_parallel.backends import TorchBackend
from mcore_parallel.comm import all_gather
from mcore_parallel.models import GPTModel, TransformerLayer
from mcore_parallel.nn import MLP
from mcore_parallel.tensor_parallel import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, is_adapter

__all__ = ["LoraLoadError", "LoraTable", "adapter_bytes", "adapter_root", "check_slots"]

Linear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear
_MAX_NAME_CHARACTERS = 256


@experimental_api
class LoraLoadError(ValueError):
    """An adapter that ``load_lora`` refuses; nothing was written."""


@experimental_api
def adapter_root(name: str, load: int) -> bytes:
    """What the cached beginnings of requests with an adapter begin from (``PrefixChain``): others than those of the base model, of other
    adapters, and of what was loaded under the name before.

    Args:
        name: of the adapter.
        load: number of its load.

    Example:
        >>> len({adapter_root("sql", 1), adapter_root("sql", 2), adapter_root("chat", 1), b""})
        4
    """
    return hashlib.sha256(f"lora {load} {name}".encode()).digest()


@experimental_api
def check_slots(model: GPTModel, slots: LoraSlots | None) -> None:
    """Whether a model can be served with adapters; nothing is allocated. With pp > 1 ``LoraTable.join_stages`` asks all stages what the
    targets name.

    Raises:
        ValueError: its backend is batch-invariant, a layer has an adapter that is being trained, or a target names no layer.
    """
    if slots is None:
        return
    if isinstance(model.backend, TorchBackend) and model.backend.batch_invariant:
        raise ValueError(
            f"lora={slots} and batch_invariant=True of the backend exclude each other: GEMMs of all slots are no bits of a trainer; merge "
            "the adapter, or serve without batch_invariant"
        )
    # Beside any layer, also one that cannot have slots.
    for name in (name for name, _ in model.named_parameters() if is_adapter(name)):
        layer = name.rpartition(".")[0].removesuffix(".lora").removesuffix("_lora")
        raise ValueError(f"{layer} has an adapter of its own; merge_lora before it is served with lora=LoraSlots(...)")
    if model.groups.pp.size == 1:
        _check_targets(slots, _layers(model, slots))


@experimental_api
def adapter_bytes(model: GPTModel, slots: LoraSlots | None) -> int:
    """Memory of the slots on this rank."""
    if slots is None:
        return 0
    shapes = [layer.weight_spec.local_shape(layer.groups) for layer in _layers(model, slots).values()]
    return slots.total_rank * _dtype(model).itemsize * sum(shape[-1] + torch.Size(shape[:-1]).numel() for shape in shapes)


@dataclass(frozen=True)
class _Loaded:
    slot: int
    root: bytes


# T tokens, P ranks of all slots.
@experimental_api
class LoraTable:
    """Adapters of an engine, in slots beside the linear layers of its model.

    A layer has them while a step of the engine runs (``applied``), and not in between: whoever calls the model otherwise gets the base. In
    another thread than the engine's nobody can meanwhile (RuntimeError): engines that step side by side have a model each. Tensors keep
    their addresses; adapters are written in place, behind the steps that were launched before.

    Each rank makes its own, and has the memory then; ``join_stages`` comes before the first load.

    Args:
        model: that ``check_slots`` lets pass.
        slots: how many, and beside which layers.
    """

    def __init__(self, model: GPTModel, slots: LoraSlots) -> None:
        self.slots = slots
        layers = _layers(model, slots)
        self._shapes = {name: layer.weight_spec.shape for name, layer in layers.items()}
        device, self._dtype, self._chosen = next(model.parameters()).device, _dtype(model), Chosen()
        sizes = {"max_loras": slots.max_loras, "max_lora_rank": slots.max_lora_rank, "dtype": self._dtype, "device": device}
        self._stacks = {
            name: (layer, StackedAdapters(layer.weight_spec, layer.groups, self._chosen, **sizes)) for name, layer in layers.items()
        }
        self._slot_P = torch.arange(slots.max_loras, dtype=torch.int32, device=device).repeat_interleave(slots.max_lora_rank)
        self._loaded: dict[str, _Loaded] = {}
        self._num_loads = 0

    def join_stages(self, model: GPTModel) -> None:
        """Learn which layers of other stages have slots; with pp > 1 all stages call it together.

        Raises:
            ValueError: a target names no layer of any stage.
        """
        self._shapes = _shapes_of_all_stages(model, self._shapes)
        _check_targets(self.slots, self._shapes)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the loaded adapters, in the order of their loads; any thread may ask."""
        return tuple(self._loaded)

    def slot(self, name: str) -> int:
        """Where a loaded adapter lies."""
        return self._loaded[name].slot

    def root(self, name: str) -> bytes:
        """``adapter_root`` of a loaded adapter."""
        return self._loaded[name].root

    @torch.no_grad()
    def load(self, name: str, weights: LoraWeights) -> None:
        """Write an adapter into a free slot.

        Args:
            name: by which requests choose it.
            weights: of layers among the targets; others keep what the base gives.

        Raises:
            LoraLoadError: the name is none or taken, no slot is free, the rank is above ``max_lora_rank``, a layer has no slots or another
                shape, or a number is not finite in the model's dtype.
        """
        self._check_name(name)
        if not isinstance(weights, LoraWeights):
            raise LoraLoadError(f"weights is a {type(weights).__name__}; give LoraWeights(rank=..., alpha=..., matrices=...)")
        limits = self.slots
        taken = {loaded.slot for loaded in self._loaded.values()}
        slot = next((slot for slot in range(limits.max_loras) if slot not in taken), None)
        if slot is None:
            raise LoraLoadError(
                f"all max_loras={limits.max_loras} slots are taken, by {', '.join(self.names)}; unload_lora one of them, or raise max_loras"
            )
        if weights.rank > limits.max_lora_rank:
            raise LoraLoadError(f"{name} has rank={weights.rank} and max_lora_rank={limits.max_lora_rank}; raise that")
        matrices = {layer: self._cast(layer, A, B, weights.scaling) for layer, (A, B) in weights.matrices.items()}
        for layer, (_, stack) in self._stacks.items():
            if layer in matrices:
                stack.write(slot, *matrices[layer])
            else:
                stack.clear(slot)
        self._num_loads += 1
        self._loaded[name] = _Loaded(slot, adapter_root(name, self._num_loads))

    def unload(self, name: str) -> None:
        """Let a loaded adapter's slot be free; no request may use it."""
        del self._loaded[name]

    @contextlib.contextmanager
    def applied(self, slots_T: Tensor) -> Iterator[None]:
        """Let the model's layers add the adapters of the tokens of one step.

        Args:
            slots_T: [T] int32, the slot of each token, -1 for the base.

        Raises:
            RuntimeError: a layer has got an adapter from elsewhere since the table was made.
        """
        if any(layer.lora is not None for layer, _ in self._stacks.values()):
            raise RuntimeError(
                "the model of an engine with lora=LoraSlots(...) has got adapters from elsewhere, by add_lora or by another engine in a "
                "step; give each a model of its own"
            )
        chosen, self._chosen.thread = self._chosen, threading.get_ident()
        chosen.slots_T, chosen.others_TP = slots_T, slots_T.unsqueeze(1) != self._slot_P
        try:
            for layer, stack in self._stacks.values():
                # A module would look through all that it has, for each layer of each step.
                vars(layer)["lora"] = stack
            yield
        finally:
            for layer, _ in self._stacks.values():
                vars(layer)["lora"] = None
            chosen.slots_T = chosen.others_TP = None

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
            raise LoraLoadError(f"name={repr(name)[:80]} must be 1 to {_MAX_NAME_CHARACTERS} printable characters without outer spaces")
        if name in self._loaded:
            raise LoraLoadError(f"an adapter {name} is loaded; unload_lora it first, or choose another name")

    def _cast(self, layer: str, A: Tensor, B: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Whole A, and B with its factor, in the model's dtype."""
        shape = self._shapes.get(layer)
        if shape is None:
            near = difflib.get_close_matches(str(layer), self._shapes, n=3)
            raise LoraLoadError(
                f"{layer} has no slots: they are beside targets={self.slots.wanted} of LoraSlots, never beside experts; the nearest are "
                f"{near}; add it to the targets, or merge the adapter"
            )
        *out, width = shape
        if A.shape[1:] != (width,) or B.shape[:-1] != tuple(out):
            raise LoraLoadError(f"{layer} of the adapter has A {list(A.shape)} and B {list(B.shape)}, and its base weight is {list(shape)}")
        wide = torch.promote_types(torch.promote_types(A.dtype, B.dtype), torch.float32)
        cast = A.detach().to(self._dtype), (B.detach().to(wide) * scaling).to(self._dtype)
        for kind, matrix in zip("AB", cast, strict=True):
            if not bool(torch.isfinite(matrix).all()):
                raise LoraLoadError(f"{kind} of {layer} holds numbers that are not finite in {self._dtype}")
        return cast


def _layers(model: GPTModel, slots: LoraSlots) -> dict[str, Linear]:
    """Linear layers of this stage that the targets name: of mixers, and of feed-forwards that see all tokens of a step."""
    layers: dict[str, Linear] = {}
    for number, block in model.layers.items():
        if not isinstance(block, TransformerLayer):
            continue
        parts = {block.mixer_name: block.mixer} | ({"mlp": block.mlp} if type(block.mlp) is MLP else {})
        for part_name, part in parts.items():
            for name, linear in () if part is None else part.named_children():
                if name in slots.wanted and isinstance(linear, Linear):
                    layers[f"layers.{number}.{part_name}.{name}"] = linear
    return layers


def _check_targets(slots: LoraSlots, layers: Collection[str]) -> None:
    """Whether each target is one of the layers of all stages.

    Raises:
        ValueError: one is not, or there are none.
    """
    available = {name.rpartition(".")[2] for name in layers}
    for target in slots.targets or ():
        if target not in available:
            raise ValueError(
                f"targets={target!r} of LoraSlots names no linear layer of this model that can have adapters (experts cannot); of the "
                f"targets it has {', '.join(sorted(available)) or 'none'}; leave it out"
            )
    if not available:
        raise ValueError(f"targets=None of LoraSlots is one of {', '.join(slots.wanted)}, and this model has none; name others that it has")


def _dtype(model: GPTModel) -> torch.dtype:
    """Of activations: that of weights which are not in fp8."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.dtype.itemsize > 1)


def _shapes_of_all_stages(model: GPTModel, own: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Global shapes of the weights with slots by the names of their layers; the stages of a pipeline call it together."""
    group = model.groups.pp
    if group.size == 1:
        return dict(own)
    device = next(model.parameters()).device
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(device)
    sizes = all_gather(torch.tensor([len(data)], device=device), group).tolist()
    rows = torch.nn.functional.pad(data, (0, max(sizes) - len(data))).unsqueeze(0)
    stages = [json.loads(bytes(row[:size])) for row, size in zip(all_gather(rows, group).tolist(), sizes, strict=True)]
    return {name: tuple(shape) for stage in stages for name, shape in stage.items()}
