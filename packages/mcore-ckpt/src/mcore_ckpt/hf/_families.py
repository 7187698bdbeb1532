# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The families. Only data: a new family is a new entry in the file of its kind, or an entry point of another package."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt.hf._families_dense import BERT, DENSE
from mcore_ckpt.hf._families_hybrid import HYBRID
from mcore_ckpt.hf._families_mixture import LATENT, MIXTURE
from mcore_ckpt.hf._fields import Family

__all__ = ["ENTRY_POINTS", "FAMILIES", "NOT_COVERED", "all_families", "find_family"]

ENTRY_POINTS = "mcore_ckpt.hf_families"
"""The group in which an installed package names its families."""

FAMILIES = MappingProxyType({family.name: family for family in (*DENSE, *MIXTURE, *LATENT, *HYBRID, *BERT)})
"""Families of this wheel by name."""

NOT_COVERED = MappingProxyType(
    {
        "gemma3": "the part that sees images; the text model alone, gemma3_text, is covered",
        "mamba": "the first Mamba's layers",
        "qwen3_next": "gated delta nets beside experts",
    }
)
"""Values of model_type that look like one of the families, and what of them is not."""


def all_families() -> Mapping[str, Family]:
    """Families of this wheel, then those of other installed packages, by name; the environment is read at each call.

    Raises:
        CheckpointingException: an entry point that does not load, holds no `Family`, or one whose name or model_type is taken.
    """
    families = dict(FAMILIES)
    kinds = {family.model_type: "mcore-ckpt" for family in families.values()}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value)):
        package = "?" if point.dist is None else point.dist.name
        where = f"entry point {point.name}={point.value} of {package}"
        try:
            family = point.load()
        except Exception as error:
            raise CheckpointingException(f"{where} does not load: {type(error).__name__}: {error}; mend or uninstall {package}") from error
        if not isinstance(family, Family):
            raise CheckpointingException(f"{where} is a {type(family).__name__}; name a mcore_ckpt.hf.families.Family")
        if family.name in families:
            raise CheckpointingException(f"{where} has name={family.name!r}, which is taken; rename it or uninstall one")
        if family.model_type in kinds:
            taken = kinds[family.model_type]
            raise CheckpointingException(f"{where} has model_type={family.model_type!r}, which {taken} describes; uninstall one of the two")
        families[family.name], kinds[family.model_type] = family, package
    return MappingProxyType(families)


def find_family(name: str | Family) -> Family:
    """The family called ``name``, of this wheel or of an installed package; a `Family` is its own.

    Raises:
        CheckpointingException: the families of the installed packages contradict each other.
        ValueError: there is none.

    Example:
        >>> find_family("llama").architecture
        'LlamaForCausalLM'
    """
    if isinstance(name, Family):
        return name
    if name in FAMILIES:
        return FAMILIES[name]
    families = all_families()
    if name not in families:
        raise ValueError(f"family={name!r} is unknown; the families are {', '.join(sorted(families))}")
    return families[name]
