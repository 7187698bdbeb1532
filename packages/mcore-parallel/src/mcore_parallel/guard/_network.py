# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether this machine reaches the others under the names that it was given."""

import ipaddress
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_AGAIN_S = 0.5


@dataclass(frozen=True, kw_only=True)
class NetworkFinding:
    """What became of one setting."""

    setting: str
    """Name and value, as ``MASTER_ADDR=node-1``."""
    detail: str
    """What it leads to, or what is wrong and how to put it right."""
    is_problem: bool


def inspect_network(environment: Mapping[str, str], *, backend: str = "gloo", timeout_s: float = 10.0) -> list[NetworkFinding]:
    """Look at the settings that say where the store of a run is and which interface the ranks talk through; nothing is changed.

    Args:
        environment: of a rank, ``os.environ``: MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, TORCHELASTIC_USE_AGENT_STORE,
            GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.
        backend: of the process groups; gloo listens at the address of the machine's name unless an interface is set.
        timeout_s: how long to try to reach the store.
    """
    several = int(environment.get("WORLD_SIZE", "1")) > int(environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE", "1")))
    return [*_store(environment, several, timeout_s), *_interfaces(environment, several and backend == "gloo")]


def check_network(environment: Mapping[str, str], *, backend: str = "gloo", timeout_s: float = 30.0) -> None:
    """Refuse settings that cannot work, before anything waits for them; arguments as of ``inspect_network``.

    Raises:
        ValueError: names each such setting, its value and the remedy.
    """
    report = inspect_network(environment, backend=backend, timeout_s=timeout_s)
    if problems := [f"{row.setting} {row.detail}" for row in report if row.is_problem]:
        raise ValueError("; ".join(problems))


def _store(environment: Mapping[str, str], several: bool, timeout_s: float) -> Iterator[NetworkFinding]:
    name, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if not name:
        return
    setting = f"MASTER_ADDR={name}"
    remedy = "start torchrun with --local-addr and an address of the first machine that all others reach, or have the name resolve to it"
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        yield NetworkFinding(setting=setting, detail=f"does not resolve on this machine ({error}); {remedy}", is_problem=True)
        return
    address = str(addresses[0][4][0])
    if several and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        yield NetworkFinding(setting=setting, detail=f"is {address}, which other machines do not reach; {remedy}", is_problem=True)
        return
    # Without torchrun's store the first rank opens one itself, later.
    listens = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or environment.get("RANK", "0") != "0"
    if listens and port and (why := _unreachable(address, int(port), timeout_s)):
        detail = f"({address}) does not answer on MASTER_PORT={port} within {timeout_s:g} s ({why}); look for a firewall, or {remedy}"
        yield NetworkFinding(setting=setting, detail=detail, is_problem=True)
        return
    yield NetworkFinding(setting=setting, detail=f"is {address}" + (", and answers" if listens and port else ""), is_problem=False)


def _unreachable(address: str, port: int, timeout_s: float) -> str:
    """Why no connection can be made; empty when one can."""
    deadline, why = time.monotonic() + timeout_s, "no time to try"
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
        except OSError as error:
            why = str(error)
            time.sleep(min(_AGAIN_S, max(0.0, deadline - time.monotonic())))
        else:
            return ""
    return why


def _interfaces(environment: Mapping[str, str], by_host_name: bool) -> Iterator[NetworkFinding]:
    here = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        # NCCL takes beginnings of names, and "^" before those that it should leave out.
        exact = variable.startswith("GLOO") or value.startswith("=")
        for name in value.removeprefix("=").split(",") if value and not value.startswith("^") else ():
            known = any(other == name if exact else other.startswith(name.partition(":")[0]) for other in here)
            detail = "is there" if known else f"is no interface of this machine; it has {', '.join(here)}"
            yield NetworkFinding(setting=f"{variable}={name}", detail=detail, is_problem=not known)
    if by_host_name and not environment.get("GLOO_SOCKET_IFNAME"):
        yield _host_name()


def _host_name() -> NetworkFinding:
    """Where gloo listens when nobody says: at the address of the machine's name."""
    name = socket.gethostname()
    setting, remedy = "GLOO_SOCKET_IFNAME is not set, and", "set it to the interface that the other machines reach"
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError) as error:
        return NetworkFinding(setting=setting, detail=f"the machine's name {name} does not resolve ({error}); {remedy}", is_problem=True)
    lonely = ipaddress.ip_address(address).is_loopback
    detail = f"the machine's name {name} is {address}"
    return NetworkFinding(setting=setting, detail=f"{detail}, which others do not reach; {remedy}" if lonely else detail, is_problem=lonely)
