# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A forward and a backward that were recorded together."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.graphs._capture import Capture, CaptureError
from mcore_parallel.graphs._tree import Tree
from mcore_parallel.tensor_parallel import MainGradient, WeightCopyHolder


class Flight:
    """A replayed forward whose backward is due; it ends with its backward, or when nobody can run that any more."""

    landed = False


@dataclass(eq=False)
class Pair:
    """A forward graph and its backward graph, with the memory that they read and write."""

    inputs: list[Tensor]
    outputs: Tree
    differentiable: list[bool]
    """Of the outputs."""
    grads_out: list[Tensor]
    """Of the differentiable outputs."""
    grads_in: tuple[Tensor | None, ...]
    """Of the inputs that need one, then of the parameters."""
    parameters: list[nn.Parameter]
    """That need a gradient."""
    replay_forward: Callable[[], None]
    replay_backward: Callable[[], None]
    begins: list[Callable[[], None]]
    dones: list[Callable[[], None]]
    bound: "_Bound"
    keep: Any
    """The recorded graph of autograd, whose saved tensors the backward reads."""
    flight: Callable[[], Flight | None] = lambda: None
    memory_bytes: int = 0
    """Device memory that they hold."""

    @property
    def busy(self) -> bool:
        """Whether a backward is due that needs what the graphs hold."""
        flight = self.flight()
        return flight is not None and not flight.landed

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Replay the forward on these tensors; what autograd is given replays the backward."""
        with torch.no_grad():
            copy_tensors(self.inputs, tensors)
        flight = Flight()
        self.flight = weakref.ref(flight)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        # What another graph reads is read before it changes; whatever else takes a gradient may keep it, or send it on later.
        copied = [not isinstance(getattr(tensor.grad_fn, "flight", None), Flight) for tensor in wanted]
        outputs = _Replay.apply(self, flight, copied, *wanted, *self.parameters)
        return self.outputs.rebuilt(outputs)


@dataclass(eq=False)
class ForwardOnly:
    """The graph of a forward without a gradient, with the memory that it reads and writes."""

    inputs: list[Tensor]
    outputs: Tree
    replay: Callable[[], None]
    bound: "_Bound"
    memory_bytes: int = 0
    """Device memory that it holds."""

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Replay on these tensors."""
        copy_tensors(self.inputs, tensors)
        self.replay()
        # The next replay in the pool may overwrite what lies there.
        return self.outputs.rebuilt([tensor.clone() for tensor in self.outputs.tensors])


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: Pair, flight: Flight, copied: list[bool], *sources: Tensor) -> Any:
        ctx.pair, ctx.flight, ctx.copied = pair, flight, copied
        pair.replay_forward()
        outputs = [tensor.detach() for tensor in pair.outputs.tensors]
        ctx.mark_non_differentiable(*(x for x, wanted in zip(outputs, pair.differentiable, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        pair: Pair = ctx.pair
        if ctx.flight.landed:
            raise RuntimeError("a graph runs its backward once for each forward; run the forward again, or do without retain_graph")
        wanted = [grad for grad, differentiable in zip(grads, pair.differentiable, strict=True) if differentiable]
        for begin in pair.begins:
            begin()
        copy_tensors(pair.grads_out, wanted)
        pair.replay_backward()
        for done in pair.dones:
            done()
        ctx.flight.landed = True
        grads_in: list[Tensor | None] = list(pair.grads_in)
        for place, copied in enumerate(ctx.copied):
            grad = grads_in[place]
            grads_in[place] = grad.clone() if copied and grad is not None else grad
        return None, None, None, *grads_in


@dataclass(frozen=True)
class _Bound:
    """What a recording refers to by its address."""

    tensors: tuple[Tensor, ...]
    """Parameters, buffers and main gradients."""
    addresses: list[int]
    trainable: list[bool] | None
    """Which tensors need a gradient; None of a recording without a backward."""
    attributes: tuple[tuple[nn.Module, str, Any], ...]
    """Main gradients, and dicts of them."""
    members: tuple[tuple[dict[str, Any], str, Any], ...]
    """Submodules, parameters and buffers of each part, None where a name has nothing."""
    places: tuple[dict[str, Any], ...]
    """Where the parts keep them."""
    sizes: list[int]
    parts: tuple[nn.Module, ...]
    modes: list[bool]
    """Which parts are in training mode."""

    @classmethod
    def of(cls, module: nn.Module, *, with_gradients: bool = True) -> "_Bound":
        """Submodules, parameters and buffers and, of a recording with a backward, main gradients and which tensors need a gradient."""
        attributes = tuple(_main_gradients(module)) if with_gradients else ()
        parts = tuple(module.modules())
        places = tuple(place for part in parts for place in _places(part))
        members = tuple((place, name, member) for place in places for name, member in place.items())
        totals = [grad.total for _, _, value in attributes for grad in _members(value)]
        tensors = (*totals, *(member for _, _, member in members if isinstance(member, Tensor)))
        return cls(
            tensors=tensors,
            addresses=[tensor.data_ptr() for tensor in tensors],
            trainable=[tensor.requires_grad for tensor in tensors] if with_gradients else None,
            attributes=attributes,
            members=members,
            places=places,
            sizes=[*map(len, places)],
            parts=parts,
            modes=[part.training for part in parts],
        )

    @property
    def holds(self) -> bool:
        """Whether the module has what it had and nothing else, where it was, in the same modes, and the same tensors need a gradient."""
        return (
            all(vars(part).get(name) is value for part, name, value in self.attributes)
            and [*map(len, self.places)] == self.sizes
            and all(place.get(name, place) is member for place, name, member in self.members)
            and [tensor.data_ptr() for tensor in self.tensors] == self.addresses
            and [part.training for part in self.parts] == self.modes
            and (self.trainable is None or [tensor.requires_grad for tensor in self.tensors] == self.trainable)
        )


def bound_of(module: nn.Module) -> "_Bound":
    """What a recording of this block refers to by its address."""
    return _Bound.of(module)


def main_gradient_totals(module: nn.Module) -> list[Tensor]:
    """Memory that the backward of this block adds to."""
    return [grad.total for _, _, value in _main_gradients(module) for grad in _members(value)]


def capture_pair(capture: Capture, work: Callable[..., Any], module: nn.Module, tree: Tree) -> Pair:
    """Record the forward of ``work`` on such inputs, and its backward.

    Args:
        capture: records.
        work: the forward of the module.
        module: whose parameters it uses.
        tree: inputs like those of the calls to come.

    Raises:
        CaptureError: what cannot be recorded.
    """
    pool, bound = capture.pool(), _Bound.of(module)
    holders = [part for part in module.modules() if isinstance(part, WeightCopyHolder)]
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tree.tensors]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with members_kept(module), silent_main_gradients(module) as (begins, dones), stand_ins(module) as stand_in:
        sources = [*wanted, *(stand_in[id(parameter)] for parameter in parameters)]

        def forward() -> Any:
            arguments, options = tree.rebuilt(inputs)
            return work(*arguments, **options)

        # Copies of weights in another form are made inside the recording, and nobody else may use those.
        drop_copies(holders)
        result, replay_forward = capture.record(forward, pool)
        outputs = Tree.of(result)
        differentiable = [tensor.requires_grad for tensor in outputs.tensors]
        ends = [tensor for tensor in outputs.tensors if tensor.requires_grad]
        if not ends:
            raise CaptureError(f"no output of {type(module).__name__} depends on an input or parameter that needs a gradient")
        grads_out = [torch.zeros_like(tensor) for tensor in ends]
        # Kept for later: memory of saved tensors that were let go would be given to the next recording.
        gradients = functools.partial(torch.autograd.grad, ends, sources, grads_out, allow_unused=True, retain_graph=True)
        grads_in, replay_backward = capture.record(gradients, pool)
        drop_copies(holders)
    return Pair(
        inputs=[tensor.detach() for tensor in inputs],
        outputs=dataclasses.replace(outputs, tensors=[tensor.detach() for tensor in outputs.tensors]),
        differentiable=differentiable,
        grads_out=grads_out,
        grads_in=grads_in,
        parameters=parameters,
        replay_forward=replay_forward,
        replay_backward=replay_backward,
        begins=begins,
        dones=dones,
        bound=bound,
        keep=ends,
    )


@torch.no_grad()
def capture_forward(capture: Capture, work: Callable[..., Any], module: nn.Module, tree: Tree, pool: Any) -> ForwardOnly:
    """Record the forward of ``work`` on such inputs, without a gradient.

    Args:
        capture: records.
        work: the forward of the module.
        module: whose parameters it uses.
        tree: inputs like those of the calls to come.
        pool: of the recording; others in it are never replayed beside this one.

    Raises:
        CaptureError: what cannot be recorded.
    """
    bound = _Bound.of(module, with_gradients=False)
    holders = [part for part in module.modules() if isinstance(part, WeightCopyHolder)]
    inputs = [tensor.detach().clone() for tensor in tree.tensors]

    def forward() -> Any:
        arguments, options = tree.rebuilt(inputs)
        return work(*arguments, **options)

    # As of ``capture_pair``.
    drop_copies(holders)
    try:
        with members_kept(module):
            result, replay = capture.record(forward, pool)
    finally:
        drop_copies(holders)
    return ForwardOnly(inputs, Tree.of(result), replay, bound)


@contextlib.contextmanager
def silent_main_gradients(module: nn.Module) -> Iterator[tuple[list[Callable[[], None]], list[Callable[[], None]]]]:
    """Inside, main gradients tell nobody about additions, which are recorded and not done; who is to be told, in order, is given out.

    A replay adds whatever comes before it, so none of them is claimed.
    """
    begins: list[Callable[[], None]] = []
    dones: list[Callable[[], None]] = []

    def silent(grad: MainGradient) -> MainGradient:
        begin = None if grad.begin is None else functools.partial(begins.append, grad.begin)
        done = None if grad.done is None else functools.partial(dones.append, grad.done)
        return dataclasses.replace(grad, begin=begin, done=done, claim=None)

    swapped = list(_main_gradients(module))
    for part, name, value in swapped:
        setattr(part, name, {key: silent(one) for key, one in value.items()} if isinstance(value, dict) else silent(value))
    try:
        yield begins, dones
    finally:
        for part, name, value in swapped:
            setattr(part, name, value)


@contextlib.contextmanager
def members_kept(module: nn.Module) -> Iterator[None]:
    """Inside, the module runs to be recorded; behind it the module has the members that it had, and none in memory of the recording.

    Raises:
        CaptureError: it had others, which a replay does not give it.
    """
    kept = [(name, place, dict(place)) for name, part in module.named_modules() for place in _places(part)]
    rebound: list[str] = []
    try:
        yield
    finally:
        for name, place, before in kept:
            changed = [key for key in {**before, **place} if before.get(key, before) is not place.get(key, place)]
            if changed:
                rebound += [f"{name}.{key}" if name else key for key in changed]
                place.clear()
                place.update(before)
    if rebound:
        raise CaptureError(
            f"the forward of {type(module).__name__} sets {', '.join(rebound)}, which a replay does not; let that be there before, and "
            "write into it (copy_, add_)"
        )


@contextlib.contextmanager
def stand_ins(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Inside, other parameters over the same memory take the places of the module's; by the ``id`` of these.

    Autograd ties a parameter to the stream of its first use, which is none that can be recorded on.
    """
    replacements: dict[int, nn.Parameter] = {}
    swapped: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                replacements.setdefault(id(parameter), nn.Parameter(parameter.detach(), parameter.requires_grad))
                swapped.append((part._parameters, name, parameter))
    for place, name, parameter in swapped:
        place[name] = replacements[id(parameter)]
    try:
        yield replacements
    finally:
        for place, name, parameter in swapped:
            place[name] = parameter


def _places(part: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a part keeps its submodules, parameters and buffers."""
    return part._modules, part._parameters, part._buffers


def _main_gradients(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Attributes of the module and its parts that are main gradients, or dicts of them."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, MainGradient) or (isinstance(value, dict) and value and _all_main(value)):
                yield part, name, value


def _all_main(values: dict[Any, Any]) -> bool:
    return all(isinstance(value, MainGradient) for value in values.values())


def _members(value: Any) -> list[MainGradient]:
    return list(value.values()) if isinstance(value, dict) else [value]


def drop_copies(holders: Sequence[WeightCopyHolder]) -> None:
    for holder in holders:
        holder.parameters_changed()


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One launch for each dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr() or not target.numel():
            into, out = by_dtype.setdefault(target.dtype, ([], []))
            into.append(target)
            out.append(source)
    launch: Any = torch
    for into, out in by_dtype.values():
        launch._foreach_copy_(into, out)
