"""``ppd-bench capacity``: the highest rate that meets the objectives, per configuration and workload, simulated or live.

Rounds of loads are played into one ordinary run folder, so that the records stay, and a stopped search goes on. All
configurations are searched side by side, and a layout is launched once per round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppd_bench.analysis.capacity import (
    FILLING_LIFETIMES,
    Bracket,
    Limits,
    bracket_of,
    capacities,
    conversation_s,
    judge_loads,
    rounded,
)
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.core.topology import parse_topology
from ppd_bench.report.units import counted
from ppd_bench.runner.listeners import Listener
from ppd_bench.runner.runs import chosen_points, open_run, stored_spec
from ppd_bench.runner.summaries import SUMMARY_COLUMNS, summaries_of, trusted_points, write_summaries
from ppd_bench.runner.sweep import Prepared, SweepRequest, play_prepared, point_words, prepare
from ppd_bench.store import layout
from ppd_bench.store.atomic import write_bytes
from ppd_bench.store.read import read_records
from ppd_bench.sweep.expand import expand
from ppd_bench.sweep.spec import SweepSpec

LOADS, CAPACITY = "loads.csv", "capacity.csv"

Probe = tuple[str, str, float]
"""Topology, workload and QPS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """What was asked. Bounds of ``limits`` that are null are those of the sweep's ``slo``. ``sweep`` gives all but the rates."""

    sweep: SweepRequest
    limits: Limits
    start_qps: float = 2.0
    lowest_qps: float = 0.1
    highest_qps: float = 128.0
    tolerance_ratio: float = 0.1
    n_repeats: int = 3

    def check(self) -> None:
        """
        Raises:
            SpecError: a range that cannot be searched.
        """
        problems = []
        if not 0 < self.lowest_qps <= self.start_qps <= self.highest_qps:
            problems.append(
                f"command line: --lowest {self.lowest_qps:g}, --start {self.start_qps:g} and --highest {self.highest_qps:g} "
                "must be above 0 and in this order"
            )
        if not 0.01 <= self.tolerance_ratio <= 1:
            problems.append(f"command line: --tolerance {self.tolerance_ratio:g}: a number from 0.01 to 1 is needed")
        if problems:
            raise SpecError(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityResult:
    """``table``: ``analysis.capacity.CAPACITY_FIELDS``; ``loads``: every load that was looked at."""

    headline: str
    table: pd.DataFrame
    loads: pd.DataFrame
    paths: tuple[Path, ...]
    notice: str


def capacity(request: CapacityRequest, listener: Listener) -> CapacityResult:
    """Search, going on from what the run folder holds.

    Raises:
        SpecError: no objectives, configurations with different numbers of GPUs, recorded arrivals, or another bad setting.
    """
    request.check()
    overrides = {**request.sweep.overrides, "qps": [request.start_qps], "repeats": request.n_repeats}
    sweep = dataclasses.replace(request.sweep, overrides=overrides, with_report=False)
    prepared = prepare(sweep)
    limits = _limits(request.limits, prepared.spec)
    _check(prepared.spec)
    search = _Search(prepared, request, limits, listener)
    loads = search.run()
    table = capacities(loads)
    notes = (search.notice, _invalid(prepared.folder), _still_filling(prepared, search.points, table))
    paths = tuple(prepared.folder / name for name in (CAPACITY, LOADS))
    for path, frame in zip(paths, (table, loads), strict=True):
        labelled = frame.assign(evidence=prepared.choice.executor.evidence)
        write_bytes(path, labelled.to_csv(index=False).encode())
    return CapacityResult(headline=_headline(prepared, request, limits), table=table, loads=loads,
                          paths=paths, notice="\n".join(filter(None, notes)))  # fmt: skip


def _still_filling(prepared: Prepared, points: Sequence[Point], table: pd.DataFrame) -> str:
    """A warning where loads that were met arrived for less time than a few conversations last; empty where none did."""
    records = read_records(prepared.folder, columns=SUMMARY_COLUMNS)
    met = {(row["topology"], row["workload"], row["capacity_qps"]) for row in table.to_dict("records")}
    loads: dict[Probe, list[Point]] = {}
    for point in points:
        if (key := (point.topology, point.workload.name, point.qps)) in met:
            loads.setdefault(key, []).append(point)
    lasting = {key: conversation_s(records, group) for key, group in loads.items()}
    duration_s = prepared.spec.duration_s
    short = {key: lasts_s for key, lasts_s in lasting.items() if lasts_s * FILLING_LIFETIMES > duration_s}
    if not short:
        return ""
    (topology, workload, qps), lasts_s = max(short.items(), key=lambda item: item[1])
    return (
        f"warning: {len(short)} of {len(lasting)} capacities may be far TOO HIGH: arrivals end before the engines are "
        f"full ({topology} {workload} at QPS {qps:g}: a conversation lasts {lasts_s:.3g} s, arrivals {duration_s:g} s). "
        f"Give --duration {math.ceil(FILLING_LIFETIMES * lasts_s / 10) * 10}s or more, and another --out or --name"
    )


def _invalid(folder: Path) -> str:
    """What is to be known of points that did not measure what they should; empty where there are none."""
    run = open_run(folder)
    write_summaries(run)
    trusted = {point.point_id for point in trusted_points(run, summaries_of(run))}
    doubted = [point_words(point) for point in run.points if point.point_id not in trusted]
    if not doubted:
        return ""
    named = ", ".join(doubted[:5]) + (f" and {len(doubted) - 5} more" if len(doubted) > 5 else "")
    return f"warning: {counted(len(doubted), 'point')} invalid, and the loads may be misjudged by them: {named}"


def _limits(asked: Limits, spec: SweepSpec) -> Limits:
    limits = dataclasses.replace(
        asked,
        ttft_s=spec.slo.ttft_s if asked.ttft_s is None else asked.ttft_s,
        tpot_s=spec.slo.tpot_s if asked.tpot_s is None else asked.tpot_s,
    )
    limits.check()
    return limits


def _check(spec: SweepSpec) -> None:
    n_gpus = {name: parse_topology(name).n_gpus for name in spec.topologies}
    problems = []
    if len(set(n_gpus.values())) > 1:
        told = ", ".join(f"{name} {n}" for name, n in n_gpus.items())
        problems.append(
            f"capacity compares configurations of equal numbers of GPUs, and these differ: {told}; give "
            "--topologies of one number"
        )
    recorded = [w.name for w in spec.workloads if w.traffic is not None and w.traffic.arrivals == "recorded"]
    if recorded:
        problems.append(
            f"{', '.join(recorded)}: recorded arrivals have one rate; capacity needs workloads whose rate can be set"
        )
    if problems:
        raise SpecError(problems)


class _Search:
    """Loads that were looked at, and the next ones."""

    def __init__(self, prepared: Prepared, request: CapacityRequest, limits: Limits, listener: Listener) -> None:
        self._prepared, self._request, self._limits, self._listener = prepared, request, limits, listener
        self._pairs = [(t, w.name) for t in prepared.spec.topologies for w in prepared.spec.workloads]
        self.notice = ""
        self.points: tuple[Point, ...] = ()

    def run(self) -> pd.DataFrame:
        probes = self._there() | {(t, w, rounded(self._request.start_qps)) for t, w in self._pairs}
        self.notice = self._play(probes)
        while True:
            loads = self._judged(probes)
            found = self._brackets(loads)
            wanted = {(*pair, qps) for pair, bracket in found.items() if (qps := self._next(bracket)) is not None}
            self._listener.stage(f"{len(probes)} loads looked at; {len(wanted)} of {len(found)} searches go on")
            if not wanted - probes:
                return loads
            probes |= wanted
            self._play(probes)

    def _there(self) -> set[Probe]:
        """Loads of an earlier start: they are part of the run and must stay."""
        if not (self._prepared.folder / layout.MANIFEST).exists():
            return set()
        return {(p.topology, p.workload.name, p.qps) for p in open_run(self._prepared.folder).points}

    def _brackets(self, loads: pd.DataFrame) -> dict[tuple[str, str], Bracket]:
        rows = dict(iter(loads.groupby(["topology", "workload"])))
        return {pair: bracket_of(rows[pair]) for pair in self._pairs}

    def _next(self, bracket: Bracket) -> float | None:
        asked = self._request
        return bracket.next_qps(asked.start_qps, asked.lowest_qps, asked.highest_qps, asked.tolerance_ratio)

    def _play(self, probes: set[Probe]) -> str:
        prepared = self._prepared
        spec = dataclasses.replace(prepared.spec, qps=tuple(sorted({qps for _, _, qps in probes})))
        version, profile = prepared.stored["engine_version"], prepared.stored["profile_hash"]
        every = expand(spec, executor=prepared.choice.executor, engine_version=version, profile_hash=profile)
        repeats: list[list[Any]] = [
            [t, w, qps, self._request.n_repeats if (t, w, qps) in probes else 0]
            for t, w in self._pairs
            for qps in spec.qps
        ]
        self.points = chosen_points(every, repeats)
        stored = {**stored_spec(spec, version, profile), "repeats": repeats}
        return play_prepared(
            dataclasses.replace(prepared, spec=spec, points=self.points, stored=stored), self._listener
        )

    def _judged(self, probes: set[Probe]) -> pd.DataFrame:
        records = read_records(self._prepared.folder, columns=SUMMARY_COLUMNS)
        return judge_loads(records, self.points, self._limits)


def _headline(prepared: Prepared, request: CapacityRequest, limits: Limits) -> str:
    bounds = [
        f"{name} {1e3 * bound:g} ms" for name, bound in (("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s)) if bound
    ]
    n_gpus = parse_topology(prepared.spec.topologies[0]).n_gpus
    return (
        f"{prepared.choice.executor.evidence}: highest QPS with p{100 * limits.quantile:g} {' and '.join(bounds)} and success "
        f"{limits.success_ratio:.0%}, {n_gpus} GPUs each, {counted(request.n_repeats, 'repeat')} of "
        f"{prepared.spec.duration_s:g} s of arrivals, within {request.tolerance_ratio:.0%}"
    )
