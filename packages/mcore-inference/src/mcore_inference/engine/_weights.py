# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""New weights for a model that is being served."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mcore_inference._capability import StoredWeight
from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api
from mcore_inference.decoder import fp8_parameters
from mcore_inference.engine._coverage import Coverage
from mcore_inference.engine._pipeline import names_elsewhere
from mcore_parallel import named_buffer_shards, named_shards
from mcore_parallel.models import GPTModel

WeightPolicy = Literal["recompute", "keep", "drain"]
"""What becomes of requests in flight when weights are loaded."""
_BUCKET_BYTES = 256 * 2**20


@experimental_api
class WeightLoadError(ValueError):
    """Weights that a load refuses."""


@experimental_api
class IncompleteWeightsError(RuntimeError):
    """A load failed after it had begun to copy, and was not repeated."""


@experimental_api
@dataclass(frozen=True, kw_only=True, eq=False)
class WeightSlice:
    """A part of a parameter.

    Example:
        >>> rows = WeightSlice(tensor=torch.ones(2, 4), offsets=(6, 0))  # rows 6 and 7

    Raises:
        ValueError: not one offset for each dim, or a negative one.
    """

    tensor: Tensor
    """Any box of the global tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the global tensor."""
    ends_buffer: bool = False
    """Whether memory of this slice, and of chunks before it, is written again once the next chunk is asked for: all of them are copied
    before, and no reference to them is kept."""

    def __post_init__(self) -> None:
        offsets = tuple(as_integer("offsets", offset, 0, 2**62) for offset in self.offsets)
        if len(offsets) != self.tensor.dim():
            raise ValueError(f"offsets={offsets} must have one entry for each dim of shape {tuple(self.tensor.shape)}")
        object.__setattr__(self, "offsets", offsets)


WeightChunk = tuple[str, Tensor | WeightSlice]
"""Global name of a parameter or persistent buffer, and all of it or a part."""


def ends_buffer(part: Tensor | WeightSlice) -> bool:
    """Whether all parts so far must be copied before the next one is asked for."""
    return isinstance(part, WeightSlice) and part.ends_buffer


def check_chunks(chunks: object) -> None:
    """See that weights come as pairs; ``load`` looks at each of them.

    Raises:
        WeightLoadError: they are a mapping, such as a state dict, or cannot be iterated.
    """
    if isinstance(chunks, Mapping):
        raise WeightLoadError(f"chunks is a {type(chunks).__name__}, whose iteration gives names alone; give its .items()")
    if not isinstance(chunks, Iterable):
        raise WeightLoadError(f"chunks is a {type(chunks).__name__}; give pairs of a global name and a tensor")


def check_policy(policy: str) -> None:
    """See that a policy is one.

    Raises:
        ValueError: it is none.
    """
    if policy not in ("recompute", "keep", "drain"):
        raise ValueError(f"in_flight={policy!r} is unknown; choose recompute, keep or drain")


@dataclass
class _Target:
    """What this rank holds of a parameter."""

    tensor: Tensor
    shape: tuple[int, ...]
    """Global."""
    start: tuple[int, ...]
    """Of this rank's part in the global tensor."""
    coverage: Coverage
    dtype: torch.dtype
    """Of what comes, up to a cast: the model's for a parameter in fp8."""
    fp8: StoredWeight | None = None
    staging: Tensor | None = None
    """What came for a parameter in fp8, until it is whole."""

    @property
    def memory(self) -> Tensor:
        """Where chunks are copied to."""
        if self.fp8 is None:
            return self.tensor
        if self.staging is None:
            self.staging = torch.empty_like(self.tensor, dtype=self.dtype)
        return self.staging

    def round(self) -> None:
        """Take over what was collected, if it is whole."""
        if self.fp8 is not None and self.staging is not None and self.coverage.is_whole:
            self.fp8.store(self.tensor, self.staging)
            self.staging = None


@dataclass(frozen=True)
class _Copy:
    """A part of a chunk that this rank holds."""

    target: _Target
    into: Tensor
    source: Tensor


class ModelWeights:
    """Replaces all parameters and persistent buffers of a model in place.

    The engine keeps no copies that follow from them: its kernels read the parameters themselves. What comes for a parameter in fp8 is
    collected in the model's dtype, and rounded in place when it is whole.

    Args:
        model: its parameters keep their addresses.
        bucket_bytes: chunks of so many bytes are checked before any of them is copied; or those up to one that
            ends a buffer.
    """

    def __init__(self, model: GPTModel, bucket_bytes: int = _BUCKET_BYTES) -> None:
        self._model, self._bucket_bytes = model, bucket_bytes
        self._elsewhere = names_elsewhere(model)
        self.are_complete = True
        """False between the first copy of a load, or a move of experts, and its end, so after one that failed half-way."""

    def check_complete(self) -> None:
        """See that the model can run.

        Raises:
            IncompleteWeightsError: it cannot.
        """
        if not self.are_complete:
            raise IncompleteWeightsError(
                "the last load_weights failed after it had begun to copy, or experts did not arrive; repeat it with all parameters"
            )

    @torch.no_grad()
    def load(self, chunks: Iterable[WeightChunk]) -> None:
        """Copy this rank's parts; the contract is that of ``DynamicInferenceEngine.load_weights``."""
        targets = self._targets()
        bucket: list[_Copy] = []
        num_bytes = 0
        for chunk in chunks:
            if not isinstance(chunk, Sequence) or isinstance(chunk, str) or len(chunk) != 2:
                raise WeightLoadError(f"chunks holds a {type(chunk).__name__}; give pairs of a global name and a tensor")
            name, part = chunk
            # One of another stage ends a buffer all the same.
            copy = None if name in self._elsewhere else _copy(targets, name, part)
            if copy is not None:
                bucket.append(copy)
                num_bytes += copy.source.nbytes
                # No reference to a buffer outlives it.
                del copy
            if num_bytes >= self._bucket_bytes or ends_buffer(part):
                self._write(bucket)
                bucket.clear()
                num_bytes = 0
        missing = sorted(name for name, target in targets.items() if not target.coverage.is_whole)
        if missing:
            raise WeightLoadError(f"{len(missing)} parameters did not come, among them {missing[:5]}; give all, and each of them whole")
        self._write(bucket)
        self.are_complete = True

    def _write(self, bucket: Sequence[_Copy]) -> None:
        if bucket:
            self.are_complete = False
            kernels: Any = torch
            kernels._foreach_copy_([copy.into for copy in bucket], [copy.source for copy in bucket])
            for copy in bucket:
                copy.target.round()

    def _targets(self) -> dict[str, _Target]:
        groups = self._model.groups
        tensors = {shard.name: (shard.parameter, shard.spec) for shard in named_shards(self._model)}
        tensors |= {buffer.name: (buffer.tensor, buffer.spec) for buffer in named_buffer_shards(self._model)}
        rounded = fp8_parameters(self._model)
        targets = {}
        for name, (tensor, spec) in tensors.items():
            fp8 = rounded.get(tensor)
            if fp8 is None and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
                raise WeightLoadError(
                    f"{name} is in {tensor.dtype} beside an adapter, with scales that new weights would not change; serve a model whose "
                    "frozen weights are in its own dtype (LoraConfig.base_dtype=None)"
                )
            coverage, dtype = Coverage(spec.local_shape(groups)), tensor.dtype if fp8 is None else fp8.dtype
            targets[name] = _Target(tensor.detach(), spec.shape, spec.offset(groups), coverage, dtype, fp8)
        return targets


def _copy(targets: Mapping[str, _Target], name: str, part: Tensor | WeightSlice) -> _Copy | None:
    """Where a chunk goes and what goes there; None for a part that other ranks hold.

    Raises:
        WeightLoadError: the chunk does not fit, or came before.
    """
    if name not in targets:
        near = difflib.get_close_matches(str(name), targets, n=3)
        raise WeightLoadError(f"{name} is no parameter of the model; the nearest are {near}")
    target = targets[name]
    tensor = part.tensor if isinstance(part, WeightSlice) else part
    offsets = part.offsets if isinstance(part, WeightSlice) else (0,) * len(target.shape)
    _check_kind(name, tensor, target.dtype)
    shape = tuple(tensor.shape)
    if not isinstance(part, WeightSlice) and shape != target.shape:
        raise WeightLoadError(f"{name} has shape {shape}; its global shape is {target.shape}")
    if len(shape) != len(target.shape) or any(
        offset + size > whole for offset, size, whole in zip(offsets, shape, target.shape, strict=True)
    ):
        raise WeightLoadError(f"a part of {name} has shape {shape} at {offsets}; its global shape is {target.shape}")
    # In the coordinates of this rank's part.
    first = tuple(offset - start for offset, start in zip(offsets, target.start, strict=True))
    begin = tuple(max(0, at) for at in first)
    end = tuple(min(at + size, own) for at, size, own in zip(first, shape, target.tensor.shape, strict=True))
    if any(one >= other for one, other in zip(begin, end, strict=True)):
        return None
    if not target.coverage.add(begin, end):
        raise WeightLoadError(f"{name} came twice, or parts of it overlap; give each parameter once")
    into = target.memory[tuple(slice(*bounds) for bounds in zip(begin, end, strict=True))]
    source = tensor.detach()[tuple(slice(one - at, other - at) for one, other, at in zip(begin, end, first, strict=True))]
    return _Copy(target, into, source)


def _check_kind(name: str, tensor: Tensor, own: torch.dtype) -> None:
    """Floating-point tensors are cast to one another; a scaled format of one byte says nothing without its scales."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        kind = "tensor without memory" if isinstance(tensor, Tensor) and tensor.is_meta else type(tensor).__name__
        raise WeightLoadError(f"{name} is a {kind}; give a plain tensor, for instance DTensor.full_tensor()")
    floats = tensor.dtype.is_floating_point and own.is_floating_point and tensor.dtype.itemsize > 1 and own.itemsize > 1
    if tensor.dtype != own and not floats:
        raise WeightLoadError(f"{name} has dtype {tensor.dtype} and the model's is {own}; give that, or a floating-point one for it")
