"""Sweep files by name or path."""

from __future__ import annotations

from ppd_bench.workload.shelf import Shelf

SWEEPS = Shelf(noun="sweep", folder="sweeps", package="ppd_bench.sweep.library_data")
DEFAULT_SWEEP = "paper"
QUICK_SWEEP = "quick"


def resolve_sweep(name_or_path: str = DEFAULT_SWEEP) -> tuple[str, str]:
    """Text of a sweep file and the path by which messages name it: a path, ./sweeps/NAME.yaml, or the bundled one.

    Raises:
        SpecError: nothing of that name (the message lists the names), or a file that cannot be read.
    """
    source = SWEEPS.read(name_or_path)
    return source.text, source.shown
