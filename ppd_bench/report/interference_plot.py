"""Decode slowdown by prefills over batch size and over context length (paper, Figures 2, 7 and 8)."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ppd_bench.report.plots import Plot
from ppd_bench.report.style import (
    KINDS,
    new_figure,
    plain_numbers,
    put_footer,
    put_legend,
    set_scale,
    state_empty,
    styled,
)
from ppd_bench.report.units import listed

LOOKS = {"full": KINDS["x0"], "append": KINDS["x1"]}
AXES = {"n_decode": "decodes running", "context_tokens": "tokens of a prefill's whole prompt"}


def interference_plots(frame: pd.DataFrame, *, evidence: str) -> list[Plot]:
    """One plot per axis that has more than one value; over batch size where nothing varies."""
    over = [axis for axis in AXES if frame[axis].nunique() > 1] or ["n_decode"]
    return [_plot(frame, axis, evidence) for axis in over]


def _plot(frame: pd.DataFrame, axis: str, evidence: str) -> Plot:
    budgets = [f"{budget:,}" for budget in dict.fromkeys(frame["max_num_batched_tokens"])]
    return Plot(
        name=f"interference_{axis.removesuffix('_tokens')}",
        title=f"Slowdown of running decodes by {AXES[axis]}",
        caption=f"{evidence.capitalize()}. Solid: mean of the steps that carry the prefills; dotted: over a window of tokens. "
        "One panel per step budget.",
        alt=f"Line charts of decode slowdown against {AXES[axis]}, for step budgets of {listed(budgets)} tokens.",
        figure=figure_interference(frame, axis, evidence=evidence),
    )


@styled
def figure_interference(frame: pd.DataFrame, axis: str, *, evidence: str) -> Figure:
    """One column per step budget, one row per number of prefills; percent. What the axis does not show is at its largest."""
    other = next(name for name in AXES if name != axis)
    shown = frame[frame[other] == frame[other].max()]
    budgets = list(dict.fromkeys(frame["max_num_batched_tokens"])) or [0]
    numbers = sorted(set(frame["n_prefills"])) or [0]
    fig = new_figure(1.0 + 1.9 * len(numbers))
    panels = fig.subplots(len(numbers), len(budgets), squeeze=False, sharex=True, sharey="row")
    for row, n_prefills in zip(panels, numbers, strict=True):
        for ax, budget in zip(row, budgets, strict=True):
            _draw(ax, shown[(shown["n_prefills"] == n_prefills) & (shown["max_num_batched_tokens"] == budget)], axis)
        row[0].set_ylabel(f"{n_prefills} prefill{'s' if n_prefills > 1 else ''}\nslowdown (%)")
    for ax, budget in zip(panels[0], budgets, strict=True):
        ax.set_title(f"step budget {budget:,}")
    for ax in panels[-1]:
        set_scale(ax, "x", [float(value) for value in shown[axis]])
        ax.set_xlabel(AXES[axis])
    put_legend(fig, _handles(), n_columns=4)
    note = f"{AXES[other]}: {shown[other].max():,}" if len(shown) else ""
    put_footer(fig, run_name="interference", evidence=evidence, note=note)
    return fig


def _draw(ax: Axes, rows: pd.DataFrame, axis: str) -> None:
    for kind, mark in LOOKS.items():
        found = rows[rows["kind"] == kind].sort_values(axis)
        for column, line in (("carrying_slowdown_ratio", "-"), ("window_slowdown_ratio", ":")):
            ax.plot(found[axis], 100 * found[column], color=mark.stroke, linestyle=line, marker=mark.marker, markersize=4,
                    markerfacecolor=mark.colour, markeredgecolor="black", markeredgewidth=0.5, linewidth=1.3)  # fmt: skip
    plain_numbers(ax.yaxis)
    if rows.empty:
        state_empty(ax, "no mix could be told")


def _handles() -> list[Line2D]:
    kinds = [
        Line2D(
            [],
            [],
            color=mark.stroke,
            marker=mark.marker,
            markerfacecolor=mark.colour,
            markeredgecolor="black",
            label=f"{kind} prefill",
        )
        for kind, mark in LOOKS.items()
    ]
    carrying = Line2D([], [], color="black", linestyle="-", label="carrying steps")
    return [*kinds, carrying, Line2D([], [], color="black", linestyle=":", label="window")]
