# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Outputs of a given form: which tokens may come next."""

from mcore_inference.structured._llguidance import GrammarCompiler, GrammarMatcher

__all__ = ["GrammarCompiler", "GrammarMatcher"]
