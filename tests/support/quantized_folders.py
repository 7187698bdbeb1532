# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hugging Face folders quantised as models are published, and the same ones dequantised. No code is shared with the import."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def to_mxfp4(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[E, in, out] as blocks [E, out, in / 32, 16], scales [E, out, in / 32], and what they stand for, [E, in, out] float32."""
    groups = value.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    numbers = (groups / torch.exp2(exponents)[..., None]).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    meant = (E2M1[numbers] * torch.exp2(exponents)[..., None]).flatten(2).transpose(1, 2).contiguous()
    blocks = (numbers[..., 0::2] + 16 * numbers[..., 1::2]).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), meant


def to_fp8(value: Tensor, block: tuple[int, int] | None, *, powers_of_two: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """[O, I] as float8_e4m3fn, its scales, and what they stand for in float32; a scalar scale without ``block``."""
    high, wide = block or tuple(value.shape)
    rows, columns = (math.ceil(size / step) for size, step in zip(value.shape, (high, wide), strict=True))
    scales, narrow = torch.empty(rows, columns), torch.empty(value.shape, dtype=torch.float8_e4m3fn)
    meant = torch.empty(value.shape)
    for row in range(rows):
        for column in range(columns):
            part = slice(row * high, row * high + high), slice(column * wide, column * wide + wide)
            scale = value[part].float().abs().max() / 448
            scales[row, column] = scale = torch.exp2(torch.ceil(torch.log2(scale))) if powers_of_two else scale
            narrow[part] = (value[part].float() / scale).to(torch.float8_e4m3fn)
            meant[part] = narrow[part].float() * scale
    return narrow, scales if block else scales[0, 0], meant


def write_quantized(source: Path, target: Path, twin: Path, method: str, **entries: Any) -> None:
    """A folder as ``save_pretrained`` writes it, quantised into ``target``, and what that means into ``twin``, both of its dtype.

    Args:
        source: the folder.
        target: to create.
        twin: to create.
        method: "mxfp4" for the experts of gpt-oss, "fp8" for every projection.
        entries: of ``quantization_config``; "weight_block_size" is [128, 128] unless it says otherwise.
    """
    from safetensors.torch import load_file

    tensors = {name: tensor for path in sorted(source.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    quantized: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    block = entries.get("weight_block_size", (128, 128))
    for name, tensor in tensors.items():
        meant[name] = quantized[name] = tensor
        if method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            del quantized[name]
            quantized[f"{name}_blocks"], quantized[f"{name}_scales"], wide = to_mxfp4(tensor)
            meant[name] = wide.to(tensor.dtype)
        elif method == "fp8" and name.endswith(("proj.weight", "proj_with_mqa.weight")):
            exponents = entries.get("scale_fmt") == "ue8m0"
            quantized[name], scales, wide = to_fp8(tensor, block, powers_of_two=exponents)
            quantized[f"{name}_scale_inv"] = scales
            meant[name] = wide.to(tensor.dtype)
    quantization = {"quant_method": method, **entries}
    if method == "fp8":
        quantization = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block) if block else None, **quantization}
    config = json.loads((source / "config.json").read_text())
    write_folder(target, quantized, {**config, "quantization_config": quantization})
    write_folder(twin, meant, config)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """One file of weights and a config.json."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
