"""The w_tpot control surface (paper, Figure 6): how many cells of each decision table say local as w_tpot grows."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppd_bench.core.topology import parse_topology
from ppd_bench.report.style import new_figure, plain_numbers, put_footer, put_legend, state_empty, styled

W_TPOT_VALUES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0, 30.0)
"""The paper's 1, 3 and 6 and enough around them to see where decisions change; w_ttft is 1."""

COLOURS = ("#08306b", "#e07b00", "#2b74b4", "#9a7b00", "#6a4c93", "#777777")
MARKERS = ("o", "s", "^", "P", "D", "X")


@styled
def figure_control(shares: pd.DataFrame, *, run_name: str, evidence: str, w_tpot_built: float | None = None) -> Figure:
    """One line per (x=0, x=1) pair.

    Args:
        shares: what ``findings.local_shares`` gives: baseline, candidate, w_tpot, local_ratio (NaN where a table has no
            cell with enough evidence).
        run_name, evidence: for the footer.
        w_tpot_built: the weight that the tables were built with, drawn as a vertical line; null draws none.
    """
    fig = new_figure(3.9)
    ax = fig.subplots()
    lines = shares.dropna().groupby(["baseline", "candidate"], sort=False)
    for index, ((baseline, candidate), line) in enumerate(lines):
        hybrid = parse_topology(str(baseline)).category == "hybrid"
        ax.plot(
            line["w_tpot"],
            100 * line["local_ratio"],
            label=f"{baseline} / {candidate}",
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            markeredgecolor="black",
            markeredgewidth=0.5,
            linestyle="--" if hybrid else "-",
            linewidth=1.5,
        )
    if not ax.lines:
        state_empty(ax, "no decision table with enough evidence")
    else:
        put_legend(fig, list(ax.lines), n_columns=3)
        _finish(ax, w_tpot_built)
    put_footer(fig, run_name=run_name, evidence=evidence, note="legend: x = 0 arm / x = 1 arm of a layout")
    return fig


def _finish(ax: Axes, w_tpot_built: float | None) -> None:
    ax.set_xscale("log")
    ax.set_ylim(-4, 104)
    ax.set_xticks([0.1, 0.3, 1, 3, 10, 30])
    ax.minorticks_off()
    plain_numbers(ax.xaxis)
    ax.set_xlabel("weight of TPOT, w_tpot (w_ttft = 1)")
    ax.set_ylabel("cells decided local (%)")
    if w_tpot_built:
        ax.axvline(w_tpot_built, color="#555555", linewidth=0.9, linestyle=(0, (1, 2)))
        ax.annotate(
            f"tables built with {w_tpot_built:g}",
            (w_tpot_built, 1),
            xycoords=("data", "axes fraction"),
            va="bottom",
            ha="center",
        )
