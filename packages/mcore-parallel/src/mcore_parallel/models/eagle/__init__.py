# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Draft heads of the EAGLE-3 kind: architecture, vocabulary, layers, and the form in which they are published."""

from mcore_parallel.models.eagle._config import EagleConfig
from mcore_parallel.models.eagle._head import DraftLayer, EagleDraft, EagleHead
from mcore_parallel.models.eagle._published import (
    load_published,
    published_architecture,
    published_config,
    published_vocabulary,
    published_weights,
    read_published,
    save_published,
)
from mcore_parallel.models.eagle._unrolled import DraftRows, UnrolledAttention
from mcore_parallel.models.eagle._vocabulary import DraftVocabulary

__all__ = [
    "DraftLayer",
    "DraftRows",
    "DraftVocabulary",
    "EagleConfig",
    "EagleDraft",
    "EagleHead",
    "UnrolledAttention",
    "load_published",
    "published_architecture",
    "published_config",
    "published_vocabulary",
    "published_weights",
    "read_published",
    "save_published",
]
