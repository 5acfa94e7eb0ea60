"""``reproduce handoff``: which of Tables 1, 2 and 5 each hand-off model explains, on the paper's grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ppd_bench.analysis.paper_figures import agreement
from ppd_bench.report.text_table import TextTable
from ppd_bench.report.units import number
from ppd_bench.runner.reproduce import paper_comparison
from ppd_bench.runner.reproduce_parts import Compared, Part, PartRequest, Tell, play
from ppd_bench.runner.summaries import summaries_of

MODELS: Mapping[str, Mapping[str, Any]] = {
    "push_blocking": {},
    "pull_async": {"engine": {"handoff": "pull_async"}},
    "push_blocking, receiver 0.1 s": {"simulator": {"receiver_cost": "100ms"}},
}
"""Changes to ``sweeps/paper.yaml``. The last is a hypothesis, chosen for Table 5's pattern."""

NEAR_POINTS, NEAR_RANK = 10.0, 0.7
"""Our rule for saying that a model explains a table: near in level, and in the published order."""
SAME_POINTS = 0.1
"""Mean distances that differ by less are the same."""

QUICK: Mapping[str, Any] = {
    "topologies": ["4R", "2P_2D", "2P_2pD", "3P_1D", "3P_1pD"],
    "workloads": ["large_mid_bal"],
    "qps": [2, 8, 16],
    "duration": "3s",
}


def handoff(request: PartRequest, tell: Tell) -> Part:
    """The paper's grid with every hand-off model, each beside Tables 1, 2 and 5."""
    frames = []
    for name, changes in MODELS.items():
        where = f"handoff/{name.replace(', ', '-').replace(' ', '-')}"
        run = play(request, where, "paper", {**(QUICK if request.quick else {}), **changes}, tell)
        frames.append(paper_comparison(run, summaries_of(run)).assign(model=name))
    cells = pd.concat(frames, ignore_index=True)
    scores = agreement(cells)
    return Part(
        key="handoff",
        title="Hand-off models on the paper's grid: mean distance from the published tables",
        data=_data(request.quick),
        compared=tuple(
            Compared(
                what=f"{r['model']}: {r['table']}", unit="points", published=(), words="0 would be the same",
                simulated=float(r["mean_distance"]), papers_data=not request.quick,
            )
            for r in scores.to_dict("records")
        ),
        differences=_differences(scores),
        assumptions=(
            "push_blocking moves all blocks and D's step waits; pull_async moves what D lacks and D goes on (P2P NCCL and NIXL)",
            "a receiver that spends 0.1 s on each transfer is a hypothesis that was chosen for Table 5's pattern: that "
            "it comes near Table 5 "
            "is no evidence for it, what it does to Tables 1 and 2 is",
        ),
        frames={"cells": cells, "agreement": scores},
        tables=(_table(scores),),
        folder=request.folder / "handoff",
    )  # fmt: skip


def _data(quick: bool) -> str:
    if not quick:
        return "the paper's 18 workloads and 10 QPS levels"
    n_workloads, n_rates = len(QUICK["workloads"]), len(QUICK["qps"])
    return (
        f"{n_workloads} of the paper's 18 workloads at {n_rates} of its 10 QPS levels: a first look that judges nothing"
    )


def _differences(scores: pd.DataFrame) -> tuple[str, ...]:
    told = []
    for table, rows in scores.dropna(subset=["mean_distance"]).groupby("table", sort=False):
        least = rows["mean_distance"].min()
        nearest = [str(name) for name in rows.loc[rows["mean_distance"] <= least + SAME_POINTS, "model"]]
        every = ", ".join(f"{r['model']} {r['mean_distance']:.1f}" for r in rows.to_dict("records"))
        told.append(f"{table}: nearest is {' and '.join(nearest)} (mean distances in points: {every}).")
    near = (scores["mean_distance"] <= NEAR_POINTS) & (scores["rank_correlation"] >= NEAR_RANK)
    explained = [f"{r['table'].partition(':')[0]} by {r['model']}" for r in scores[near].to_dict("records")]
    told.append(
        f"Explained, by the rule of a mean distance of at most {NEAR_POINTS:g} points and a rank correlation of at "
        f"least {NEAR_RANK:g}: "
        f"{', '.join(explained) or 'none'}."
    )
    return tuple(told)


def _table(scores: pd.DataFrame) -> TextTable:
    rows = tuple(
        (str(r["table"]), str(r["model"]), f"{r['n_cells']}", number(r["mean_distance"]), number(r["worst_distance"]),
         number(r["rank_correlation"]))
        for r in scores.sort_values("table", kind="stable").to_dict("records")
    )  # fmt: skip
    return TextTable(
        caption="Distance of each table's cells from the published ones, percentage points",
        head=("table", "hand-off model", "cells", "mean", "largest", "rank correlation"),
        rows=rows,
        note="Rank correlation: whether the cells stand in the published order (1: yes, 0: no relation), whatever their level.",
    )
