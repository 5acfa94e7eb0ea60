"""A short soak; ``soak.py`` as a program runs a long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from soak import soak


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_left_behind_while_everything_fails(tmp_path: Path) -> None:
    figures = asyncio.run(asyncio.wait_for(soak(tmp_path, n_requests=700, n_clients=12, seed=1), 120.0))
    assert figures["breaches"] == []
    assert figures["requests"] == sum(figures["outcomes"].values()) >= 700
    assert figures["outcomes"]["ok"] > 350
    assert sum(figures["faults"].values()) > 5
