# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decode steps of plain transformer blocks in few kernels, and weights in fp8."""

from mcore_inference._capability import StoredWeight
from mcore_inference.decoder._decoder import FusedDecoder
from mcore_inference.decoder._fp8 import Fp8Weight, check_quantization, fp8_parameters, quantize_weights
from mcore_inference.decoder._torch_decoder import TorchDecoder

__all__ = ["Fp8Weight", "FusedDecoder", "StoredWeight", "TorchDecoder", "check_quantization", "fp8_parameters", "quantize_weights"]
