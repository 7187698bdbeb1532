# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Settings of the network that cannot work are refused by name, before anything waits for them."""

import json
import socket

import pytest

from mcore_parallel.backends._doctor import main
from mcore_parallel.guard import check_network, inspect_network

SEVERAL = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "2", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def test_a_machine_alone_needs_nothing() -> None:
    assert inspect_network({}) == []
    check_network({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})


def test_a_store_that_answers_is_well(port: str) -> None:
    (row,) = inspect_network({"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2"})
    assert not row.is_problem and (row.setting, row.detail) == ("MASTER_ADDR=localhost", "is 127.0.0.1, and answers")


def test_a_name_that_does_not_resolve_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"MASTER_ADDR=node-1 does not resolve on this machine .*--local-addr"):
        check_network({"MASTER_ADDR": "node-1", "MASTER_PORT": "29500", **SEVERAL})


def test_an_address_that_others_do_not_reach_is_refused(port: str) -> None:
    with pytest.raises(ValueError, match=r"MASTER_ADDR=localhost is 127\.0\.0\.1, which other machines do not reach; .*--local-addr"):
        check_network({"MASTER_ADDR": "localhost", "MASTER_PORT": port, **SEVERAL})


def test_a_store_that_does_not_answer_is_refused_in_time(port: str) -> None:
    # Nobody listens at a port that is only bound, and no other process gets it.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        closed = str(bound.getsockname()[1])
        words = rf"MASTER_ADDR=127\.0\.0\.1 .*does not answer on MASTER_PORT={closed} within 0\.3 s .*firewall"
        with pytest.raises(ValueError, match=words):
            check_network({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": closed, "RANK": "1", "WORLD_SIZE": "2"}, timeout_s=0.3)
        # The first rank opens it itself.
        check_network({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": closed, "RANK": "0", "WORLD_SIZE": "2"}, timeout_s=0.3)


@pytest.mark.parametrize(
    ("variable", "value"), [("GLOO_SOCKET_IFNAME", "lo,ib9"), ("NCCL_SOCKET_IFNAME", "=ib9"), ("NCCL_SOCKET_IFNAME", "ib")]
)
def test_an_interface_that_is_not_there_is_refused(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{variable}=ib9? is no interface of this machine; it has .*lo"):
        check_network({variable: value})
    check_network({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"})


def test_gloo_needs_an_interface_where_the_name_of_the_machine_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    several = {name: value for name, value in SEVERAL.items() if name != "GLOO_SOCKET_IFNAME"}
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME is not set, and the machine's name localhost is 127.* set it to"):
        check_network(several)
    check_network(several, backend="nccl")


def test_the_doctor_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    assert main([]) == 1
    assert "network, problem" in (text := capsys.readouterr().out) and "GLOO_SOCKET_IFNAME=ib9 is no interface of this machine" in text
    assert main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["network"][0]["is_problem"] is True
