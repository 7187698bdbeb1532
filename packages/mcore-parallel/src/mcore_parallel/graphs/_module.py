# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A block whose forward and backward are replayed from graphs, and what it must not have for that."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mcore_parallel._backward import in_backward
from mcore_parallel.graphs._capture import CaptureError, CudaCapture, why_not
from mcore_parallel.graphs._external import AnyCapture, ExternalCapture, ExternalPair, transformer_engine_capture
from mcore_parallel.graphs._pair import ForwardOnly, Pair, capture_forward, capture_pair
from mcore_parallel.graphs._tree import Tree
from mcore_parallel.nn import DrawsNoise, LayerMemory, LogitTracker, ManagedCore
from mcore_parallel.tensor_parallel import WeightGradientQueue

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@runtime_checkable
class GraphChecked(Protocol):
    """A module that says before the capture whether a graph can hold it."""

    def graph_obstacle(self) -> str | None:
        """What of it, or of its fields, no graph can hold, and the remedy; None where one can."""
        ...


def check_inside(module: nn.Module, *, recompute: bool = False) -> None:
    """Refuse what would happen once, at the capture, and never again, and what no graph can hold.

    Args:
        module: the block.
        recompute: as of `CudaGraphConfig`.

    Raises:
        CaptureError: hooks inside the block, deferred weight gradients, offloading, random states that are copied, tracked logits, random
            numbers that a second run would draw anew, and what a `GraphChecked` part says.
    """
    for name, part in module.named_modules():
        where = name or "the block"
        if name and (hooks := [kind for kind in _HOOKS if getattr(part, kind)]):
            kind = hooks[0].strip("_").replace("_", " ")
            raise CaptureError(f"{where} has {kind}, which a replay does not run; hang hooks on the block itself")
        if isinstance(part, GraphChecked) and (obstacle := part.graph_obstacle()):
            raise CaptureError(f"{where}: {obstacle}")
        if recompute and isinstance(part, DrawsNoise) and (noise := part.noise_fields):
            raise CaptureError(
                f"{where} draws random numbers ({noise}), and the backward of CudaGraphConfig.recompute=True would draw others; set it to "
                "False, or draw none"
            )
        for key, value in vars(part).items():
            if isinstance(value, WeightGradientQueue):
                raise CaptureError(f"{where} defers its weight gradients ({key}), but a graph computes them at once; leave that off")
            if isinstance(value, LogitTracker):
                raise CaptureError(f"{where} tracks its largest logits ({key}) on the host's side; leave QK-clip or these graphs out")
            if isinstance(value, LayerMemory | ManagedCore):
                _check_memory(value)


def _check_memory(memory: LayerMemory | ManagedCore) -> None:
    offloaded = memory.offloaded if isinstance(memory, LayerMemory) else memory.offloaded_layers
    if offloaded:
        raise CaptureError(f"activations are offloaded ({sorted(offloaded)}), but a graph keeps its own; leave offloading out")
    if memory.recomputed and memory.preserve_rng_state:
        raise CaptureError("recomputation copies random states, which no graph can; set RecomputeConfig.preserve_rng_state=False")


# Known to no stub.
_INTERNALS: Any = torch._C


IMPLEMENTATIONS = ("local", "transformer_engine")


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """When and how blocks are captured.

    Raises:
        ValueError: a negative number of steps, an unknown implementation, another library and calls without a gradient.
    """

    warmup_steps: int = 3
    """Calls of each kind (shapes, place in the pipeline) that run as ever before one is captured; kernels are compiled and chosen there."""
    recompute: bool = False
    """Graphs keep the inputs of the block only, and its backward runs it again; not for what draws random numbers."""
    capture_forward_only: bool = False
    """Calls without a gradient, of evaluations and scores, are captured, too, each kind on its own. Their graphs share the memory in which
    they compute."""
    cuda_graph_impl: str = "local"
    """Who captures: "local", or "transformer_engine" (extra ``te``), which waits for the device and so for no pipeline."""
    external_cuda_graph: bool = False
    """Former name of ``cuda_graph_impl="transformer_engine"``."""
    freeze_gc: bool | None = None
    """As ``collection_paused``; ``freeze_gc_choice`` reads it from an environment."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must not be negative")
        if self.cuda_graph_impl not in IMPLEMENTATIONS:
            raise ValueError(f"cuda_graph_impl={self.cuda_graph_impl!r} must be one of {', '.join(map(repr, IMPLEMENTATIONS))}")
        if self.capture_forward_only and self.is_external:
            raise ValueError(
                "capture_forward_only=True: cuda_graph_impl='transformer_engine' captures forwards with their backwards alone; set it to "
                "False, or cuda_graph_impl='local'"
            )

    @property
    def is_external(self) -> bool:
        """Whether another library captures."""
        return self.external_cuda_graph or self.cuda_graph_impl != "local"

    def capture(self) -> AnyCapture | None:
        """Who captures here; None where there is no CUDA device.

        Raises:
            CaptureError: the library that was chosen is not installed.
        """
        if why_not():
            return None
        return transformer_engine_capture(self.freeze_gc) if self.is_external else CudaCapture(self.freeze_gc)


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """What became of the calls of a block, or of many."""

    graphs: int = 0
    """Pairs of a forward and a backward that are captured, and forwards without a gradient."""
    replays: int = 0
    """Forwards that were replayed."""
    memory_bytes: int = 0
    """Device memory that the graphs hold: inputs, outputs, gradients and activations."""
    eager: Counter[str] = field(default_factory=Counter)
    """Calls that ran without a graph, by reason."""

    def __add__(self, other: "GraphReport") -> "GraphReport":
        return GraphReport(
            graphs=self.graphs + other.graphs,
            replays=self.replays + other.replays,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            eager=self.eager + other.eager,
        )


class ModuleGraphs:
    """Takes over the forward of a module, and gives it back on ``remove``.

    The first calls with a gradient run as ever. Then each kind of call has a forward and a backward graph for every micro-batch
    that a pipeline has under way; a call whose graphs are all waiting for their backward captures another pair. Results have
    the bits of the module. They lie in memory that is filled anew after their backward: whoever keeps an output longer copies it.
    Hooks, of data parallelism for instance, run on the module itself, and are refused inside it.

    Graphs read parameters, buffers and main gradients by their addresses. Each call sees whether these are where they were; where one has
    moved, as gradients do whose memory was given back meanwhile, the block or a part of it has another parameter, buffer or submodule than
    at the capture, another parameter needs a gradient, or a part changed between training and evaluation, the call is captured anew.

    Calls inside a backward, a recomputation or autocast, with tensors on the host or, unless ``CudaGraphConfig.capture_forward_only`` asks
    for them, without a gradient run as ever; ``report`` tells why.

    Args:
        module: any block; its inputs and outputs are tensors, and tuples, dicts and dataclasses of them.
        config: when and how.
        capture: records; None for CUDA graphs as the config says, and where there is no CUDA device everything runs as ever.
        forward_pool: of ``Capture.pool``, for calls without a gradient; blocks none of which runs inside another may share one. None for
            one of this block.

    Raises:
        CaptureError: a choice of the block that no graph can carry out.
        ValueError: its forward is replaced already; ``capture`` is another library's, and calls without a gradient are to be captured.
    """

    def __init__(
        self, module: nn.Module, config: CudaGraphConfig | None = None, *, capture: AnyCapture | None = None, forward_pool: Any = None
    ) -> None:
        self.module = module
        self.config = CudaGraphConfig() if config is None else config
        self._capture = self.config.capture() if capture is None else capture
        if self.config.capture_forward_only and isinstance(self._capture, ExternalCapture):
            raise ValueError("capture_forward_only=True: an ExternalCapture captures forwards with their backwards alone; set it to False")
        self._pairs: dict[Hashable, list[Pair | ExternalPair]] = {}
        self._forwards: dict[Hashable, ForwardOnly] = {}
        self._forward_pool = forward_pool
        self._calls: Counter[Hashable] = Counter()
        self._eager: Counter[str] = Counter()
        self._replays = 0
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} has its forward replaced already; remove the other graphs, or take it before torch.compile"
            )
        check_inside(module, recompute=self.config.recompute)
        self._forward = module.forward
        # As an attribute of the instance, so that names, parameters and hooks stay as they are.
        module.forward = self._run

    def remove(self) -> None:
        """Give the module its own forward back and drop the graphs; call when no backward is due."""
        vars(self.module).pop("forward", None)
        self._pairs.clear()
        self._forwards.clear()

    def drop_pairs(self) -> None:
        """Give up what is captured of calls with a gradient, and its memory; call when no backward is due.

        Later calls are captured anew, without another warm-up. Forwards without a gradient stay: their memory is shared, and small.
        """
        self._pairs.clear()

    def report(self) -> GraphReport:
        """What became of the calls so far."""
        held = [*(pair for pairs in self._pairs.values() for pair in pairs), *self._forwards.values()]
        memory_bytes = sum(graph.memory_bytes for graph in held)
        return GraphReport(graphs=len(held), replays=self._replays, memory_bytes=memory_bytes, eager=Counter(self._eager))

    def _run(self, *inputs: Any, **options: Any) -> Any:
        reason = self._state()
        tree = None
        if not reason:
            try:
                tree = Tree.of((inputs, options))
            except TypeError as error:
                reason = str(error)
        # A layer is another one in evaluation, and memory of the inference mode is of no use outside of it.
        key = None if tree is None else (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.module.training, tree.key)
        graph = None if tree is None or reason else self._held(key)
        if graph is None and tree is not None and not reason:
            reason = self._unfit(tree, key)
        if tree is None or reason:
            self._eager[reason] += 1
            return self._forward(*inputs, **options)
        if graph is None:
            graph = self._captured_pair(tree, key) if torch.is_grad_enabled() else self._captured_forward(tree, key)
        self._replays += 1
        return graph.run(tree.tensors)

    def _state(self) -> str:
        """Why nothing can be replayed now."""
        if self._capture is None:
            return why_not()
        if not torch.is_grad_enabled() and not self.config.capture_forward_only:
            return "no gradient is wanted"
        if in_backward():
            return "it runs again inside a backward"
        # Its copies of weights end with it, wherever a graph would read them.
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "autocast chooses its dtypes; give the block parameters and inputs of the dtype instead"
        # Such hooks would take what a graph keeps for its own backward.
        if _INTERNALS._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "the caller recomputes or offloads it; set CudaGraphConfig.recompute instead"
        return ""

    def _held(self, key: Hashable) -> Pair | ExternalPair | ForwardOnly | None:
        """What was captured of such calls, refers to what the module has now, and waits for no backward."""
        if not torch.is_grad_enabled():
            graph = self._forwards.get(key)
            return graph if graph is not None and graph.bound.holds else None
        pairs = self._pairs.get(key, [])
        pairs[:] = [pair for pair in pairs if pair.bound.holds]
        return next((pair for pair in pairs if not pair.busy), None)

    def _unfit(self, tree: Tree, key: Hashable) -> str:
        """Why a call of such inputs cannot be captured."""
        if tree.holds_function:
            return "an input is a function, which a replay does not call"
        tensors = (*tree.tensors, *self.module.parameters())
        if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
            return "nothing needs a gradient"
        homes = {tensor.device for tensor in tensors}
        if len(homes) > 1:
            return f"inputs lie on {', '.join(sorted(map(str, homes)))}"
        self._calls[key] += 1
        return "warm-up" if self._calls[key] <= self.config.warmup_steps else ""

    def _captured_pair(self, tree: Tree, key: Hashable) -> Pair | ExternalPair:
        assert self._capture is not None
        check_inside(self.module, recompute=self.config.recompute)
        before = _allocated(tree.tensors)
        if isinstance(self._capture, ExternalCapture):
            pair = self._capture.pair(self._work(), self.module, tree)
        else:
            pair = capture_pair(self._capture, self._work(), self.module, tree)
        pair.memory_bytes = _allocated(tree.tensors) - before
        self._pairs.setdefault(key, []).append(pair)
        return pair

    def _captured_forward(self, tree: Tree, key: Hashable) -> ForwardOnly:
        assert self._capture is not None and not isinstance(self._capture, ExternalCapture)
        check_inside(self.module)
        if self._forward_pool is None:
            self._forward_pool = self._capture.pool()
        before = _allocated(tree.tensors)
        # One that holds no more goes after it: a pool lives as long as something is recorded in it.
        graph = capture_forward(self._capture, self._forward, self.module, tree, self._forward_pool)
        graph.memory_bytes = _allocated(tree.tensors) - before
        self._forwards[key] = graph
        return graph

    def _work(self) -> Callable[..., Any]:
        if not self.config.recompute:
            return self._forward
        return functools.partial(checkpoint, self._forward, use_reentrant=False, preserve_rng_state=False)


def _allocated(tensors: Sequence[Tensor]) -> int:
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return 0 if device is None else torch.cuda.memory_allocated(device)
