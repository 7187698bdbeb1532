# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A checkpoint of theirs as one of ours."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core import DeferredTensor, SaveOptions, is_checkpoint, read_manifest, run_save
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import BACKEND_NAME, METADATA_NAME
from mcore_ckpt._storage import Folder, WatchedFolder, open_folder
from mcore_ckpt.megatron._config import check_unread, family_of, sizes_of
from mcore_ckpt.megatron._fsdp_dtensor import is_fsdp, open_fsdp
from mcore_ckpt.megatron._legacy import is_legacy, open_legacy
from mcore_ckpt.megatron._names import is_gated, our_name, our_shape
from mcore_ckpt.megatron._source import MegatronSource, plain, plain_groups
from mcore_ckpt.megatron._torch_dist import open_dist

__all__ = ["import_checkpoint_megatron", "open_megatron", "stored_bytes"]

_KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_TRACKER = "latest_checkpointed_iteration.txt"
_NARROW = (torch.bfloat16, torch.float16)


def import_checkpoint_megatron(
    directory: str | Path | Folder,
    output: str | Path | Folder,
    *,
    prefix: str = "model.",
    config: Mapping[str, Any] | None = None,
    optimizer: bool = True,
    drop: tuple[str, ...] = (),
    on_bytes: Callable[[int], None] | None = None,
) -> list[str]:
    """Make a checkpoint of ours of a GPT model's in Megatron's ``torch_dist`` (both generations), ``fsdp_dtensor`` or legacy form.

    Nothing in it is executed. Host memory holds one tensor of one layer at a time, and its parts while they are joined. Not collective.
    Weights get our names behind ``prefix``; optimizer state becomes ``optimizer.exp_avg.NAME``, ``optimizer.exp_avg_sq.NAME`` and, of
    16-bit weights, ``optimizer.master.NAME``, whichever sharding type of the optimizer holds it. Weights of 32 bits in ``fsdp_dtensor``
    are masters where its args, or ``config``, say ``bf16`` or ``fp16``; the model's are those rounded. ``extra`` gets "config" and
    "family", by which the checkpoint can be exported to Hugging Face, "iteration", and of the optimizer's state
    "optimizer_step" and "optimizer_param_groups": learning rates and decay, which an export gives back, as it does "opt_param_scheduler".

    Args:
        directory: of one iteration, or the folder above with the file that names the newest.
        output: where to write, as for `mcore_ckpt.save`.
        prefix: put before the names of the model's weights, not before those of optimizer state.
        config: settings that the checkpoint does not say or says wrongly, by their names in its args (``num_query_groups``, ...).
        optimizer: also take over the optimizer's state.
        drop: patterns of keys to leave out, such as "mtp.*".
        on_bytes: told of bytes as they are written.

    Returns:
        Names of what was left out.

    Raises:
        CheckpointingException: not such a checkpoint, or damaged; tensors that no GPT model of ours has, by name; a size that is needed
            and not known.
    """
    target = open_folder(output)
    if is_checkpoint(target):
        raise CheckpointingException(f"{target} already holds a checkpoint; choose another folder or remove it first")
    folder, source = open_megatron(directory, config or {}, optimizer=optimizer)
    settings = {**source.args, **(config or {})}
    keys = [key for key in source.tensors if not any(fnmatchcase(key, pattern) for pattern in drop)]
    unknown = [key for key in keys if our_name(key) is None]
    if unknown:
        raise CheckpointingException(f"{folder} holds tensors that this import does not know: {list_names(unknown)}; drop them to go on")
    shapes = {key: source.tensors[key].global_shape for key in keys}
    gated, groups = is_gated(shapes), _groups(settings)
    state: dict[str, DeferredTensor] = {}
    try:
        check_unread(source.args, config or {})
        for key in keys:
            shape = our_shape(key, shapes[key], gated=gated, num_query_groups=groups, num_heads=settings.get("num_attention_heads"))
            state[prefix + str(our_name(key))] = _shaped(source.tensors[key], shape)
            for kind, ours in _KINDS.items() if optimizer else ():
                # A weight of 32 bits is its own master.
                if (kind, key) in source.states and (kind != "param" or source.tensors[key].dtype in _NARROW):
                    state[f"optimizer.{ours}.{our_name(key)}"] = _shaped(source.states[kind, key], shape)
        sizes = sizes_of(settings, shapes, gated=gated)
    except ValueError as error:
        raise CheckpointingException(f"{folder}: {error}") from error
    extra: dict[str, Any] = {"config": sizes, **plain(source.common)}
    if (family := family_of(settings, sizes, gated=gated)) is not None:
        extra["family"] = family
    if optimizer and isinstance(scheduler := source.common.get("opt_param_scheduler"), Mapping):
        extra["opt_param_scheduler"] = plain(scheduler)
    if optimizer and source.states and source.step is not None:
        extra |= {"optimizer_step": source.step, "optimizer_param_groups": plain_groups(source.groups)}
    place = target if on_bytes is None else WatchedFolder(target, on_bytes)
    run_save(state, place, extra, None, SaveOptions())
    return sorted({*source.left, *(key for key in source.tensors if key not in shapes)})


def open_megatron(directory: str | Path | Folder, config: Mapping[str, Any], *, optimizer: bool = True) -> tuple[Folder, MegatronSource]:
    """The folder of one iteration, and what lies there.

    Raises:
        CheckpointingException: neither form of theirs.
    """
    folder = open_folder(directory)
    size = folder.size(_TRACKER)
    if size is not None:
        text = bytes(folder.read(_TRACKER, 0, min(size, 64))).decode("ascii", "replace").strip()
        if not (text == "release" or text.isdigit()):
            raise CheckpointingException(f"{folder}/{_TRACKER} says {text!r}; an iteration or release is expected")
        folder = folder.child(text if text == "release" else f"iter_{int(text):07d}")
    if folder.size(METADATA_NAME) is not None:
        if folder.size(BACKEND_NAME) is None and is_fsdp(read_manifest(folder).tensors):
            return folder, open_fsdp(folder, config, optimizer=optimizer)
        return folder, open_dist(folder, config, optimizer=optimizer)
    if is_legacy(folder):
        return folder, open_legacy(folder, config, optimizer=optimizer)
    # Says what lies there: zarr arrays, steps of ours, nothing.
    read_manifest(folder)
    raise CheckpointingException(f"{folder} is a checkpoint of this library already; load it, or convert it to another format")


def stored_bytes(directory: str | Path | Folder, config: Mapping[str, Any] | None = None, *, optimizer: bool = True) -> int:
    """Bytes of the tensors that `import_checkpoint_megatron` reads with the same arguments.

    Raises:
        CheckpointingException: no checkpoint of Megatron-LM that can be read.
    """
    _, source = open_megatron(directory, config or {}, optimizer=optimizer)
    return sum(tensor.num_bytes for tensor in (*source.tensors.values(), *source.states.values()))


def _groups(settings: Mapping[str, Any]) -> int | None:
    if settings.get("group_query_attention") is False:
        return settings.get("num_attention_heads")
    num_groups = settings.get("num_query_groups") or settings.get("num_attention_heads")
    return int(num_groups) if num_groups else None


def _shaped(tensor: DeferredTensor, shape: tuple[int, ...]) -> DeferredTensor:
    def read() -> Tensor:
        return tensor.read().reshape(shape)

    return DeferredTensor(tensor.dtype, shape, read)
