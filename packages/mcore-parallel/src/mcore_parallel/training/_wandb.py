# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The numbers of each step for Weights & Biases."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandbWriter:
    """Sends the numbers of each step to a run of Weights & Biases; needs the extra ``wandb``.

    Make it on the first rank only: it begins the run. One that has the same ``run_id`` as an earlier one goes on with it.

    Args:
        project: where the run is listed.
        folder: of what wandb keeps on the disk; it is made.
        run_id: name of the run among those of the project; None for a new one.
        config: settings of the run that are shown with it.
        mode: "online", "offline" (synchronised later) or "disabled"; None as the environment says.

    Raises:
        ModuleNotFoundError: wandb is not installed; nothing was written.
    """

    def __init__(
        self,
        project: str,
        folder: str | Path,
        *,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> None:
        # By its name, so that type checkers do without it.
        try:
            wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError:
            raise ModuleNotFoundError('wandb is not installed: pip install "mcore-parallel[wandb]"', name="wandb") from None
        Path(folder).mkdir(parents=True, exist_ok=True)
        again = None if run_id is None else "allow"
        self._run = wandb.init(project=project, dir=str(folder), id=run_id, resume=again, config=dict(config or {}), mode=mode)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
