# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A Hugging Face folder as our tensors, one at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._storage import SafetensorsFile
from mcore_ckpt.hf._config import from_hf_config, measure
from mcore_ckpt.hf._rules import Family, Form, Site, join

__all__ = ["HFModel", "import_hf"]

_INDEX = "model.safetensors.index.json"


class HFModel(NamedTuple):
    """A model read from a Hugging Face folder."""

    family: str
    config: dict[str, Any]
    """Its sizes in our field names."""
    tensors: Iterator[tuple[str, Tensor]]
    """Our global names and whole tensors in host memory; each is read when it is asked for."""


def import_hf(directory: str | Path) -> HFModel:
    """Open a folder with config.json and safetensors files. Names, shapes and types are checked before it returns.

    Raises:
        CheckpointingException: an unknown family or setting; missing, unexpected or misshapen weights, by name; a damaged file.
    """
    folder = Path(directory)
    family, config = from_hf_config(_read_json(folder / "config.json"))
    weights = _open_weights(folder)
    tied = config["share_embeddings_and_output_weights"]
    sizes = measure(config)
    chosen, problems, used = [], [], set()
    for site in family.sites(sizes, tied=tied):
        form = _choose(site, weights)
        names = [name for name, _ in site.parts(form)]
        used |= set(names)
        chosen.append((site, form))
        problems += _check(site, form, weights)
    if tied:
        used |= _tied_copies(family, sizes, weights)
    missing = {name for site, form in chosen for name, _ in site.parts(form)} - weights.keys()
    unexpected = {name for name in weights.keys() - used if not name.endswith(family.ignored)}
    if missing:
        problems.insert(0, f"missing weights: {list_names(missing, unexpected)}")
    if unexpected:
        problems.insert(0, f"weights this model does not have: {list_names(unexpected, missing)}")
    if problems:
        raise CheckpointingException(f"{folder}: " + "; ".join(problems))
    return HFModel(family.name, config, _stream(chosen, weights))


def _stream(chosen: list[tuple[Site, Form]], weights: Mapping[str, SafetensorsFile]) -> Iterator[tuple[str, Tensor]]:
    for site, form in chosen:
        yield site.name, join([weights[name].tensor(name) for name, _ in site.parts(form)], form, site)


def _choose(site: Site, weights: Mapping[str, SafetensorsFile]) -> Form:
    for form in site.rule.forms:
        if all(name in weights for name, _ in site.parts(form)):
            return form
    return site.rule.forms[0]


def _check(site: Site, form: Form, weights: Mapping[str, SafetensorsFile]) -> list[str]:
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


def _tied_copies(family: Family, sizes: Mapping[str, int], weights: Mapping[str, SafetensorsFile]) -> set[str]:
    """Names of stored copies of what is shared; equal to the original, or the model is not tied at all."""
    copies = {name for site in family.sites(sizes, tied=False) if not site.rule.when_tied for name, _ in site.parts(site.rule.forms[0])}
    original = next(site for site in family.sites(sizes, tied=True) if site.name == "embedding.weight")
    source = original.parts(original.rule.forms[0])[0][0]
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
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointingException(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointingException(f"{path}: not a JSON object")
    return value
