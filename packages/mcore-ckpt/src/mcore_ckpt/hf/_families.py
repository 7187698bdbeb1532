# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The families. Only data: a new family is a new entry in the file of its kind."""

from types import MappingProxyType

from mcore_ckpt.hf._families_dense import BERT, DENSE
from mcore_ckpt.hf._families_hybrid import HYBRID
from mcore_ckpt.hf._families_mixture import LATENT, MIXTURE

__all__ = ["FAMILIES", "FAMILY_NAMES", "NOT_COVERED"]

FAMILIES = MappingProxyType({family.name: family for family in (*DENSE, *MIXTURE, *LATENT, *HYBRID, *BERT)})
"""Families by name."""
FAMILY_NAMES = tuple(sorted(FAMILIES))
"""Values of ``family`` that exports take."""

NOT_COVERED = MappingProxyType(
    {
        "gemma2": "soft caps of scores and logits",
        "gemma3": "the part that sees images; the text model alone, gemma3_text, is covered",
        "mamba": "the first Mamba's layers",
        "olmoe": "norms over all heads of queries and keys",
        "qwen3_next": "gated delta nets beside experts",
    }
)
"""Values of model_type that look like one of the families, and what of them is not."""
