# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels compiled for Hopper on a machine without a GPU: what the interpreter does not see."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, what one program may use."""
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class CompiledLaunches:
    """Stands in a module for one of its kernels: a launch is compiled for its arguments, down to the assembler, and not run.

    Args:
        kernel: of ``triton.jit`` or ``gluon.jit``.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.shared_bytes: list[int] = []
        """Of each launch."""
        self.ptx: list[str] = []
        """Of each launch."""
        self.ttgir: list[str] = []
        """Of each launch: Triton's own form, with layouts."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(
        self,
        *args: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        enable_fp_fusion: bool = True,
        maxnreg: int | None = None,
        **constants: Any,
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        if self._kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as ASTSource

        names = self._kernel.arg_names
        values = {**dict(zip(names, args, strict=False)), **constants}
        assert list(values) == names, "every argument once, constants last"
        signature, fixed, attributes = {}, {}, {}
        for place, (name, parameter) in enumerate(zip(names, self._kernel.params, strict=True)):
            value, special = values[name], not parameter.do_not_specialize
            # As a launch does: 1 is a constant, and multiples of 16 are known to be so.
            if name in constants or value is None or (special and isinstance(value, int) and value == 1):
                signature[name], fixed[(place,)] = "constexpr", value
                continue
            if hasattr(value, "block_shape"):
                layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
                signature[name], aligned = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>", False
            elif isinstance(value, Tensor):
                signature[name], aligned = f"*{_TYPES[value.dtype]}", True
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                aligned = signature[name] == "i32" and value % 16 == 0
            if special and aligned:
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self._kernel, signature=signature, constexprs=fixed, attrs=attributes)
        # Said, since triton 3.9 warns of a default that will change.
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion, "maxnreg": maxnreg}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.shared_bytes.append(compiled.metadata.shared)
        self.ptx.append(compiled.asm["ptx"])
        self.ttgir.append(compiled.asm["ttgir"])
        assert compiled.metadata.shared <= SHARED_BYTES
