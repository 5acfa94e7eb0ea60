"""The tables of the page, as text cells with a class where colour says something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from ppd_bench.policy.table import Cell, DecisionTable
from ppd_bench.report.configurations import (
    CATEGORY_TITLES,
    ordered_categories,
    ordered_configurations,
    ordered_workloads,
)
from ppd_bench.report.findings import GOALS, Findings
from ppd_bench.report.style import KINDS
from ppd_bench.report.units import UNKNOWN, ms, number, percent, tokens_per_s

EVIDENCE_MARKS = {"measured": "", "simulated": "", "extrapolated": "*", "insufficient": "?"}
RULE_MARKS = {"x0_failed": "!", "x1_failed": "!"}
DECISION_LEGEND = (
    "L: local, prefill on the decode node. P: through the prefill node. No mark: Equation 1 on this run's evidence. "
    "!: the other side failed. *: extrapolated, borrowed from the nearest context class. ?: insufficient evidence, the "
    "fallback answers."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCell:
    """One cell: its text, a CSS class where colour repeats what the text says, and a tooltip."""

    text: str
    css: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table with row headers in its first column. ``note`` stands below the caption."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[TextCell, ...]], ...]
    note: str = ""


def configuration_table(found: Findings) -> PageTable:
    """All configurations: kind, medians of the goals over the cells where they work, cells won, cells failed."""
    kinds = dict(zip(found.summaries["configuration"], found.summaries["kind"], strict=True))
    rows = []
    for name in ordered_configurations(found.summaries):
        texts = [KINDS[kinds[name]].label]
        texts += [goal.show(found.typical(name, key)) for key, goal in GOALS.items()]
        texts += [f"{found.wins(key).get(name, 0)}" for key in GOALS]
        texts.append(f"{found.costs[name].n_failed} of {found.costs[name].n_cells}")
        rows.append((name, tuple(TextCell(text=text) for text in texts)))
    return PageTable(
        caption="Configurations",
        note="Medians over the cells (workload and QPS) in which the configuration works; cells won per goal.",
        head=(
            "configuration",
            "kind",
            *(f"median {goal.title}" for goal in GOALS.values()),
            *(f"won: {goal.noun}" for goal in GOALS.values()),
            "cells failed",
        ),
        rows=tuple(rows),
    )


def cost_table(found: Findings) -> PageTable:
    """What each configuration gives away against the best one of the cell."""
    rows = []
    for name in ordered_configurations(found.summaries):
        texts = [percent(found.costs[name].gaps[goal]) for goal in GOALS]
        rows.append((name, tuple(TextCell(text=text) for text in texts)))
    return PageTable(
        caption="Cost against the best configuration of each cell",
        note="Median over the cells in which the configuration works: latencies longer, throughput less.",
        head=(
            "configuration",
            *(f"{g.noun}: {'less' if name == 'throughput' else 'longer'} by" for name, g in GOALS.items()),
        ),
        rows=tuple(rows),
    )


def winner_tables(found: Findings) -> list[PageTable]:
    """Per goal: the winning configuration of every cell, workloads by QPS; tied ones are all named."""
    levels = sorted(float(q) for q in found.values["qps"].unique())
    head = ("workload", *(f"QPS {q:g}" for q in levels))
    tables = []
    for key, goal in GOALS.items():
        won = found.won[found.won["goal"] == key]
        cells = {
            (workload, qps): TextCell(text=tied, css=f"k-{kind}")
            for workload, qps, tied, kind in zip(won["workload"], won["qps"], won["tied"], won["kind"], strict=True)
        }
        rows = [
            (workload, tuple(cells.get((workload, qps), TextCell(text=UNKNOWN)) for qps in levels))
            for workload in ordered_workloads(found.summaries)
        ]
        tables.append(PageTable(caption=f"Winners: {goal.title}", head=head, rows=tuple(rows)))
    return tables


def frontier_table(panels: pd.DataFrame) -> PageTable:
    """The members of every Pareto panel's frontier, lowest TTFT first."""
    rows = []
    for row in panels[panels["on_frontier"]].sort_values("ttft_p99_s", kind="stable").to_dict("records"):
        category = CATEGORY_TITLES.get(row["workload_category"], row["workload_category"])
        texts = (
            row["configuration"],
            ms(row["ttft_p99_s"]),
            tokens_per_s(row["throughput_tokens_per_s"]),
            "best" if row["best"] else "",
        )
        rows.append((f"{category}, QPS {row['qps']:g}", tuple(TextCell(text=text) for text in texts)))
    order = {name: index for index, name in enumerate(_panel_names(panels))}
    head = ("panel", "configuration", "P99 TTFT", "throughput", "choice")
    return PageTable(
        caption="Frontiers of the Pareto panels", head=head, rows=tuple(sorted(rows, key=lambda row: order[row[0]]))
    )


def _panel_names(panels: pd.DataFrame) -> list[str]:
    return [
        f"{CATEGORY_TITLES.get(category, category)}, QPS {qps:g}"
        for category in ordered_categories(panels)
        for qps in sorted(panels["qps"].unique())
    ]


def failure_table(found: Findings) -> PageTable:
    """How many workloads fail, configuration by QPS."""
    levels = sorted(float(q) for q in found.values["qps"].unique())
    rows = []
    for name in [n for n in ordered_configurations(found.summaries) if n in found.failures]:
        counts = [found.failures[name].get(qps) for qps in levels]
        rows.append(
            (name, tuple(TextCell(text=UNKNOWN if n is None else f"{n}", css="bad" if n else "") for n in counts))
        )
    return PageTable(
        caption="Failures",
        note=(
            f"Workloads (of {found.values['workload'].nunique()}) in which fewer than {percent(found.success_bound)} "
            "of the turns succeed or the result is invalid. Configurations that are not listed never fail."
        ),
        head=("configuration", *(f"QPS {q:g}" for q in levels)),
        rows=tuple(rows),
    )


def decision_table(table: DecisionTable) -> PageTable:
    """Decisions and evidence, context class and type by QPS."""
    rows = []
    for (context, kind), cells in groupby(table.cells, key=lambda c: (c.context, c.type)):
        rows.append((f"{context}, {kind}", tuple(_decision_cell(cell) for cell in cells)))
    d = table.domain
    return PageTable(
        caption=f"Decision table: {d.baseline} and {d.candidate}",
        note=(
            f"w_ttft = {table.weights.w_ttft:g}, w_tpot = {table.weights.w_tpot:g}; {d.executor}; {d.model} on "
            f"{d.gpu}, engine {d.engine_version}, hand-off {d.handoff}; table {table.content_hash}."
        ),
        head=("context, type", *(f"QPS {q:g}" for q in table.axes.qps)),
        rows=tuple(rows),
    )


def _decision_cell(cell: Cell) -> TextCell:
    mark = EVIDENCE_MARKS[cell.evidence] or RULE_MARKS.get(cell.rule, "")
    css = "none" if cell.evidence == "insufficient" else cell.decision
    hint = f"{cell.key}: {cell.decision}, {cell.evidence}, {cell.rule}"
    if cell.delta_ttft is not None and cell.delta_tpot is not None:
        hint += f"; delta_ttft {number(cell.delta_ttft)}, delta_tpot {number(cell.delta_tpot)}, {cell.n_pairs} pairs"
    return TextCell(text=("L" if cell.decision == "local" else "P") + mark, css=css, hint=hint)


def frame_table(frame: pd.DataFrame, *, caption: str, note: str = "") -> PageTable:
    """Any small frame: the first column heads the rows; numbers get three significant digits."""
    rows = [
        (_text(first), tuple(TextCell(text=_text(value)) for value in rest))
        for first, *rest in frame.itertuples(index=False, name=None)
    ]
    head = tuple(str(name).replace("_", " ") for name in frame.columns)
    return PageTable(caption=caption, note=note, head=head, rows=tuple(rows))


def _text(value: Any) -> str:
    if value is None or (isinstance(value, (float, np.floating)) and np.isnan(value)):
        return UNKNOWN
    if isinstance(value, (float, np.floating)):
        return number(float(value))
    return str(value)


def provenance_table(manifest: Mapping[str, Any]) -> PageTable:
    """Everything of the manifest but the spec, nested keys with dots, and how recorded traffic was read: its token counts may
    be estimates."""
    known = [*_flat(manifest), *_recorded(manifest)]
    rows = [(key, (TextCell(text=_text(value)),)) for key, value in known if value is not None]
    return PageTable(caption="Provenance", head=("what", "value"), rows=tuple(rows))


def _recorded(manifest: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """One line per workload of recorded traffic: its file, its format, and where its token counts come from."""
    workloads = ((manifest.get("spec") or {}).get("sweep") or {}).get("workloads") or ()
    traffic = [(one["name"], one["traffic"]) for one in workloads if isinstance(one, Mapping) and one.get("traffic")]
    return [(f"recorded traffic {name}", f"{found['source']}, read as {found['reading']}") for name, found in traffic]


def _flat(content: Mapping[str, Any], prefix: str = "") -> Sequence[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            pairs += [] if not prefix and key == "spec" else _flat(value, f"{prefix}{key}.")
        elif value not in ([], ()):
            pairs.append((f"{prefix}{key}", value))
    return pairs
