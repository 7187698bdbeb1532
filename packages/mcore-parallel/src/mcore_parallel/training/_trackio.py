# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The numbers of each step for Trackio."""

import importlib
from collections.abc import Mapping
from typing import Any


class TrackioWriter:
    """Keeps the numbers of each step in Trackio's database on this machine; needs the extra ``trackio``.

    Make it on the first rank only: it begins the run. One that has the same ``name`` as an earlier one of the project goes on with it.
    The database lies where the environment says (``TRACKIO_DIR``); ``trackio show`` opens it.

    Args:
        project: where the run is listed.
        name: of the run in the project; None for a new one.
        config: settings of the run that are shown with it, as values of JSON.

    Raises:
        ModuleNotFoundError: trackio is not installed; nothing was written.
    """

    def __init__(self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        # By its name, so that type checkers do without it.
        try:
            trackio: Any = importlib.import_module("trackio")
        except ModuleNotFoundError:
            raise ModuleNotFoundError('trackio is not installed: pip install "mcore-parallel[trackio]"', name="trackio") from None
        self._run = trackio.init(project=project, name=name, resume="never" if name is None else "allow", config=dict(config or {}))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
