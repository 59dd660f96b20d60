"""Ports: kept where ours, named and replaced where taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from cli.stack.file import HOST
from cli.stack.ports import STORE_PORTS, USUAL, choose, free_ports, is_free


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_free_ports_are_distinct_and_free() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    assert all(is_free(port) for port in found)


def test_a_taken_port_is_named_with_its_holder_and_replaced(taken: int) -> None:
    said: list[str] = []
    ports = choose(["gateway"], {"gateway": taken}, [], said.append)
    assert ports["gateway"] != taken
    assert said[0].startswith(f"port {taken} for gateway is taken")
    assert said[0].endswith(f"using {ports['gateway']}")


def test_the_port_of_a_live_part_of_ours_is_kept(taken: int) -> None:
    said: list[str] = []
    assert choose(["gateway"], {"gateway": taken}, ["gateway"], said.append) == {"gateway": taken}
    assert said == []


def test_remembered_ports_come_back() -> None:
    first = choose(USUAL, {}, [], lambda text: None, any_free=True)
    assert choose(USUAL, first, [], lambda text: None) == first
    assert len(set(first.values())) == len(USUAL)


def test_a_part_without_a_usual_port_gets_a_free_one() -> None:
    ports = choose(["learner-mine"], {}, [], lambda text: None)
    assert is_free(ports["learner-mine"])


def test_usual_ports_are_distinct() -> None:
    assert len(set(USUAL.values())) == len(USUAL)
    assert "s3_filer_grpc" in STORE_PORTS
    assert "gateway" not in STORE_PORTS
