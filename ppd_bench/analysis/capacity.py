"""The highest rate at which a configuration still meets its objectives: what a load is worth, and which load to look at next.

Objectives are on quantiles over all turns of all repeats, a failed turn counting as infinitely late, and on the share of turns
that succeed. The search assumes that a configuration that misses them at one rate misses them at every higher one; bracketing by
doubling and bisection on the logarithm of the rate follow from it. Where noise breaks the assumption the answer is still a
bracket of two rates that were both looked at: the lower met the objectives, the upper did not. Goodput per GPU is DistServe's
measure (Zhong et al., OSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ppd_bench.analysis.grouping import Groups, SortedGroups, counts, ratio
from ppd_bench.analysis.metrics import Flags, Floats, floats, labels, with_latencies
from ppd_bench.analysis.summary import configuration_name, summarise
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.core.slo import SLO
from ppd_bench.core.topology import parse_topology

QPS_DIGITS = 3
"""Significant digits of a rate that is looked at."""

KEYS = ["configuration", "topology", "workload", "qps"]
LOAD_FIELDS = (
    *(*KEYS, "n_gpus", "n_repeats", "n_turns", "success_ratio", "ttft_s", "tpot_s", "goodput_per_gpu_rps"),
    *("qps_per_gpu", "n_repeats_met", "met", "broken"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is asked of a load: the quantile of TTFT and of TPOT over all turns, seconds (null: not asked), and success."""

    quantile: float = 0.99
    ttft_s: float | None = None
    tpot_s: float | None = None
    success_ratio: float = 0.95

    def check(self) -> None:
        """
        Raises:
            SpecError: every bound that cannot be used, or no bound on a latency.
        """
        problems = [
            f"command line: {flag} {value:g}: a number from 0 to 1 is needed"
            for flag, value in (("--quantile", self.quantile), ("--success", self.success_ratio))
            if not 0 <= value <= 1
        ]
        problems += [
            f"command line: {flag}: seconds above 0 are needed"
            for flag, value in (("--ttft", self.ttft_s), ("--tpot", self.tpot_s))
            if value is not None and not value > 0
        ]
        if self.ttft_s is None and self.tpot_s is None:
            problems.append(
                "command line: give --ttft or --tpot, or an slo section in the sweep: capacity is a rate that meets them"
            )
        if problems:
            raise SpecError(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Rates that were looked at: the highest that met the objectives below the lowest that did not; null where none."""

    met: float | None = None
    missed: float | None = None

    def next_qps(self, start: float, lowest: float, highest: float, tolerance_ratio: float) -> float | None:
        """The rate to look at next; null when the bracket is as narrow as asked or an end of the range is reached."""
        if self.met is None and self.missed is None:
            return start
        if self.missed is None:
            return None if self.met is None or self.met >= highest else min(rounded(2 * self.met), highest)
        if self.met is None:
            return None if self.missed <= lowest else max(rounded(self.missed / 2), lowest)
        middle = rounded(math.sqrt(self.met * self.missed))
        narrow = self.missed <= self.met * (1 + tolerance_ratio)
        return None if narrow or not self.met < middle < self.missed else middle


def rounded(qps: float) -> float:
    """A rate that people can read."""
    return float(f"{qps:.{QPS_DIGITS}g}")


def bracket_of(loads: pd.DataFrame) -> Bracket:
    """From the rows of one (configuration, workload): ``met`` is the highest met rate below the lowest missed one."""
    missed = loads.loc[~loads["met"], "qps"]
    lowest_missed = float(missed.min()) if len(missed) else None
    below = loads["met"] & (loads["qps"] < (math.inf if lowest_missed is None else lowest_missed))
    met = loads.loc[below, "qps"]
    return Bracket(met=float(met.max()) if len(met) else None, missed=lowest_missed)


def judge_loads(records: pd.DataFrame, points: Sequence[Point], limits: Limits) -> pd.DataFrame:
    """One row of ``LOAD_FIELDS`` per (configuration, workload, QPS), repeats pooled.

    ``ttft_s`` and ``tpot_s`` are the quantile asked for; ``n_repeats_met`` counts the repeats that meet the objectives by
    themselves; ``broken`` names the objectives that are missed. A load without turns meets nothing. ``goodput_per_gpu_rps``:
    turns per second that meet both latency bounds each (GLOSSARY), per GPU, mean of the repeats.
    """
    frame = pd.DataFrame(
        {
            "configuration": [configuration_name(p) for p in points],
            "topology": [p.topology for p in points],
            "workload": [p.workload.name for p in points],
            "qps": [p.qps for p in points],
        }
    )
    load: Groups = np.asarray(frame.groupby(KEYS, sort=False).ngroup(), dtype=np.int64)
    number = pd.Index([p.point_id for p in points]).get_indexer(pd.Index(records["point_id"]))
    turns = with_latencies(records[number >= 0])
    point: Groups = number[number >= 0].astype(np.int64)
    rows = frame.drop_duplicates().reset_index(drop=True)
    n_loads = len(rows)
    pooled = _figures(turns, load[point], n_loads, limits)
    alone = _figures(turns, point, len(points), limits)
    slo = SLO(ttft_s=limits.ttft_s, tpot_s=limits.tpot_s)
    summary = summarise(records, points, slo=slo).query("slice == 'all'")
    goodput = np.nan_to_num(summary["goodput_rps"].to_numpy(dtype=float))
    n_gpus = np.array([parse_topology(name).n_gpus for name in rows["topology"]])
    n_repeats = counts(load, n_loads)
    rows = rows.assign(
        n_gpus=n_gpus,
        n_repeats=n_repeats,
        **pooled,
        goodput_per_gpu_rps=np.bincount(load, weights=goodput, minlength=n_loads) / n_repeats / n_gpus,
        qps_per_gpu=rows["qps"] / n_gpus,
        n_repeats_met=np.bincount(load, weights=_met(alone, limits), minlength=n_loads).astype(int),
        met=_met(pooled, limits),
        broken=_broken(pooled, limits),
    )
    return rows[list(LOAD_FIELDS)]


def _figures(turns: pd.DataFrame, groups: Groups, n: int, limits: Limits) -> dict[str, Floats]:
    ok = labels(turns, "status", "ok")
    n_turns, n_ok = counts(groups, n), counts(groups[ok], n)
    found: dict[str, Floats] = {"n_turns": n_turns.astype(float), "success_ratio": ratio(n_ok, n_turns)}
    for name in ("ttft_s", "tpot_s"):
        quantiles = SortedGroups(floats(turns, name), groups, n).quantiles(ok, (limits.quantile,), n_turns - n_ok)
        found[name] = quantiles[:, 0]
    return found


def _checks(figures: dict[str, Floats], limits: Limits) -> dict[str, Flags]:
    """Objectives that are missed, by name. A quantile of no value at all is no failure: success tells that no turn was there."""
    bounds = {"TTFT": (figures["ttft_s"], limits.ttft_s), "TPOT": (figures["tpot_s"], limits.tpot_s)}
    missed = {name: values > bound for name, (values, bound) in bounds.items() if bound is not None}
    return {**missed, "success": ~(figures["success_ratio"] >= limits.success_ratio)}


def _met(figures: dict[str, Floats], limits: Limits) -> Flags:
    return np.asarray(~np.any(list(_checks(figures, limits).values()), axis=0), dtype=np.bool_)


def _broken(figures: dict[str, Floats], limits: Limits) -> list[str]:
    checks = _checks(figures, limits)
    return [
        ", ".join(name for name, flag in zip(checks, row, strict=True) if flag)
        for row in zip(*checks.values(), strict=True)
    ]


FILLING_LIFETIMES = 4.0
"""Lifetimes of a conversation that a load must arrive for. The conversations in flight need one lifetime to become as many as
the load keeps there (Little's law), and queues some more to show; a shorter load measures an engine that is still filling."""


def conversation_s(records: pd.DataFrame, points: Sequence[Point]) -> float:
    """Median time from a conversation's first scheduled instant to its last end, seconds; NaN without an ended one."""
    kept = records[records["point_id"].isin([p.point_id for p in points])]
    times = pd.DataFrame({
        "conversation": kept["point_id"].astype(str) + " " + kept["session_id"].astype(str),
        "begin": floats(kept, "scheduled_s"), "end": floats(kept, "end_s"),
    })  # fmt: skip
    spans = times.groupby("conversation", sort=False).agg(begin=("begin", "min"), end=("end", "max"))
    return float((spans["end"] - spans["begin"]).median())


CAPACITY_FIELDS = (
    *(
        "configuration",
        "topology",
        "workload",
        "n_gpus",
        "capacity_qps",
        "missed_qps",
        "broken",
        "capacity_per_gpu_qps",
    ),
    *("goodput_per_gpu_rps", "on_frontier"),
)


def capacities(loads: pd.DataFrame) -> pd.DataFrame:
    """One row of ``CAPACITY_FIELDS`` per (configuration, workload).

    ``capacity_qps`` is NaN where no load met the objectives, ``missed_qps`` where none missed them. ``broken`` is what fails at
    ``missed_qps``. ``goodput_per_gpu_rps`` is the highest of all loads looked at. ``on_frontier``: no other configuration of the
    workload has both a higher capacity and a higher goodput per GPU, or one of them higher and the other equal.
    """
    rows = []
    for (configuration, topology, workload), group in loads.groupby(KEYS[:3], sort=False):
        bracket = bracket_of(group)
        at = group[group["qps"] == bracket.missed]
        n_gpus = int(group["n_gpus"].iloc[0])
        capacity = math.nan if bracket.met is None else bracket.met
        rows.append({
            "configuration": configuration, "topology": topology, "workload": workload, "n_gpus": n_gpus,
            "capacity_qps": capacity, "missed_qps": math.nan if bracket.missed is None else bracket.missed,
            "broken": str(at["broken"].iloc[0]) if len(at) else "", "capacity_per_gpu_qps": capacity / n_gpus,
            "goodput_per_gpu_rps": float(group["goodput_per_gpu_rps"].max()),
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    on = np.zeros(len(frame), dtype=np.bool_)
    for _, group in frame.groupby("workload"):
        on[group.index] = _frontier(group)
    return frame.assign(on_frontier=on)[list(CAPACITY_FIELDS)]


def _frontier(group: pd.DataFrame) -> Flags:
    a, b = np.nan_to_num(floats(group, "capacity_per_gpu_qps")), floats(group, "goodput_per_gpu_rps")
    no_worse = (a[:, None] >= a) & (b[:, None] >= b)
    better = (a[:, None] > a) | (b[:, None] > b)
    return np.asarray(~(no_worse & better).any(axis=0) & (a > 0), dtype=np.bool_)
