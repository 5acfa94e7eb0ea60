"""Which configuration wins each (workload, QPS) cell, metric by metric, and how the weights move a table's decisions.

Ties are told. A configuration whose summary is invalid, undefined or below the success bound never wins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ppd_bench.analysis.compile_table import SUCCESS_BOUND, reweighed
from ppd_bench.core.errors import SpecError
from ppd_bench.policy.table import DecisionTable

TIE_TOLERANCE_RATIO = 1e-9
"""Values closer than this, relative to the best, are one value: only the order of additions can tell them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a configuration is judged by: a column of a summary slice, and whether more of it is better."""

    column: str
    slice: str
    maximise: bool = False


GOALS: dict[str, Goal] = {
    "ttft": Goal(column="ttft_mean_s", slice="turn2plus"),
    "ttft_p99": Goal(column="ttft_p99_s", slice="turn2plus"),
    "tpot": Goal(column="tpot_mean_s", slice="all"),
    "tpot_p99": Goal(column="tpot_p99_s", slice="all"),
    "e2e": Goal(column="e2e_mean_s", slice="all"),
    "throughput": Goal(column="throughput_tokens_per_s", slice="all", maximise=True),
    "goodput": Goal(column="goodput_rps", slice="all", maximise=True),
}
"""By name. ``ttft`` is the mean over turn-2+ turns and ``tpot`` the mean over all turns, as in the paper's tables."""

SHARE_FIELDS = (
    *("w_ttft", "w_tpot", "n_cells", "n_local", "n_tie", "n_no_interval"),
    *("local_ratio", "local_low_ratio", "local_high_ratio"),
)
WINNER_FIELDS = ("workload", "workload_category", "qps", "goal", "winner", "category", "tied", "n_tied", "value")
_CELL = ["workload", "workload_category", "qps"]


def cell_values(summaries: pd.DataFrame, goal: Goal, *, success_bound: float = SUCCESS_BOUND) -> pd.DataFrame:
    """One row per (workload, QPS, configuration): the goal's value, averaged over repeats with equal weight.

    Columns: workload, workload_category, qps, configuration, topology, category, layout, value, success_ratio (mean
    over repeats, of all turns), eligible (every repeat valid, value defined, success at or above the bound).

    Raises:
        SpecError: the summaries hold more than one executor, model or GPU.
    """
    for name in ("executor", "model", "gpu"):
        if summaries[name].nunique() > 1:
            found = ", ".join(sorted(summaries[name].unique()))
            raise SpecError(f"summaries of several values of {name} ({found}) cannot compete; pass one at a time")
    rows = summaries[summaries["slice"] == goal.slice]
    success = summaries.loc[summaries["slice"] == "all"].set_index("point_id")["success_ratio"]
    # Without rows pandas has no number to infer a type from.
    reached = rows["point_id"].map(success).astype(float)
    rows = rows.assign(value=rows[goal.column].astype(float), success_ratio=reached)
    keys = [*_CELL, "configuration", "topology", "category", "layout"]
    cells = rows.groupby(keys, sort=False).agg(
        value=("value", "mean"), success_ratio=("success_ratio", "mean"), valid=("valid", "all")
    )
    eligible = cells["valid"] & cells["value"].notna() & (cells["success_ratio"] >= success_bound)
    return cells.drop(columns="valid").assign(eligible=eligible).reset_index()


def winners(
    summaries: pd.DataFrame, *, goals: Sequence[str] = tuple(GOALS), success_bound: float = SUCCESS_BOUND
) -> pd.DataFrame:
    """One row per (workload, QPS, goal) with the columns ``WINNER_FIELDS``.

    ``winner`` and ``category`` are of the first best configuration in the order of the summaries, null where nobody is
    eligible; ``tied`` names all that share the best value (itself included), ``n_tied`` counts them (0: nobody).
    """
    frames = [_goal_winners(cell_values(summaries, GOALS[g], success_bound=success_bound), g) for g in goals]
    return pd.concat(frames, ignore_index=True)


def best_rows(values: pd.DataFrame, goal: Goal) -> pd.DataFrame:
    """The eligible rows of ``cell_values`` whose value is the best of their (workload, QPS) cell, ties included."""
    some = values[values["eligible"]]
    best = some.groupby(_CELL)["value"].transform("max" if goal.maximise else "min")
    return some[np.isclose(some["value"], best, rtol=TIE_TOLERANCE_RATIO, atol=0.0)]


def _goal_winners(values: pd.DataFrame, goal: str) -> pd.DataFrame:
    won = best_rows(values, GOALS[goal]).groupby(_CELL, sort=False)
    told = won.agg(
        winner=("configuration", "first"),
        category=("category", "first"),
        tied=("configuration", ", ".join),
        n_tied=("configuration", "size"),
        value=("value", "first"),
    )
    cells = values[_CELL].drop_duplicates()
    rows = cells.merge(told.reset_index(), on=_CELL, how="left").assign(goal=goal)
    return rows.assign(n_tied=rows["n_tied"].fillna(0).astype(int), tied=rows["tied"].fillna(""))[list(WINNER_FIELDS)]


def local_share(
    table_json: str,
    w_tpot: Sequence[float],
    *,
    w_ttft: float = 1.0,
    types: Collection[str] | None = None,
    qps: Collection[float] | None = None,
) -> pd.DataFrame:
    """Share of a table's decisions that are local, for each value of ``w_tpot`` (the paper's Figure 6).

    Counts visited cells with sufficient evidence, of the given workload types and QPS levels (null: all). Columns:
    w_ttft, w_tpot, n_cells, n_local, n_tie, n_no_interval, local_ratio (as the table answers, ties with the fallback),
    local_low_ratio and local_high_ratio (with every tie counted as pd, and as local). NaN without cells.
    """
    table, rows = DecisionTable.from_json(table_json), []
    for weight in w_tpot:
        cells = [
            c
            for c in reweighed(table, w_ttft, weight).cells
            if c.visited
            and c.evidence != "insufficient"
            and (types is None or c.type in types)
            and (qps is None or c.qps in qps)
        ]
        n_local = sum(c.decision == "local" for c in cells)
        ties = [c.decision for c in cells if c.certainty == "tie"]
        n_unknown = sum(c.certainty == "no_interval" for c in cells)
        low = n_local - ties.count("local")
        shares = [n / len(cells) if cells else float("nan") for n in (n_local, low, low + len(ties))]
        rows.append((float(w_ttft), float(weight), len(cells), n_local, len(ties), n_unknown, *shares))
    return pd.DataFrame(rows, columns=list(SHARE_FIELDS))
