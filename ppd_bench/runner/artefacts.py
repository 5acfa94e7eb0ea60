"""From records to summaries, deltas, tables, plots and the page: each rebuilt from the one before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppd_bench.analysis.compile_table import MAX_UNKNOWN_RATIO, check_settings, compile_table
from ppd_bench.analysis.judging import doubts
from ppd_bench.analysis.pairing import pair_arms
from ppd_bench.core.errors import NoEvidence, SpecError, TableError
from ppd_bench.policy.table import DecisionTable, Rules, Side, Weights
from ppd_bench.runner.refine_journal import read_standings
from ppd_bench.runner.reproduce import published_comparison
from ppd_bench.runner.runs import Run
from ppd_bench.runner.summaries import stored_deltas, summaries_of
from ppd_bench.store import layout
from ppd_bench.store.atomic import write_bytes

if TYPE_CHECKING:
    from ppd_bench.report.plots import Plot  # matplotlib takes a second; only verbs that draw should pay for it


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """How decision tables are compiled. A weight that is null is that of the table that is there, and 1 without one."""

    w_ttft: float | None = None
    w_tpot: float | None = None
    success_bound: float = 0.95
    fallback: Side = "pd"
    max_unknown_ratio: float = MAX_UNKNOWN_RATIO

    def check(self) -> None:
        """
        Raises:
            SpecError: weights or bounds that cannot be used.
        """
        check_settings(self.weights(None), self.rules)

    def weights(self, there: DecisionTable | None) -> Weights:
        """The weights to compile with; ``there`` is the table that would be replaced."""
        w_ttft, w_tpot = (there.weights.w_ttft, there.weights.w_tpot) if there else (1.0, 1.0)
        return Weights(
            w_ttft=w_ttft if self.w_ttft is None else self.w_ttft, w_tpot=w_tpot if self.w_tpot is None else self.w_tpot
        )

    @property
    def rules(self) -> Rules:
        return Rules(success_bound=self.success_bound, fallback=self.fallback, max_unknown_ratio=self.max_unknown_ratio)


def table_options(
    w_ttft: float, w_tpot: float, success_bound: float, fallback: str, max_unknown: float
) -> TableOptions:
    """Options as the command line gives them.

    Raises:
        SpecError: an unknown fallback.
    """
    sides: dict[str, Side] = {"pd": "pd", "local": "local"}
    if fallback not in sides:
        raise SpecError(f"command line: --fallback {fallback!r} is not known; allowed: {', '.join(sides)}")
    return TableOptions(
        w_ttft=w_ttft,
        w_tpot=w_tpot,
        success_bound=success_bound,
        fallback=sides[fallback],
        max_unknown_ratio=max_unknown,
    )


def write_tables(run: Run, options: TableOptions, out: Path | None = None) -> list[Path]:
    """One decision table per (x=0, x=1) pair of the run, ``tables/LAYOUT.json``.

    Raises:
        SpecError: the run holds no pair.
    """
    pairs = pair_arms(run.points)
    if not pairs:
        raise SpecError(
            f"{run.path}: no table can be built: the run has no layout with both an all-D (x=0) and an all-pD (x=1) "
            "configuration, such as 2P_2D and 2P_2pD"
        )
    deltas = stored_deltas(run)
    folder = out or run.path / layout.TABLES
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for pair in pairs:
        path = folder / f"{pair[0].name}.json"
        weights = options.weights(table_at(path))
        text = compile_table(
            deltas,
            run.points,
            pair=pair,
            w_ttft=weights.w_ttft,
            w_tpot=weights.w_tpot,
            success_bound=options.success_bound,
            fallback=options.fallback,
            max_unknown_ratio=options.max_unknown_ratio,
        )
        write_bytes(path, text.encode())
        paths.append(path)
    return paths


def table_at(path: Path) -> DecisionTable | None:
    """The table that is there, null where there is none that can be read."""
    try:
        return DecisionTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TableError):
        return None


def long_workloads(run: Run) -> list[str]:
    """A warning where a table says less than the run: its cells are of turn 2, and later turns are averaged into them."""
    names = list(dict.fromkeys(p.workload.name for p in run.points if len(p.workload.turns) > 2))
    recorded = {
        p.workload.name: followup
        for p in run.points
        if p.workload.traffic and p.workload.has_cell and (followup := p.workload.followup)
    }
    warnings = [
        f"{name}: recorded traffic; all of its follow-up turns are averaged into one cell per rate, that of their means (context "
        f"{context:,}, new {new:,}, output {output:,} tokens); a grid of fixed lengths gives cells that differ"
        for name, (context, new, output) in recorded.items()
    ]
    if names:
        warnings.append(
            f"{', '.join(names)}: more than two turns; all follow-up turns are averaged into the cell of turn 2, so contexts and "
            "lengths of later turns have no cells of their own"
        )
    return warnings


def table_texts(run: Run) -> list[str]:
    """The texts of the run's tables, in order of the run's pairs."""
    paths = [run.path / layout.TABLES / f"{pair[0].name}.json" for pair in pair_arms(run.points)]
    return [path.read_text(encoding="utf-8") for path in paths if path.exists()]


def weak_tables(paths: Sequence[Path]) -> list[str]:
    """Warnings: tables that a router would refuse to start with, and cells whose decision is uncertain."""
    tables = [DecisionTable.from_json(path.read_text(encoding="utf-8")) for path in paths]
    warnings = []
    for path, table in zip(paths, tables, strict=True):
        try:
            table.check_evidence()
        except NoEvidence as error:
            warnings.append(f"{path}: {error}")
    return warnings + doubts(*tables)


def draw_plots(run: Run) -> list[Plot]:
    """The standard plots of a run, to be saved, shown on the page, or both."""
    from ppd_bench.report.findings import find
    from ppd_bench.report.plots import standard_plots
    from ppd_bench.report.refine_plot import refined

    found = find(summaries_of(run), success_bound=run.spec.success_bound_ratio)
    plots = standard_plots(found, table_texts(run), run_name=run.manifest.name)
    rounds = read_standings(run.path)
    return [*plots, refined(rounds, run_name=run.manifest.name, evidence=run.evidence)] if len(rounds) else plots


def write_plots(run: Run, out: Path | None = None, plots: Sequence[Plot] | None = None) -> list[Path]:
    """The standard plots as PNG and SVG; ``plots`` null draws them. Returns their paths."""
    from ppd_bench.report.style import save

    folder = out or run.path / layout.PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_plots(run) if plots is None else plots
    return [path for plot in drawn for path in save(plot.figure, folder / plot.name)]


def write_report(run: Run, out: Path | None = None, plots: Sequence[Plot] | None = None) -> Path:
    """The one-page HTML report; ``plots`` null draws them. Returns its path."""
    from ppd_bench.report.page import ReportInput, render_page

    summaries = summaries_of(run)
    html = render_page(
        ReportInput(
            run_name=run.manifest.name,
            evidence=run.evidence,
            manifest=dataclasses.asdict(run.manifest),
            summaries=summaries,
            deltas=stored_deltas(run),
            tables=table_texts(run),
            published=published_comparison(run, summaries),
            plots=plots,
            success_bound=run.spec.success_bound_ratio,
        )
    )
    path = out or run.path / layout.REPORT
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, html.encode())
    return path
