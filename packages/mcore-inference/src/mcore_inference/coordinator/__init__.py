# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Many engines behind one address: requests are spread, engines may come and go (extra ``coordinator``)."""

from mcore_inference._extras import brought_by
from mcore_inference._fields import is_loopback

with brought_by("coordinator", "msgspec", "zmq"):
    from mcore_inference.coordinator._client import InferenceClient, RemoteStream
    from mcore_inference.coordinator._config import CoordinatorConfig, CoordinatorSecurity
    from mcore_inference.coordinator._coordinator import DataParallelInferenceCoordinator
    from mcore_inference.coordinator._messages import EngineStatus, Status
    from mcore_inference.coordinator._runner import CoordinatedRunner
    from mcore_inference.coordinator._states import GroupState
    from mcore_inference.coordinator._worker import EngineWorker

__all__ = [
    "CoordinatedRunner",
    "CoordinatorConfig",
    "CoordinatorSecurity",
    "DataParallelInferenceCoordinator",
    "EngineStatus",
    "EngineWorker",
    "GroupState",
    "InferenceClient",
    "RemoteStream",
    "Status",
    "is_loopback",
]
