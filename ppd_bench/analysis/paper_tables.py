"""The paper's Tables 1, 2 and 5 and its 92.2 % figure, computed by the paper's conventions, beside what it published.

These conventions (GLOSSARY, last paragraph) are applied here and nowhere else: each cell's mean turn-2 TTFT and its
all-turn mean TPOT. Every table is in long form with the columns ``TABLE_FIELDS``; ``value`` is in percent, NaN where
no cell counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from ppd_bench.analysis.compile_table import SUCCESS_BOUND
from ppd_bench.analysis.winners import GOALS, Goal, best_rows, cell_values
from ppd_bench.core.errors import SpecError

TABLE_FIELDS = ("row", "column", "value", "n_cells")
BANDS: dict[str, tuple[float, ...]] = {"low": (0.5, 1, 2), "med": (4, 6, 8), "high": (12, 16, 20)}
"""Table 1's QPS bands. QPS 10 is in none."""

TABLE2_GOALS = ("ttft", "tpot", "throughput")
TABLE2_CATEGORIES = ("replica", "x0", "partial", "x1", "hybrid")
TABLE5_QPS = (8.0, 12.0, 16.0, 20.0)
_CELL = ["workload", "qps"]


def table1(summaries: pd.DataFrame) -> pd.DataFrame:
    """Change of turn-2 TTFT from x=0 to x=1, percent (negative: better), per P/D layout and QPS band.

    The mean, with equal weight, over a band's cells of each cell's change of its mean turn-2 TTFT. Cells where an arm
    has no ok turn-2+ turn are left out (``n_cells`` tells); success plays no part: the paper names no bound here.
    """
    values = cell_values(_paper_points(summaries), GOALS["ttft"], success_bound=0.0)
    keys = ["layout", *_CELL]
    x0, x1 = (values[values["category"] == arm].set_index(keys)["value"] for arm in ("x0", "x1"))
    change = (100 * (x1 - x0) / x0).dropna().reset_index(name="change")
    band = {float(qps): name for name, levels in BANDS.items() for qps in levels}
    groups = change.assign(band=change["qps"].map(band)).groupby(["layout", "band"])["change"]
    found = groups.agg(["mean", "size"])
    layouts = x0.index.get_level_values("layout").unique()
    return _long(found.reindex(pd.MultiIndex.from_product([layouts, BANDS]), fill_value=float("nan")))


def table2(summaries: pd.DataFrame) -> pd.DataFrame:
    """Share of all (workload, QPS) cells that a category of configurations wins, percent, per goal; ``avg`` over goals.

    All configurations compete. A tie is shared equally among the tied. Row ``none`` is the share of cells in which no
    configuration is eligible (valid, at or above 95 % success), so that each goal's column sums to 100.
    """
    n_cells = len(_paper_points(summaries)[_CELL].drop_duplicates())
    shares = pd.DataFrame({goal: _category_shares(summaries, goal, n_cells) for goal in TABLE2_GOALS})
    shares["avg"] = shares.mean(axis=1)
    return _long(pd.DataFrame({"mean": shares.stack(), "size": n_cells}))


def table5(summaries: pd.DataFrame) -> pd.DataFrame:
    """Share of the workloads that fail, percent, for the x=0, x=1 and replica configurations at QPS 8, 12, 16 and 20.

    A workload fails at a QPS when its success ratio (ok turns / scheduled turns, timeout 30 s) is below 95 %: every
    published value is a multiple of 1/18, so workloads were counted, not requests, and 95 % is the bound at which the
    paper speaks of service degradation (Figure 4, Sections 6.1 and 6.2). Points without any turn are left out.
    """
    values = cell_values(_paper_points(summaries), Goal(column="success_ratio", slice="all"), success_bound=0.0)
    kept = values[values["qps"].isin(TABLE5_QPS) & values["category"].isin(["x0", "x1", "replica"])].dropna(
        subset="value"
    )
    failed = kept.assign(
        row=[
            layout if c == "replica" else f"{layout}_{c}"
            for layout, c in zip(kept["layout"], kept["category"], strict=True)
        ],
        failed=100.0 * (kept["value"] < SUCCESS_BOUND),
    )
    return _long(failed.groupby(["row", "qps"], sort=False)["failed"].agg(["mean", "size"]))


def different_winner_share(summaries: pd.DataFrame) -> pd.DataFrame:
    """Share of the (workload, QPS) cells whose turn-2 TTFT winner is not its TPOT winner, percent (the paper: 92.2).

    Winners are configurations, not categories; ties count as the same winner when any configuration is best in both.
    Cells in which a goal has no eligible configuration are left out (``n_cells`` tells).
    """
    ttft, tpot = (_winning_sets(summaries, goal) for goal in ("ttft", "tpot"))
    both = [not (ttft[cell] & tpot[cell]) for cell in ttft.keys() & tpot.keys()]
    share = 100 * sum(both) / len(both) if both else float("nan")
    return pd.DataFrame([("all", "different", share, len(both))], columns=list(TABLE_FIELDS))


PAPER_TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "table1_ttft_change_pct": table1,
    "table2_winner_pct": table2,
    "table5_failure_pct": table5,
    "cells_with_different_ttft_and_tpot_winner_pct": different_winner_share,
}
"""By the key of the published figures."""


def beside(published: Mapping[Any, Any] | float, computed: pd.DataFrame) -> pd.DataFrame:
    """Published figures beside computed ones, percent, with the signed difference computed - published (points).

    ``published`` is {row: {column: number}}, or one number for a table of one cell; a row ``bands`` is a legend and
    is left out. One row per published number, in its order; ``computed`` is NaN where the run has no such cell.

    Raises:
        SpecError: one number is published but the computed table has more than one cell.
    """
    if not isinstance(published, Mapping):
        if len(computed) != 1:
            raise SpecError(f"one published figure cannot stand beside a table of {len(computed)} cells")
        published = {computed["row"].iloc[0]: {computed["column"].iloc[0]: published}}
    told = [
        (str(row), _name(column), float(value))
        for row, columns in published.items()
        if row != "bands"
        for column, value in columns.items()
    ]
    left = pd.DataFrame(told, columns=["row", "column", "published"])
    merged = left.merge(computed.rename(columns={"value": "computed"}), on=["row", "column"], how="left")
    merged["difference"] = merged["computed"] - merged["published"]
    n_cells = merged["n_cells"].fillna(0).astype(int)
    return merged.assign(n_cells=n_cells)[["row", "column", "published", "computed", "difference", "n_cells"]]


def _paper_points(summaries: pd.DataFrame) -> pd.DataFrame:
    """The paper's configurations differ by the roles of their nodes only."""
    return summaries[summaries["policy"] == "node"]


def _name(column: object) -> str:
    return f"{column:g}" if isinstance(column, (int, float)) else str(column)


def _long(grouped: pd.DataFrame) -> pd.DataFrame:
    """From a (row, column) index with ``mean`` and ``size`` to ``TABLE_FIELDS``."""
    rows = [
        (row, _name(column), float(mean), 0 if pd.isna(size) else int(size))
        for (row, column), mean, size in zip(grouped.index, grouped["mean"], grouped["size"], strict=True)
    ]
    return pd.DataFrame(rows, columns=list(TABLE_FIELDS))


def _category_shares(summaries: pd.DataFrame, goal: str, n_cells: int) -> pd.Series:
    best = best_rows(cell_values(_paper_points(summaries), GOALS[goal]), GOALS[goal])
    credit = 1 / best.groupby(_CELL)["value"].transform("size")
    won = credit.groupby(best["category"]).sum().reindex(list(TABLE2_CATEGORIES), fill_value=0.0)
    won["none"] = n_cells - won.sum()
    return 100 * won / n_cells


def _winning_sets(summaries: pd.DataFrame, goal: str) -> dict[Any, set[str]]:
    best = best_rows(cell_values(_paper_points(summaries), GOALS[goal]), GOALS[goal])
    return {cell: set(rows) for cell, rows in best.groupby(_CELL)["configuration"]}
