# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How a running server is told to take the weights of a folder: by the routes of its own kind."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from mcore_rl._http import HttpPeer, PeerError, PeerReplyError
from mcore_rl._stability import experimental_api

InFlight = Literal["recompute", "keep", "drain"]
"""What answers in flight do when weights change: compute their keys and values again, keep them, or end first."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class WeightServer:
    """A server that takes new weights, and reads the trainer's folder under the same path.

    Each kind is told by its own routes: ``mcore`` and ``sglang`` by ``/update_weights_from_disk``, ``vllm`` by ``reload_weights`` of
    ``/collective_rpc``, which it has when started with VLLM_SERVER_DEV_MODE=1. SGLang and vLLM are paused meanwhile by
    ``/pause_generation`` and ``/continue_generation``, or ``/pause`` and ``/resume``.

    Raises:
        ValueError: a setting that is out of range; names it.
    """

    url: str
    """Without path."""
    kind: Literal["mcore", "sglang", "vllm"]
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    timeout_s: float = 600.0
    """Limit of each of the calls of an update."""

    def __post_init__(self) -> None:
        if self.kind not in ("mcore", "sglang", "vllm"):
            raise ValueError(f"kind={self.kind!r} must be mcore, sglang or vllm")
        self._peer()

    async def pause(self, in_flight: InFlight) -> None:
        """No tokens are drawn from here on; a server of this project needs no pause, it loads between two steps.

        Raises:
            PeerError: (a subclass) it gave no answer, or refused.
        """
        if self.kind == "vllm":
            # Frozen answers go on after /resume; without its cache vLLM computes their keys and values again.
            mode, clear = ("wait", True) if in_flight == "drain" else ("keep", in_flight == "recompute")
            await self._peer().post(f"/pause?{urlencode({'mode': mode, 'clear_cache': str(clear).lower()})}", b"{}")
        elif self.kind == "sglang" and in_flight != "drain":
            # Not paused, SGLang ends what is in flight before it loads.
            await self._post("/pause_generation", {"mode": "retract" if in_flight == "recompute" else "in_place"})

    async def load(self, folder: Path, version: int, in_flight: InFlight) -> None:
        """Take the weights of a Hugging Face folder.

        Raises:
            PeerError: as of ``pause``.
        """
        if self.kind == "vllm":
            await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            return
        body: dict[str, Any] = {"model_path": str(folder)}
        if self.kind == "mcore":
            body |= {"weight_version": version, "in_flight": in_flight}
        else:
            body |= {"weight_version": str(version), "flush_cache": in_flight != "keep"}
        content = await self._post("/update_weights_from_disk", body)
        try:
            reply = json.loads(content)
            success, message = reply["success"], reply.get("message", "")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PeerReplyError(f"{self.url} did not say whether it took the weights ({error!r}): {content[:200]!r}") from error
        if success is not True:
            raise PeerError(f"{self.url} refused the weights: {str(message)[:500]}")

    async def resume(self, in_flight: InFlight) -> None:
        """Draw tokens again.

        Raises:
            PeerError: as of ``pause``.
        """
        if self.kind == "vllm":
            await self._peer().post("/resume", b"{}")
        elif self.kind == "sglang" and in_flight != "drain":
            await self._post("/continue_generation", {})

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._peer().post(path, json.dumps(body).encode())

    def _peer(self) -> HttpPeer:
        return HttpPeer(self.url, api_key=self.api_key, timeout_s=self.timeout_s)
