"""Free ports."""

from __future__ import annotations

import socket

import pytest

from ppd_bench.core.errors import LaunchError
from ppd_bench.engine.ports import FIRST_PORT, LAST_PORT, free_ports, port_taken


def test_a_listening_port_is_taken_and_a_closed_one_is_free_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_taken("127.0.0.1", port)
    assert not port_taken("127.0.0.1", port)


def test_blocks_are_free_disjoint_and_below_the_range_of_outgoing_connections() -> None:
    bases = free_ports(4, 3)
    ports = [port for base in bases for port in range(base, base + 3)]
    assert len(set(ports)) == 12
    assert all(FIRST_PORT <= port <= LAST_PORT for port in ports)
    assert not any(port_taken("127.0.0.1", port) for port in ports)


def test_a_block_with_one_taken_port_is_passed_over() -> None:
    middle = free_ports(1, 3)[0] + 1
    with socket.create_server(("127.0.0.1", middle)):
        base = free_ports(1, 3)[0]
    assert not base <= middle < base + 3
    assert free_ports(1, 3, avoid=[middle]) == [base]


def test_more_ports_than_there_are_is_a_clear_error() -> None:
    with pytest.raises(LaunchError, match=r"only \d of 2 runs of 12768 free ports between 20000 and 32767"):
        free_ports(2, LAST_PORT - FIRST_PORT + 1)
