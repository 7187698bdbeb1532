# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An OpenAI-compatible HTTP server over an engine (extra ``server``)."""

from mcore_inference._extras import brought_by

with brought_by("server", "fastapi", "h11", "prometheus_client", "pydantic", "starlette", "uvicorn"):
    from mcore_inference.server._connection import ConnectionLimits
    from mcore_inference.server._group import GroupMember, ServerGroup
    from mcore_inference.server._limits import ServerLimits
    from mcore_inference.server._loras import LoraFolders
    from mcore_inference.server._runner import Runner
    from mcore_inference.server._server import InferenceServer, serve, serve_runner
    from mcore_inference.server._signals import StopSignals
    from mcore_inference.server._weights import WeightFolders

__all__ = [
    "ConnectionLimits",
    "GroupMember",
    "InferenceServer",
    "LoraFolders",
    "Runner",
    "ServerGroup",
    "ServerLimits",
    "StopSignals",
    "WeightFolders",
    "serve",
    "serve_runner",
]
