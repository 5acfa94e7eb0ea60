"""Compiled and interpreted modules give the same bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_sim_invariants import hash_of_some_points

from ppd_bench.sim.kernel import compiled

SOURCES = Path(__file__).resolve().parents[2] / "ppd_bench"
PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
from ppd_bench.sim.kernel import compiled
assert not compiled()
from test_sim_invariants import hash_of_some_points
print(hash_of_some_points())
"""


@pytest.mark.skipif(not compiled(), reason="the simulator runs interpreted here: there is nothing to compare")
def test_compiled_modules_give_the_records_of_interpreted_ones(tmp_path: Path) -> None:
    """A second process takes a copy of the checkout's sources, without what may have been compiled in place."""
    if not (SOURCES / "sim" / "worker.py").is_file():
        pytest.skip(f"no sources in {SOURCES}")
    shutil.copytree(SOURCES, tmp_path / "ppd_bench", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == hash_of_some_points()
