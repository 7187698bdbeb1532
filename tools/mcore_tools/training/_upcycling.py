# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture of experts that begins with the weights of a dense model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.storage import Folder
from mcore_moe import upcycle_state_dict
from mcore_parallel import ProcessGroups
from mcore_parallel.training import TensorShard
from mcore_tools.assembly import build_model
from mcore_tools.recipes import RunConfig
from mcore_tools.training._conversion import fill_parts
from mcore_tools.training._pretrained import HuggingFaceFolder
from mcore_tools.training._stored import check_stored, stored_model

_EXPERTS = "experts.up"


def check_origin(config: RunConfig, folder: Folder | HuggingFaceFolder | None, *, is_own: bool) -> "Upcycling | None":
    """``check_stored``, and with ``load.upcycle`` what makes the run's mixture of the dense model in ``folder``.

    Args:
        config: the run.
        folder: of the checkpoint whose weights it takes; None for no weights.
        is_own: it is a step of the run itself, which is a mixture already.

    Raises:
        ValueError: the weights are of another model, of a mixture already, or do not become this one; names the field.
        CheckpointingException: the checkpoint cannot be read.
    """
    if is_own or folder is None or not config.load.upcycle:
        check_stored(config, folder, is_own=is_own)
        return None
    dense = _dense_run(config)
    if _is_mixture(folder, dense):
        raise ValueError(f"load.upcycle=true makes a mixture of a dense model, and {folder} holds one already; set load.upcycle=false")
    check_stored(dense, folder)
    return Upcycling(config, dense)


class Upcycling:
    """Asks a checkpoint for the dense model of a mixture, and makes experts of its feed-forwards, a layer at a time.

    Each rank reads the whole feed-forwards of its layers into host memory.

    Args:
        config: the run.
        dense: one of the dense model.

    Raises:
        ValueError: the one does not become the other.
    """

    def __init__(self, config: RunConfig, dense: RunConfig) -> None:
        assert config.moe is not None, "RunConfig asks for experts"
        single = ProcessGroups.single()
        self._moe = config.moe
        self._dense = build_model(dense, single, "meta").state_dict()
        self._mixture = build_model(config, single, "meta").state_dict()
        self._prefixes = tuple(name.removesuffix(_EXPERTS) for name in self._mixture if name.endswith(f".{_EXPERTS}"))
        # The same in every layout.
        draws = torch.Generator().manual_seed(config.train.seed)
        for prefix in self._prefixes:
            for name, value in _under(prefix + "router.", self._mixture).items():
                router = torch.zeros(value.shape, dtype=value.dtype)
                if name.endswith(".weight"):
                    router.copy_(torch.empty(value.shape).normal_(0.0, config.model.init_method_std, generator=draws))
                self._mixture[name] = router
        try:
            upcycle_state_dict(self._dense, self._mixture, self._moe)
        except ValueError as error:
            raise ValueError(f"load.upcycle=true: {error}") from None

    def dense(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """What to read for ``wanted``, the mixture's parts on this rank by name: the dense model's, its feed-forwards whole."""
        state = {name: value for name, value in wanted.items() if not name.startswith(self._prefixes)}
        for prefix in self._here(wanted):
            for name, value in _under(prefix, self._dense).items():
                data = torch.empty(value.shape, dtype=value.dtype)
                state[name] = TensorShard(data=data, global_shape=tuple(data.shape), offset=(0,) * data.dim(), replica=0)
        return state

    @torch.no_grad()
    def fill(self, wanted: Mapping[str, Any], dense: Mapping[str, Any]) -> None:
        """Copy experts and routers made of ``dense``, which was read, into the parts of this rank."""
        for prefix in self._here(wanted):
            read = {name: shard.data for name, shard in _under(prefix, dense).items()}
            for name, value in upcycle_state_dict(read, _under(prefix, self._mixture), self._moe).items():
                fill_parts(wanted.get(name, ()), value)

    def _here(self, wanted: Mapping[str, Any]) -> list[str]:
        """Prefixes of the mixtures of which this rank holds a part."""
        return [prefix for prefix in self._prefixes if any(name.startswith(prefix) for name in wanted)]


def _dense_run(config: RunConfig) -> RunConfig:
    """A run of the model without experts, whose feed-forwards stand where these are."""
    pattern = config.model.hybrid_layer_pattern
    model = dataclasses.replace(config.model, hybrid_layer_pattern=None if pattern is None else pattern.replace("E", "-"))
    load = dataclasses.replace(config.load, upcycle=False)
    return RunConfig(model=model, train=config.train, load=load, output=config.output)


def _is_mixture(folder: Folder | HuggingFaceFolder, dense: RunConfig) -> bool:
    """By what the weights say of their model, or else by their names."""
    try:
        stored = stored_model(folder, dense)
    except (ValueError, TypeError):
        # It is compared next, and named there.
        return False
    if stored is not None:
        return stored[1] is not None
    return isinstance(folder, Folder) and any(".experts." in name for name in read_manifest(folder).tensors)


def _under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith(prefix)}
