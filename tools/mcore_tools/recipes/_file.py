# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs as YAML files."""

from pathlib import Path
from typing import Any

import yaml

from mcore_tools.recipes._config import RunConfig
from mcore_tools.recipes._override import RecipeError, merge
from mcore_tools.recipes._registry import recipe
from mcore_tools.recipes._values import plain

BASE = "recipe"
"""Key of a file that names the recipe which the file changes."""
_OF_MODEL = ("model", "moe", "masked", "spans", "batch_invariant")
_OF_MODEL_IN_TRAIN = ("dtype", "seq_len")


def read_config(path: str | Path, base: RunConfig | None = None) -> RunConfig:
    """The run of a file: the fields that differ from a recipe, or all that have no default.

    Args:
        path: a YAML file that maps fields to values, parts such as ``model`` to mappings of their own; ``recipe: NAME`` says what it
            begins from.
        base: what it begins from instead.

    Raises:
        RecipeError: no YAML, an unknown field (names the nearest), a value of another type, or one the configuration refuses.
        OSError: the file cannot be read.
    """
    values = _read_values(path, str(path))
    name = values.pop(BASE, None)
    if base is None and name is not None:
        base = recipe(str(name))
    return merge(RunConfig if base is None else base, values, str(path))


def read_model_config(path: str | Path, source: str) -> RunConfig:
    """The run of a file as far as its model goes: sizes, experts, dtype and the length of its texts. All else has its default, so that
    what was trained is used whatever is refused in a training meanwhile.

    Args:
        path: as of ``read_config``.
        source: what the file is, for messages.

    Raises:
        RecipeError, OSError: as of ``read_config``, for these fields.
    """
    values = _read_values(path, source)
    name = values.get(BASE)
    kept = {field: values[field] for field in _OF_MODEL if field in values}
    train = values.get("train", {})
    kept["train"] = {field: train[field] for field in _OF_MODEL_IN_TRAIN if field in train} if isinstance(train, dict) else train
    return merge(RunConfig if name is None else recipe(str(name)), kept, source)


def _read_values(path: str | Path, source: str) -> dict[str, Any]:
    """What a file maps."""
    try:
        values: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{source} is no YAML: {' '.join(str(error).split())}; correct it there") from None
    except RecursionError:
        raise RecipeError(f"{source} is nested too deeply to be a run; a run has mappings in mappings at most") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{source} must map fields to values, found {type(values).__name__}; --write-config writes such a file")
    return values


def config_text(config: RunConfig) -> str:
    """The whole run as YAML, defaults included, so that a later change of one does not change it; ``read_config`` gives it back.

    Raises:
        ValueError: a field that a file cannot hold.
    """
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def write_config(config: RunConfig, path: str | Path) -> None:
    """Write ``config_text``; the folder is made.

    Raises:
        ValueError: a field that a file cannot hold; nothing is written.
        OSError: it cannot be written.
    """
    text = config_text(config)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
