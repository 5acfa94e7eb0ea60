"""Free TCP ports for engines."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

from ppd_bench.core.errors import LaunchError

FIRST_PORT = 20_000
LAST_PORT = 32_767
"""Below Linux' range for outgoing connections (32768 to 60999), which would take a port between choosing and using it."""


def port_taken(host: str, port: int) -> bool:
    """Whether somebody listens on (or holds) the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def free_ports(n_blocks: int, block_size: int, *, host: str = "127.0.0.1", avoid: Collection[int] = ()) -> list[int]:
    """The first ports of ``n_blocks`` runs of ``block_size`` consecutive free ports.

    The search starts at a place that depends on the process, so that two launches at once do not choose the same ones.

    Raises:
        LaunchError: there are not so many.
    """
    span = LAST_PORT - FIRST_PORT + 1
    start = os.getpid() * 101 % span
    found: list[int] = []
    offset = 0
    while len(found) < n_blocks and offset + block_size <= span:
        base = FIRST_PORT + (start + offset) % span
        block = range(base, base + block_size)
        usable = block[-1] <= LAST_PORT and not any(port in avoid or port_taken(host, port) for port in block)
        if usable:
            found.append(base)
        offset += block_size if usable else 1
    if len(found) < n_blocks:
        raise LaunchError(
            f"only {len(found)} of {n_blocks} runs of {block_size} free ports between {FIRST_PORT} and {LAST_PORT} on "
            f"{host}; end what listens there"
        )
    return found
