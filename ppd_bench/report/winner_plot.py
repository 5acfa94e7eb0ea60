"""Heat maps of the winning kind of configuration in every (workload, QPS) cell, one map per goal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ppd_bench.report.configurations import ordered_workloads
from ppd_bench.report.style import KINDS, evidence_of, new_figure, put_footer, put_legend, state_empty, styled
from ppd_bench.report.units import counted

Codes = npt.NDArray[np.int64]
NO_WINNER = "–"
ROW_HEIGHT_IN = 0.19


@styled
def figure_winners(won: pd.DataFrame, summaries: pd.DataFrame, *, run_name: str, titles: Mapping[str, str]) -> Figure:
    """One heat map per goal in ``titles``; colour and letter of a cell are the kind of the winner.

    Args:
        won: ``Findings.won``; a cell without a row had no configuration that works. A tie shows the first, and ``=``.
        summaries: the run's summaries, for the axes.
        run_name: for the footer.
        titles: goals in drawing order, to their titles.
    """
    workloads = ordered_workloads(summaries)
    levels = sorted(float(q) for q in summaries["qps"].unique())
    fig = new_figure(1.4 + ROW_HEIGHT_IN * max(6, len(workloads)))
    axes = fig.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    kinds = list(KINDS)
    for ax, (goal, title) in zip(axes, titles.items(), strict=True):
        ax.set_title(title)
        if not workloads:
            state_empty(ax, "no data")
            continue
        here = won[won["goal"] == goal]
        codes = here["kind"].map({kind: index for index, kind in enumerate(kinds)})
        tied = _grid(here, (here["n_tied"] > 1).astype(int), workloads, levels) == 1
        _draw(ax, _grid(here, codes, workloads, levels), tied, kinds)
        _label(ax, workloads, levels)
        _separate(ax, summaries, workloads)
    shown = [k for k in kinds if k in set(won["kind"])]
    nobody = Patch(facecolor="white", edgecolor="#777777", label=f"{NO_WINNER}  none works")
    put_legend(fig, [*(_swatch(kind) for kind in shown), nobody], n_columns=4)
    note = f"{counted(len(workloads) * len(levels), 'cell')} per map"
    put_footer(fig, run_name=run_name, evidence=evidence_of(summaries), note=note)
    return fig


def _swatch(kind: str) -> Patch:
    mark = KINDS[kind]
    label = f"{mark.letter}  {mark.label}"
    return Patch(facecolor=mark.colour, edgecolor="#333333", hatch=mark.hatch, linewidth=0.5, label=label)


def _grid(here: pd.DataFrame, values: pd.Series, workloads: Sequence[str], levels: Sequence[float]) -> Codes:
    """Values by (workload, QPS); -1 where nothing won."""
    table = here.assign(value=values.astype(float)).pivot(index="workload", columns="qps", values="value")
    codes = table.reindex(index=list(workloads), columns=list(levels)).astype(float).fillna(-1.0)
    return codes.to_numpy(dtype=np.int64)


def _draw(ax: Axes, grid: Codes, tied: npt.NDArray[np.bool_], kinds: Sequence[str]) -> None:
    colours = ListedColormap(["white", *(KINDS[k].colour for k in kinds)])
    ax.pcolormesh(grid, cmap=colours, vmin=-1.5, vmax=len(kinds) - 0.5, edgecolors="white", linewidth=0.7)
    for (row, column), code in np.ndenumerate(grid):
        mark = KINDS[kinds[int(code)]] if code >= 0 else None
        if mark is not None and mark.hatch:
            ax.add_patch(Rectangle((column, row), 1, 1, fill=False, hatch=mark.hatch, edgecolor="#777777", linewidth=0))
        letter, ink = (mark.letter, mark.ink) if mark else (NO_WINNER, "black")
        text = letter + ("=" if tied[row, column] else "")
        ax.text(column + 0.5, row + 0.5, text, ha="center", va="center_baseline", color=ink, fontweight="bold")
    ax.invert_yaxis()


def _label(ax: Axes, workloads: Sequence[str], levels: Sequence[float]) -> None:
    ax.set_xticks(np.arange(len(levels)) + 0.5, [f"{q:g}" for q in levels])
    ax.set_yticks(np.arange(len(workloads)) + 0.5, list(workloads))
    ax.tick_params(length=0)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlabel("conversations/s (QPS)")


def _separate(ax: Axes, summaries: pd.DataFrame, workloads: Sequence[str]) -> None:
    """A line between workload categories."""
    category = dict(zip(summaries["workload"], summaries["workload_category"], strict=True))
    for row in range(1, len(workloads)):
        if category[workloads[row]] != category[workloads[row - 1]]:
            ax.axhline(row, color="black", linewidth=1.2)
