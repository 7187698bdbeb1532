# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether a run gives the same bits each time."""

from collections.abc import Mapping

import torch

_WORKSPACES = (":4096:8", ":16:8")


def check_deterministic(environment: Mapping[str, str], *, device: torch.device | str) -> None:
    """Refuse a process whose settings let results differ from run to run; call before the model is built.

    The layers of this package add nothing atomically: the fused cross entropy, the transfers in pieces and the weight gradients that
    layers accumulate have an order that is fixed by the layout, so they may stay on.

    Args:
        environment: of the process, as the application read it.
        device: what the run uses; on the CPU only torch's own switch matters.

    Raises:
        ValueError: names every setting that is wrong and what to set.

    Example:
        >>> torch.use_deterministic_algorithms(True)
        >>> check_deterministic({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}, device="cuda")
        >>> torch.use_deterministic_algorithms(False)
    """
    wrong = []
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        wrong.append("call torch.use_deterministic_algorithms(True)")
    if torch.device(device).type == "cuda":
        workspace = environment.get("CUBLAS_WORKSPACE_CONFIG")
        if workspace not in _WORKSPACES:
            wrong.append(f"set CUBLAS_WORKSPACE_CONFIG to one of {', '.join(_WORKSPACES)}, found {workspace!r}")
        algorithm = environment.get("NCCL_ALGO")
        if algorithm != "Ring":
            wrong.append(
                f"set NCCL_ALGO=Ring (unset, it is chosen by message size and topology; Tree adds in another order), found {algorithm!r}"
            )
        if torch.backends.cudnn.benchmark:
            wrong.append("set torch.backends.cudnn.benchmark = False")
    if wrong:
        raise ValueError("results may differ from run to run: " + "; ".join(wrong))
