# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hidden states of named modules."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mcore_parallel.pipeline import ModelChunks


class HiddenCapture:
    """Keeps the outputs of named modules while it is open, each until it is taken; afterwards nothing of it is left in the model.

    It looks at the chunk with the output only (the last one of the last pipeline stage), where objectives are evaluated; elsewhere it does
    nothing.

    Args:
        model: this rank's stage; ``ModelChunks`` when it has several chunks.
        names: of the modules, as in the model's parameter names.

    Raises:
        ValueError: the chunk with the output has no such module.

    Example:
        >>> model = nn.Sequential(nn.Identity(), nn.Flatten())
        >>> with HiddenCapture(model, ["0"]) as capture:
        ...     _ = model(Tensor(1, 2, 3))
        ...     capture.take()["0"].shape
        torch.Size([1, 2, 3])
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        chunk: Any = model[-1] if isinstance(model, ModelChunks | nn.ModuleList) else model
        here = getattr(chunk, "is_last", True)
        self._chunk, self._wanted = chunk, False
        self._modules: dict[str, nn.Module] = {}
        self._found: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for name in dict.fromkeys(names) if here else ():
            try:
                self._modules[name] = chunk.get_submodule(name)
            except AttributeError:
                layers = getattr(chunk, "stage_layers", None)
                hint = "" if layers is None else f", whose layers are {layers.start} to {layers.stop - 1}"
                raise ValueError(f"no module {name!r} in the chunk with the output{hint}; name one of these") from None

    def __enter__(self) -> "HiddenCapture":
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._keeper(name)))
        if self._modules:
            self._handles.append(self._chunk.register_forward_pre_hook(self._begin))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._found.clear()

    def take(self) -> dict[str, Tensor]:
        """Outputs of the last forward, by name; they are kept no longer.

        Raises:
            RuntimeError: there was none since the last time, or the capture is not open.
        """
        missing = [name for name in self._modules if name not in self._found]
        if missing:
            raise RuntimeError(f"nothing was captured of {missing}; open the capture around the forward passes: with capture: ...")
        captured, self._found, self._wanted = self._found, {}, False
        return captured

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._wanted = True

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            # A layer that runs again in the backward is of no interest. One may return its auxiliary loss beside.
            if self._wanted:
                self._found[name] = output[0] if isinstance(output, tuple) else output

        return keep
