"""Figures of two runs of the same points: values against each other, and errors by figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from ppd_bench.report.style import (
    KINDS,
    MIN_FONT_PT,
    new_figure,
    plain_numbers,
    put_legend,
    set_scale,
    state_empty,
    styled,
)

PANELS = (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E"))
BANDS = (0.15, 0.5)
"""Dotted lines: so far off."""
LOOKS = [
    (KINDS[kind].stroke, KINDS[kind].marker) for kind in ("x1", "x0", "replica", "hybrid_local", "partial", "hybrid_x0")
]
SHOWN = (0.02, 50.0)
"""Ratios beyond are drawn at the edge: some engines hand out a whole answer at once, and its TPOT is next to nothing."""
SLICE_WORDS = {"all": "all turns", "turn1": "turn 1", "turn2plus": "turn 2+"}


@styled
def figure_compared(
    errors: pd.DataFrame,
    *,
    reference: str,
    candidate: str,
    note: str = "",
    by: str = "configuration",
    slice_: str = "all",
) -> Figure:
    """Mean TTFT, TPOT and E2E of every point, one run against the other, on the line where they agree.

    Args:
        errors: ``analysis.comparison.errors``; ``by`` is the column that colours tell apart.
    """
    fig = new_figure(3.0)
    axes = fig.subplots(1, len(PANELS))
    shown = errors[(errors["slice"] == slice_) & (errors["statistic"] == "mean")].dropna(subset=["error_ratio"])
    kinds = list(dict.fromkeys(shown[by]))
    for ax, (metric, title) in zip(axes, PANELS, strict=True):
        _draw_values(ax, shown[shown["metric"] == metric], by, kinds)
        ax.set_title(f"{title}, mean")
        ax.set_xlabel(f"{reference} (ms)")
    axes[0].set_ylabel(f"{candidate} (ms)")
    put_legend(fig, [_handle(name, index) for index, name in enumerate(kinds)], n_columns=4)
    _footer(fig, f"line: equal; dotted: 15 % and 50 % off · {SLICE_WORDS[slice_]}" + (f" · {note}" if note else ""))
    return fig


def _draw_values(ax: Axes, rows: pd.DataFrame, by: str, kinds: Sequence[str]) -> None:
    if rows.empty:
        state_empty(ax, "no value in both runs")
        return
    for index, kind in enumerate(kinds):
        mine = rows[rows[by] == kind]
        colour, marker = LOOKS[index % len(LOOKS)]
        ax.plot(
            1e3 * mine["reference"],
            1e3 * mine["candidate"],
            linestyle="none",
            color=colour,
            marker=marker,
            markersize=5,
        )
    values = 1e3 * np.concatenate([rows["reference"].to_numpy(), rows["candidate"].to_numpy()]).astype(np.float64)
    ends = np.array([0.8 * values[values > 0].min(), 1.25 * values.max()])
    ax.plot(ends, ends, color="#555555", linewidth=0.9)
    for band in BANDS:
        for factor in (1 + band, 1 / (1 + band)):
            ax.plot(ends, ends * factor, color="#888888", linewidth=0.7, linestyle=(0, (1, 2)))
    set_scale(ax, "x", values.tolist())
    set_scale(ax, "y", values.tolist())
    ax.set(xlim=ends, ylim=ends)


@styled
def figure_errors(errors: pd.DataFrame, *, reference: str, candidate: str) -> Figure:
    """Every point's ratio to the reference by statistic: one panel per metric, one colour per slice; bars are medians."""
    fig = new_figure(3.2)
    axes = fig.subplots(1, len(PANELS), sharey=True)
    slices = [name for name in SLICE_WORDS if name in set(errors["slice"])]
    for ax, (metric, title) in zip(axes, PANELS, strict=True):
        _draw_errors(ax, errors[errors["metric"] == metric].dropna(subset=["error_ratio"]), slices)
        ax.set_title(title)
    axes[0].set_ylabel("ratio to the reference")
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes[0].yaxis.set_minor_locator(NullLocator())
    plain_numbers(axes[0].yaxis)
    put_legend(fig, [_handle(SLICE_WORDS[name], index) for index, name in enumerate(slices)], n_columns=3)
    _footer(
        fig, f"{candidate} against {reference}; a mark is a point of the runs, a bar their median; dotted: 15 % off"
    )
    return fig


def _draw_errors(ax: Axes, rows: pd.DataFrame, slices: Sequence[str]) -> None:
    statistics = list(dict.fromkeys(rows["statistic"]))
    if not statistics:
        state_empty(ax, "no value in both runs")
        return
    ax.axhline(1.0, color="#555555", linewidth=0.9)
    for edge in (1 + BANDS[0], 1 / (1 + BANDS[0])):
        ax.axhline(edge, color="#888888", linewidth=0.7, linestyle=(0, (1, 2)))
    for index, name in enumerate(slices):
        colour, marker = LOOKS[index]
        for place, statistic in enumerate(statistics):
            ratios = 1 + rows.loc[(rows["slice"] == name) & (rows["statistic"] == statistic), "error_ratio"].to_numpy()
            mine = np.clip(ratios, *SHOWN)
            x = place + 0.26 * (index - (len(slices) - 1) / 2)
            ax.plot(
                np.full(len(mine), x), mine, linestyle="none", color=colour, marker=marker, markersize=3.5, alpha=0.7
            )
            if len(mine):
                ax.plot([x - 0.11, x + 0.11], [np.median(mine)] * 2, color="black", linewidth=1.6)
    ax.set_xticks(range(len(statistics)), statistics)


def _handle(name: str, index: int) -> Line2D:
    colour, marker = LOOKS[index % len(LOOKS)]
    return Line2D([], [], color=colour, marker=marker, linestyle="none", label=name)


def _footer(fig: Figure, text: str) -> None:
    fig.supxlabel(text, x=0.01, ha="left", fontsize=MIN_FONT_PT, color="#444444")
