# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which blocks of a model are replayed from graphs."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from mcore_parallel.graphs._external import AnyCapture, ExternalCapture
from mcore_parallel.graphs._module import CudaGraphConfig, GraphReport, ModuleGraphs


class GraphableMegatronModule(nn.Module):
    """A block that can replay its own calls; subclasses define ``forward`` only.

    Blocks of other classes are served by ``graph_modules``, which needs no base class.

    Example:
        >>> import torch
        >>> class Block(GraphableMegatronModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inner = nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return x + self.inner(x)
        >>> block = Block()
        >>> graphs = block.enable_cuda_graphs()
        >>> block(torch.ones(3, 2)).shape, graphs.report().graphs
        (torch.Size([3, 2]), 0)
    """

    _graphs: ModuleGraphs | None = None

    def enable_cuda_graphs(self, config: CudaGraphConfig | None = None, *, capture: AnyCapture | None = None) -> ModuleGraphs:
        """Replay the calls of this block from now on, where there is a CUDA device.

        Args:
            config: when and how.
            capture: as of ``ModuleGraphs``.

        Raises:
            CaptureError: a choice of the block that no graph can carry out.
        """
        self.disable_cuda_graphs()
        self._graphs = ModuleGraphs(self, config, capture=capture)
        return self._graphs

    def disable_cuda_graphs(self) -> None:
        """Run as ever again, and drop the graphs."""
        if self._graphs is not None:
            self._graphs.remove()
        self._graphs = None


class GraphedModel:
    """The graphs of the blocks of one model; also a context that removes them.

    Args:
        blocks: by name.
    """

    def __init__(self, blocks: Mapping[str, ModuleGraphs]) -> None:
        self.blocks = dict(blocks)

    def report(self) -> GraphReport:
        """Of all blocks together."""
        return sum((block.report() for block in self.blocks.values()), GraphReport())

    def drop_pairs(self) -> None:
        """As of ``ModuleGraphs``, in all blocks: between two kinds of training, whose calls may have other shapes."""
        for block in self.blocks.values():
            block.drop_pairs()

    def remove(self) -> None:
        """Let all blocks run as ever again, and drop the graphs."""
        for block in self.blocks.values():
            block.remove()

    def __enter__(self) -> "GraphedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def graph_modules(
    model: nn.Module,
    patterns: Sequence[str] = ("layers.*",),
    config: CudaGraphConfig | None = None,
    *,
    capture: AnyCapture | None = None,
) -> GraphedModel:
    """Replay the calls of some blocks of a model.

    Args:
        model: any; ``ModelChunks`` for several chunks of a pipeline stage.
        patterns: names of modules, part by part: "layers.*" for whole layers, "layers.*.mlp", "layers.*.attention" or "layers.*.mamba"
            for their parts, "" for the model as a whole.
        config: when and how.
        capture: as of ``ModuleGraphs``; shared by all blocks.

    Raises:
        CaptureError: a choice of a block that no graph can carry out.
        ValueError: a pattern that no module has, or a block inside another one.
    """
    selected: dict[str, nn.Module] = {}
    modules = dict(model.named_modules())
    for pattern in patterns:
        names = [name for name in modules if name.count(".") == pattern.count(".") and _matches(name, pattern)]
        if not names:
            raise ValueError(f"patterns hold {pattern!r}, which no module of {type(model).__name__} is called; see model.named_modules()")
        selected |= {name: modules[name] for name in names}
    for name in selected:
        if outer := [other for other in selected if name != other and (not other or name.startswith(f"{other}."))]:
            raise ValueError(f"patterns choose {name!r} and {outer[0]!r} around it; choose one of them")
    config = CudaGraphConfig() if config is None else config
    shared = config.capture() if capture is None else capture
    # Blocks run one after the other, so that what they compute without a gradient may lie in the same memory.
    pool = None
    if config.capture_forward_only and shared is not None and not isinstance(shared, ExternalCapture):
        pool = shared.pool()
    blocks: dict[str, ModuleGraphs] = {}
    try:
        for name, module in selected.items():
            blocks[name] = ModuleGraphs(module, config, capture=shared, forward_pool=pool)
    except (RuntimeError, ValueError):
        GraphedModel(blocks).remove()
        raise
    return GraphedModel(blocks)


def _matches(name: str, pattern: str) -> bool:
    # The model itself has an empty name, which is no "*".
    return bool(name) == bool(pattern) and all(
        fnmatchcase(part, wanted) for part, wanted in zip(name.split("."), pattern.split("."), strict=True)
    )
