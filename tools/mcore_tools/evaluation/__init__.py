# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a model is worth: perplexity of text, multiple choice, and the tasks of lm-evaluation-harness."""

from mcore_tools.evaluation._choices import Choice, ChoiceScores, read_choices, score_choices
from mcore_tools.evaluation._perplexity import Perplexity, read_texts, score_texts
from mcore_tools.evaluation._scorer import Scorer

__all__ = [
    "Choice",
    "ChoiceScores",
    "Perplexity",
    "Scorer",
    "read_choices",
    "read_texts",
    "score_choices",
    "score_texts",
]
