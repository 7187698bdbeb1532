# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A Hugging Face folder as our tensors, one at a time."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_ckpt._core import DEFAULT_FILE_BYTES, DeferredTensor, ShardedTensor, as_parts, save
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._stability import experimental_api
from mcore_ckpt._storage import SafetensorsFile, WatchedFolder, dtype_code, open_folder
from mcore_ckpt.chunks import Box
from mcore_ckpt.hf._config import brief, from_hf_config, measure
from mcore_ckpt.hf._families import find_family
from mcore_ckpt.hf._fields import Family
from mcore_ckpt.hf._quantized import StoredTensor, stored_tensors
from mcore_ckpt.hf._rules import Form, PartLayout, WeightSite, join, sites
from mcore_ckpt.hf._tokenizer import tokenizer_files

__all__ = ["HFModel", "import_checkpoint_hf", "import_hf", "kept_entries", "load_hf"]

_Piece = tuple[int, Tensor]
_INDEX = "model.safetensors.index.json"
_PREDICTING = "num_nextn_predict_layers"
_TIED = "share_embeddings_and_output_weights"
# Entries of config.json that say nothing about the weights, and that an export of the same model should have again.
_EXPORTED_ENTRIES = ("bos_token_id", "eos_token_id", "max_position_embeddings", "pad_token_id")


class HFModel(NamedTuple):
    """A model read from a Hugging Face folder."""

    family: str
    config: dict[str, Any]
    """Its sizes in our field names."""
    tensors: Iterator[tuple[str, Tensor]]
    """Our global names and whole tensors in host memory; each is read, and dequantised, when it is asked for."""


def import_hf(directory: str | Path, *, ignore: Collection[str] = (), family: str | Family | None = None) -> HFModel:
    """Open a folder with config.json and safetensors files. Names, shapes and types are checked before it returns.

    Weights in MXFP4 ("mxfp4", gpt-oss) and in fp8 with scales ("fp8", DeepSeek-V3 and Qwen3) come dequantised to the dtype that config.json
    names, bfloat16 where it names none.

    Args:
        directory: the folder to read.
        ignore: entries of config.json to pass over: those that this library does not know and that change nothing, and dropout, to train
            without it. Other entries that nothing here reads are refused.
        family: the one to read it by, for instance one of your own; by default that of its model_type.

    Raises:
        CheckpointingException: an unknown family, setting or quantisation; missing, unexpected or misshapen weights or scales, by name; a
            damaged file.
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
        dtype: convert, or dequantise, to this; None for that of each tensor, as `import_hf` gives it.
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
    hf_config = _entries_for_export(opened.theirs)
    extra = {"family": opened.family.name, "config": brief(opened.config), "hf_config": hf_config}
    folder = open_folder(checkpoint) if on_bytes is None else WatchedFolder(open_folder(checkpoint), on_bytes)
    save(state, folder, extra=extra, assets=tokenizer_files(directory), max_file_bytes=max_file_bytes)


@experimental_api
def load_hf(
    directory: str | Path, state: Mapping[str, Any], *, ignore: Collection[str] = (), family: str | Family | None = None
) -> frozenset[str]:
    """Fill the parts of a model that this rank holds from a Hugging Face folder, in place. Not collective.

    Each rank reads the tensors and, of a mixture, the experts that its parts lie in, and no others; host memory holds one tensor, or one
    expert, at a time. Quantised weights are dequantised to the dtype of the part.

    Args:
        directory: the folder to read.
        state: our global names, and what this rank holds of each, as for `load`: tensors, DTensors, `ShardedTensor`, or lists of parts.
        ignore: as of `import_hf`.
        family: as of `import_hf`.

    Returns:
        The names that the folder has no weights for; their parts are left as they are.

    Raises:
        CheckpointingException: as `import_hf`; a tensor has another shape than its part says.
        ValueError: as `import_hf`.
    """
    opened = _open(Path(directory), ignore, family)
    left = dict(state)
    wanted = [(site, form, as_parts(site.name, left.pop(site.name))) for site, form in opened.chosen if site.name in left]
    for site, _, parts in wanted:
        for part in parts:
            if part.global_shape != site.shape:
                raise CheckpointingException(
                    f"{directory}: {site.name} has shape {list(site.shape)}, this model's {list(part.global_shape)}; make model that "
                    "of its config.json"
                )
    for site, form, parts in wanted:
        opened.fill(site, form, [part for part in parts if part.data.numel()])
    return frozenset(left)


def kept_entries(directory: str | Path) -> dict[str, Any]:
    """Entries of a folder's config.json that an export of the same model should have again."""
    return _entries_for_export(_read_json(Path(directory) / "config.json"))


def _entries_for_export(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: theirs[name] for name in _EXPORTED_ENTRIES if theirs.get(name) is not None}


@dataclass(frozen=True)
class _Opened:
    """A folder whose headers fit the family."""

    family: Family
    config: dict[str, Any]
    """Complete, in our names."""
    theirs: Mapping[str, Any]
    chosen: list[tuple[WeightSite, Form]]
    weights: Mapping[str, StoredTensor]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        for site, form in self.chosen:
            yield site.name, self.read(site, form)

    def read(self, site: WeightSite, form: Form, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor. Beside one of a mixture, host memory holds four times the size of one of its experts at most."""
        dtype = site.dtype(dtype)
        if not _has_experts(site, form):
            (tensor,) = (piece for _, piece in self.pieces(site, form, dtype))
            return tensor.to(dtype)
        whole = torch.empty(site.shape, dtype=dtype or self._dtype(site, form))
        for row, piece in self.pieces(site, form, dtype):
            whole[row : row + 1] = piece
            # Not while the next is read.
            del piece
        return whole

    def pieces(self, site: WeightSite, form: Form, dtype: torch.dtype | None, rows: Sequence[int] | None = None) -> Iterator[_Piece]:
        """Indices ``rows`` of dim 0, all by default: expert by expert in a mixture, else in one piece from the first to the last.

        Args:
            site: the tensor.
            form: how it is stored.
            dtype: what to dequantise to; None for the model's. What is not quantised has its own.
            rows: ascending.
        """
        names = [name for name, _ in site.parts(form)]
        if _has_experts(site, form):
            one, count = replace(site, sizes={**site.sizes, "E": 1}), len(form.parts)
            for expert in range(site.shape[0]) if rows is None else rows:
                if "{expert}" in form.parts[0].name:
                    own, which = names[expert * count : (expert + 1) * count], None
                else:
                    own, which = names, (expert, expert + 1)
                yield expert, join([self.weights[name].read(dtype, which) for name in own], form, one)
            return
        span = None if rows is None else (rows[0], rows[-1] + 1)
        if span is not None and form.layout is PartLayout.STACK and self.weights[names[0]].shape == site.shape:
            yield span[0], self.weights[names[0]].read(dtype, span)
            return
        tensor = join([self.weights[name].read(dtype) for name in names], form, site)
        yield (0, tensor) if span is None else (span[0], tensor[slice(*span)])

    @torch.no_grad()
    def fill(self, site: WeightSite, form: Form, parts: Sequence[ShardedTensor]) -> None:
        """Copy into parts of the tensor what lies in them."""
        if not parts:
            return
        rows: Sequence[int] | None = None
        if site.shape:
            spans = [range(part.offset[0], part.offset[0] + part.data.shape[0]) for part in parts]
            if _has_experts(site, form):
                rows = sorted({row for span in spans for row in span})
            else:
                rows = range(min(span.start for span in spans), max(span.stop for span in spans))
        for row, piece in self.pieces(site, form, parts[0].dtype, rows):
            box = Box((row, *(0 for _ in site.shape[1:])) if site.shape else (), tuple(piece.shape))
            for part in parts:
                if (both := box.intersect(part.box)) is not None:
                    part.data[both.relative_to(part.box).slices()].copy_(piece[both.relative_to(box).slices()])

    def deferred(self, dtype: torch.dtype | None) -> dict[str, DeferredTensor]:
        return {
            site.name: DeferredTensor(site.dtype(dtype) or self._dtype(site, form), site.shape, partial(self.read, site, form, dtype))
            for site, form in self.chosen
        }

    def _dtype(self, site: WeightSite, form: Form) -> torch.dtype:
        return self.weights[site.parts(form)[0][0]].dtype


def _has_experts(site: WeightSite, form: Form) -> bool:
    """Whether dim 0 of ours counts experts, and that of what is stored too, or each of them has names of its own."""
    by_name = all("{expert}" in part.name for part in form.parts)
    return site.rule.shape[0] == "E" and len(site.shape) > 2 and (by_name or (len(form.parts) == 1 and form.parts[0].shape[0] == "E"))


def _open(folder: Path, ignore: Collection[str], chosen_family: str | Family | None) -> _Opened:
    described = None if chosen_family is None else find_family(chosen_family)
    theirs = _read_json(folder / "config.json")
    family, config = from_hf_config(theirs, ignore, described)
    files = _open_weights(folder)
    try:
        weights = stored_tensors(files, theirs)
    except CheckpointingException as error:
        raise CheckpointingException(f"{folder}: {error}") from None
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
    heads = _predicting_layers(family, config, theirs)
    unexpected = {name for name in weights.keys() - used if not name.endswith(family.ignored) and not name.startswith(heads)}
    if missing:
        problems.insert(0, f"missing weights: {list_names(missing, unexpected)}")
    if unexpected:
        problems.insert(0, f"weights this model does not have: {list_names(unexpected, missing)}")
    if problems:
        raise CheckpointingException(f"{folder}: " + "; ".join(problems))
    return _Opened(family, config, theirs, chosen, weights)


def _predicting_layers(family: Family, config: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of the names of layers behind the last, which predict further tokens, where the family passes their entry over."""
    count = theirs.get(_PREDICTING) if _PREDICTING in family.inert else 0
    return tuple(f"model.layers.{config['num_layers'] + layer}." for layer in range(count if type(count) is int else 0))


def _choose(site: WeightSite, weights: Mapping[str, StoredTensor]) -> Form:
    for form in site.rule.forms:
        if all(name in weights for name, _ in site.parts(form)):
            return form
    return site.rule.forms[0]


def _check(site: WeightSite, form: Form, weights: Mapping[str, StoredTensor]) -> list[str]:
    problems, dtypes = [], set()
    for name, shape in site.parts(form):
        if name in weights:
            stored = weights[name]
            dtypes.add(dtype_code(stored.dtype))
            if stored.shape != shape:
                problems.append(f"{name} has shape {list(stored.shape)}, config.json means {list(shape)}")
    if len(dtypes) > 1:
        problems.append(f"the parts of {site.name} have different dtypes: {', '.join(sorted(dtypes))}")
    return problems


def _tied_copies(family: Family, config: Mapping[str, Any], weights: Mapping[str, StoredTensor]) -> set[str]:
    """Names of stored copies of what is shared; equal to the original, or the model is not tied at all."""
    tied, untied = (
        {site.name: site.parts(site.rule.forms[0])[0][0] for site in sites(family.rules, measure(config), {**config, _TIED: shared})}
        for shared in (True, False)
    )
    source = tied["embedding.weight"]
    copies = {untied[name] for name in untied.keys() - tied.keys()}
    for name in copies & weights.keys():
        if source in weights and not torch.equal(weights[name].read(), weights[source].read()):
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
