"""Compiled and interpreted modules give the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_sim_invariants import hash_of_some_points

from ppd_bench.sim.kernel import compiled

CHECKOUT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
from ppd_bench.sim.kernel import compiled
assert not compiled(), "the checkout holds compiled modules"
from test_sim_invariants import hash_of_some_points
print(hash_of_some_points())
"""


@pytest.mark.skipif(not compiled(), reason="the simulator runs interpreted here: there is nothing to compare")
def test_compiled_modules_give_the_records_of_interpreted_ones() -> None:
    """A second process takes the checkout's sources."""
    if not (CHECKOUT / "ppd_bench" / "sim" / "worker.py").is_file():
        pytest.skip("no sources beside the tests")
    program = [sys.executable, "-c", PROGRAM, str(CHECKOUT), str(Path(__file__).parent)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert child.stdout.strip() == hash_of_some_points()
