"""Workloads by name or path, and the paper's eighteen."""

from __future__ import annotations

from pathlib import PurePath

from ppd_bench.core.errors import SpecError
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.workload.shelf import Shelf
from ppd_bench.workload.spec import load_workload

WORKLOADS = Shelf(noun="workload", folder="workloads", package="ppd_bench.workload.library_data")

TURN1_NAMES = ("small", "large")
TURN2_NAMES = (
    "tiny", "short_gen", "long_gen", "very_long_gen", "small_bal", "mid_bal", "mid_paste", "big_paste", "huge_paste",
)  # fmt: skip
PAPER_WORKLOADS = tuple(f"{first}_{second}" for first in TURN1_NAMES for second in TURN2_NAMES)
"""The paper's 18 (Section 4.2): two sizes of turn 1 by nine kinds of turn 2."""


def find_workload(name_or_path: str) -> WorkloadSpec:
    """Load a workload by path, from ./workloads, or from the bundled ones, in this order.

    Raises:
        SpecError: an unknown name, or every problem of its file. A workload is called as its file is, so that a label
            in a result leads back to one file.
    """
    source = WORKLOADS.read(name_or_path)
    workload = load_workload(source.text, file=source.shown)
    stem = PurePath(name_or_path.replace("\\", "/")).name.removesuffix(".yaml").removesuffix(".yml")
    if workload.name != stem:
        raise SpecError(f"{source.shown}: name: {workload.name!r} is not the file's name; allowed: {stem}")
    return workload


def list_workloads() -> tuple[WorkloadSpec, ...]:
    """Every workload that a name reaches: the paper's in its order, then others by name."""
    found = WORKLOADS.names()
    ordered = [n for n in PAPER_WORKLOADS if n in found] + [n for n in found if n not in PAPER_WORKLOADS]
    return tuple(find_workload(name) for name in ordered)
