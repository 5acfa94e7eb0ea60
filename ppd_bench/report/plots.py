"""The standard set of plots of a run, each with a title, a caption and an alternative text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from ppd_bench.policy.table import DecisionTable
from ppd_bench.report.configurations import CATEGORY_TITLES
from ppd_bench.report.control_plot import W_TPOT_VALUES, figure_control
from ppd_bench.report.findings import GOALS, Findings, local_shares, pareto_panels
from ppd_bench.report.load_plot import figure_load, load_groups
from ppd_bench.report.pareto_plot import figure_pareto, nearest_levels
from ppd_bench.report.style import KINDS
from ppd_bench.report.units import listed, percent
from ppd_bench.report.winner_plot import figure_winners

PARETO_CAPTION = """\
Each point is one configuration. Its P99 TTFT (all turns; the axis is logarithmic where the range demands it) and
its throughput are means, with equal weight, over the workloads of the panel's category. The line joins the
configurations that no other one beats on both. The ring marks the best of these: the greatest throughput per
second of P99 TTFT. Hollow points take no part: on average fewer than {bound} of their turns succeed, or a workload
of the panel has no valid result."""

WINNERS_CAPTION = """\
Colour and letter say which kind of configuration has the lowest mean TTFT of turn 2 and later, the lowest mean
TPOT, or the highest throughput in each cell of workload and QPS. Configurations that fail in a cell (fewer than
{bound} of the turns succeed) cannot win it. = marks a tie; the first configuration of the run is shown."""

LOAD_CAPTION = """\
Medians over the run's workloads, for success the lowest; replica-only configurations are drawn in every column
for reference. Faint: fewer than {bound} of the turns succeed, so the values are of survivors. The dotted line
in the last row is that bound."""

CONTROL_CAPTION = """\
One line per pair of configurations that differ only in where follow-up turns are prefilled. The share is of the
cells that the sweep visited and whose evidence suffices; cells that one side wins because the other fails do not
move with the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure and what is said of it. ``name`` is its file's stem."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


def standard_plots(found: Findings, table_texts: Sequence[str], *, run_name: str) -> list[Plot]:
    """Pareto panels, winner maps, one load figure per group of layouts, and the control surface."""
    return [
        pareto(found, run_name=run_name),
        winners(found, run_name=run_name),
        *loads(found, run_name=run_name),
        control(table_texts, evidence=found.evidence, run_name=run_name),
    ]


def pareto(found: Findings, *, run_name: str) -> Plot:
    """Panels at the run's levels nearest to QPS 2, 8 and 20."""
    levels = nearest_levels([float(q) for q in found.summaries["qps"].unique()])
    panels = pareto_panels(found, levels)
    told = [
        f"{CATEGORY_TITLES.get(row['workload_category'], row['workload_category'])} at QPS {row['qps']:g}: "
        f"{row['configuration']}"
        for row in panels[panels["best"]].to_dict("records")
    ]
    return Plot(
        name="pareto",
        title="P99 TTFT against throughput",
        caption=_caption(PARETO_CAPTION, found.success_bound),
        alt=f"Scatter panels of P99 TTFT against throughput. Best: {'; '.join(told) or 'none'}.",
        figure=figure_pareto(panels, found.summaries, run_name=run_name),
    )


def winners(found: Findings, *, run_name: str) -> Plot:
    """One heat map per goal."""
    titles = {name: goal.title for name, goal in GOALS.items()}
    told = []
    for name, title in titles.items():
        kinds = found.won.loc[found.won["goal"] == name, "kind"].value_counts()
        counts = listed([f"{KINDS[str(kind)].label} {n}" for kind, n in kinds.items()])
        told.append(f"{title}: {counts or 'no winner'}")
    return Plot(
        name="winners",
        title="Winner of every cell",
        caption=_caption(WINNERS_CAPTION, found.success_bound),
        alt=f"Heat maps of winning kinds over {found.n_cells} cells. {'. '.join(told)}.",
        figure=figure_winners(found.won, found.summaries, run_name=run_name, titles=titles),
    )


def loads(found: Findings, *, run_name: str) -> list[Plot]:
    """One figure per group of layouts, hybrids apart."""
    bound = found.success_bound
    return [
        Plot(
            name=f"load_{number}",
            title=f"Latency, throughput and success against load: {listed(list(layouts)) or 'no layout'}",
            caption=_caption(LOAD_CAPTION, bound),
            alt=f"Line charts of TTFT, TPOT, throughput and success against QPS, layouts {listed(list(layouts))}.",
            figure=figure_load(found.summaries, layouts, run_name=run_name, success_bound=bound),
        )
        for number, layouts in enumerate(load_groups(found.summaries), start=1)
    ]


def control(table_texts: Sequence[str], *, evidence: str, run_name: str) -> Plot:
    """The control surface of all tables. Where all were built with one ratio of weights, that is marked."""
    shares = local_shares(table_texts, W_TPOT_VALUES)
    weights = [DecisionTable.from_json(text).weights for text in table_texts]
    built = {w.w_tpot / w.w_ttft for w in weights if w.w_ttft > 0}
    marked = built.pop() if len(built) == 1 else None
    return Plot(
        name="control",
        title="Share of cells decided local against the weight of TPOT",
        caption=_caption(CONTROL_CAPTION, 0.0),
        alt=f"Line chart of the share of cells decided local against w_tpot for {_pairs(shares)}.",
        figure=figure_control(shares, run_name=run_name, evidence=evidence, w_tpot_built=marked),
    )


def _caption(text: str, bound: float) -> str:
    return text.replace("\n", " ").format(bound=percent(bound))


def _pairs(shares: pd.DataFrame) -> str:
    ends = shares.dropna().groupby("baseline", sort=False)["local_ratio"].agg(["first", "last"])
    told = [
        f"{name} ({percent(float(first))} to {percent(float(last))})"
        for name, first, last in zip(ends.index, ends["first"], ends["last"], strict=True)
    ]
    return listed(told, most=8) or "no pair"
