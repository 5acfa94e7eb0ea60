"""The w_tpot control surface (paper, Figure 6) and the scores behind it, both with what is uncertain about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.table import Cell, DecisionTable
from ppd_bench.report.style import MIN_FONT_PT, new_figure, plain_numbers, put_footer, put_legend, state_empty, styled

W_TPOT_VALUES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0, 30.0)
"""The paper's 1, 3 and 6 and enough around them to see where decisions change; w_ttft is 1."""

COLOURS = ("#08306b", "#e07b00", "#2b74b4", "#9a7b00", "#6a4c93", "#777777")
MARKERS = ("o", "s", "^", "P", "D", "X")


@styled
def figure_control(shares: pd.DataFrame, *, run_name: str, evidence: str, w_tpot_built: float | None = None) -> Figure:
    """One line per (x=0, x=1) pair.

    Args:
        shares: what ``findings.local_shares`` gives: baseline, candidate, w_tpot, local_ratio (NaN where a table has no
            cell with enough evidence); where it has local_low_ratio and local_high_ratio, the band between them is shaded:
            cells whose sides tie.
        run_name, evidence: for the footer.
        w_tpot_built: the weight that the tables were built with, drawn as a vertical line; null draws none.
    """
    fig = new_figure(3.9)
    ax = fig.subplots()
    lines = shares.dropna(subset=["local_ratio"]).groupby(["baseline", "candidate"], sort=False)
    for index, ((baseline, candidate), line) in enumerate(lines):
        hybrid = parse_topology(str(baseline)).category == "hybrid"
        colour = COLOURS[index % len(COLOURS)]
        if "local_low_ratio" in line:
            low, high = 100 * line["local_low_ratio"], 100 * line["local_high_ratio"]
            ax.fill_between(line["w_tpot"], low, high, color=colour, alpha=0.18, linewidth=0)
        ax.plot(
            line["w_tpot"],
            100 * line["local_ratio"],
            label=f"{baseline} / {candidate}",
            color=colour,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """How cells of one kind are marked in ``figure_scores``."""

    label: str
    colour: str
    marker: str
    filled: bool = True


_LOOKS: dict[str, _Look] = {
    "local": _Look(label="local, decided", colour="#08306b", marker="o"),
    "pd": _Look(label="through prefill node, decided", colour="#e07b00", marker="s"),
    "tie": _Look(label="tie: the fallback answers", colour="#666666", marker="D", filled=False),
    "success_unclear": _Look(label="success ratio unclear", colour="#6a4c93", marker="^", filled=False),
    "no_interval": _Look(label="no interval: too few repeats", colour="#b2182b", marker="x"),
}
_N_COLUMNS = 3


@styled
def figure_scores(table: DecisionTable) -> Figure:
    """Equation 1's score S of every visited cell with its 95 % interval, one panel per context class and workload type.

    Bars that cross the line at 0 do not tell local from pd. A cell without a score (a side failed, or evidence is insufficient)
    has a mark at the bottom of its panel: ``!`` or ``?``.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in table.cells:
        if cell.visited:
            groups.setdefault(f"{cell.context}, {cell.type}", []).append(cell)
    n_rows = max(1, -(-len(groups) // _N_COLUMNS))
    fig = new_figure(1.1 + 1.35 * n_rows)
    panels = fig.subplots(n_rows, _N_COLUMNS, squeeze=False, sharex=True).ravel()
    for ax, (name, cells) in zip(panels, groups.items(), strict=False):
        ax.set_title(name)
        _draw_scores(ax, cells, table)
    for ax in panels[len(groups) :]:
        ax.set_visible(False)
    if not groups:
        panels[0].set_visible(True)
        state_empty(panels[0], "no cell was visited")
    seen = dict.fromkeys(_look_of(c) for cells in groups.values() for c in cells if c.score is not None)
    put_legend(fig, [_handle(_LOOKS[name]) for name in _LOOKS if name in seen], n_columns=3)
    d, w = table.domain, table.weights
    fig.supylabel("S (above 0: local)", fontsize=MIN_FONT_PT)
    note = f"bars: 95 % of each cell; x: conversations/s; w_ttft {w.w_ttft:g}, w_tpot {w.w_tpot:g}"
    put_footer(
        fig, run_name=f"{d.baseline} / {d.candidate}, table {table.content_hash}", evidence=d.executor, note=note
    )
    return fig


def _look_of(cell: Cell) -> str:
    if cell.certainty in ("tie", "success_unclear"):
        return str(cell.certainty)
    # A table of before there were intervals says nothing of certainty.
    return cell.decision if cell.certainty == "decided" else "no_interval"


def _draw_scores(ax: Axes, cells: list[Cell], table: DecisionTable) -> None:
    levels = list(table.axes.qps)
    ax.axhline(0, color="#333333", linewidth=0.8)
    for cell in cells:
        place, score = levels.index(cell.qps), cell.score
        if score is None:
            mark = "?" if cell.evidence == "insufficient" else "!"
            ax.text(place, 0.02, mark, transform=ax.get_xaxis_transform(), ha="center", va="bottom")
            continue
        look = _LOOKS[_look_of(cell)]
        low, high = cell.score_interval or (score, score)
        ax.plot([place, place], [low, high], color=look.colour, linewidth=1.4)
        ax.plot([place], [score], **_marks(look))
    ax.set_xticks(range(len(levels)), [f"{q:g}" for q in levels])
    ax.set_xlim(-0.6, len(levels) - 0.4)


def _marks(look: _Look) -> dict[str, Any]:
    return {
        "marker": look.marker,
        "markersize": 4.5,
        "color": look.colour,
        "markerfacecolor": look.colour if look.filled else "white",
        "linestyle": "none",
    }


def _handle(look: _Look) -> Line2D:
    return Line2D([], [], label=look.label, **_marks(look))
