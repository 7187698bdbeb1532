# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the tensors of a folder mean: as they are stored, or dequantised by ``quantization_config`` of its config.json.

Two methods are read. Both are named as in transformers, and so are their entries:

* "mxfp4", as gpt-oss is published: ``NAME_blocks`` uint8 [E, O, G, 16], two e2m1 values a byte, the low four bits first, and
  ``NAME_scales`` uint8 [E, O, G], a power of two for each 32 values: 127 is 1, 255 is NaN (OCP Microscaling Formats 1.0). NAME is
  [E, 32 G, O] then, inputs before outputs.
* "fp8", as DeepSeek-V3 and Qwen3 FP8 are: float8_e4m3fn [..., O, I] and ``NAME_scale_inv`` or ``NAME_scale``, what to multiply each
  block of ``weight_block_size`` by, the last of a row or column perhaps short; or one number for the whole tensor.

What a folder stores in another dtype (``modules_to_not_convert``) stays as it is. How activations are quantised says nothing about weights.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._storage import SafetensorsFile, dtype_of

__all__ = ["StoredTensor", "dequantize_fp8", "dequantize_mxfp4", "stored_tensors"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = 32
_STRIP_VALUES = 2**18
_BLOCKS, _SCALES = "_blocks", "_scales"
_INVERSE, _SCALE = "_scale_inv", "_scale"
_ACTIVATIONS = ("activation_scale", "input_scale")
_SCALE_CODES = ("F32", "BF16", "F16", "F8_E8M0")
_WHOLE_BLOCK = (128, 128)
# Entries that change no weight: which modules are quantised is seen in the files.
_INERT = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})
_FP8_INERT = _INERT | {"activation_scheme", "ignored_layers", "modules_to_convert", "weight_block_size"}
_FP8_FIXED: Mapping[str, tuple[str, ...]] = {"fmt": ("e4m3",), "scale_fmt": ("float", "ue8m0"), "expert_dtype": ("fp8",)}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Read(Protocol):
    def __call__(self, dtype: torch.dtype | None, rows: tuple[int, int] | None) -> Tensor: ...


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """As stored; of a quantised one that of the model, bfloat16 where config.json does not say it."""
    _read: _Read

    def read(self, dtype: torch.dtype | None = None, rows: tuple[int, int] | None = None) -> Tensor:
        """In host memory; what is not quantised is a view of the file's pages, in its own dtype.

        Args:
            dtype: what to dequantise to; None for that of the tensor.
            rows: the indices of dim 0 that are wanted, first and one past the last; only their bytes are read. None for all.
        """
        return self._read(dtype or self.dtype, rows)


def stored_tensors(files: Mapping[str, SafetensorsFile], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a folder by the names of the model's weights; nothing but headers is read.

    Args:
        files: the one that holds each name.
        config: of config.json.

    Raises:
        CheckpointingException: a quantisation that is not read, scales that are missing, misshapen or of no weight; names them all.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        if narrow := sorted(name for name, file in files.items() if file.slots[name].dtype.startswith("F8")):
            raise CheckpointingException(
                f"{list_names(narrow)} are in fp8, and config.json has no quantization_config that says their scales; take config.json of "
                "the folder that they come from"
            )
        return {name: _plain(file, name) for name, file in files.items()}
    if not isinstance(quantization, Mapping):
        _refuse("quantization_config", quantization, "must be a group of entries")
    method = quantization.get("quant_method")
    dtype = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), torch.bfloat16)
    if method == "mxfp4":
        _check_entries(quantization, _INERT, {})
        return _Mxfp4(files, dtype).tensors()
    if method == "fp8":
        _check_entries(quantization, _FP8_INERT, _FP8_FIXED)
        return _Fp8(files, dtype, _block(quantization), quantization.get("scale_fmt") == "ue8m0").tensors()
    _refuse("quantization_config.quant_method", method, "is not read; 'mxfp4' and 'fp8' are: import the unquantised model")


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., G, 16] and [..., G], both uint8, as values [..., 32 G]; exact in bfloat16 and float32."""
    exact, word = (torch.bfloat16, torch.int32) if dtype is torch.bfloat16 else (torch.float32, torch.int64)
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=exact)
    # The two values of each byte, as one word.
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1).view(word).flatten()
    result = torch.empty(*scales.shape[:-1], scales.shape[-1] * _GROUP, dtype=dtype)
    rows, packed, exponents = result.flatten(0, -2), blocks.flatten(0, -3), scales.view(torch.float8_e8m0fnu).flatten(0, -2)
    for strip in _strips(rows):
        words = pairs.index_select(0, packed[strip].flatten().int())
        groups = words.view(exact).view(*exponents[strip].shape, _GROUP)
        rows[strip] = groups.mul_(exponents[strip].float().to(exact).unsqueeze(-1)).flatten(1)
    return result


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype, first_row: int = 0) -> Tensor:
    """Each block of [..., O, I] times its scale in float32, rounded once.

    Args:
        weight: float8_e4m3fn [..., O, I], from row ``first_row`` of the whole one on.
        scale: [..., blocks of the whole O, blocks of I].
        block: rows and columns of one.
        dtype: of the result.
        first_row: where in its first block the weight begins is seen from this.
    """
    (outputs, columns), (high, wide) = weight.shape[-2:], block
    result = torch.empty(weight.shape, dtype=dtype)
    by_row = scale.float().index_select(-2, torch.arange(first_row, first_row + outputs) // high).flatten(0, -2)
    # What each byte stands for: a conversion by torch takes six times as long.
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rows, narrow, full = result.flatten(0, -2), weight.view(torch.uint8).flatten(0, -2), columns // wide
    for strip in _strips(rows):
        values = numbers.index_select(0, narrow[strip].flatten().int()).view(narrow[strip].shape)
        factors = by_row[strip].unsqueeze(-1)
        values[:, : full * wide].unflatten(1, (full, wide)).mul_(factors[:, :full])
        if columns > full * wide:
            values[:, full * wide :].mul_(factors[:, -1])
        rows[strip] = values
    return result


def _strips(rows: Tensor) -> Iterator[slice]:
    """Rows that are converted together: few enough for a cache, so that what is in between takes neither memory nor page faults."""
    step = max(1, _STRIP_VALUES // max(1, rows.shape[1]))
    return (slice(row, row + step) for row in range(0, rows.shape[0], step))


def _plain(file: SafetensorsFile, name: str) -> StoredTensor:
    slot = file.slots[name]
    return StoredTensor(slot.shape, dtype_of(slot.dtype), partial(_as_stored, file, name))


def _as_stored(file: SafetensorsFile, name: str, dtype: torch.dtype | None, rows: tuple[int, int] | None) -> Tensor:
    return file.tensor(name, rows)


class _Mxfp4:
    """Pairs of blocks and scales."""

    def __init__(self, files: Mapping[str, SafetensorsFile], dtype: torch.dtype) -> None:
        self._files, self._dtype = files, dtype

    def tensors(self) -> dict[str, StoredTensor]:
        packed = {name.removesuffix(_BLOCKS) for name in self._files if name.endswith(_BLOCKS)}
        alone = [name for name in self._files if name.endswith(_SCALES) and name.removesuffix(_SCALES) not in packed]
        problems = [f"{name} is the scale of {name.removesuffix(_SCALES)}{_BLOCKS}, which is missing" for name in sorted(alone)]
        for name in sorted(packed):
            problems += self._problems(name)
        _raise(problems)
        others = {name for name in self._files if name.removesuffix(_BLOCKS).removesuffix(_SCALES) not in packed}
        return {name: _plain(self._files[name], name) for name in others} | {name: self._packed(name) for name in packed}

    def _problems(self, name: str) -> Iterator[str]:
        if name in self._files:
            yield f"{name} is stored twice, quantised and not; remove {name} or {name}{_BLOCKS}"
        if name + _SCALES not in self._files:
            yield f"{name}{_BLOCKS} lacks its scale {name}{_SCALES}"
            return
        blocks, scales = (self._files[name + end].slots[name + end] for end in (_BLOCKS, _SCALES))
        if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP // 2:
            yield f"{name}{_BLOCKS} is {blocks.dtype} {list(blocks.shape)}, mxfp4 means U8 [E, O, G, {_GROUP // 2}]"
        elif scales.dtype not in ("U8", "F8_E8M0") or scales.shape != blocks.shape[:-1]:
            yield f"{name}{_SCALES} is {scales.dtype} {list(scales.shape)}, its blocks mean U8 {list(blocks.shape[:-1])}"

    def _packed(self, name: str) -> StoredTensor:
        experts, outputs, groups, _ = self._files[name + _BLOCKS].slots[name + _BLOCKS].shape
        return StoredTensor((experts, groups * _GROUP, outputs), self._dtype, partial(self._read, name))

    def _read(self, name: str, dtype: torch.dtype | None, rows: tuple[int, int] | None) -> Tensor:
        blocks, scales = (self._files[name + end].tensor(name + end, rows) for end in (_BLOCKS, _SCALES))
        return dequantize_mxfp4(blocks, scales, dtype or self._dtype).transpose(-1, -2)


class _Fp8:
    """Weights and their scales."""

    def __init__(self, files: Mapping[str, SafetensorsFile], dtype: torch.dtype, block: tuple[int, int] | None, exponents: bool) -> None:
        self._files, self._dtype, self._block, self._exponents = files, dtype, block, exponents

    def tensors(self) -> dict[str, StoredTensor]:
        weights = [name for name, file in self._files.items() if file.slots[name].dtype == "F8_E4M3"]
        scales = {name: self._scales(name) for name in weights}
        used = {scale for found in scales.values() for scale in found}
        problems: list[str] = []
        for name in sorted(self._files.keys() - used):
            if name.endswith((_INVERSE, f".weight{_SCALE}")):
                weight = name.removesuffix(_INVERSE).removesuffix(_SCALE)
                what = f"is {self._files[weight].slots[weight].dtype}, not F8_E4M3" if weight in self._files else "is missing"
                problems.append(f"{name} is the scale of {weight}, which {what}")
        for name in sorted(weights):
            problems += self._problems(name, scales[name])
        _raise(problems)
        plain = self._files.keys() - scales.keys() - used
        tensors = {name: _plain(self._files[name], name) for name in plain if not name.endswith(_ACTIVATIONS)}
        for name, (scale,) in scales.items():
            tensors[name] = StoredTensor(self._files[name].slots[name].shape, self._dtype, partial(self._read, name, scale))
        return tensors

    def _scales(self, name: str) -> list[str]:
        return [name + end for end in (_INVERSE, _SCALE) if name + end in self._files]

    def _problems(self, name: str, scales: list[str]) -> Iterator[str]:
        shape = self._files[name].slots[name].shape
        if len(scales) != 1:
            yield f"{name} has two scales, {' and '.join(scales)}" if scales else f"{name} lacks its scale {name}{_INVERSE}"
        elif len(shape) < 2:
            yield f"{name} has shape {list(shape)}, fp8 means at least two dims"
        else:
            slot, grid = self._files[scales[0]].slots[scales[0]], self._grid(shape)
            codes = (*_SCALE_CODES, "U8") if self._exponents else _SCALE_CODES
            if slot.dtype not in codes:
                yield f"{scales[0]} is {slot.dtype}, fp8 means one of {', '.join(codes)}"
            if not self._is_one(slot.shape) and slot.shape != grid:
                size = "null" if self._block is None else str(list(self._block))
                yield f"{scales[0]} has shape {list(slot.shape)}, weight_block_size={size} means {list(grid)} for {name} {list(shape)}"

    def _is_one(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) == 1 and (len(shape) < 2 or self._block is None)

    def _blocks(self, shape: tuple[int, ...]) -> tuple[int, int]:
        high, wide = self._block or shape[-2:]
        return high, wide

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        high, wide = self._blocks(shape)
        return (*shape[:-2], -(-shape[-2] // high), -(-shape[-1] // wide))

    def _read(self, name: str, scale_name: str, dtype: torch.dtype | None, rows: tuple[int, int] | None) -> Tensor:
        weight, scale = self._files[name].tensor(name, rows), self._files[scale_name].tensor(scale_name)
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        shape = self._files[name].slots[name].shape
        grid, first_row = self._grid(shape), 0
        if self._is_one(tuple(scale.shape)):
            scale = scale.float().expand(grid)
        if rows is not None and len(shape) == 2:
            first_row = rows[0]
        elif rows is not None:
            scale = scale[rows[0] : rows[1]]
        return dequantize_fp8(weight, scale, self._blocks(shape), dtype or self._dtype, first_row)


def _block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block; None for one scale a tensor."""
    block = quantization.get("weight_block_size", _WHOLE_BLOCK)
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        _refuse(
            "quantization_config.weight_block_size", block, "is no size of blocks; only two positive ints, such as [128, 128], or null are"
        )
    return block[0], block[1]


def _check_entries(quantization: Mapping[str, Any], inert: frozenset[str], fixed: Mapping[str, tuple[str, ...]]) -> None:
    for name, value in quantization.items():
        if value is None or name in inert or name.startswith("_"):
            continue
        if name not in fixed:
            _refuse(f"quantization_config.{name}", value, "is not known; remove it from config.json if it changes no weight")
        if value not in fixed[name]:
            _refuse(f"quantization_config.{name}", value, f"is not read; only {' and '.join(map(repr, fixed[name]))} is")


def _raise(problems: list[str]) -> None:
    if problems:
        raise CheckpointingException("; ".join(problems) + "; fetch the folder again, or import the unquantised model")


def _refuse(name: str, value: Any, why: str) -> NoReturn:
    raise CheckpointingException(f"config.json: {name}={value!r} {why}")
