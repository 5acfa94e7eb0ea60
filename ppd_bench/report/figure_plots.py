"""The paper's figures drawn from simulated points: one function per kind of figure. Values are those of
``analysis.paper_figures``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ppd_bench.report.configurations import with_kinds
from ppd_bench.report.pareto_plot import figure_pareto
from ppd_bench.report.plots import Plot
from ppd_bench.report.style import KINDS, Mark, new_figure, put_footer, put_legend, set_linear, state_empty, styled
from ppd_bench.report.units import listed, percent

ARM_MARKS: dict[str, Mark] = {
    "x0": KINDS["x0"],
    "x1": KINDS["x1"],
    "ppd": KINDS["partial"],
    "replica": KINDS["replica"],
}
ARM_LABELS = {"x0": "x = 0", "x1": "x = 1", "ppd": "table (PPD)", "replica": "replica (R)"}
BARS = {
    "x0": (KINDS["x0"], "x = 0", ""),
    "x0_recompute": (KINDS["x0"], "x = 0, P recomputes all", "////"),
    "x1": (KINDS["x1"], "x = 1", ""),
    "replica": (KINDS["replica"], "replica (R)", ""),
}
WIDTH = 0.21
DEGRADED_COLOUR = "#c00000"
MAX_ROWS = 3


def latency_plot(name: str, points: pd.DataFrame, *, arms: Sequence[str], data: str, timeout_s: float = 30.0) -> Plot:
    """Figures 4 and 11: mean E2E against QPS, one column per layout and one row per workload."""
    layouts = list(dict.fromkeys(points["layout"]))
    n_bad = {arm: int(points.loc[points["arm"] == arm, "degraded"].sum()) for arm in arms}
    told = listed([f"{ARM_LABELS[arm]} {n}" for arm, n in n_bad.items()])
    return Plot(
        name=name,
        title=f"Mean E2E against load, time-out {timeout_s:g} s",
        caption=f"Simulated; {data}. Crosses mark points below 95 % success, whose latency is of the turns that succeeded.",
        alt=f"Line charts of mean E2E against QPS for {listed(layouts)}. Degraded points: {told}.",
        figure=figure_latency(points, arms=arms, note=data),
    )


@styled
def figure_latency(points: pd.DataFrame, *, arms: Sequence[str], note: str) -> Figure:
    """Panels of mean E2E, seconds. Workloads beyond the first ``MAX_ROWS`` are left out."""
    layouts = list(dict.fromkeys(points["layout"])) or [""]
    workloads = list(dict.fromkeys(points["workload"]))[:MAX_ROWS] or [""]
    fig = new_figure(1.0 + 1.9 * len(workloads))
    axes = fig.subplots(len(workloads), len(layouts), squeeze=False, sharex=True, sharey="row")
    for row, workload in zip(axes, workloads, strict=True):
        for ax, layout in zip(row, layouts, strict=True):
            _latency_panel(ax, points[(points["layout"] == layout) & (points["workload"] == workload)], arms)
        values = points.loc[points["workload"] == workload, "e2e_s"].dropna()
        set_linear(row[0], "y", [float(v) for v in values])
        row[0].set_ylabel(f"{workload}\nmean E2E (s)")
    for ax, layout in zip(axes[0], layouts, strict=True):
        ax.set_title(f"layout {layout}")
    for ax in axes[-1]:
        ax.set_xlabel("conversations/s (QPS)")
    handles = [_handle(arm) for arm in arms]
    handles.append(Line2D([], [], color=DEGRADED_COLOUR, marker="x", linestyle="none", label="below 95 % success"))
    put_legend(fig, handles, n_columns=4)
    put_footer(fig, run_name="reproduce", evidence="simulated", note=note)
    return fig


def _latency_panel(ax: Axes, rows: pd.DataFrame, arms: Sequence[str]) -> None:
    for arm in arms:
        found = rows[rows["arm"] == arm].sort_values("qps").dropna(subset=["e2e_s"])
        _line(ax, arm, found["qps"], found["e2e_s"])
        bad = found[found["degraded"]]
        ax.plot(bad["qps"], bad["e2e_s"], color=DEGRADED_COLOUR, marker="x", markersize=7, linestyle="none", zorder=5)
    if rows["e2e_s"].notna().sum() == 0:
        state_empty(ax, "no turn succeeded")


def _look(arm: str) -> dict[str, Any]:
    mark = ARM_MARKS[arm]
    return {
        "color": mark.stroke,
        "linestyle": mark.line,
        "linewidth": 1.3,
        "marker": mark.marker,
        "markerfacecolor": mark.colour,
        "markeredgecolor": "black",
        "markeredgewidth": 0.5,
        "markersize": 4.5,
    }


def _line(ax: Axes, arm: str, xs: pd.Series, ys: pd.Series) -> None:
    ax.plot(xs, ys, **_look(arm))


def _handle(arm: str) -> Line2D:
    return Line2D([], [], label=ARM_LABELS[arm], **_look(arm))


def frontier_plot(panels: pd.DataFrame, summaries: pd.DataFrame) -> Plot:
    """Figure 1: P99 TTFT against throughput, a panel per load. ``panels``: rows of ``analysis.pareto.panels``."""
    labelled = with_kinds(panels.assign(policy="node", request_x_ratio=float("nan")))
    best = [f"QPS {row['qps']:g}: {row['configuration']}" for row in panels[panels["best"]].to_dict("records")]
    return Plot(
        name="figure1",
        title="P99 TTFT against throughput",
        caption="Simulated. Lower right is better; hollow points fail. The ring is the most throughput per second of P99 TTFT.",
        alt=f"Scatter panels of P99 TTFT against throughput. Best: {listed(best) or 'none'}.",
        figure=figure_pareto(labelled, summaries, run_name="reproduce figure1"),
    )


def ttft_bars_plot(name: str, frame: pd.DataFrame, *, title: str, axis: str) -> Plot:
    """Figure 10: TTFT of x=0, x=1 and replicas for each key of ``analysis.paper_figures.ttft_by``."""
    keys = [str(key) for key in frame["key"]]
    return Plot(
        name=name,
        title=title,
        caption="Simulated. The reduction from x = 0 to x = 1 stands above x = 1 and its neighbour.",
        alt=f"Bars of TTFT for x = 0, x = 1 and replicas over {axis}: {listed(keys)}.",
        figure=figure_ttft_bars(frame, axis=axis),
    )


@styled
def figure_ttft_bars(frame: pd.DataFrame, *, axis: str) -> Figure:
    """Grouped bars, milliseconds."""
    arms = [arm for arm in BARS if f"{arm}_s" in frame]
    fig = new_figure(2.8)
    ax = fig.subplots()
    for offset, arm in enumerate(arms):
        mark, label, hatch = BARS[arm]
        places = [index + WIDTH * (offset - (len(arms) - 1) / 2) for index in range(len(frame))]
        ax.bar(
            places,
            1000 * frame[f"{arm}_s"],
            WIDTH,
            color=mark.colour,
            edgecolor="black",
            linewidth=0.5,
            label=label,
            hatch=hatch,
        )
    for index, (top, ratio) in enumerate(zip(frame["x1_s"], frame["reduction_ratio"], strict=True)):
        if ratio == ratio:
            ax.text(
                index + WIDTH * (arms.index("x1") - (len(arms) - 2) / 2),
                1000 * top,
                f"−{percent(float(ratio))}",
                ha="center",
                va="bottom",
            )
    ax.set_xticks(range(len(frame)), [str(key) for key in frame["key"]])
    ax.set(xlabel=axis, ylabel="TTFT, turns 2+ (ms)")
    ax.margins(y=0.15)
    put_legend(fig, ax.get_legend_handles_labels()[0], n_columns=4)
    put_footer(fig, run_name="reproduce figure10", evidence="simulated")
    return fig


def links_plot(points: pd.DataFrame, *, data: str) -> Plot:
    """Figure 5: TTFT, TPOT and E2E over interconnects (column ``link``)."""
    return Plot(
        name="figure5",
        title="Latency over four interconnects",
        caption=f"Simulated; {data}. From the fastest link to the slowest.",
        alt="Line charts of TTFT, TPOT and E2E of x = 0, x = 1 and the table from NVLink to 100GbE.",
        figure=figure_links(points, note=data),
    )


@styled
def figure_links(points: pd.DataFrame, *, note: str) -> Figure:
    """Three panels, milliseconds; the mean over workloads."""
    links = list(dict.fromkeys(points["link"]))
    fig = new_figure(2.8)
    panels = (("ttft_s", "TTFT, turns 2+ (ms)"), ("tpot_s", "TPOT (ms)"), ("e2e_s", "E2E (ms)"))
    for ax, (column, label) in zip(fig.subplots(1, len(panels)), panels, strict=True):
        for arm in ("x0", "x1", "ppd"):
            means = 1000 * points[points["arm"] == arm].groupby("link")[column].mean().reindex(links)
            _line(ax, arm, pd.Series(range(len(links))), means)
        ax.set_xticks(range(len(links)), links, rotation=20)
        ax.set_ylabel(label)
        ax.margins(y=0.2)
    put_legend(fig, [_handle(arm) for arm in ("x0", "x1", "ppd")], n_columns=3)
    put_footer(fig, run_name="reproduce figure5", evidence="simulated", note=note)
    return fig


def weights_plot(rows: pd.DataFrame, *, data: str) -> Plot:
    """Figure 6: the operating points from x = 0 to x = 1 (columns arm, ttft_s, tpot_s, local_ratio)."""
    told = [f"{row['arm']}: {percent(row['local_ratio'])} local" for row in rows.to_dict("records")]
    return Plot(
        name="figure6",
        title="TTFT against TPOT by the weight of TPOT",
        caption=f"Simulated; {data}. Points are arms, with the share of turns that stayed local.",
        alt=f"Scatter of TPOT against TTFT. {listed(told, most=12)}.",
        figure=figure_weights(rows, note=data),
    )


@styled
def figure_weights(rows: pd.DataFrame, *, note: str) -> Figure:
    """TTFT (turns 2+) against TPOT, milliseconds; one point per arm. Equal places carry one label."""
    fig = new_figure(3.2)
    ax = fig.subplots()
    xs, ys = 1000 * rows["ttft_s"], 1000 * rows["tpot_s"]
    _line(ax, "ppd", xs, ys)
    places: dict[tuple[float, float], list[str]] = {}
    for x, y, row in zip(xs, ys, rows.to_dict("records"), strict=True):
        places.setdefault((round(float(x), 1), round(float(y), 2)), []).append(
            f"{row['arm']} ({percent(row['local_ratio'])})"
        )
    for place, names in places.items():
        ax.annotate("\n".join(names), place, xytext=(5, 4), textcoords="offset points")
    ax.set(xlabel="TTFT, turns 2+ (ms)", ylabel="TPOT (ms)")
    ax.margins(0.25, 0.3)
    put_footer(fig, run_name="reproduce figure6", evidence="simulated", note=note)
    return fig
