"""What the paper's Figures 1, 4, 5, 6, 10 and 11 and Table 3 show, computed from summaries and records by the paper's
conventions.

An arm is ``x0`` (every decode node is a D), ``x1`` (every one a pD), ``ppd`` (a decision table decides) or ``replica``. A
point is degraded below 95 % success (Figure 4). All functions are pure; times are seconds, shares ratios.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from ppd_bench.analysis.compile_table import SUCCESS_BOUND
from ppd_bench.analysis.metrics import floats
from ppd_bench.analysis.winners import TIE_TOLERANCE_RATIO

ARMS = ("x0", "x1", "ppd")
METRICS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
"""Latencies of an arm's point by name: mean TTFT of turns 2+, mean TPOT and mean E2E of all turns."""

POINT_KEYS = ["layout", "workload", "qps"]
POINT_FIELDS = (
    *(*POINT_KEYS, "arm", "ttft_s", "ttft_p99_s", "tpot_s", "e2e_s", "throughput_tokens_per_s", "success_ratio"),
    *("n_scheduled", "n_ok", "realised_x_ratio", "transfer_bytes", "degraded"),
)
WIN_FIELDS = ("arm", "n_points", "n_tpot", "n_ttft", "n_success_all", "n_degraded", "n_tpot_alone", "n_ttft_alone")
VISIT_FIELDS = ("layout", "cell", "evidence", "route", "n_turns", "share_ratio", "off_grid_ratio")
REGRET_FIELDS = (
    *("layout", "metric", "n_points", "n_left_out", "mean_ratio", "p90_ratio", "max_ratio"),
    *("x0_mean_ratio", "x1_mean_ratio"),
)

AGREEMENT_FIELDS = ("model", "table", "n_cells", "mean_distance", "worst_distance", "rank_correlation")

_TABLE_REASON = r"^table \S+ (?P<cell>\S+) (?P<evidence>\S+)"


def arm_points(summaries: pd.DataFrame) -> pd.DataFrame:
    """One row per (layout, workload, QPS, arm) with the columns ``POINT_FIELDS``, repeats averaged with equal weight.

    ``ttft_s`` and ``ttft_p99_s`` are of turns 2+, all else of all turns. Rows of configurations that are no arm are left out. A
    point that is invalid (no turn succeeded among other reasons) counts as degraded.
    """
    arms = [_arm(p, c) for p, c in zip(summaries["policy"], summaries["category"], strict=True)]
    rows = summaries.assign(arm=pd.Series(arms, index=summaries.index, dtype="object"))
    rows = rows[rows["arm"].notna()]
    later = rows[rows["slice"] == "turn2plus"].set_index("point_id")
    every = rows[rows["slice"] == "all"].set_index("point_id")
    figures = every[[*POINT_KEYS, "arm"]].assign(
        ttft_s=later["ttft_mean_s"].astype(float),
        ttft_p99_s=later["ttft_p99_s"].astype(float),
        tpot_s=every["tpot_mean_s"].astype(float),
        e2e_s=every["e2e_mean_s"].astype(float),
        throughput_tokens_per_s=every["throughput_tokens_per_s"].astype(float),
        success_ratio=every["success_ratio"].astype(float),
        n_scheduled=every["n_scheduled"].astype(float),
        n_ok=every["n_ok"].astype(float),
        realised_x_ratio=later["realised_x_ratio"].astype(float),
        transfer_bytes=every["transfer_bytes"].astype(float),
        works=every["valid"].astype(float),
    )
    points = figures.groupby([*POINT_KEYS, "arm"], sort=False).mean().reset_index()
    points["degraded"] = (points.pop("works") < 1.0) | ~(points["success_ratio"] >= SUCCESS_BOUND)
    return points[list(POINT_FIELDS)]


def _arm(policy: object, category: object) -> str | None:
    if policy == "table":
        return "ppd"
    return str(category) if policy == "node" and category in ("x0", "x1", "replica") else None


def _wide(points: pd.DataFrame, column: str) -> pd.DataFrame:
    """Rows points, columns arms."""
    wide = points.set_index([*POINT_KEYS, "arm"])[column].unstack("arm")
    return wide.reindex(columns=list(ARMS))


def _where_it_works(points: pd.DataFrame, column: str) -> pd.DataFrame:
    return _wide(points.assign(kept=points[column].where(~points["degraded"])), "kept").astype(float)


def wins(points: pd.DataFrame) -> pd.DataFrame:
    """Table 3: per arm, the points at which it is best by TPOT and by TTFT, and those at which every turn succeeded.

    A degraded arm cannot win. A tie is shared equally, so that each column of wins sums to the points at which some arm works;
    ``n_*_alone`` counts the wins without a tie.
    """
    rows = pd.DataFrame({"arm": list(ARMS)}).set_index("arm")
    rows["n_points"] = len(points[POINT_KEYS].drop_duplicates())
    for metric in ("tpot", "ttft"):
        values = _where_it_works(points, METRICS[metric])
        best = values.le(values.min(axis=1) * (1 + TIE_TOLERANCE_RATIO), axis=0)
        n_best = best.sum(axis=1).replace(0, np.nan)
        rows[f"n_{metric}"] = best.div(n_best, axis=0).sum()
        rows[f"n_{metric}_alone"] = best[n_best == 1].sum()
    by_arm = points.groupby("arm")
    rows["n_success_all"] = by_arm["success_ratio"].agg(lambda ratios: int((ratios >= 1.0).sum()))
    rows["n_degraded"] = by_arm["degraded"].sum()
    return rows.fillna({"n_success_all": 0, "n_degraded": 0}).reset_index()[list(WIN_FIELDS)]


def reductions(points: pd.DataFrame, *, arm: str = "ppd", against: str = "x0") -> pd.DataFrame:
    """Per point at which both arms work: by what share ``arm`` lowers each latency and the KV bytes moved per ok turn.

    Columns: layout, workload, qps, ttft_ratio, tpot_ratio, e2e_ratio, transfer_ratio (1 - arm / against; negative: worse).
    """
    points = points.assign(transfer_per_turn=points["transfer_bytes"] / points["n_ok"].where(points["n_ok"] > 0))
    columns = {f"{name}_ratio": column for name, column in METRICS.items()} | {"transfer_ratio": "transfer_per_turn"}
    found = {}
    for name, column in columns.items():
        wide = _where_it_works(points, column)
        found[name] = 1.0 - wide[arm] / wide[against]
    rows = pd.DataFrame(found)
    return rows[rows["e2e_ratio"].notna()].reset_index()


def regret(points: pd.DataFrame) -> pd.DataFrame:
    """How much worse the table is than the better of x=0 and x=1, which it could not know, per layout and metric.

    The regret of a point is value / best - 1 (negative: the table beats both). Points at which the table or both others are
    degraded are left out and counted. ``x0_mean_ratio`` and ``x1_mean_ratio`` are the same of always taking one side, over the
    points at which that side works.
    """
    rows = []
    for layout, found in points.groupby("layout", sort=False):
        for metric, column in METRICS.items():
            values = _where_it_works(found, column)
            best = values[["x0", "x1"]].min(axis=1)
            over = values.div(best, axis=0) - 1.0
            ppd = over["ppd"].dropna()
            spread = (ppd.mean(), ppd.quantile(0.9), ppd.max()) if len(ppd) else (np.nan,) * 3
            sides = (over["x0"].mean(), over["x1"].mean())
            rows.append((layout, metric, len(ppd), len(values) - len(ppd), *spread, *sides))
    return pd.DataFrame(rows, columns=list(REGRET_FIELDS))


def visited_cells(records: pd.DataFrame, layout: str) -> pd.DataFrame:
    """Which cells of a decision table the follow-up turns of its arm fell in, most visited first (columns ``VISIT_FIELDS``).

    Read from the recorded reasons. ``off_grid_ratio``: share of the cell's turns that are not near the cell's own place
    (``DecisionTable.covers``). Turns that the table was not asked for (first turns, KV that is gone) are left out.
    """
    asked = records[records["reason"].astype(str).str.startswith("table ")]
    told = asked["reason"].astype(str).str.extract(_TABLE_REASON)
    told = told.assign(route=asked["route"].astype(str), off=asked["reason"].astype(str).str.endswith(" off-grid"))
    groups = told.groupby(["cell", "evidence", "route"])["off"].agg(["size", "mean"]).reset_index()
    rows = groups.rename(columns={"size": "n_turns", "mean": "off_grid_ratio"})
    rows = rows.assign(layout=layout, share_ratio=rows["n_turns"] / max(1, len(told)))
    return rows.sort_values(["n_turns", "cell"], ascending=[False, True])[list(VISIT_FIELDS)].reset_index(drop=True)


def ttft_by(points: pd.DataFrame, key: str, keys: Collection[str | float]) -> pd.DataFrame:
    """TTFT of turns 2+ per arm for each value of ``key``, with the reduction from x=0 to x=1 (Figures 5 and 10).

    Columns: key, x0_s, x1_s, replica_s, reduction_ratio. NaN where an arm is absent or degraded.
    """
    kept = points.assign(value=points["ttft_s"].where(~points["degraded"]))
    wide = kept.groupby([key, "arm"])["value"].mean().unstack("arm").reindex(index=list(keys))
    wide = wide.reindex(columns=["x0", "x1", "replica"])
    named = wide.rename(columns={arm: f"{arm}_s" for arm in wide.columns})
    return named.assign(reduction_ratio=1.0 - floats(named, "x1_s") / floats(named, "x0_s")).reset_index()


def agreement(cells: pd.DataFrame) -> pd.DataFrame:
    """How near computed tables come to published ones, per (model, table).

    ``cells``: columns model, table, published, computed (``paper_tables.beside``). Returned columns: model, table, n_cells,
    mean_distance and worst_distance (absolute, in the cells' unit) and rank_correlation (Spearman's; NaN where a side is
    constant).
    """
    rows = []
    for (model, table), found in cells.dropna(subset=["computed"]).groupby(["model", "table"], sort=False):
        distance = (found["computed"] - found["published"]).abs()
        varies = found["computed"].nunique() > 1 and found["published"].nunique() > 1
        rank = found["computed"].rank().corr(found["published"].rank()) if varies else np.nan
        rows.append((model, table, len(found), float(distance.mean()), float(distance.max()), float(rank)))
    return pd.DataFrame(rows, columns=list(AGREEMENT_FIELDS))
