# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Blocks whose forward and backward another library captures together, as Transformer Engine does."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from mcore_parallel.graphs._capture import Capture, CaptureError, collection_paused
from mcore_parallel.graphs._pair import Flight, bound_of, drop_copies, main_gradient_totals, members_kept, silent_main_gradients, stand_ins
from mcore_parallel.graphs._tree import Tree
from mcore_parallel.tensor_parallel import WeightCopyHolder


class GraphedCallables(Protocol):
    """Captures a module on sample tensors, and gives back what replays it; may run both passes for real before."""

    def __call__(self, module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]: ...


@dataclass(frozen=True)
class ExternalCapture:
    """Captures pairs of a forward and a backward by another library, in place of ``CudaCapture``.

    Args:
        graph: of the library; ``transformer_engine_capture`` chooses it.
        freeze_gc: as of ``collection_paused``.
    """

    graph: GraphedCallables
    freeze_gc: bool | None = None

    def pair(self, work: Callable[..., Any], module: nn.Module, tree: Tree) -> "ExternalPair":
        """Capture ``work``, the forward of ``module``, on inputs like these.

        Raises:
            CaptureError: no input needs a gradient, the library refuses the work, or the module sets its own members in it.
        """
        if not any(tensor.requires_grad for tensor in tree.tensors):
            raise CaptureError(
                f"no input of {type(module).__name__} needs a gradient, which cuda_graph_impl='transformer_engine' cannot capture; "
                "use 'local'"
            )
        holders = [part for part in module.modules() if isinstance(part, WeightCopyHolder)]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        bound, totals = bound_of(module), main_gradient_totals(module)
        # The library runs the backward once for real.
        before = [total.clone() for total in totals]
        samples = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tree.tensors]
        with members_kept(module):
            try:
                with collection_paused(self.freeze_gc), silent_main_gradients(module) as (begins, dones), stand_ins(module) as stand_in:
                    block = _FlatBlock(work, tree, [begins.clear, dones.clear, lambda: drop_copies(holders)])
                    # Parameters are inputs like others, so that gradients come to those of the module.
                    graphed = self.graph(block, (*samples, *(stand_in[id(parameter)] for parameter in parameters)))
            except (RuntimeError, AssertionError) as error:
                raise CaptureError(f"{type(module).__name__} cannot be captured: {error}; use cuda_graph_impl='local'") from error
            finally:
                drop_copies(holders)
                with torch.no_grad():
                    for total, saved in zip(totals, before, strict=True):
                        total.copy_(saved)
        assert block.outputs is not None
        return ExternalPair(graphed, block.outputs, parameters, begins, dones, bound)


@dataclass(eq=False)
class ExternalPair:
    """What ``ModuleGraphs`` replays: one forward, then its backward."""

    graphed: Callable[..., tuple[Tensor, ...]]
    outputs: Tree
    parameters: list[nn.Parameter]
    begins: list[Callable[[], None]]
    dones: list[Callable[[], None]]
    bound: Any
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
        flight = Flight()
        self.flight = weakref.ref(flight)
        wanted = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
        inputs = list(tensors)
        for number, tensor in zip(wanted, _End.apply(self, flight, *(tensors[number] for number in wanted)), strict=True):
            inputs[number] = tensor
        outputs = list(self.graphed(*inputs, *self.parameters))
        differentiable = [number for number, tensor in enumerate(outputs) if tensor.requires_grad]
        for number, tensor in zip(differentiable, _Begin.apply(self, flight, *(outputs[number] for number in differentiable)), strict=True):
            outputs[number] = tensor
        return self.outputs.rebuilt(outputs)


class _Begin(torch.autograd.Function):
    """First in the backward: who adds to main gradients announces it."""

    @staticmethod
    def forward(ctx: Any, pair: ExternalPair, flight: Flight, *outputs: Tensor) -> Any:
        ctx.pair, ctx.flight = pair, flight
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.flight.landed:
            raise RuntimeError("a graph runs its backward once for each forward; run the forward again, or do without retain_graph")
        for begin in ctx.pair.begins:
            begin()
        return None, None, *grads


class _End(torch.autograd.Function):
    """Last in the backward: main gradients are complete, and gradients leave the memory of the graph."""

    @staticmethod
    def forward(ctx: Any, pair: ExternalPair, flight: Flight, *inputs: Tensor) -> Any:
        ctx.pair, ctx.flight = pair, flight
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        for done in ctx.pair.dones:
            done()
        ctx.flight.landed = True
        return None, None, *(grad.clone() for grad in grads)


class _FlatBlock(nn.Module):
    """A block that takes tensors only and gives a tuple of them; parameters behind the inputs are those that the block holds by then."""

    def __init__(self, work: Callable[..., Any], tree: Tree, first: Sequence[Callable[[], object]]) -> None:
        super().__init__()
        self._work, self._tree, self._before = work, tree, tuple(first)
        self.outputs: Tree | None = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        for step in self._before:
            step()
        arguments, options = self._tree.rebuilt(tensors[: len(self._tree.tensors)])
        self.outputs = Tree.of(self._work(*arguments, **options))
        outputs = tuple(self.outputs.tensors)
        if not any(tensor.requires_grad for tensor in outputs):
            raise CaptureError("no output depends on an input or parameter that needs a gradient")
        return outputs


AnyCapture = Capture | ExternalCapture


def transformer_engine_capture(freeze_gc: bool | None = None) -> ExternalCapture:
    """Capture by Transformer Engine's ``make_graphed_callables`` (extra ``te``), which is imported here.

    Raises:
        CaptureError: it is not installed.
    """
    try:
        import transformer_engine.pytorch as te
    except ImportError as error:
        raise CaptureError(
            "cuda_graph_impl='transformer_engine' needs transformer_engine, which is not installed: "
            "pip install 'mcore-parallel[te]', or use 'local'"
        ) from error
    make: Any = te.make_graphed_callables

    def capture(module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
        # One pass runs for real before: some versions choose there which parameters have a gradient.
        return make(module, samples, num_warmup_iters=1, allow_unused_input=True)

    return ExternalCapture(cast(GraphedCallables, capture), freeze_gc)
