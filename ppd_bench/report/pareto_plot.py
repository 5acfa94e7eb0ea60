"""P99 TTFT against throughput: one panel per workload category (columns) and QPS level (rows)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ppd_bench.report.configurations import CATEGORY_TITLES, ordered_categories
from ppd_bench.report.style import (
    KINDS,
    evidence_of,
    kind_handle,
    new_figure,
    plain_numbers,
    put_footer,
    put_legend,
    set_scale,
    state_empty,
    styled,
)

PAPER_LEVELS = (2.0, 8.0, 20.0)
FRONTIER_COLOUR = "#555555"
BEST: dict[str, Any] = {"marker": "o", "ms": 13, "mfc": "none", "mec": "#c00000", "mew": 1.4}
"""A ring around the best point of a panel."""


def nearest_levels(available: Sequence[float], wanted: Sequence[float] = PAPER_LEVELS) -> list[float]:
    """The run's levels nearest to the wanted ones, each once, ascending; of two equally near ones the lower."""
    return sorted({min(sorted(available), key=lambda level: abs(level - goal)) for goal in wanted}) if available else []


@styled
def figure_pareto(panels: pd.DataFrame, summaries: pd.DataFrame, *, run_name: str) -> Figure:
    """Frontier panels. Lower right is better.

    Args:
        panels: what ``findings.pareto_panels`` gives: rows of ``analysis.pareto.panels``
            with ``kind``.
        summaries: the run's summaries, for the axes.
        run_name: for the footer.
    """
    categories = ordered_categories(summaries) or [""]
    levels = sorted(float(q) for q in panels["qps"].unique()) or [0.0]
    fig = new_figure(1.3 + 2.15 * len(levels))
    axes = fig.subplots(len(levels), len(categories), squeeze=False)
    for row, level in zip(axes, levels, strict=True):
        for ax, category in zip(row, categories, strict=True):
            panel = panels[(panels["workload_category"] == category) & (panels["qps"] == level)]
            _draw(ax, panel.dropna(subset=["ttft_p99_s", "throughput_tokens_per_s"]))
        row[0].set_ylabel(f"QPS {level:g}\nP99 TTFT (ms)")
    for top, bottom, category in zip(axes[0], axes[-1], categories, strict=True):
        # The empty second line leaves room for the title of the panel, which is set at the left.
        top.set_title(CATEGORY_TITLES.get(category, category) + "\n")
        bottom.set_xlabel("throughput (tokens/s)")
    fig.align_ylabels(axes[:, 0])
    put_legend(fig, _legend(panels), n_columns=4)
    put_footer(fig, run_name=run_name, evidence=evidence_of(summaries), note="lower right is better")
    return fig


def _draw(ax: Axes, panel: pd.DataFrame) -> None:
    if panel.empty:
        state_empty(ax, "no turn succeeded")
        return
    frontier = panel[panel["on_frontier"]].sort_values("throughput_tokens_per_s")
    ax.plot(
        frontier["throughput_tokens_per_s"],
        frontier["ttft_p99_s"] * 1000,
        color=FRONTIER_COLOUR,
        linewidth=1.1,
        zorder=2,
    )
    for row in panel.sort_values("best", kind="stable").to_dict("records"):
        _draw_point(ax, row["throughput_tokens_per_s"], row["ttft_p99_s"] * 1000, row["kind"], bool(row["eligible"]))
    best = panel[panel["best"]]
    ax.plot(best["throughput_tokens_per_s"], best["ttft_p99_s"] * 1000, linestyle="none", zorder=4, **BEST)
    names = ", ".join(best["configuration"])
    ax.set_title(f"best: {names}" if names else "none works", loc="left", fontsize=8, fontweight="normal")
    _scale(ax, panel)


def _draw_point(ax: Axes, throughput: float, ttft_ms: float, kind: str, works: bool) -> None:
    mark = KINDS[kind]
    solid: dict[str, Any] = {"mfc": mark.colour, "mec": "black", "mew": 0.6}
    hollow: dict[str, Any] = {"mfc": "none", "mec": mark.stroke, "alpha": 0.7}
    ax.plot(throughput, ttft_ms, marker=mark.marker, ms=7, linestyle="none", zorder=3, **(solid if works else hollow))


def _scale(ax: Axes, panel: pd.DataFrame) -> None:
    """Margins that leave room for the ring around the best point."""
    ax.margins(0.14, 0.16)
    set_scale(ax, "y", [float(v) * 1000 for v in panel["ttft_p99_s"]])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    plain_numbers(ax.xaxis)


def _legend(panels: pd.DataFrame) -> list[Line2D]:
    handles = [kind_handle(kind) for kind in KINDS if kind in set(panels["kind"])]
    handles.append(Line2D([], [], color=FRONTIER_COLOUR, linewidth=1.1, label="frontier"))
    handles.append(Line2D([], [], linestyle="none", label="best", **BEST))
    if not panels["eligible"].all():
        hollow: dict[str, Any] = {"marker": "s", "ms": 6.5, "mfc": "none", "mec": "#777777"}
        handles.append(Line2D([], [], linestyle="none", label="hollow: fails", **hollow))
    return handles
