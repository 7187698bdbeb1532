# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Training of draft heads, from a target that runs beside them or from its features on disk."""

from mcore_parallel.training.eagle._ends import TargetEnds, vocab_parallel_argmax
from mcore_parallel.training.eagle._features import (
    FeatureStore,
    FeatureStoreConfig,
    FeatureStoreError,
    FeatureStoreWriter,
    record_features,
)
from mcore_parallel.training.eagle._objective import EagleObjective

__all__ = [
    "EagleObjective",
    "FeatureStore",
    "FeatureStoreConfig",
    "FeatureStoreError",
    "FeatureStoreWriter",
    "TargetEnds",
    "record_features",
    "vocab_parallel_argmax",
]
