# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A Hugging Face folder as our tensors, one at a time."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_ckpt._core import DEFAULT_FILE_BYTES, DeferredTensor, save
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._storage import SafetensorsFile, WatchedFolder, dtype_of, open_folder
from mcore_ckpt.hf._config import brief, from_hf_config, measure
from mcore_ckpt.hf._families import find_family
from mcore_ckpt.hf._fields import Family
from mcore_ckpt.hf._rules import Form, WeightSite, join, sites
from mcore_ckpt.hf._tokenizer import tokenizer_files

__all__ = ["HFModel", "import_checkpoint_hf", "import_hf", "kept_entries"]

_INDEX = "model.safetensors.index.json"
_TIED = "share_embeddings_and_output_weights"
# Entries of config.json that say nothing about the weights, and that an export of the same model should have again.
_KEPT = ("bos_token_id", "eos_token_id", "max_position_embeddings", "pad_token_id")


class HFModel(NamedTuple):
    """A model read from a Hugging Face folder."""

    family: str
    config: dict[str, Any]
    """Its sizes in our field names."""
    tensors: Iterator[tuple[str, Tensor]]
    """Our global names and whole tensors in host memory; each is read when it is asked for."""


def import_hf(directory: str | Path, *, ignore: Collection[str] = (), family: str | Family | None = None) -> HFModel:
    """Open a folder with config.json and safetensors files. Names, shapes and types are checked before it returns.

    Args:
        directory: the folder to read.
        ignore: entries of config.json to pass over: those that this library does not know and that change nothing, and dropout, to train
            without it. Other entries that nothing here reads are refused.
        family: the one to read it by, for instance one of your own; by default that of its model_type.

    Raises:
        CheckpointingException: an unknown family or setting; missing, unexpected or misshapen weights, by name; a damaged file.
        ValueError: ``ignore`` names an entry that the weights depend on.
    """
    opened = _open(Path(directory), ignore, family)
    return HFModel(opened.family.name, brief(opened.config), opened.stream())


def import_checkpoint_hf(
    directory: str | Path,
    checkpoint: str | Path,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    on_bytes: Callable[[int], None] | None = None,
    ignore: Collection[str] = (),
    family: str | Family | None = None,
) -> None:
    """A checkpoint of the model in a Hugging Face folder. Not collective: call it on one rank.

    Host memory holds one tensor at a time. ``extra`` of the checkpoint says "family" and "config", from which `export_checkpoint_hf` and a
    model can be built again, and under "hf_config" the token ids and the context length of config.json. The
    tokenizer's files become assets, see `tokenizer_files`.

    Args:
        directory: the folder to read.
        checkpoint: folder to write, as for `save`.
        prefix: what to put before the model's names, for instance "model.".
        dtype: convert to this; None to keep.
        max_file_bytes: as for `save`.
        on_bytes: told of bytes as they are written.
        ignore: as of `import_hf`.
        family: as of `import_hf`.

    Raises:
        CheckpointingException: as `import_hf` and `save`.
        ValueError: as `import_hf`.
    """
    opened = _open(Path(directory), ignore, family)
    state = {prefix + name: tensor for name, tensor in opened.deferred(dtype).items()}
    hf_config = _kept(opened.theirs)
    extra = {"family": opened.family.name, "config": brief(opened.config), "hf_config": hf_config}
    folder = open_folder(checkpoint) if on_bytes is None else WatchedFolder(open_folder(checkpoint), on_bytes)
    save(state, folder, extra=extra, assets=tokenizer_files(directory), max_file_bytes=max_file_bytes)


def kept_entries(directory: str | Path) -> dict[str, Any]:
    """Entries of a folder's config.json that an export of the same model should have again."""
    return _kept(_read_json(Path(directory) / "config.json"))


def _kept(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: theirs[name] for name in _KEPT if theirs.get(name) is not None}


@dataclass(frozen=True)
class _Opened:
    """A folder whose headers fit the family."""

    family: Family
    config: dict[str, Any]
    """Complete, in our names."""
    theirs: Mapping[str, Any]
    chosen: list[tuple[WeightSite, Form]]
    weights: Mapping[str, SafetensorsFile]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        for site, form in self.chosen:
            yield site.name, self.read(site, form)

    def read(self, site: WeightSite, form: Form, dtype: torch.dtype | None = None) -> Tensor:
        return join([self.weights[name].tensor(name) for name, _ in site.parts(form)], form, site).to(site.dtype(dtype))

    def deferred(self, dtype: torch.dtype | None) -> dict[str, DeferredTensor]:
        tensors = {}
        for site, form in self.chosen:
            first = site.parts(form)[0][0]
            stored = dtype_of(self.weights[first].slots[first].dtype)
            tensors[site.name] = DeferredTensor(site.dtype(dtype) or stored, site.shape, partial(self.read, site, form, dtype))
        return tensors


def _open(folder: Path, ignore: Collection[str], chosen_family: str | Family | None) -> _Opened:
    described = None if chosen_family is None else find_family(chosen_family)
    theirs = _read_json(folder / "config.json")
    family, config = from_hf_config(theirs, ignore, described)
    weights = _open_weights(folder)
    config |= {name: True for name, weight in family.shown_by.items() if weight in weights}
    chosen, problems, used = [], [], set()
    for site in sites(family.rules, measure(config), config):
        form = _choose(site, weights)
        names = [name for name, _ in site.parts(form)]
        used |= set(names)
        chosen.append((site, form))
        problems += _check(site, form, weights)
    if config[_TIED]:
        used |= _tied_copies(family, config, weights)
    missing = {name for site, form in chosen for name, _ in site.parts(form)} - weights.keys()
    unexpected = {name for name in weights.keys() - used if not name.endswith(family.ignored)}
    if missing:
        problems.insert(0, f"missing weights: {list_names(missing, unexpected)}")
    if unexpected:
        problems.insert(0, f"weights this model does not have: {list_names(unexpected, missing)}")
    if problems:
        raise CheckpointingException(f"{folder}: " + "; ".join(problems))
    return _Opened(family, config, theirs, chosen, weights)


def _choose(site: WeightSite, weights: Mapping[str, SafetensorsFile]) -> Form:
    for form in site.rule.forms:
        if all(name in weights for name, _ in site.parts(form)):
            return form
    return site.rule.forms[0]


def _check(site: WeightSite, form: Form, weights: Mapping[str, SafetensorsFile]) -> list[str]:
    problems, dtypes = [], set()
    for name, shape in site.parts(form):
        if name in weights:
            slot = weights[name].slots[name]
            dtypes.add(slot.dtype)
            if slot.shape != shape:
                problems.append(f"{name} has shape {list(slot.shape)}, config.json means {list(shape)}")
    if len(dtypes) > 1:
        problems.append(f"the parts of {site.name} have different dtypes: {', '.join(sorted(dtypes))}")
    return problems


def _tied_copies(family: Family, config: Mapping[str, Any], weights: Mapping[str, SafetensorsFile]) -> set[str]:
    """Names of stored copies of what is shared; equal to the original, or the model is not tied at all."""
    tied, untied = (
        {site.name: site.parts(site.rule.forms[0])[0][0] for site in sites(family.rules, measure(config), {**config, _TIED: shared})}
        for shared in (True, False)
    )
    source = tied["embedding.weight"]
    copies = {untied[name] for name in untied.keys() - tied.keys()}
    for name in copies & weights.keys():
        if source in weights and not torch.equal(weights[name].tensor(name), weights[source].tensor(source)):
            raise CheckpointingException(
                f"{name} differs from {source}, though config.json says tie_word_embeddings; set it to false there"
            )
    return copies


def _open_weights(folder: Path) -> dict[str, SafetensorsFile]:
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointingException(f"{folder / _INDEX}: weight_map is malformed")
    elif (folder / "model.safetensors").is_file():
        only = SafetensorsFile(folder / "model.safetensors")
        return dict.fromkeys(only.slots, only)
    else:
        raise CheckpointingException(f"{folder} has neither {_INDEX} nor model.safetensors; other formats (such as .bin) are not read")
    files: dict[str, SafetensorsFile] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or file.startswith("."):
            raise CheckpointingException(f"{folder / _INDEX}: file name {file!r} does not stay inside the folder")
        if not (folder / file).is_file():
            raise CheckpointingException(f"{folder / file} is missing, {_INDEX} names it")
        files[file] = SafetensorsFile(folder / file)
    absent = [name for name, file in weight_map.items() if name not in files[file].slots]
    if absent:
        raise CheckpointingException(f"{folder}: {_INDEX} places {list_names(absent)} in files that do not hold them")
    return {name: files[file] for name, file in weight_map.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        lacking = f"{path.parent} has no {path.name}" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise CheckpointingException(f"{lacking}; name the folder of a Hugging Face model") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointingException(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointingException(f"{path}: not a JSON object")
    return value
