# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Proposals for the next tokens of a request, which the model verifies several at a time."""

from mcore_inference.speculation._heads import DraftHeads, EagleHeads, EagleSpeculation, MtpHeads, MtpSpeculation
from mcore_inference.speculation._ngram import NgramDrafter, NgramSpeculation

__all__ = [
    "DraftHeads",
    "EagleHeads",
    "EagleSpeculation",
    "MtpHeads",
    "MtpSpeculation",
    "NgramDrafter",
    "NgramSpeculation",
]
