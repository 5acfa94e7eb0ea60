"""Summaries of the middle of each point: without the warm-up, when queues are still short, and without the drain, when nobody
arrives any more.

The full summary stands beside it (``analysis.summary``): a short point is mostly warm-up and drain, and the paper's own
figures contain both. Where the load is more than the engines carry there is no steady state at all; ``growth_ratio`` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ppd_bench.analysis.grouping import Groups, means, ratio, sums
from ppd_bench.analysis.metrics import Flags, Floats, floats, labels, with_latencies
from ppd_bench.analysis.summary import SUMMARY_FIELDS, SUMMARY_UNITS, summarise
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.core.results import SLICES
from ppd_bench.core.slo import SLO

WARM_UP_RATIO = 0.2
"""Default share of the arrival window that counts as warm-up. A convention, stated in every row; ``growth_ratio`` tells whether
it was enough."""

_LEFT_OUT = ("span_s", "drain_s")
STEADY_FIELDS: tuple[str, ...] = (
    *(name for name in SUMMARY_FIELDS if name not in _LEFT_OUT),
    *("window_start_s", "window_end_s", "growth_ratio"),
)
"""Columns of a steady-state summary, in order."""

STEADY_UNITS: dict[str, str] = {
    **{name: SUMMARY_UNITS[name] for name in SUMMARY_FIELDS if name not in _LEFT_OUT},
    "window_start_s": "s",
    "window_end_s": "s",
    "growth_ratio": "1",
}
"""Unit of each column: '1' for counts and ratios, '' for labels."""


def steady_state(
    records: pd.DataFrame, points: Sequence[Point], *, slo: SLO | None = None, warm_up_ratio: float = WARM_UP_RATIO
) -> pd.DataFrame:
    """One row per (point, slice) with the columns ``STEADY_FIELDS``, in the order of ``summarise``.

    The window is [``warm_up_ratio`` x duration, duration) of each point. It holds the turns that were to be sent in it, whenever
    they ended; a turn that was never sent because the one before failed stands where that one does, so that no failure drops out.

    - Counts, success, latencies and hit ratios: as in ``summarise``, over the window's turns.
    - ``offered_rps``, ``achieved_rps`` and ``goodput_rps``: per second of the window.
    - ``throughput_tokens_per_s``: tokens of ok turns generated in the window, whenever their turns were sent, per second of the
      window. A turn's tokens are spread evenly between its first and its last.
    - ``growth_ratio``: mean E2E of the ok turns of the window's second half / that of its first half. Far above 1 the queues
      still grow, and no window of such a point is steady.

    Raises:
        SpecError: ``warm_up_ratio`` is not in [0, 1).
    """
    if not 0 <= warm_up_ratio < 1:
        raise SpecError(f"warm_up_ratio is {warm_up_ratio}: a share of the point from 0 to below 1 is needed")
    number = pd.Index([p.point_id for p in points]).get_indexer(pd.Index(records["point_id"]))
    known = records[number >= 0]
    group: Groups = number[number >= 0].astype(np.int64)
    end_s = np.array([p.duration_s for p in points], dtype=float)
    start_s = warm_up_ratio * end_s
    place_s = _places(known)
    inside = (place_s >= start_s[group]) & (place_s < end_s[group])
    tokens = _token_rates(known, group, start_s, end_s)
    growth = _growth(known[inside], group[inside], place_s[inside], (start_s + end_s) / 2)
    table = summarise(known[inside], points, slo=slo)
    point = np.repeat(np.arange(len(points)), len(SLICES))
    window_s = (end_s - start_s)[point]
    return table.assign(
        offered_rps=table["n_scheduled"] / window_s,
        achieved_rps=table["n_ok"] / window_s,
        goodput_rps=table["goodput_rps"] * table["span_s"] / window_s,
        throughput_tokens_per_s=tokens.ravel(),
        window_start_s=start_s[point],
        window_end_s=end_s[point],
        growth_ratio=growth.ravel(),
    )[list(STEADY_FIELDS)]


def _places(records: pd.DataFrame) -> Floats:
    """When each turn was to be sent; a turn that never was stands where the last turn before it does."""
    placed = pd.DataFrame(
        {
            "point_id": records["point_id"].astype(str).to_numpy(),
            "session_id": records["session_id"].astype(str).to_numpy(),
            "turn": floats(records, "turn"),
            "scheduled_s": floats(records, "scheduled_s"),
        }
    )
    ordered = placed.sort_values(["point_id", "session_id", "turn"], kind="stable")
    filled = ordered.groupby(["point_id", "session_id"], sort=False)["scheduled_s"].ffill()
    return filled.sort_index().to_numpy(dtype=np.float64)


def _slices(records: pd.DataFrame) -> tuple[Flags, ...]:
    turn = floats(records, "turn")
    return np.ones(len(turn), dtype=np.bool_), turn == 1, turn >= 2


def _token_rates(records: pd.DataFrame, group: Groups, start_s: Floats, end_s: Floats) -> Floats:
    """Tokens per second that ok turns generated inside each point's window, shape (n_points, 3) by slice."""
    first, last, n_tokens = (floats(records, name) for name in ("first_token_s", "last_token_s", "generated_tokens"))
    low, high = start_s[group], end_s[group]
    overlap_s = np.clip(np.minimum(last, high) - np.maximum(first, low), 0.0, None)
    at_once = ((first >= low) & (first < high)).astype(float)
    share = np.where(last > first, overlap_s / np.where(last > first, last - first, 1.0), at_once)
    tokens = np.where(labels(records, "status", "ok"), n_tokens * share, 0.0)
    found = [np.nan_to_num(sums(tokens[rows], group[rows], len(end_s))) for rows in _slices(records)]
    return np.stack(found, axis=1) / (end_s - start_s)[:, None]


def _growth(records: pd.DataFrame, group: Groups, place_s: Floats, middle_s: Floats) -> Floats:
    """Mean E2E of the second half over that of the first, shape (n_points, 3) by slice."""
    e2e_s = np.where(labels(records, "status", "ok"), floats(with_latencies(records), "e2e_s"), np.nan)
    late = place_s >= middle_s[group]
    n = len(middle_s)
    halves = [[means(e2e_s[rows & half], group[rows & half], n) for half in (late, ~late)] for rows in _slices(records)]
    return np.stack([ratio(second, first) for second, first in halves], axis=1)
