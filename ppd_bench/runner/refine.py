"""``sweep --refine``: every cell once, then repeats where a decision is uncertain and matters.

A round looks at what all points so far say (``analysis.refine``), chooses cells, and plays one more repeat of both arms of each.
``refine.jsonl`` in the run folder tells every choice and why it was made; it is also what a stopped run goes on from. Rounds
depend on records alone, so a run that was stopped ends with the same points as one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppd_bench.analysis.metrics import floats
from ppd_bench.analysis.refine import Candidate, Standing, next_round, round_allotment, standing
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.runner.refine_journal import Grid, Journal, Repeats
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import stored_deltas, write_summaries
from ppd_bench.store import layout

DEFAULT_CONFIDENCE = 0.95
DEFAULT_MAX_REPEATS = 10
"""Repeats that a cell gets at most, where the sweep does not say."""

Play = Callable[[Sequence[Point], list[list[Any]]], str]
"""Plays what is missing of the points into the run folder, and says what the user should know of how it was opened. The second
argument is what the manifest keeps of the choice (``runner.runs.chosen_points``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefineOptions:
    """When to stop: by GPU-seconds, as ``plan`` counts them (null: no bound), or when every cell is as sure as asked."""

    budget_gpu_s: float | None = None
    confidence: float = DEFAULT_CONFIDENCE

    def check(self) -> None:
        """
        Raises:
            SpecError: a bound that cannot be used.
        """
        problems = []
        if self.budget_gpu_s is not None and not self.budget_gpu_s > 0:
            problems.append(f"command line: --budget {self.budget_gpu_s:g}: GPU-seconds above 0 are needed")
        if not 0.5 < self.confidence < 1:
            problems.append(f"command line: --confidence {self.confidence:g}: a number between 0.5 and 1 is needed")
        if problems:
            raise SpecError(problems)


def refine_options(wanted: bool, budget_gpu_s: float | None, confidence: float) -> RefineOptions | None:
    """Options as the command line gives them.

    Raises:
        SpecError: a budget without --refine.
    """
    if wanted:
        return RefineOptions(budget_gpu_s=budget_gpu_s, confidence=confidence)
    if budget_gpu_s is not None:
        raise SpecError("command line: --budget bounds --refine: give both")
    return None


def refine(points: Sequence[Point], folder: Path, options: RefineOptions, weights: tuple[float, float],
           success_bound: float, play: Play, tell: Callable[[str], None]) -> str:  # fmt: skip
    """Play rounds until the budget or the confidence is reached. Returns what the first opening of the folder had to say.

    ``points``: all that may be played, up to the repeats that a cell gets at most.

    Raises:
        SpecError: nothing to compare, or a budget that is below the coarse pass.
        StoreError: ``refine.jsonl`` is damaged, or belongs to another sweep.
    """
    grid = Grid(points)
    _check(grid, options)
    journal = Journal(folder / layout.REFINE, grid)
    notice = play(grid.chosen(journal.repeats), _kept(journal.repeats))
    while True:
        found, deltas = _standing(folder, grid, weights, success_bound)
        journal.stand(found, options.confidence)
        tell(journal.words(options.budget_gpu_s))
        chosen, why_not = _choose(grid, journal, found, options)
        if not chosen:
            journal.stop(why_not)
            tell(why_not)
            return notice
        journal.add(chosen, found, floats(deltas, "n_repeats"))
        play(grid.chosen(journal.repeats), _kept(journal.repeats))


def _check(grid: Grid, options: RefineOptions) -> None:
    options.check()
    if not grid.cells:
        raise SpecError(
            "command line: --refine has nothing to decide: the sweep has no layout with both an all-D and an all-pD "
            "configuration, such as 2P_2D and 2P_2pD"
        )
    if options.budget_gpu_s is not None and options.budget_gpu_s < grid.coarse_gpu_s:
        raise SpecError(
            f"command line: --budget {options.budget_gpu_s:g} GPU-seconds: every cell once costs {grid.coarse_gpu_s:,.0f} "
            "already; give more, or a smaller sweep (--for-table, fewer workloads or rates)"
        )


def _kept(repeats: Repeats) -> list[list[Any]]:
    return [[*key, n] for key, n in sorted(repeats.items())]


def _standing(
    folder: Path, grid: Grid, weights: tuple[float, float], success_bound: float
) -> tuple[Standing, pd.DataFrame]:
    """Of every cell, in the grid's order, by the records that are there."""
    run = open_run(folder)
    write_summaries(run)
    rows = stored_deltas(run).set_index(["baseline", "workload", "qps"])
    wanted = pd.MultiIndex.from_tuples(
        [(cell.arms[0], cell.workload, cell.qps) for cell in grid.cells], names=rows.index.names
    )
    deltas = rows.reindex(wanted).reset_index().fillna({"n_repeats": 0})
    return standing(deltas, w_ttft=weights[0], w_tpot=weights[1], success_bound=success_bound), deltas


def _choose(grid: Grid, journal: Journal, found: Standing, options: RefineOptions) -> tuple[list[Candidate], str]:
    """The next round's cells, or none and why."""
    unsure = found.confidence < options.confidence
    if not unsure.any():
        return [], f"stopped: every cell is decided with a confidence of {options.confidence:g} or more"
    able = [Candidate(i, c.cost_gpu_s) for i, c in enumerate(grid.cells) if journal.n_repeats(c) < grid.max_repeats]
    if not any(unsure[c.row] for c in able):
        return (
            [],
            f"stopped: the {int(unsure.sum())} cells that are left undecided have had all {grid.max_repeats} repeats",
        )
    allotment = round_allotment(grid.coarse_gpu_s, grid.round_launch_gpu_s, options.budget_gpu_s)
    if options.budget_gpu_s is not None:
        allotment = min(allotment, options.budget_gpu_s - journal.spent_gpu_s)
    chosen = next_round(
        found,
        journal.all_repeats(),
        able,
        confidence=options.confidence,
        allotment_gpu_s=allotment - grid.round_launch_gpu_s,
    )
    if chosen:
        return chosen, ""
    return [], f"stopped: the budget has no room for another round ({int(unsure.sum())} cells are left undecided)"
