"""One self-contained HTML page of a run: words first, then plots, tables and provenance. No network, no script."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined

from ppd_bench.analysis.compile_table import SUCCESS_BOUND
from ppd_bench.policy.table import DecisionTable
from ppd_bench.report.findings import Findings, find, pareto_panels
from ppd_bench.report.pareto_plot import nearest_levels
from ppd_bench.report.plots import Plot, standard_plots
from ppd_bench.report.style import KINDS, svg_text
from ppd_bench.report.tables import (
    DECISION_LEGEND,
    PageTable,
    configuration_table,
    cost_table,
    decision_table,
    failure_table,
    frame_table,
    frontier_table,
    provenance_table,
    winner_tables,
)
from ppd_bench.report.units import counted
from ppd_bench.report.words import in_words


@dataclass(frozen=True, kw_only=True)
class ReportInput:
    """All that a page is made of.

    - ``evidence``: the executor word, ``simulated`` or ``measured``.
    - ``manifest``: the run's manifest as JSON values; its ``spec`` is shown in full.
    - ``summaries``: ``analysis.summary.summarise``; ``deltas``: ``analysis.pairing.deltas``, null without pairs.
    - ``tables``: the texts of decision table files.
    - ``published``: rows of ``analysis.paper_tables.beside`` after a first column that names the table; null: none.
    - ``plots``: null draws ``plots.standard_plots``.
    """

    run_name: str
    evidence: str
    manifest: Mapping[str, Any]
    summaries: pd.DataFrame
    deltas: pd.DataFrame | None = None
    tables: Sequence[str] = ()
    published: pd.DataFrame | None = None
    plots: Sequence[Plot] | None = None
    success_bound: float = SUCCESS_BOUND


def render_page(content: ReportInput) -> str:
    """The page's HTML. Same input, same bytes.

    Raises:
        SpecError: the summaries hold more than one executor, model or GPU.
        TableError: a table text is damaged or of another schema.
    """
    found = find(content.summaries, success_bound=content.success_bound)
    tables = [DecisionTable.from_json(text) for text in content.tables]
    plots = content.plots
    if plots is None:
        plots = standard_plots(found, content.tables, run_name=content.run_name)
    template = files("ppd_bench.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        run_name=content.run_name,
        evidence=content.evidence,
        facts=_facts(found),
        passages=in_words(found, content.deltas, tables, content.published),
        plots=[(plot, _data_uri(svg_text(plot.figure))) for plot in plots],
        result_tables=_result_tables(found),
        decision_tables=[decision_table(table) for table in tables],
        decision_legend=DECISION_LEGEND,
        published=_published(content),
        provenance=provenance_table(content.manifest),
        spec=json.dumps(content.manifest.get("spec"), indent=2, sort_keys=True, ensure_ascii=False),
        kinds=KINDS,
    )


def _facts(found: Findings) -> str:
    s = found.summaries
    counts = [
        (s["configuration"].nunique(), "configuration"),
        (s["workload"].nunique(), "workload"),
        (s["qps"].nunique(), "QPS level"),
        (s["repeat"].nunique(), "repeat"),
        (found.n_points, "point"),
    ]
    told = ", ".join(counted(n, noun) for n, noun in counts)
    where = ", ".join(sorted({f"{model} on {gpu}" for model, gpu in zip(s["model"], s["gpu"], strict=True)}))
    return f"{told}; {where or 'no model'}"


def _result_tables(found: Findings) -> list[PageTable]:
    if found.values.empty:
        return []
    levels = nearest_levels([float(q) for q in found.summaries["qps"].unique()])
    tables = [configuration_table(found), cost_table(found), failure_table(found)]
    tables += [frontier_table(pareto_panels(found, levels)), *winner_tables(found)]
    return [table for table in tables if table.rows]


def _published(content: ReportInput) -> PageTable | None:
    if content.published is None or content.published.empty:
        return None
    return frame_table(
        content.published,
        caption="Beside the published figures",
        note=f"Computed figures are {content.evidence}. Difference is computed minus published, in points.",
    )


def _data_uri(svg: str) -> str:
    """An image without ids that could collide with those of another image on the page."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode("ascii")
