# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Divergence of the policy from a reference, estimated on the tokens that the policy drew."""

from torch import Tensor

from mcore_rl._stability import experimental_api

KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
MAX_LOG_RATIO = 20.0


@experimental_api
def kl_estimate(current: Tensor, reference: Tensor, estimator: str = "k3") -> Tensor:
    """Per token, with d = reference - current, limited to +-20: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1 (Schulman 2020), abs = |d|.

    k1 and k3 are unbiased for KL(current || reference); k3 is never negative. As a loss, k2 has the gradient that k1 has as a reward.

    Args:
        current: log-probabilities of the policy, any shape.
        reference: of the reference, the same shape.
        estimator: one of the four.

    Raises:
        ValueError: another estimator.

    Example:
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2")
        tensor([0.1250])
    """
    check_estimator(estimator)
    delta = (reference - current).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator in ("k1", "abs"):
        return -delta if estimator == "k1" else delta.abs()
    return delta.square() / 2 if estimator == "k2" else delta.exp() - delta - 1


def check_estimator(estimator: str, name: str = "kl_estimator") -> None:
    """Refuse what is no estimator in field ``name``."""
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"{name}={estimator!r} must be one of {', '.join(KL_ESTIMATORS)}")
