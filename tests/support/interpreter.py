# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton's interpreter: kernels on a processor, in a process of its own, as it takes over every kernel of a process."""

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# What nearly every program imports: loaded once in the server, it costs a program nothing. A wheel that is not installed is passed over.
_PRELOADED = [
    "hypothesis", "torch._dynamo", "triton.language", "mcore_parallel.data_parallel", "mcore_parallel.models", "mcore_parallel.optim",
    "mcore_parallel.training", "mcore_inference", "mcore_moe",
]  # fmt: skip
_servers: list[subprocess.Popen[str]] = []


def run_interpreted(*program: str) -> None:
    """Run Python with these arguments (a test file, or ``-c`` and code) where kernels are interpreted; skip where there is no Triton.

    Raises:
        AssertionError: the program did not come to its last line, which prints "same".
        TimeoutError: it gave no answer in time.
    """
    pytest.importorskip("triton")
    if not _servers:
        _servers.append(_start_server())
    [server] = _servers
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as unanswered:
        unanswered.callback(_end_server)
        output, errors = (Path(folder) / name for name in ("out", "err"))
        print(json.dumps([str(output), str(errors), *program]), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], 110)[0]:
            raise TimeoutError(f"{program[0]} gave no answer")
        assert server.stdout.readline() == "ended\n", "the server of interpreted programs died"
        unanswered.pop_all()
        assert output.read_text() == "same\n", errors.read_text()[-3000:]


def _start_server() -> subprocess.Popen[str]:
    """A process that takes over kernels from its first import on, loads what programs need, and forks itself for each.

    It ends with its stdin.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command, pipe = [sys.executable, "-W", "ignore", "-m", __name__], subprocess.PIPE
    # In a group of its own: what a program started ends with it.
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _end_server() -> None:
    with _servers.pop() as server:
        os.killpg(server.pid, signal.SIGKILL)


def round_dots_once() -> None:
    """From now on the interpreter of this process multiplies in float64 and rounds to float32; a library's order of sums cannot show.

    A row has the same bits wherever it stands in its tile then, as matrix instructions have them.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def patch_language_once() -> None:
    """From now on the interpreter of this process leaves Triton's language patched; it would do so at every call of a device function.

    What it makes at every operation, tables and types, it makes once.
    """
    from triton.runtime import interpreter

    # A scope that has restored what was patched would be of no use to the next caller of the same function.
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    # A table of all types, built at every operation.
    interpreter._get_np_dtype = _by_type(interpreter._get_np_dtype)
    # Computed in 64 bits at every operation, and asserted in a mode that no test is run in.
    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _make_types_once()


def _make_types_once() -> None:
    """Types, and the shapes that tensors have of them, are made once each; operands of one type are taken as they are."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    convert, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    types: dict[Any, Any] = {}
    # Those in which every operation of two such numbers is computed.
    lasting = {core.int1, core.int32, core.int64, core.float32, core.float64}

    def block_type(cls: Any, element: Any, shape: Any) -> Any:
        key = element, *[size.value if isinstance(size, core.constexpr) else size for size in shape]
        if key not in types:
            types[key] = object.__new__(cls)
            make_type(types[key], element, shape)
            types[key].sizes = key[1:]
        return types[key]

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        if "fields" not in vars(kind):
            make_tensor(self, handle, kind)
            kind.fields = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(kind.fields, handle=handle)

    def of_one_type(self: Any, one: Any, other: Any, *options: Any, **more: Any) -> Any:
        same = isinstance(one, core.tensor) and isinstance(other, core.tensor) and one.type is other.type
        return (one, other) if same and one.dtype in lasting else convert(self, one, other, *options, **more)

    def of_one_shape(self: Any, one: Any, other: Any) -> Any:
        # A number has no sizes.
        same = getattr(one.type, "sizes", ()) == getattr(other.type, "sizes", ())
        return (one, other) if same else broadcast(self, one, other)

    # Pointers are compared by what they point to, and have no hash for want of one.
    core.pointer_type.__hash__ = core.dtype.__hash__
    core.block_type.__new__, core.block_type.__init__ = block_type, lambda *_: None
    core.block_type.__eq__ = lambda self, other: self is other
    core.tensor.__init__ = tensor
    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = of_one_type, of_one_shape


def _by_type(convert: Any) -> Any:
    from triton.language import block_type, pointer_type

    of_element = functools.cache(convert)

    def np_dtype(kind: Any) -> np.dtype[Any]:
        element = kind.element_ty if isinstance(kind, block_type) else kind
        return convert(element) if isinstance(element, pointer_type) else of_element(element)

    return np_dtype


def _serve() -> list[str]:
    """Fork for each line of stdin, and say when that process has ended; there, the program that the line asked for."""
    for name in _PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    patch_language_once()
    # What is loaded is no garbage: looking through it would copy the server's memory.
    gc.freeze()
    for line in sys.stdin:
        if not (pid := os.fork()):
            output, errors, *program = json.loads(line)
            for number, path in ((1, output), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            return program
        os.waitpid(pid, 0)
        print("ended", flush=True)
    raise SystemExit


if __name__ == "__main__":
    sys.argv = _serve()
    if sys.argv[0] == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
