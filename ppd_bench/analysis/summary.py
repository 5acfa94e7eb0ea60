"""One row per (point, slice): counts, rates, latencies, goodput, cache and transfer figures, validity.

Slices are ``all``, ``turn1`` and ``turn2plus``. Latencies are over ok turns; quantiles interpolate linearly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from types import MappingProxyType

import numpy as np
import pandas as pd

from ppd_bench.analysis.grouping import Groups, SortedGroups, counts, largest, means, ratio, smallest, sums
from ppd_bench.analysis.metrics import (
    LATENCIES,
    Flags,
    Floats,
    floats,
    labels,
    meets,
    prefix_hit_tokens,
    prompt_tokens,
    with_latencies,
)
from ppd_bench.core.enums import Executor, Status
from ppd_bench.core.point import Point
from ppd_bench.core.results import QUANTILES, SLICES
from ppd_bench.core.slo import SLO
from ppd_bench.core.topology import parse_topology

SEND_LAG_LIMIT_S = 0.05
"""A live point whose p99 send lag is above this is invalid: it measured the client, not the engines."""

_UNITS_BY_SUFFIX = {
    "_tokens_per_s": "tokens/s",
    "_rps": "1/s",
    "qps": "1/s",
    "_s": "s",
    "_ratio": "1",
    "_tokens": "tokens",
    "_bytes": "bytes",
    "repeat": "1",
}
_QUANTILE_NAMES = tuple(f"p{q * 100:g}" for q in QUANTILES)
_LATENCY_COLUMNS = tuple(
    f"{name}_{statistic}_s" for name in ("ttft", "tpot", "e2e") for statistic in ("mean", *_QUANTILE_NAMES)
)
_FAILURE_COLUMNS = tuple(
    f"{name}_{quantile}_with_failures_s" for name in ("ttft", "tpot", "e2e") for quantile in _QUANTILE_NAMES
)

SUMMARY_FIELDS: tuple[str, ...] = (
    *("point_id", "executor", "topology", "configuration", "category", "layout", "policy"),
    *("node_x_ratio", "request_x_ratio", "realised_x_ratio", "model", "gpu"),
    *("workload", "workload_category", "qps", "repeat", "slice"),
    *("n_scheduled", "n_ok", "n_timeout", "n_error", "n_aborted", "n_unsent", "success_ratio"),
    *("offered_rps", "achieved_rps", *_LATENCY_COLUMNS, *_FAILURE_COLUMNS),
    *("n_null_tpot", "itl_mean_s", "itl_max_s", "send_lag_p99_s"),
    *("throughput_tokens_per_s", "span_s", "drain_s", "goodput_rps"),
    *("prefix_hit_ratio", "transferred_tokens", "transfer_bytes", "n_preemptions", "valid", "invalid_reasons"),
)
"""Columns of a summary, in order."""


def _unit(name: str) -> str:
    if name.startswith("n_"):
        return "1"
    return next((unit for suffix, unit in _UNITS_BY_SUFFIX.items() if name.endswith(suffix)), "")


SUMMARY_UNITS: dict[str, str] = {name: _unit(name) for name in SUMMARY_FIELDS}
"""Unit of each column: '1' for counts and ratios, '' for labels."""


def summarise(
    records: pd.DataFrame,
    points: Sequence[Point],
    *,
    slo: SLO | None = None,
    send_lag_limit_s: float = SEND_LAG_LIMIT_S,
    problems: Mapping[str, str] = MappingProxyType({}),
) -> pd.DataFrame:
    """Summaries with the columns ``SUMMARY_FIELDS``, sorted by the order of ``points``, then by slice.

    Points without any turn are included (counts 0, latencies NaN); records of other points are left out.

    - ``offered_rps``: scheduled turns / the point's arrival window; ``achieved_rps``: ok turns / span.
    - ``span_s`` and ``throughput_tokens_per_s`` as in GLOSSARY: the span is the point's, in every slice. ``drain_s`` is
      the part of it after the arrival window.
    - ``realised_x_ratio``: share of the sent turn-2+ turns whose route was local (null for turn 1).
    - Latencies are of survivors where turns failed. ``*_with_failures_s`` are the same quantiles over all scheduled turns, a
      failed one counting as infinitely late: what a client that needs every answer met.
    - ``goodput_rps`` is null without an SLO. ``valid`` is false where ``invalid_reasons`` says why; ``problems`` are
      reasons from outside the records, by point id (a path that is not proven, an engine that died).
    """
    static = pd.DataFrame([_labels_of(point) for point in points])
    turns = _Turns(records, static["point_id"], np.array([p.duration_s for p in points]), slo)
    frames = [static.assign(slice=name, **_figures(turns, _slice_rows(turns.turn, name))) for name in SLICES]
    summary = pd.concat(frames).sort_index(kind="stable").reset_index(drop=True)
    judged = frozenset(point.point_id for point in points if not _holds_back(point))
    return _with_validity(summary, send_lag_limit_s, judged, problems)[list(SUMMARY_FIELDS)]


def _holds_back(point: Point) -> bool:
    """Whether conversations wait by order, which is no lateness of the client."""
    return point.workload.traffic is not None and point.workload.traffic.max_inflight_sessions is not None


def configuration_name(point: Point) -> str:
    """The topology, followed by the route decider and its parameters where roles do not decide the route."""
    label = policy_label(point)
    return point.topology if label == "node" else f"{point.topology} {label}"


def policy_label(point: Point) -> str:
    """The decider and its parameters: ``node``, ``fraction x=0.5``."""
    return " ".join([point.policy.decider, *(f"{name}={value}" for name, value in point.policy.params)])


def _labels_of(point: Point) -> dict[str, object]:
    topology = parse_topology(point.topology)
    nan = float("nan")
    return {
        "point_id": point.point_id,
        "executor": point.executor.value,
        "topology": point.topology,
        "configuration": configuration_name(point),
        "category": topology.category,
        "layout": topology.layout.name,
        "policy": policy_label(point),
        "node_x_ratio": nan if topology.node_x_ratio is None else topology.node_x_ratio,
        "request_x_ratio": nan if point.request_x_ratio is None else point.request_x_ratio,
        "model": point.model,
        "gpu": point.gpu,
        "workload": point.workload.name,
        "workload_category": point.workload.category,
        "qps": point.qps,
        "repeat": point.repeat,
    }


class _Turns:
    """The records of the points as arrays, with what is sorted or reduced once for all slices."""

    def __init__(self, records: pd.DataFrame, point_ids: pd.Series, duration_s: Floats, slo: SLO | None) -> None:
        number = pd.Index(point_ids).get_indexer(pd.Index(records["point_id"]))
        known = number >= 0
        frame = with_latencies(records if known.all() else records[known])
        self.group: Groups = number[known].astype(np.int64)
        self.n_groups = len(point_ids)
        self.frame = frame
        self.turn = floats(frame, "turn")
        self.status = {status: labels(frame, "status", status) for status in Status}
        self.met = meets(frame, slo) if slo is not None else None
        self.local = labels(frame, "route", "local")
        self.latency = {name: floats(frame, name) for name in LATENCIES}
        self.sorted = {n: SortedGroups(v, self.group, self.n_groups) for n, v in self.latency.items()}
        self.duration_s = duration_s
        last = largest(floats(frame, "last_token_s"), self.group, self.n_groups)
        first = smallest(floats(frame, "sent_s"), self.group, self.n_groups)
        self.span_s = np.where(last > first, last - first, np.nan)
        self.drain_s = np.where(np.isnan(last), np.nan, np.maximum(last - self.duration_s, 0.0))

    def count(self, keep: Flags) -> Groups:
        return counts(self.group[keep], self.n_groups)

    def reduce(self, reduction: Callable[[Floats, Groups, int], Floats], values: Floats, keep: Flags) -> Floats:
        """A reduction of ``grouping`` over the rows where ``keep``."""
        return reduction(values[keep], self.group[keep], self.n_groups)

    def column(self, reduction: Callable[[Floats, Groups, int], Floats], name: str, keep: Flags) -> Floats:
        return self.reduce(reduction, floats(self.frame, name), keep)


def _slice_rows(turn: Floats, name: str) -> Flags:
    rows: dict[str, Flags] = {"all": turn >= 1, "turn1": turn == 1, "turn2plus": turn >= 2}
    return rows[name]


def _figures(turns: _Turns, keep: Flags) -> dict[str, Floats | Groups]:
    ok = keep & turns.status[Status.OK]
    return _count_figures(turns, keep, ok) | _latency_figures(turns, keep, ok) | _token_figures(turns, keep, ok)


def _count_figures(turns: _Turns, keep: Flags, ok: Flags) -> dict[str, Floats | Groups]:
    n_scheduled, n_ok = turns.count(keep), turns.count(ok)
    follow_up = keep & (turns.turn >= 2) & ~turns.status[Status.UNSENT]
    n_met = np.full(turns.n_groups, np.nan) if turns.met is None else turns.count(keep & turns.met)
    return {
        "n_scheduled": n_scheduled,
        **{f"n_{status}": turns.count(keep & rows) for status, rows in turns.status.items()},
        "success_ratio": ratio(n_ok, n_scheduled),
        "offered_rps": ratio(n_scheduled, turns.duration_s),
        "achieved_rps": ratio(n_ok, turns.span_s),
        "goodput_rps": ratio(n_met, turns.span_s),
        "realised_x_ratio": ratio(turns.count(follow_up & turns.local), turns.count(follow_up)),
    }


def _latency_figures(turns: _Turns, keep: Flags, ok: Flags) -> dict[str, Floats | Groups]:
    figures: dict[str, Floats | Groups] = {}
    n_failed = turns.count(keep) - turns.count(ok)
    for name in ("ttft", "tpot", "e2e"):
        figures[f"{name}_mean_s"] = turns.reduce(means, turns.latency[f"{name}_s"], ok)
        found = turns.sorted[f"{name}_s"].quantiles(ok, QUANTILES)
        figures |= {f"{name}_{q}_s": found[:, i] for i, q in enumerate(_QUANTILE_NAMES)}
        found = turns.sorted[f"{name}_s"].quantiles(ok, QUANTILES, n_failed)
        figures |= {f"{name}_{q}_with_failures_s": found[:, i] for i, q in enumerate(_QUANTILE_NAMES)}
    n_gaps = floats(turns.frame, "itl_count")
    gap_time = np.where(n_gaps > 0, floats(turns.frame, "itl_mean_s") * n_gaps, np.nan)
    gaps_known = np.where(np.isnan(gap_time), np.nan, n_gaps)
    return figures | {
        "n_null_tpot": turns.count(ok & np.isnan(turns.latency["tpot_s"])),
        "itl_mean_s": ratio(turns.reduce(sums, gap_time, ok), turns.reduce(sums, gaps_known, ok)),
        "itl_max_s": turns.column(largest, "itl_max_s", ok),
        "send_lag_p99_s": turns.sorted["send_lag_s"].quantiles(keep, (0.99,))[:, 0],
    }


def _token_figures(turns: _Turns, keep: Flags, ok: Flags) -> dict[str, Floats | Groups]:
    hits = prefix_hit_tokens(turns.frame)
    asked = np.where(np.isnan(hits), np.nan, prompt_tokens(turns.frame))
    return {
        "throughput_tokens_per_s": ratio(np.nan_to_num(turns.column(sums, "generated_tokens", ok)), turns.span_s),
        "span_s": turns.span_s,
        "drain_s": turns.drain_s,
        "prefix_hit_ratio": ratio(turns.reduce(sums, hits, ok), turns.reduce(sums, asked, ok)),
        "transferred_tokens": turns.column(sums, "transferred_tokens", keep),
        "transfer_bytes": turns.column(sums, "transfer_bytes", keep),
        "n_preemptions": np.nan_to_num(turns.column(sums, "n_preemptions", keep)).astype(np.int64),
    }


def _with_validity(
    summary: pd.DataFrame, send_lag_limit_s: float, judged: Collection[str], problems: Mapping[str, str]
) -> pd.DataFrame:
    point_lag = summary["send_lag_p99_s"].where(summary["slice"] == "all").groupby(summary["point_id"]).transform("max")
    checks = {
        "no turns": summary["n_scheduled"] == 0,
        "no turn succeeded": (summary["n_ok"] == 0) & (summary["n_scheduled"] > 0),
        f"send lag p99 above limit ({send_lag_limit_s:g} s)": (summary["executor"] == Executor.LIVE.value)
        & (point_lag > send_lag_limit_s)
        & summary["point_id"].isin(judged),
    }
    rows = zip(*(check.to_numpy() for check in checks.values()), strict=True)
    seen = [problems.get(point_id, "") for point_id in summary["point_id"]]
    reasons = [
        "; ".join(filter(None, (*compress(checks, failed), told))) for failed, told in zip(rows, seen, strict=True)
    ]
    return summary.assign(valid=[not reason for reason in reasons], invalid_reasons=reasons)
