"""Whether the hot modules run compiled or interpreted. Results are the same; only speed differs."""

from __future__ import annotations

from pathlib import Path

import ppd_bench
from ppd_bench.sim import worker

STATUS_FILE = "_build_status.txt"
"""Left in the installed package by the build (.ci/build_backend/ppd_build.py)."""


def compiled() -> bool:
    """True when the simulator's hot modules were compiled by mypyc."""
    return not (worker.__file__ or "").endswith(".py")


def kernel_status() -> str:
    """One line for people: how the hot modules were built, or why they are interpreted."""
    status = Path(ppd_bench.__file__).with_name(STATUS_FILE)
    if status.is_file():
        return status.read_text(encoding="utf-8").strip()
    return "compiled in place" if compiled() else "interpreted: run from the source tree"
