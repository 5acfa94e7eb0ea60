"""How sure a refined sweep became, against the GPU-seconds that it spent."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ppd_bench.report.plots import Plot
from ppd_bench.report.style import KINDS, new_figure, put_footer, styled

CAPTION = (
    "Share of the cells that are decided with the confidence asked for, and their mean confidence, after every round. The "
    "confidence counts how other cells under like strain vary; the certainty that a table states rests on a cell's own repeats."
)


def refined(standings: pd.DataFrame, *, run_name: str, evidence: str) -> Plot:
    """``standings``: one row per round, of ``runner.refine.read_journal``; not empty."""
    last = standings.iloc[-1]
    return Plot(
        name="refine",
        title="Certainty against GPU-seconds",
        caption=CAPTION,
        alt=f"Curves over {len(standings)} rounds; at the end {last['n_decided']} of {last['n_cells']} cells are decided.",
        figure=_figure(standings, run_name, evidence),
    )


@styled
def _figure(standings: pd.DataFrame, run_name: str, evidence: str) -> Figure:
    fig = new_figure(2.6)
    axes = fig.subplots()
    decided = 100 * standings["n_decided"] / standings["n_cells"]
    # Before two repeats at a load there is no confidence to show, so the first round's is 0.
    for values, kind, label in (
        (decided, "x1", f"decided with {standings['confidence'].iloc[-1]:g} or more"),
        (100 * standings["mean_confidence"], "x0", "mean confidence"),
    ):
        look = KINDS[kind]
        axes.plot(standings["gpu_s"], values, color=look.stroke, marker=look.marker, label=label)
    axes.set_xlabel("GPU-seconds, as plan counts them")
    axes.set_ylabel("% of cells")
    axes.set_ylim(0, 103)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="lower right")
    put_footer(fig, run_name=run_name, evidence=evidence)
    return fig
