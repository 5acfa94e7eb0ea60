"""Has live traffic left what a decision table was measured on?

Two questions, each by a test that may be looked at after every window of time and still keeps its false-alarm rate:

- Is the mean TTFT or TPOT of an arm in a cell further from the table's than a tolerance? The unit is the window: turns of one
  share a queue. The logarithms of (window's mean / table's mean) are tested by the Bayes factor of a t-test with a normal
  prior on the effect (Gönen et al., 2005, "The Bayesian two-sample t test"). For normal values of unknown variance it is an
  e-process, so that by Ville's inequality it passes 1 / alpha with probability alpha at most, however often one looks
  (Hendriksen, de Heide and Grünwald, 2021, "Optional stopping with Bayes factors"). All means within the tolerance must be
  rejected, so its nearest edge is tested.
- Is the share of conversations that the table's sweep saw nothing like above a bound? By the likelihood ratio of a uniform prior
  above the bound to the bound itself, on one turn per conversation; it is an e-process for every share at or below the bound.

Alpha is split evenly over the two latencies of both arms of all visited cells and that one share (Bonferroni), so that it bounds
the chance of any false alarm on a table, now or later. Window means are only nearly normal and nearly independent: the rates that
this leaves on simulated traffic are measured in ``tests/benchmarks/bench_drift.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import betainc, betaln

from ppd_bench.analysis.metrics import Floats
from ppd_bench.core.errors import SpecError
from ppd_bench.policy.table import Cell, DecisionTable

EFFECT_VARIANCE = 1.0
"""Of the normal prior on (shift / standard deviation between windows): drifts that matter are of this order or larger."""

MIN_WINDOWS = 3
"""Before a test may speak."""

METRICS = ("ttft", "tpot")
TURN_FIELDS = (
    "cell",
    "x",
    "window",
    "session",
    "covered",
    "ttft_s",
    "tpot_s",
    "context_tokens",
    "input_tokens",
    "output_tokens",
    "qps",
)
"""Columns of the turns to check, one row per follow-up turn in order of time. ``x``: 1 where it was prefilled where it decoded.
``window``: number of its stretch of time. ``covered``: whether the table covers it. Latencies are NaN where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOptions:
    """``alpha``: false-alarm rate of the whole check. ``tolerance_ratio``: how far a mean may be from the table's (0.25: by a
    factor of 1.25 either way). ``outside_ratio``: share of conversations outside the domain that is tolerated."""

    alpha: float = 0.05
    tolerance_ratio: float = 0.25
    outside_ratio: float = 0.05

    def problems(self) -> list[str]:
        """Every number that cannot be used, in words."""
        bounds = {
            "--alpha": (self.alpha, 0.5),
            "--tolerance": (self.tolerance_ratio, 10.0),
            "--outside": (self.outside_ratio, 0.99),
        }
        return [
            f"command line: {flag} {value:g}: a number above 0 and at most {most:g} is needed"
            for flag, (value, most) in bounds.items()
            if not 0 < value <= most
        ]

    def check(self) -> None:
        """
        Raises:
            SpecError: every number that cannot be used.
        """
        if problems := self.problems():
            raise SpecError(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Conversations that the table does not cover. ``at``: the conversation at which the alarm was raised; null without."""

    n: int
    n_outside: int
    evidence: float
    at: int | None

    @property
    def drifted(self) -> bool:
        return self.at is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """``cells``: one row per (cell, arm, metric) that was seen: ``cell``, ``x``, ``metric``, ``n_windows``, ``n_turns``,
    ``table_s``, ``seen_s``, ``evidence``, ``at``, ``drifted``. ``evidence`` is the largest e-value so far, ``threshold`` what
    it must reach; ``at`` counts windows. ``n_failed`` turns have no latency and are in no mean.
    ``unseen`` are visited cells that traffic never met; ``unmeasured`` cells that it met and the grid did not visit, with
    their turns."""

    cells: pd.DataFrame
    outside: Outside
    unseen: tuple[str, ...]
    unmeasured: dict[str, int]
    threshold: float
    n_turns: int
    n_failed: int

    @property
    def drifted_cells(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.cells.loc[self.cells["drifted"], "cell"]))


def check_drift(table: DecisionTable, turns: pd.DataFrame, options: DriftOptions) -> DriftReport:
    """Test follow-up turns (``TURN_FIELDS``) against a table."""
    options.check()
    visited = {cell.key: cell for cell in table.cells if cell.visited}
    threshold = (4 * len(visited) + 1) / options.alpha
    rows = [
        _test(cell, x, metric, group[group["x"] == x], options.tolerance_ratio, threshold)
        for key, group in turns.groupby("cell", sort=True)
        if (cell := visited.get(str(key))) is not None
        for x in (0, 1)
        if (group["x"] == x).any()
        for metric in METRICS
        if _table_mean(cell, x, metric)
    ]
    columns = ["cell", "x", "metric", "n_windows", "n_turns", "table_s", "seen_s", "evidence", "at", "drifted"]
    met = turns["cell"].value_counts()
    return DriftReport(
        cells=pd.DataFrame(rows, columns=columns).astype({"drifted": bool}),
        outside=_outside(turns, options.outside_ratio, threshold),
        unseen=tuple(key for key in visited if key not in met.index),
        unmeasured={str(key): int(n) for key, n in met.items() if key not in visited},
        threshold=threshold,
        n_turns=len(turns),
        n_failed=int(turns["ttft_s"].isna().sum()),
    )


def _table_mean(cell: Cell, x: int, metric: str) -> float | None:
    means = {
        ("ttft", 0): cell.ttft_x0_s,
        ("ttft", 1): cell.ttft_x1_s,
        ("tpot", 0): cell.tpot_x0_s,
        ("tpot", 1): cell.tpot_x1_s,
    }
    return means[metric, x]


def _test(
    cell: Cell, x: int, metric: str, turns: pd.DataFrame, tolerance_ratio: float, threshold: float
) -> dict[str, object]:
    values = turns[["window", f"{metric}_s"]].dropna()
    means = values.groupby("window", sort=True)[f"{metric}_s"].mean().to_numpy(dtype=float)
    means = means[means > 0]
    table_s = _table_mean(cell, x, metric) or math.nan
    e = running_evidence(np.log(means / table_s), math.log1p(tolerance_ratio))
    passed = np.flatnonzero(e >= threshold)
    return {
        "cell": cell.key, "x": int(x), "metric": metric, "n_windows": len(means), "n_turns": len(values), "table_s": table_s,
        "seen_s": float(values[f"{metric}_s"].mean()) if len(values) else math.nan, "evidence": float(e.max(initial=0.0)),
        "at": int(passed[0]) + 1 if len(passed) else None, "drifted": bool(len(passed)),
    }  # fmt: skip


def running_evidence(values: Floats, band: float) -> Floats:
    """E-value after each of the values against every mean in [-band, band]; 0 where the running mean lies inside."""
    n = np.arange(1, len(values) + 1, dtype=float)
    mean = np.cumsum(values) / n
    square = np.maximum(np.cumsum(values**2) - n * mean**2, 0.0)
    beyond = np.abs(mean) - band
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # t^2 / (n - 1) = n * shift^2 / sum of squares
        t2 = np.where(square > 0, n * beyond**2 / np.where(square > 0, square, 1.0), np.inf)
        spread = 1 + n * EFFECT_VARIANCE
        gain = np.where(np.isinf(t2), np.log(spread), np.log1p(t2) - np.log1p(t2 / spread))
        e = np.exp(np.minimum(-0.5 * np.log(spread) + 0.5 * n * gain, 700.0))
    return np.where((beyond > 0) & (n >= MIN_WINDOWS), e, 0.0)


def _outside(turns: pd.DataFrame, bound: float, threshold: float) -> Outside:
    first = turns.drop_duplicates("session")
    outside = ~first["covered"].to_numpy(dtype=bool)
    e = running_share_evidence(outside, bound)
    passed = np.flatnonzero(e >= threshold)
    return Outside(
        n=len(outside),
        n_outside=int(outside.sum()),
        evidence=float(e.max(initial=0.0)),
        at=int(passed[0]) + 1 if len(passed) else None,
    )


def running_share_evidence(hits: np.ndarray[tuple[int], np.dtype[np.bool_]], bound: float) -> Floats:
    """E-value after each trial against every probability of a hit that is at most ``bound``."""
    n = np.arange(1, len(hits) + 1, dtype=float)
    k = np.cumsum(hits).astype(float)
    above = 1 - betainc(k + 1, n - k + 1, bound)
    with np.errstate(divide="ignore"):
        top = betaln(k + 1, n - k + 1) + np.log(above) - math.log1p(-bound)
    return np.asarray(np.exp(np.minimum(top - k * math.log(bound) - (n - k) * math.log1p(-bound), 700.0)))
