# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The model chunks of one stage as one module."""

from collections.abc import Iterator, Sequence

from torch import nn


class ModelChunks(nn.Module):
    """The chunks of a stage, whose parameters keep their global names.

    The children of all chunks become children of this module under their own names: ``layers`` of chunk 0 and chunk 1 become one
    ``layers``. So data parallelism, optimizer and checkpoints see one model, and ``train_step`` runs its chunks.

    Args:
        chunks: from the first virtual stage to the last. Their children are shared, not copied.

    Raises:
        ValueError: no chunk, a parameter or buffer of a chunk outside its children, a child of two chunks that is no ``ModuleDict``.

    Example:
        >>> chunks = ModelChunks([nn.ModuleDict({"a": nn.Linear(1, 1)}), nn.ModuleDict({"b": nn.Linear(1, 1)})])
        >>> [name for name, _ in chunks.named_parameters()]
        ['a.weight', 'a.bias', 'b.weight', 'b.bias']
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        super().__init__()
        if not chunks:
            raise ValueError("chunks holds no model chunk; give one for each virtual stage of this rank")
        # A tuple: the chunks are no children themselves.
        self._chunks = tuple(chunks)
        for chunk in self._chunks:
            own = [*chunk.named_parameters(recurse=False), *chunk.named_buffers(recurse=False)]
            if own:
                raise ValueError(f"{type(chunk).__name__} owns {own[0][0]!r} itself; put it into a child module, so that it has one name")
            for name, child in chunk.named_children():
                self._adopt(name, child)

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: int) -> nn.Module:
        return self._chunks[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._chunks)

    def train(self, mode: bool = True) -> "ModelChunks":
        """As of any module; the chunks themselves, which are no children, follow."""
        super().train(mode)
        for chunk in self._chunks:
            chunk.train(mode)
        return self

    def _adopt(self, name: str, child: nn.Module) -> None:
        present = self._modules.get(name)
        if present is None:
            # A new dict, so that adding to it leaves the chunk's own alone.
            self.add_module(name, nn.ModuleDict(dict(child.items())) if type(child) is nn.ModuleDict else child)
        elif type(present) is nn.ModuleDict and type(child) is nn.ModuleDict and not set(present) & set(child):
            present.update(dict(child.items()))
        elif present is not child:
            raise ValueError(f"two chunks have a child {name!r}; give each layer its global number and each end to one chunk only")
