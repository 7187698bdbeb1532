# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What cannot be split over the context-parallel ranks."""


class SequenceSplitError(ValueError):
    """A sequence whose length is not a multiple of twice the ranks that share it, or bounds that are none."""


class HeadSplitError(ValueError):
    """Attention heads that the ranks of an all-to-all cannot share evenly."""
