# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What costs one answer, and nothing else."""

from mcore_rl._stability import experimental_api


@experimental_api
class LostError(RuntimeError):
    """One answer is lost; whatever answers, or judges, goes on.

    Args:
        reason: what is wrong, in words.
        is_transient: whether the same request can succeed a moment later.
    """

    def __init__(self, reason: str, *, is_transient: bool = False) -> None:
        super().__init__(reason)
        self.is_transient = is_transient
