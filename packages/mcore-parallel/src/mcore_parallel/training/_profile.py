# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Named ranges in the traces of profilers, and a window of steps that is traced."""

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from mcore_parallel.training._communication import CommunicationReport, exposed_communication, read_trace

_F = TypeVar("_F", bound=Callable[..., Any])


class RangeSink(Protocol):
    """Where ranges are shown."""

    def range_push(self, message: str, /) -> object: ...
    def range_pop(self) -> object: ...


class NvtxRanges:
    """Nested named ranges, seen by nsys and other readers of NVTX; off, each call returns at once.

    Every thread has its own stack, as NVTX does.

    Args:
        enabled: None for on where there is a CUDA device.
        sink: None for ``torch.cuda.nvtx``.

    Raises:
        ValueError: turned on without a sink and without a CUDA device.

    Example:
        >>> ranges = NvtxRanges(enabled=False)
        >>> with ranges.range("forward"):
        ...     pass
    """

    def __init__(self, enabled: bool | None = None, *, sink: RangeSink | None = None) -> None:
        cuda = torch.cuda.is_available()
        if enabled and sink is None and not cuda:
            raise ValueError("enabled=True needs a CUDA device, and there is none; leave it None, or pass a sink")
        self.enabled = (cuda or sink is not None) if enabled is None else enabled
        # torch.cuda.nvtx is a module with these two functions.
        target: Any = torch.cuda.nvtx if sink is None else sink
        self._sink: RangeSink = target
        self._local = threading.local()

    @property
    def depth(self) -> int:
        """Open ranges of this thread."""
        return len(self._stack)

    def push(self, message: str) -> None:
        """Open a range."""
        if self.enabled:
            self._stack.append(message)
            self._sink.range_push(message)

    def pop(self, message: str | None = None) -> None:
        """Close the innermost range.

        Args:
            message: what it must be called; None for any.

        Raises:
            RuntimeError: no range is open, or the innermost has another name.
        """
        if not self.enabled:
            return
        stack = self._stack
        if not stack:
            raise RuntimeError(f"no range is open in this thread to pop {message!r}; push it first")
        if message is not None and stack[-1] != message:
            raise RuntimeError(f"the innermost range is {stack[-1]!r}, not {message!r}; close the inner ones first")
        stack.pop()
        self._sink.range_pop()

    @contextlib.contextmanager
    def range(self, message: str) -> Iterator[None]:
        """A range around a block; whatever stays open inside, after an exception for instance, is closed with it."""
        if not self.enabled:
            yield
            return
        height = len(self._stack)
        self.push(message)
        try:
            yield
        finally:
            self.unwind(height)

    def unwind(self, depth: int) -> None:
        """Close ranges until ``depth`` are open."""
        stack = self._stack
        while len(stack) > depth:
            stack.pop()
            self._sink.range_pop()

    def decorate(self, message: str | None = None) -> Callable[[_F], _F]:
        """A decorator that puts a range around each call; whether it is on is asked at the call.

        Args:
            message: None for the function's module and name.
        """

        def wrap(function: _F) -> _F:
            name = f"{function.__module__}.{function.__qualname__}" if message is None else message

            @functools.wraps(function)
            def call(*inputs: Any, **options: Any) -> Any:
                if not self.enabled:
                    return function(*inputs, **options)
                with self.range(name):
                    return function(*inputs, **options)

            wrapped: Any = call
            return wrapped

        return wrap

    def annotate(self, model: nn.Module, name: str = "model", *, depth: int | None = None) -> "Annotation":
        """Ranges around the forward and the backward of every module below ``model``, nested as the modules are.

        A range tells the module's name, its first tensor's shape, dtype and size, as in ``layers.0.mlp [1024, 1024] bfloat16 2.0 MiB``.
        Ranges of the backward begin with ``grad``; one lasts from the gradient of a module's output to that of its input.

        Args:
            model: its modules must not be compiled; one that is replayed from a graph shows as a whole.
            name: of the model itself.
            depth: modules at most so deep below it; None for all.

        Returns:
            What takes the hooks off; also a context.
        """
        return Annotation(self, model, name, depth)

    @property
    def _stack(self) -> list[str]:
        stack = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack


class Annotation:
    """The hooks of ``NvtxRanges.annotate``."""

    def __init__(self, ranges: NvtxRanges, model: nn.Module, name: str, depth: int | None) -> None:
        self._ranges = ranges
        self._handles: list[Any] = []
        # Texts of tensors, of which a model has few kinds: making one takes longer than a range.
        self._texts: dict[tuple[torch.Size, torch.dtype], str] = {}
        if not ranges.enabled:
            return
        for path, module in model.named_modules():
            if depth is None or (path.count(".") + 1 if path else 0) <= depth:
                label = path or name
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._enter, label), with_kwargs=True))
                self._handles.append(
                    module.register_forward_hook(functools.partial(self._leave, label), with_kwargs=True, always_call=True)
                )

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> "Annotation":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _enter(self, label: str, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        tensor = _first_tensor((inputs, options))
        self._ranges.push(self._message(label, tensor))
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(functools.partial(self._close, f"grad {label}"))

    def _leave(self, label: str, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        # An exception inside leaves inner ranges open, and forward hooks that run always close them here.
        self._close(label)
        start, tensor = _first_tensor((inputs, options)), _first_tensor(output)
        # Without a gradient of the input nothing would close the range.
        if tensor is not None and tensor.grad_fn is not None and start is not None and start.requires_grad:
            tensor.grad_fn.register_prehook(functools.partial(self._open_grad, f"grad {label}"))

    def _open_grad(self, label: str, grads: tuple[Any, ...]) -> None:
        self._ranges.push(self._message(label, _first_tensor(grads)))

    def _close(self, label: str, *_: object) -> None:
        """Close the innermost range of that label and all inside it. Parts that read one input end together, in any order."""
        stack, described = self._ranges._stack, f"{label} ["
        for place in range(len(stack) - 1, -1, -1):
            if stack[place].startswith(described) or stack[place] == label:
                self._ranges.unwind(place)
                return

    def _message(self, label: str, tensor: Tensor | None) -> str:
        if tensor is None:
            return label
        kind = tensor.shape, tensor.dtype
        text = self._texts.get(kind)
        if text is None:
            text = self._texts[kind] = _describe(tensor)
        return f"{label} {text}"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps of which ranks are traced.

    Raises:
        ValueError: a tool that does not exist, a window without a step.
    """

    tool: Literal["none", "torch", "nsys"] = "none"
    """"torch" writes a trace and a table of each rank, and where there are kernels of a device how much of a step waits for communication
    (``CommunicationReport``); "nsys" tells Nsight Systems when to record
    (``nsys profile --capture-range=cudaProfilerApi``)."""
    step_start: int = 10
    """First step that is traced; the first step of a run is 1."""
    step_end: int = 12
    """First step that is no longer traced."""
    ranks: tuple[int, ...] = (0,)
    """Those that are traced."""
    nvtx_ranges: bool = False
    """Ranges around the forward and backward of each module, inside the window."""
    record_shapes: bool = True
    """Shapes of the operands, in the trace of "torch"."""
    output: str = "profile"
    """Folder of the files of "torch"."""

    def __post_init__(self) -> None:
        if self.tool not in ("none", "torch", "nsys"):
            raise ValueError(f'tool={self.tool!r} must be "none", "torch" or "nsys"')
        if not 1 <= self.step_start < self.step_end:
            raise ValueError(f"step_start={self.step_start} and step_end={self.step_end} hold no step; let 1 <= step_start < step_end")

    def build(self, *, rank: int = 0, model: nn.Module | None = None) -> "ProfileWindow":
        """The window of one rank."""
        return ProfileWindow(self, rank=rank, model=model)


class ProfileWindow:
    """Traces the steps of its window; every method may be called on every rank.

    Args:
        config: what is traced.
        rank: of this process.
        model: whose modules ``nvtx_ranges`` shows; None for none.

    Raises:
        ValueError: "nsys" on a rank without a CUDA device.

    Example:
        >>> with ProfileConfig(tool="none").build() as window:
        ...     for step in range(1, 4):
        ...         window.begin_step(step)
        ...         window.end_step(step)
        >>> window.files
        []
    """

    def __init__(self, config: ProfileConfig, *, rank: int = 0, model: nn.Module | None = None) -> None:
        self.config, self.rank, self.model = config, rank, model
        self.files: list[Path] = []
        """What was written."""
        self.communication: CommunicationReport | None = None
        """Of the steps that were traced, once the window is closed; None where no kernel ran."""
        self._takes_part = config.tool != "none" and rank in config.ranks
        self._stack: contextlib.ExitStack | None = None
        self._step = contextlib.ExitStack()
        self._profiler: Any = None
        self.ranges = NvtxRanges(None if self._takes_part and config.nvtx_ranges else False)
        if self._takes_part and config.tool == "nsys" and not torch.cuda.is_available():
            raise ValueError('tool="nsys" needs a CUDA device, and there is none; use tool="torch"')

    @property
    def is_open(self) -> bool:
        """Whether steps are traced now."""
        return self._stack is not None

    def begin_step(self, step: int) -> None:
        """Call before a step; a resumed run may begin inside the window or behind it."""
        if self._takes_part and self._stack is None and self.config.step_start <= step < self.config.step_end:
            self._open()
        self._step.enter_context(self.range(f"step {step}"))

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A range around a part of a step, as the tool shows it; outside the window nothing."""
        if self._profiler is not None:
            return torch.profiler.record_function(name)
        return self.ranges.range(name)

    def end_step(self, step: int) -> None:
        """Call after a step."""
        self._step.close()
        if self._stack is not None and step >= self.config.step_end - 1:
            self.close()

    def close(self) -> None:
        """End the window if it is open, also in the middle of a step; call it in any case when training ends."""
        self._step.close()
        self.ranges.unwind(0)
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def __enter__(self) -> "ProfileWindow":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        with contextlib.ExitStack() as stack:
            if self.config.tool == "torch":
                activities = [torch.profiler.ProfilerActivity.CPU]
                if torch.cuda.is_available():
                    activities.append(torch.profiler.ProfilerActivity.CUDA)
                self._profiler = torch.profiler.profile(activities=activities, record_shapes=self.config.record_shapes, acc_events=True)
                self._profiler.start()
                stack.callback(self._write)
            else:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                stack.callback(torch.cuda.profiler.stop)
                stack.callback(torch.cuda.synchronize)
                stack.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=self.config.record_shapes))
            if self.model is not None and self.ranges.enabled:
                stack.enter_context(self.ranges.annotate(self.model))
            self._stack = stack.pop_all()

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        folder = Path(self.config.output)
        folder.mkdir(parents=True, exist_ok=True)
        trace, table = folder / f"rank{self.rank}.trace.json.gz", folder / f"rank{self.rank}.txt"
        profiler.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table.write_text(profiler.key_averages().table(sort_by=order, row_limit=50, max_name_column_width=80))
        self.files += [trace, table]
        if torch.cuda.is_available():
            self.communication = exposed_communication(read_trace(trace))
        if self.communication is not None:
            path = folder / f"rank{self.rank}.communication.json"
            path.write_text(json.dumps(self.communication.to_json(), indent=1) + "\n", encoding="utf-8")
            self.files.append(path)


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    members = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    for member in members:
        first = _first_tensor(member)
        if first is not None:
            return first
    return None


def _describe(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} {x.numel() * x.element_size() / 2**20:.1f} MiB"
