"""Terminal tables. Milliseconds and percent are for people; inside, everything is seconds and ratios."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ppd_bench.cli.show_fit import fitted
from ppd_bench.core.errors import SpecError
from ppd_bench.core.topology import PAPER_TOPOLOGIES, Topology, parse_topology

if TYPE_CHECKING:  # only for signatures: a list of names should not wait for pandas
    import pandas as pd
    from rich.console import Console

    from ppd_bench.analysis.compile_table import CellChange
    from ppd_bench.core.workload import WorkloadSpec
    from ppd_bench.policy.table import Cell, DecisionTable
    from ppd_bench.runner.doctor import Examination
    from ppd_bench.runner.plan import Plan
    from ppd_bench.runner.reproduce import Constant


NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]\d+)?(?![\w.,])|–$")
"""How a number begins, whatever unit or second number follows; ``4R`` is a name."""


def print_rows(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table, or several below each other where the terminal is too narrow for all columns; numbers are right-aligned."""
    from rich.table import Table  # here, because --help should not wait for it

    rows = [tuple(row) for row in rows]
    for number, block in enumerate(fitted(columns, rows, console.width)):
        table = Table(title=title if not number else f"{title} (continued)", title_justify="left", header_style="bold")
        for index, width in block:
            numeric = bool(rows) and all(NUMBER.match(row[index]) or not row[index] for row in rows)
            table.add_column(columns[index], justify="right" if numeric else "left", overflow="fold", width=width)
        for row in rows:
            table.add_row(*(row[index] for index, _ in block))
        console.print(table)


def duration(seconds: float) -> str:
    """Seconds for people: 42 s, 7.5 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def show_plan(console: Console, plan: Plan, executor: str) -> None:
    """What a sweep would cost, live and simulated, with the assumptions."""
    cost = plan.estimate
    rows = [
        ("points", f"{cost.n_points:,}"),
        ("configurations x workloads x QPS x repeats",
         f"{cost.n_configurations} x {cost.n_workloads} x {cost.n_qps} x {cost.n_repeats}"),
        ("launches (layouts)", f"{cost.n_layouts}"),
        ("conversations expected", f"{cost.expected_conversations:,.0f}"),
        ("turns expected", f"{cost.expected_turns:,.0f}"),
        ("live: wall time", duration(cost.wall_s)),
        ("live: GPU-seconds", f"{cost.gpu_seconds:,.0f} ({cost.gpu_seconds / 3600:,.1f} GPU-hours)"),
        ("simulated: wall time here, roughly", duration(cost.simulated_wall_s)),
        ("executor that 'sweep' would take here", executor),
    ]  # fmt: skip
    print_rows(console, "Plan (estimated)", ("what", "value"), rows)
    served = [(layout, ", ".join(names)) for layout, names in plan.served.items()]
    print_rows(console, "Launches", ("layout", "configurations that share it"), served)
    console.print("Live figures assume: " + "; ".join(cost.assumptions) + ".")


def show_topologies(console: Console, names: Sequence[str]) -> None:
    """Configurations with their layout, class, node-level x and workers."""
    rows = []
    for t in _parsed(names or PAPER_TOPOLOGIES):
        x = "" if t.node_x_ratio is None else f"{t.node_x_ratio:.2f}"
        workers = ", ".join(f"{w.worker_id}:{w.role}" for w in t.workers)
        rows.append((t.name, t.category, t.layout.name, x, f"{t.n_gpus}", workers))
    layouts = len({row[2] for row in rows})
    print_rows(console, f"{len(rows)} configurations, {layouts} layouts (launches)",
               ("name", "class", "layout", "node x", "GPUs", "workers (process:role)"), rows)  # fmt: skip


def _parsed(names: Sequence[str]) -> list[Topology]:
    """All of them, or one error that tells every mistake."""
    topologies: list[Topology] = []
    problems: list[str] = []
    for name in names:
        try:
            topologies.append(parse_topology(name))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return topologies


def show_workloads(console: Console, workloads: Sequence[WorkloadSpec]) -> None:
    """Workloads with the lengths of their turns."""
    rows = [(w.name, w.category, _turns_words(w), f"{w.max_output_tokens}") for w in workloads]
    head = ("name", "category", "turns (input->output tokens)", "declared output")
    print_rows(console, f"{len(workloads)} workloads", head, rows)


def _turns_words(workload: WorkloadSpec) -> str:
    """``9600->100, 100->100 x4``: equal turns in a row are told once."""
    told = []
    for lengths, turns in groupby(f"{turn.input_tokens}->{turn.output_tokens}" for turn in workload.turns):
        n = len(list(turns))
        told.append(lengths if n == 1 else f"{lengths} x{n}")
    return ", ".join(told)


def show_table(console: Console, table: DecisionTable, *, every_cell: bool) -> None:
    """A decision table: domain, weights, a grid per context class, the evidence, and how sure it is."""
    domain, weights = table.domain, table.weights
    console.print(
        f"{domain.baseline} (x=0) against {domain.candidate} (x=1), {domain.model} on {domain.gpu}, "
        f"{domain.executor}; weights: TTFT {weights.w_ttft:g}, TPOT {weights.w_tpot:g}; table {table.content_hash}"
    )
    levels = list(dict.fromkeys(cell.qps for cell in table.cells))
    for context in dict.fromkeys(cell.context for cell in table.cells):
        cells = {(c.type, c.qps): c for c in table.cells if c.context == context}
        kinds = list(dict.fromkeys(kind for kind, _ in cells))
        rows = [(kind, *(_mark(cells[kind, qps]) for qps in levels)) for kind in kinds]
        print_rows(console, f"context {context}", ("type \\ QPS", *(f"{q:g}" for q in levels)), rows)
    console.print("L local, P through prefill node, ? insufficient evidence (fallback used), lower case: extrapolated")
    console.print("= tie (fallback used), ~ success ratio unclear, ° no interval (too few repeats)")
    for line in _certainty_lines(table):
        console.print(line)
    if every_cell:
        _print_cells(console, [c for c in table.cells if c.visited])


CERTAINTY_MARKS = {"tie": "=", "success_unclear": "~", "no_interval": "°"}


def _mark(cell: Cell) -> str:
    if cell.evidence == "insufficient":
        return "?"
    letter = "L" if cell.decision == "local" else "P"
    letter = letter.lower() if cell.evidence == "extrapolated" else letter
    # A table of before there were intervals has cells without any certainty.
    return letter + CERTAINTY_MARKS.get(cell.certainty or "no_interval", "")


def _certainty_lines(table: DecisionTable) -> list[str]:
    """How many of the visited cells with evidence are sure, and the doubts about the others."""
    from ppd_bench.analysis.judging import doubts

    known = [c for c in table.cells if c.visited and c.evidence != "insufficient"]
    n_decided = sum(c.certainty == "decided" for c in known)
    told = [f"{n_decided} of {len(known)} cells with evidence are decided with certainty"]
    if known and not any(c.certainty for c in known):
        told.append(
            "warning: NO INTERVALS: an earlier version built this table; build it again from a run with repeats"
        )
    return told + [f"warning: {line}" for line in doubts(table)]


def _print_cells(console: Console, cells: Sequence[Cell]) -> None:
    """Every visited cell: decision, figures with their 95 % intervals, and the interval of S drawn on one scale for all."""
    reach = max((abs(end) for c in cells for end in _ends(c)), default=0.0)
    columns = ("cell", "decision", "certainty", "rule", "S", "P(S>0)", f"S in ±{reach:.2f}", "delta TTFT", "delta TPOT",
               "repeats, pairs")  # fmt: skip
    print_rows(console, "cells (± 95 % of each cell by itself)", columns, [_cell_row(c, reach) for c in cells])


def _ends(cell: Cell) -> tuple[float, ...]:
    return cell.score_interval or (() if cell.score is None else (cell.score,))


def _cell_row(cell: Cell, reach: float) -> tuple[str, ...]:
    return (
        cell.key,
        cell.decision,
        (cell.certainty or cell.evidence).replace("_", " "),
        str(cell.rule),
        _with_margin(cell.score, cell.score_interval),
        "" if cell.probability is None else f"{cell.probability:.3f}",
        interval_bar(cell.score, cell.score_interval, reach),
        _with_margin(cell.delta_ttft, cell.delta_ttft_interval),
        _with_margin(cell.delta_tpot, cell.delta_tpot_interval),
        f"{cell.n_repeats}, {cell.n_pairs}",
    )


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _with_margin(value: float | None, interval: tuple[float, float] | None) -> str:
    return _signed(value) if interval is None else f"{_signed(value)} ±{(interval[1] - interval[0]) / 2:.3f}"


BAR_HALF = 8
"""Characters on each side of the middle of a drawn interval."""


def interval_bar(value: float | None, interval: tuple[float, float] | None, reach: float) -> str:
    """An interval as text, from -reach to +reach: ``─`` over its length, ``●`` at the value, ``│`` at 0, ``·`` elsewhere.

    No spaces, at which a narrow terminal would break it.
    """

    def place(x: float) -> int:
        return BAR_HALF + round(BAR_HALF * max(-1.0, min(1.0, x / reach)))

    if value is None or reach <= 0:
        return ""
    low, high = interval or (value, value)
    bar = ["─" if place(low) <= i <= place(high) else "·" for i in range(2 * BAR_HALF + 1)]
    bar[BAR_HALF] = "┼" if bar[BAR_HALF] == "─" else "│"
    bar[place(value)] = "●"
    return "".join(bar)


def show_changes(console: Console, changes: Sequence[CellChange]) -> None:
    """Cells that two tables answer differently."""
    if not changes:
        console.print("no cell differs in decision or evidence")
        return
    both = [c for c in changes if c.decision_a is not None and c.decision_b is not None]
    rows = [
        (
            c.key,
            _answer(c.decision_a, c.evidence_a),
            _answer(c.decision_b, c.evidence_b),
            _score(c.score_a),
            _score(c.score_b),
        )
        for c in both
    ]
    if rows:
        print_rows(console, f"{len(both)} cells differ", ("cell", "first", "second", "S first", "S second"), rows)
    alone = sum(c.decision_b is None for c in changes), sum(c.decision_a is None for c in changes)
    if any(alone):
        console.print(f"{alone[0]} cells are in the first table only, {alone[1]} in the second only")


def _answer(decision: str | None, evidence: str | None) -> str:
    return "–" if decision is None else f"{decision} ({evidence})"


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def show_comparison(console: Console, comparison: pd.DataFrame, evidence: str) -> None:
    """The paper's tables: published, computed here (labelled), signed difference in points."""
    for title, rows in comparison.groupby("table", sort=False):
        printed = [
            (str(r["row"]), str(r["column"]), f"{r['published']:.1f}", _percent(r["computed"]),
             _difference(r["difference"]), f"{r['n_cells']}")
            for r in rows.to_dict("records")
        ]  # fmt: skip
        print_rows(console, str(title), ("row", "column", "published", evidence, "difference", "cells"), printed)


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}"


def _difference(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.1f}"


def show_constants(console: Console, constants: Sequence[Constant]) -> None:
    """What simulated numbers rest on."""
    rows = [(c.name, c.value, c.source, c.fitted_on) for c in constants]
    print_rows(console, "Constants of the simulation", ("constant", "value", "source", "fitted on published"), rows)
    console.print("Held out (nothing fitted on them): Table 1, Table 2, Table 5 and the 92.2 % figure.")


def show_findings(console: Console, examination: Examination) -> None:
    """What doctor found, worst last."""
    for ended in examination.ended:
        console.print(f"ended an engine that a killed ppd-bench left behind: {ended}")
    order = {"ok": 0, "warning": 1, "error": 2}
    found = sorted(examination.findings, key=lambda finding: order[finding.level])
    print_rows(console, "Checks", ("level", "what", "what to do"), [(f.level, f.what, f.advice) for f in found])
