# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Activations that are computed again in the backward instead of kept."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_parallel.comm import all_gather, local_slice
from mcore_parallel.groups import Group

_EXPERT_PARTS = ("moe_act", "shared_experts")
_PARTS = ("attention", "core_attention", "mlp", "norm", *_EXPERT_PARTS)


@runtime_checkable
class DrawsNoise(Protocol):
    """A module, or a builder of feed-forwards, that may draw random numbers in training; a second run has to draw the same."""

    @property
    def noise_fields(self) -> str:
        """The fields that ask for them, with their values; empty where nothing is drawn."""
        ...


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What a model computes again in its backward.

    Raises:
        ValueError: a value that does not exist or does not fit the granularity.

    Example:
        >>> RecomputeConfig(modules=("norm", "mlp")).granularity
        'selective'
    """

    granularity: Literal["full", "selective"] = "selective"
    """"full" keeps the inputs of layers only, "selective" runs the chosen parts of every layer again."""
    modules: tuple[str, ...] = ("core_attention",)
    """Parts for "selective": "core_attention" (attention without its projections), "attention", "mlp" (whole), and "norm", whose
    output is dropped once the projections have read it, and refilled. Of a mixture "mlp" repeats the exchange of tokens, too; inside it
    "moe_act" drops and refills the output of the experts' activation, and "shared_experts" runs the shared experts again."""
    method: Literal["uniform", "block"] = "uniform"
    """For "full": "uniform" runs ``num_layers`` layers again at a time, "block" only the first ``num_layers`` of a stage, one at a time."""
    num_layers: int = 1
    """Layers of "full"; see ``method``."""
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    """For "block": of the micro-batches whose forwards a stage holds at once, so many run only the first ``num_layers`` layers again
    (0 layers are allowed), the others all layers. Stages behind hold fewer, and can afford to keep more of each. None for all alike."""
    distribute_saved_activations: bool = False
    """For "full" without sequence parallelism: each tp rank keeps its share of an input and gathers it for the backward."""
    preserve_rng_state: bool = True
    """Random numbers of the second run are those of the first; costs a copy of the generators' states. False is for what draws none."""

    def __post_init__(self) -> None:
        if self.granularity not in ("full", "selective"):
            raise ValueError(f"granularity={self.granularity!r} must be 'full' or 'selective'; for none pass no config")
        if self.method not in ("uniform", "block"):
            raise ValueError(f"method={self.method!r} must be 'uniform' or 'block'")
        partial = self.num_microbatches_with_partial_activation_checkpoints
        if partial is not None and partial < 0:
            raise ValueError(f"num_microbatches_with_partial_activation_checkpoints={partial} must not be negative")
        if partial is not None and (self.granularity, self.method) != ("full", "block"):
            raise ValueError(
                f"num_microbatches_with_partial_activation_checkpoints={partial} needs granularity='full' and method='block', "
                f"found {self.granularity!r} and {self.method!r}: with others no micro-batch keeps a part"
            )
        if self.num_layers < (1 if partial is None else 0):
            raise ValueError(f"num_layers={self.num_layers} must be at least 1")
        if unknown := set(self.modules) - set(_PARTS):
            raise ValueError(f"modules holds {sorted(unknown)}, choose among {', '.join(_PARTS)}")
        if self.granularity == "selective" and not self.modules:
            raise ValueError("modules is empty; name a part, or pass no config")
        if {"attention", "core_attention"} <= set(self.modules):
            raise ValueError("modules holds 'attention' and the 'core_attention' inside it; drop one")
        if "mlp" in self.modules and (parts := sorted({*_EXPERT_PARTS} & {*self.modules})):
            raise ValueError(f"modules holds 'mlp' and {parts} inside it; drop one")
        if self.distribute_saved_activations and self.granularity != "full":
            raise ValueError("distribute_saved_activations=True needs granularity='full'")
        for name in ("method", "num_layers"):
            if self.granularity != "full" and (value := getattr(self, name)) != getattr(RecomputeConfig, name):
                raise ValueError(f"{name}={value!r} says which layers run again as a whole; set granularity='full', or leave it out")

    @property
    def parts(self) -> frozenset[str]:
        """Parts of a layer that run again; none for "full", whose layers do so as a whole."""
        return frozenset(self.modules) if self.granularity == "selective" else frozenset()

    def check_noise(self, noise_fields: str, parts: Collection[str]) -> None:
        """Whether what draws random numbers draws the same ones again.

        Args:
            noise_fields: as of `DrawsNoise`.
            parts: of layers, that it may lie in.

        Raises:
            ValueError: it runs again, and draws others.
        """
        again = self.granularity == "full" or not self.parts.isdisjoint(parts)
        if noise_fields and again and not self.preserve_rng_state:
            raise ValueError(
                f"preserve_rng_state=False gives the second run other random numbers, and {noise_fields} draws some: gradients would be "
                "those of another forward; set preserve_rng_state=True, or draw none"
            )

    @property
    def expert_parts(self) -> list[str]:
        """Those of ``parts`` that lie inside experts, sorted."""
        return sorted(self.parts & {*_EXPERT_PARTS})

    def spans(self, num_layers: int, slot: int | None = None) -> list[tuple[int, int, bool]]:
        """Layers of a stage in order as (first, end, run again as one).

        Args:
            num_layers: of the stage.
            slot: as ``Step.slot``; without one all layers count that any micro-batch runs again.
        """
        if self.granularity == "selective":
            return [(0, num_layers, False)]
        if self.method == "uniform":
            return [(first, min(first + self.num_layers, num_layers), True) for first in range(0, num_layers, self.num_layers)]
        partial = self.num_microbatches_with_partial_activation_checkpoints
        everything = partial is not None and (slot is None or slot >= partial)
        again = num_layers if everything else min(self.num_layers, num_layers)
        return [(first, first + 1, True) for first in range(again)] + ([(again, num_layers, False)] if again < num_layers else [])


def recompute(function: Callable[..., Any], *inputs: Any, preserve_rng_state: bool = True, share: Group | None = None) -> Any:
    """``function(*inputs)`` that keeps its inputs only and runs again when the backward needs more.

    Args:
        function: gives the same result when called again.
        inputs: tensors that need a gradient must be among them.
        preserve_rng_state: give the second run the random numbers of the first.
        share: ranks that all hold the same first input: each keeps its slice of dim 0, and they gather it for the backward.

    Returns:
        What the function returns, with the same bits and the same gradients as without.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    with contextlib.nullcontext() if share is None or share.size == 1 else _shared(inputs[0], share):
        return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def discard_output(
    produce: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]],
    consume: Callable[[Tensor], Any],
    x: Tensor,
    *,
    preserve_rng_state: bool = True,
) -> Any:
    """``consume(produce(x))`` that keeps neither what ``produce`` would keep nor its output, but ``x``.

    The output is dropped when ``consume`` returns; the first use in the backward runs ``produce`` once more, which
    refills every place where the output or an inner tensor was saved. In a graph under compilation the partitioner decides
    what to keep, and this steps aside.

    Args:
        produce: cheap; gives the same result when called again. It may give a second tensor, which is kept and returned beside the result.
        consume: reads the output; nothing of the output may be used elsewhere.
        x: input of ``produce``.
        preserve_rng_state: as in ``recompute``.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> discard_output(torch.exp, lambda y: (y * y).sum(), x).backward()
        >>> torch.equal(x.grad, 2 * x.exp().square())
        True
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        y, more = _pair(produce(x))
        return consume(y) if more is None else (consume(y), more)
    frame = _Frame(produce, x, preserve_rng_state)
    with saved_tensors_hooks(frame.pack_inner, _unpack):
        y, more = _pair(produce(x))
    storage = y.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        return frame.pack_output(tensor) if tensor.untyped_storage().data_ptr() == storage else tensor

    with saved_tensors_hooks(pack, _unpack):
        result = consume(y)
    return result if more is None else (result, more)


def _pair(made: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    return made if isinstance(made, tuple) else (made, None)


class _Slot:
    """A place in the graph where a tensor was saved that is not there."""

    def __init__(self, frame: "_Frame", inner: int | None, layout: tuple[Any, ...] | None) -> None:
        self.frame, self.inner, self.layout = frame, inner, layout
        self.value: Tensor | None = None


class _Frame:
    """One run of ``produce`` and the slots that wait for its second one."""

    def __init__(self, produce: Callable[[Tensor], Any], x: Tensor, preserve_rng_state: bool) -> None:
        self.produce = produce
        self.kept = _Keep.apply(torch.empty(0, requires_grad=True), x)
        self.needs_grad = x.requires_grad
        self.random = _RandomState.now(x) if preserve_rng_state else None
        self.num_inner = 0
        self.slots: list[weakref.ref[_Slot]] = []

    def pack_inner(self, tensor: Tensor) -> _Slot:
        self.num_inner += 1
        return self._slot(self.num_inner - 1, None)

    def pack_output(self, tensor: Tensor) -> _Slot:
        return self._slot(None, (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()))

    def fill(self) -> None:
        """Run again and give every slot that still exists its tensor."""
        inner: list[Tensor] = []
        x = self.kept.grad_fn.saved_tensors[0].detach().requires_grad_(self.needs_grad)
        replayed = contextlib.nullcontext() if self.random is None else self.random.replayed()
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: inner.append(tensor.detach()), _never), replayed:
            output = _pair(self.produce(x))[0].detach()
        if len(inner) != self.num_inner:
            raise RuntimeError(
                f"the second run saved {len(inner)} tensors, the first {self.num_inner}; the function must do the same each time"
            )
        for reference in self.slots:
            slot = reference()
            if slot is not None:
                slot.value = inner[slot.inner] if slot.inner is not None else _laid_out(output, slot.layout)

    def _slot(self, inner: int | None, layout: tuple[Any, ...] | None) -> _Slot:
        slot = _Slot(self, inner, layout)
        self.slots.append(weakref.ref(slot))
        return slot


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Slot):
        return saved
    if saved.value is None:
        saved.frame.fill()
    value, saved.value = saved.value, None
    assert value is not None
    return value


def _never(saved: Any) -> Tensor:
    raise AssertionError("the graph of the second run is never walked")


def _laid_out(output: Tensor, layout: tuple[Any, ...] | None) -> Tensor:
    assert layout is not None
    dtype, size, stride, offset = layout
    return output.view(dtype).as_strided(size, stride, offset)


class _Keep(torch.autograd.Function):
    """Saves a tensor in the graph, where hooks around the layer (offloading, an outer recomputation) see it."""

    @staticmethod
    def forward(ctx: Any, flag: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return flag.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing is made of the flag")


@dataclass(frozen=True)
class _RandomState:
    cpu: Tensor
    device: Tensor | None
    index: int | None

    @classmethod
    def now(cls, x: Tensor) -> "_RandomState":
        index = x.get_device() if x.is_cuda else None
        return cls(torch.get_rng_state(), None if index is None else torch.cuda.get_rng_state(index), index)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[] if self.index is None else [self.index]):
            torch.set_rng_state(self.cpu)
            if self.device is not None and self.index is not None:
                torch.cuda.set_rng_state(self.device, self.index)
            yield


def _shared(x: Tensor, group: Group) -> saved_tensors_hooks:
    """Saving ``x`` keeps this rank's slice of it."""
    storage, shape = x.untyped_storage().data_ptr(), x.shape

    def pack(tensor: Tensor) -> Any:
        whole = tensor.untyped_storage().data_ptr() == storage and tensor.shape == shape and shape[0] % group.size == 0
        return (local_slice(tensor, group, 0).clone(),) if whole else tensor

    def unpack(saved: Any) -> Tensor:
        return all_gather(saved[0], group) if isinstance(saved, tuple) else saved

    return saved_tensors_hooks(pack, unpack)
