# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How often one of k answers is right, from more of them."""

from mcore_rl._stability import experimental_api


@experimental_api
def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """The chance that among k of n answers, drawn without replacement, one is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021).

    Args:
        num_answers: n.
        num_right: c of them are right.
        k: how many are drawn.

    Raises:
        ValueError: numbers that are out of order.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not (0 <= num_right <= num_answers and 1 <= k <= num_answers):
        raise ValueError(f"num_right={num_right} must lie from 0 to num_answers={num_answers}, and k={k} from 1 to it")
    if num_answers - num_right < k:
        return 1.0
    wrong = 1.0
    for i in range(num_answers - num_right + 1, num_answers + 1):
        wrong *= 1.0 - k / i
    return 1.0 - wrong
