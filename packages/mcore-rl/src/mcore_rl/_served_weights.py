# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trained weights to servers that run elsewhere, through a folder that trainer and servers share."""

import asyncio
import re
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mcore_parallel import Group
from mcore_rl._ranks._exchange import all_gather_json, device_of
from mcore_rl._stability import experimental_api
from mcore_rl.inference import PeerError, PeerTimeoutError, WeightServer

if TYPE_CHECKING:
    from mcore_ckpt.hf.families import Family

_VERSION = re.compile(r"version-(\d{8})")


@experimental_api
class ServedWeightsError(RuntimeError):
    """Servers that did not take the weights, each with its reason, and what the others have now."""


@experimental_api
class ServedWeights:
    """A `WeightSink` whose engines are servers: writes a Hugging Face folder, has every server load it, and removes the one before.

    All servers have the new weights afterwards. Where one refuses or is lost, all are given the weights of the call before, if there was
    one, and the error names it; what each has then is in ``versions``. A server that did not answer in time may load later: it is not
    asked again, and the next call gives it whole weights as it does all others. One whose weights are unknown is not resumed.

    Args:
        servers: of one model, reading ``folder`` under the same path.
        folder: of this object alone; kept from one run to the next, its versions go on.
        family: of the model's Hugging Face names, as of `mcore_ckpt.hf.export_hf`.
        config: the model's sizes, as there.
        hf_config: further entries of config.json.
        dtype: of the files; None for that of the weights.
        in_flight: what answers in flight do: ``recompute`` their keys and values, ``keep`` those of the old weights, or ``drain``: end
            first.
        group: ranks that share the servers; the first one writes and tells them, all learn how it went. None where one rank has them.

    Raises:
        ValueError: no servers, one twice, or a setting that is out of range.
    """

    def __init__(
        self,
        servers: Sequence[WeightServer],
        folder: str | Path,
        *,
        family: "str | Family",
        config: Mapping[str, Any],
        hf_config: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        in_flight: Literal["recompute", "keep", "drain"] = "recompute",
        group: Group | None = None,
    ) -> None:
        urls = [server.url.rstrip("/") for server in servers]
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"servers={urls} must name at least one server, and each once")
        if in_flight not in ("recompute", "keep", "drain"):
            raise ValueError(f"in_flight={in_flight!r} must be recompute, keep or drain")
        self.servers, self.folder = tuple(servers), Path(folder).absolute()
        self.in_flight: Literal["recompute", "keep", "drain"] = in_flight
        self._form: dict[str, Any] = {"family": family, "config": config, "hf_config": hf_config, "dtype": dtype}
        self._group = group
        self._newest: int | None = None
        self._last = 0
        """Version that was given last, whether servers took it or not: answers may be stamped with it."""
        self.versions: dict[str, int | None] = dict.fromkeys((server.url for server in servers), 0)
        """Of each server's weights, as the first rank knows them: 0 for those that it had at first, None for unknown."""

    @property
    def takes_weights(self) -> bool:
        """Whether this rank needs the weights; the others of ``group`` only wait."""
        return self._group is None or self._group.is_first

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], /) -> None:
        """Give all servers new weights; every rank of ``group`` calls it, outside of an event loop.

        Raises:
            ServedWeightsError: a server did not take them.
            mcore_ckpt.CheckpointingException: not the weights of ``family`` and ``config``; nothing was sent.
        """
        left, failure = iter(weights), None
        try:
            if self.takes_weights:
                self._push(left)
        except Exception as error:
            failure = error
        # Other ranks send what is left to whoever takes it, and wait otherwise.
        deque(left, maxlen=0)
        if self._group is not None and self._group.size > 1:
            reasons = all_gather_json(None if failure is None else str(failure), self._group, device_of(self._group))
            if failure is None and (found := [reason for reason in reasons if reason is not None]):
                raise ServedWeightsError(found[0])
        if failure is not None:
            raise failure

    def _push(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        # Slow to import, and only for who writes.
        from mcore_ckpt.hf import export_hf

        stored = self._stored()
        version = self._last = 1 + max(self._last, *stored, 0)
        export_hf(weights, self._path(version), **self._form)
        failed = asyncio.run(self._tell(version))
        if set(self.versions.values()) == {version}:
            self._newest = version
        else:
            stored = [] if version in self.versions.values() else [version]
        for old in stored:
            shutil.rmtree(self._path(old), ignore_errors=True)
        if failed:
            now = ", ".join(f"{url} has {_named(held)}" for url, held in self.versions.items())
            raise ServedWeightsError(f"version {version} of the weights: {'; '.join(map(str, failed.values()))}. Now {now}")

    async def _tell(self, version: int) -> dict[str, PeerError]:
        """Pause all servers, load on all, resume those whose weights are known; failures by url."""
        failed = await _all(self.servers, lambda server: server.pause(self.in_flight))
        if not failed:
            failed = await self._load(self.servers, version)
            if failed and self._newest is not None:
                await self._load([server for server in self.servers if not _is_late(failed, server)], self._newest)
        ready = [server for server in self.servers if self.versions[server.url] is not None and not _is_late(failed, server)]
        return {**await _all(ready, lambda server: server.resume(self.in_flight)), **failed}

    async def _load(self, servers: Sequence[WeightServer], version: int) -> dict[str, PeerError]:
        self.versions |= dict.fromkeys((server.url for server in servers), None)
        failed = await _all(servers, lambda server: server.load(self._path(version), version, self.in_flight))
        self.versions |= {server.url: version for server in servers if server.url not in failed}
        return failed

    def _path(self, version: int) -> Path:
        return self.folder / f"version-{version:08d}"

    def _stored(self) -> list[int]:
        """Versions in the folder."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return [int(match.group(1)) for name in names if (match := _VERSION.fullmatch(name))]


async def _all(servers: Sequence[WeightServer], call: Callable[[WeightServer], Awaitable[None]]) -> dict[str, PeerError]:
    """What failed of calls to all servers at once."""
    results = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
    failed: dict[str, PeerError] = {}
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, PeerError):
            failed[server.url] = result
        elif result is not None:
            raise result
    return failed


def _is_late(failed: Mapping[str, PeerError], server: WeightServer) -> bool:
    """Whether it may still do what it was asked."""
    return isinstance(failed.get(server.url), PeerTimeoutError)


def _named(version: int | None) -> str:
    return "unknown weights" if version is None else f"version {version}" if version else "the weights it had at first"
