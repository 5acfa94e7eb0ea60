"""``ppd-bench compare``: errors of one run against another of the same points."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppd_bench.analysis.comparison import error_table, errors, same_points
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.report.compare_plots import figure_compared, figure_errors
from ppd_bench.report.style import save
from ppd_bench.report.units import counted
from ppd_bench.runner.runs import Run, open_run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.store.atomic import make_folder, write_bytes

RESULTS = Path("results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``errors`` has a row per point, slice and figure; ``table`` one per slice and figure (``analysis.comparison``)."""

    headline: str
    errors: pd.DataFrame
    table: pd.DataFrame
    notes: tuple[str, ...]
    paths: tuple[Path, ...]


def compare(first: Path, second: Path, out: Path | None = None) -> Comparison:
    """The verb. The first run is the reference: errors are of the second against it.

    Raises:
        SpecError: no point in common, or none that is valid in both; says what differs.
        StoreError: a run that cannot be read.
    """
    reference, candidate = open_run(first), open_run(second)
    pairs = same_points(reference.points, candidate.points)
    doubted = [run_doubts(run) for run in (reference, candidate)]
    kept = [(a, b) for a, b in pairs if a.point_id not in doubted[0] and b.point_id not in doubted[1]]
    if not kept:
        raise SpecError(
            f"{first} and {second}: of {len(pairs)} points in common none is valid in both; see the runs' pages"
        )
    found = errors(kept, summaries_of(reference), summaries_of(candidate))
    folder = out or RESULTS / f"compare-{reference.manifest.name}-{candidate.manifest.name}"
    names = _names(reference, candidate)
    return Comparison(
        headline=(
            f"reference: run {names[0]}, {reference.evidence}; against it: run {names[1]}, "
            f"{candidate.evidence}; {counted(len(kept), 'point')} in both"
        ),
        errors=found,
        table=error_table(found),
        notes=tuple(_notes(reference, candidate, names, pairs, kept)),
        paths=_write(folder, reference, candidate, names, found),
    )


def run_doubts(run: Run) -> set[str]:
    """Ids of a run's invalid points."""
    summaries = summaries_of(run)
    return set(summaries.loc[~summaries["valid"], "point_id"])


def _names(reference: Run, candidate: Run) -> tuple[str, str]:
    """What the runs are called; with their folders where that does not tell them apart."""
    first, second = reference.manifest.name, candidate.manifest.name
    return (first, second) if first != second else (f"{first} ({reference.path})", f"{second} ({candidate.path})")


def _notes(
    reference: Run, candidate: Run, names: tuple[str, str], pairs: list[tuple[Point, Point]], kept: list[tuple[Point, Point]]
) -> list[str]:  # fmt: skip
    notes = []
    if len(kept) < len(pairs):
        left_out = counted(len(pairs) - len(kept), "common point")
        notes.append(f"left out, because invalid in one of the runs: {left_out}")
    for name, run in zip(names, (reference, candidate), strict=True):
        if len(pairs) < len(run.points):
            missing = counted(len(run.points) - len(pairs), "point")
            notes.append(f"in run {name} alone: {missing} of {len(run.points):,}")
    if reference.evidence == "simulated" and candidate.evidence == "measured":
        notes.append("the reference is simulated: give the measured run first for errors of the simulator")
    return notes


def _write(
    folder: Path, reference: Run, candidate: Run, names: tuple[str, str], found: pd.DataFrame
) -> tuple[Path, ...]:
    make_folder(folder)
    path = folder / "errors.csv"
    labelled = found.assign(reference_evidence=reference.evidence, candidate_evidence=candidate.evidence)
    write_bytes(path, labelled.to_csv(index=False).encode())
    shown = {"reference": f"{reference.evidence}, {names[0]}", "candidate": f"{candidate.evidence}, {names[1]}"}
    return (
        path,
        *save(figure_compared(found, **shown), folder / "compared"),
        *save(figure_errors(found, **shown), folder / "errors"),
    )
