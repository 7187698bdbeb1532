# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Students that compute as if they were quantised, by nvidia-modelopt."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.groups import Group, ProcessGroups
from mcore_parallel.nn import SharedKVProjection
from mcore_parallel.tensor_parallel import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from mcore_parallel.training._batch import Batch
from mcore_parallel.training._objective import CrossEntropyObjective
from mcore_parallel.training._step import evaluate


class ModeloptMissingError(ImportError):
    """The extra ``modelopt`` is not installed."""


def quantize_student(
    model: nn.Module,
    config: str | Mapping[str, Any],
    calibration: Sequence[Batch],
    *,
    groups: ProcessGroups | None = None,
) -> None:
    """Let the parallel linear layers of a model quantise their inputs and weights from now on, rounded and widened again (simulated);
    needs the extra ``modelopt``.

    Gradients pass the rounding as if it were not there, so the model trains like any other: distilled from a teacher with the weights
    that it begins with, it is quantisation-aware distillation. Names, shapes and shard specs of the parameters stay. The ranges of
    activations come from one pass over ``calibration``, and are the same on all tp and data-parallel ranks. They are no part of a
    checkpoint: to go on, quantise the same first weights over the same batches, and load the checkpoint after it.

    A weight of more than two dims is quantised as the matrix of its rows. Embeddings, norms and the output layer stay as they are.

    Args:
        model: this rank's stage; ``ModelChunks`` when it has several chunks.
        config: of nvidia-modelopt: the name of a preset ("FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG" ...), or a whole one.
        calibration: micro-batches, as of ``train_step``.
        groups: the layout; None for ``model.groups``.

    Raises:
        ModeloptMissingError: it is not installed.
        ValueError: no such preset, no micro-batch, a model that is quantised already, more tp ranks than key-value heads.
    """
    mtq = import_modelopt("modelopt.torch.quantization")
    if isinstance(config, str):
        presets = sorted(name for name in vars(mtq.config) if name.endswith("_CFG"))
        if config not in presets:
            raise ValueError(f"config={config!r} is no preset of nvidia-modelopt; choose one of {', '.join(presets)}")
        chosen: Mapping[str, Any] = getattr(mtq.config, config)
    else:
        chosen = config
    if not calibration:
        raise ValueError("calibration holds 0 micro-batches; give every rank at least one")
    if any(hasattr(module, "weight_quantizer") for module in model.modules()):
        raise ValueError("the model is quantised already; quantise it once")
    for name, module in model.named_modules():
        if isinstance(module, SharedKVProjection):
            raise ValueError(f"{name} shares key-value heads between tp ranks, which is not quantised; lower tp to num_query_groups")
    _register(mtq)
    mtq.quantize(model, dict(chosen), lambda _: evaluate(model, calibration, CrossEntropyObjective(), groups=groups))
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            _share_ranges(module)


def _share_ranges(layer: Any) -> None:
    """One range on all tp ranks for what has one range a tensor; nvidia-modelopt does it for weights of two dims only."""
    for quantizer in (layer.input_quantizer, layer.weight_quantizer):
        if layer.weight.dim() > 2 and quantizer.amax is not None and quantizer.axis in (None, -1):
            quantizer.sync_amax_across_distributed_group(layer.parallel_state.tensor_parallel_group)


def import_modelopt(name: str) -> Any:
    """A module of nvidia-modelopt.

    Raises:
        ModeloptMissingError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModeloptMissingError(
            "nvidia-modelopt is not installed; pip install 'mcore-parallel[modelopt]', or distil without quantisation"
        ) from error


def _register(mtq: Any) -> None:
    """Tell nvidia-modelopt, once a process, how the linear layers are quantised; its registry is its own."""
    base: Any = import_modelopt("modelopt.torch.quantization.nn.modules.quant_module").QuantLinearConvBase
    state: Callable[..., Any] = import_modelopt("modelopt.torch.utils.distributed").ParallelState
    registry: Any = import_modelopt("modelopt.torch.quantization.nn").QuantModuleRegistry

    class QuantisedLinear(base):
        def _setup(self) -> None:
            groups = self.groups
            self.parallel_state = state(_process_group(groups.dp_cp), _process_group(groups.tp))
            super()._setup()

        @staticmethod
        def _get_quantized_weight(module: Any, weight: Tensor) -> Tensor:
            if not module._enable_weight_quantization:
                return weight
            return module.weight_quantizer(weight.flatten(0, -2)).view(weight.shape)

        def iter_weights_for_calibration(self) -> Any:
            yield self.weight.flatten(0, -2), self.weight_quantizer

    kinds = {ColumnParallelLinear: {"_is_column_parallel": True}, RowParallelLinear: {"_is_row_parallel": True}, ReplicatedLinear: {}}
    for kind, flags in kinds.items():
        if kind not in registry:
            registry.register({kind: f"mcore.{kind.__name__}"})(type(f"Quantised{kind.__name__}", (QuantisedLinear,), flags))


def _process_group(group: Group) -> torch.distributed.ProcessGroup | int:
    """As nvidia-modelopt wants it: -1 for none."""
    return -1 if group.pg is None or group.size == 1 else group.pg
