"""P99 TTFT against throughput: panels of configurations, their Pareto frontier, the best point (paper, Figure 9)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from ppd_bench.analysis.compile_table import SUCCESS_BOUND
from ppd_bench.analysis.metrics import Flags
from ppd_bench.analysis.winners import GOALS, Goal, cell_values

P99_TTFT = Goal(column="ttft_p99_s", slice="all")
"""The vertical axis of Figure 9, over all turns."""

PANEL_FIELDS = (
    *("workload_category", "qps", "configuration", "topology", "category", "layout"),
    *("ttft_p99_s", "throughput_tokens_per_s", "success_ratio", "n_workloads", "eligible", "on_frontier", "best"),
)
_PANEL = ["workload_category", "qps"]
_CONFIGURATION = ["configuration", "topology", "category", "layout"]


def panels(
    summaries: pd.DataFrame, *, categories: Collection[str] | None = None, success_bound: float = SUCCESS_BOUND
) -> pd.DataFrame:
    """One row per (workload category, QPS, configuration) with the columns ``PANEL_FIELDS``.

    A configuration's place is the mean over the panel's workloads (equal weight) of its p99 TTFT, seconds, and of its
    throughput, tokens/s. It is eligible for the frontier when both are defined for every workload and the mean
    success ratio is at or above the bound. ``categories`` keeps only those topology categories (null: all).

    ``best`` marks the frontier's point with the greatest throughput per second of p99 TTFT: a rule without weights or
    scales. Equal points are all on the frontier, and all best.
    """
    kept = summaries if categories is None else summaries[summaries["category"].isin(list(categories))]
    latency = cell_values(kept, P99_TTFT, success_bound=0.0).rename(columns={"value": "ttft_p99_s"})
    tokens = cell_values(kept, GOALS["throughput"], success_bound=0.0)
    places = latency.assign(throughput_tokens_per_s=tokens["value"], defined=latency["eligible"] & tokens["eligible"])
    rows = places.groupby([*_PANEL, *_CONFIGURATION], sort=False).agg(
        ttft_p99_s=("ttft_p99_s", "mean"),
        throughput_tokens_per_s=("throughput_tokens_per_s", "mean"),
        success_ratio=("success_ratio", "mean"),
        n_workloads=("workload", "nunique"),
        defined=("defined", "all"),
    )
    rows = rows.reset_index()
    rows["eligible"] = rows.pop("defined") & (rows["success_ratio"] >= success_bound)
    rows["on_frontier"] = False
    for _, panel in rows[rows["eligible"]].groupby(_PANEL):
        rows.loc[panel.index, "on_frontier"] = frontier(panel)
    return rows.assign(best=_best(rows))[list(PANEL_FIELDS)]


def frontier(places: pd.DataFrame) -> Flags:
    """Which rows no other row beats: ``ttft_p99_s`` no more, throughput no less, and one of them strictly better."""
    latency = places["ttft_p99_s"].to_numpy(dtype=float)
    tokens = places["throughput_tokens_per_s"].to_numpy(dtype=float)
    no_worse = (latency[:, None] <= latency) & (tokens[:, None] >= tokens)
    better = (latency[:, None] < latency) | (tokens[:, None] > tokens)
    return ~np.asarray((no_worse & better).any(axis=0), dtype=np.bool_)


def _best(rows: pd.DataFrame) -> pd.Series:
    worth = (rows["throughput_tokens_per_s"] / rows["ttft_p99_s"]).where(rows["on_frontier"])
    top = worth.groupby([rows[name] for name in _PANEL]).transform("max")
    return rows["on_frontier"] & (worth == top)
