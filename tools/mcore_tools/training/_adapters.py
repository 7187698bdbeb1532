# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps of a run that trains adapters: they hold these alone, and their base model is where the run took it from."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mcore_ckpt import CheckpointManager
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.storage import Folder
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import quantize_base
from mcore_parallel.optim import MegatronOptimizer
from mcore_parallel.tensor_parallel import LoraConfig, add_lora, is_adapter
from mcore_tools.assembly import build_model
from mcore_tools.recipes import LoadConfig, RunConfig
from mcore_tools.training._begun_adapter import check_adapter, fill_adapter
from mcore_tools.training._pretrained import HuggingFaceFolder
from mcore_tools.training._start import RunCheckpoints, Source
from mcore_tools.training._stored import absolute_place

_OPTIMIZER = "optimizer."
_LORA, _BASE = "lora", "lora_base"


def check_lora(config: RunConfig, own: CheckpointManager) -> None:
    """Refuse targets that the model has not, and adapters other than those of the run's own steps, or of ``load.adapter``.

    Args:
        config: the run.
        own: its checkpoints.

    Raises:
        ValueError: names the field.
    """
    newest = own.latest()
    stored = {} if newest is None else read_manifest(own.folder(newest)).extra
    if config.lora is None:
        if _LORA in stored:
            raise ValueError(f"{own.directory} holds adapters of {stored[_BASE]}, and lora=none; set lora as there, or name another output")
        if config.load.adapter:
            raise ValueError(f"load.adapter={config.load.adapter!r} is trained further, and lora=none; leave lora out, or load.adapter")
        return
    single = ProcessGroups.single()
    try:
        model = build_model(config, single, "meta")
        layers = add_lora(model, config.lora, single)
        quantize_base(model)
    except ValueError as error:
        raise ValueError(f"lora.{error}") from None
    if config.sft is not None and config.sft.export == "adapter":
        # A pair of matrices for each expert.
        stacks = (name for name, value in model.named_parameters() if is_adapter(name) and name.endswith(".A") and value.dim() > 2)
        if (stack := next(stacks, None)) is not None:
            raise ValueError(
                f"sft.export='adapter' has no form for adapters of experts, such as {stack}; set sft.export=merged, or leave experts out "
                "of lora.targets"
            )
    if newest is None:
        if config.load.adapter:
            check_adapter(config, layers)
        return
    if _LORA not in stored:
        raise ValueError(f"{own.directory} holds whole models, and lora is set; name another output, or set lora=none")
    ours, theirs = _settings(config.lora), stored[_LORA]
    for name in ("rank", "alpha", "targets", "base_dtype"):
        if ours[name] != theirs.get(name):
            raise ValueError(f"lora.{name}={ours[name]!r}, and the adapters in {own.directory} have {theirs.get(name)!r}; set that")


def describe_adapters(config: RunConfig, origin: Folder | HuggingFaceFolder | None) -> dict[str, Any]:
    """What each step of the run says of its adapters and their base model; empty without adapters."""
    if config.lora is None or origin is None:
        return {}
    base = str(origin)
    return {_LORA: _settings(config.lora), _BASE: absolute_place(base)}


def _settings(config: LoraConfig) -> dict[str, Any]:
    return {**dataclasses.asdict(config), "targets": list(config.targets)}


class AdapterCheckpoints:
    """The checkpointer of a run with adapters: saves them with the optimizer's state, and loads them onto the base model.

    Args:
        config: where the base model is.
        own: the checkpoints of the run.
        base: of ``find_base``.
        optimizer: of the run.
        described: what each step says of its model beside (``extra``).
        asynchronous: as for ``RunCheckpoints``.
    """

    def __init__(
        self,
        config: LoadConfig,
        own: CheckpointManager,
        base: Source,
        optimizer: MegatronOptimizer,
        described: Mapping[str, Any],
        *,
        asynchronous: bool = False,
    ) -> None:
        self._config, self._own, self._described, self._asynchronous = config, own, described, asynchronous
        self._base = RunCheckpoints(config, own, base, optimizer)
        self.loaded = ""
        """What was loaded, in words."""

    def latest(self) -> int:
        """The newest step; 0 where the base model is all that there is to load."""
        return self._own.latest() or 0

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Save the adapters of a step."""
        saved = {name: value for name, value in state.items() if _is_saved(name)}
        self._own.save(step, saved, {**self._described, **extra}, asynchronous=self._asynchronous)

    def load(self, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """As ``RunCheckpoints.load``: the base model, and the adapters of the newest step, or those that the run begins with. Collective.

        Raises:
            CheckpointingException: they do not fit, or cannot be read.
            ValueError: the base has weights that the model has not.
        """
        goes_on, adapter = self._own.latest() is not None, self._config.adapter
        if adapter and not goes_on:
            # The base's optimizer takes its masters from all weights.
            fill_adapter(state, self._config)
        begun = self._base.load({name: value for name, value in state.items() if not _is_saved(name)})
        self.loaded = self._base.loaded
        if not goes_on:
            self.loaded = f"the adapter in {adapter} on {self.loaded}" if adapter else self.loaded
            return begun
        step, extra = self._own.load({name: value for name, value in state.items() if _is_saved(name)})
        self.loaded = f"step {step} of {self._own.directory} on {self.loaded}"
        return step, extra


def _is_saved(name: str) -> bool:
    return name.startswith(_OPTIMIZER) or is_adapter(name)
