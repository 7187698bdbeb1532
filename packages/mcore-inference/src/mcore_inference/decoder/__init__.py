# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decode steps of plain transformer blocks in few kernels."""

from mcore_inference.decoder._decoder import FusedDecoder

__all__ = ["FusedDecoder"]
