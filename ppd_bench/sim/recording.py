"""Records of a finished cluster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ppd_bench.core.point import Point
from ppd_bench.core.record import RECORD_FIELDS, Columns
from ppd_bench.core.topology import parse_topology
from ppd_bench.sim.cluster import Cluster
from ppd_bench.sim.rows import GapStatistics, sent_row, unsent_row
from ppd_bench.sim.trip import Trip

Floats = NDArray[np.float64]
WorkerEnds = tuple[list[float], Floats]
"""Ends of a worker's steps, and the gaps between them."""

P99_POSITION = 0.99
"""Quantiles interpolate linearly, as everywhere (analysis uses the same rule)."""


def to_columns(point: Point, cluster: Cluster, *, keep_gaps: bool) -> Columns:
    """One row per turn in order of (session, turn); see ``core.record`` for the columns."""
    trips = cluster.trips
    n = len(trips)
    columns: Columns = {
        "point_id": [point.point_id] * n,
        "executor": [point.executor.value] * n,
        "topology": [point.topology] * n,
        "workload": [point.workload.name] * n,
        "qps": [point.qps] * n,
        "repeat": [point.repeat] * n,
    }
    names = [worker.worker_id for worker in parse_topology(point.topology).workers]
    ends = [(worker.step_end_s, np.diff(worker.step_end_s)) for worker in cluster.workers]
    bytes_per_token = cluster.settings.kv_bytes_per_token
    rows = []
    for trip in trips:
        decision = trip.decision
        if decision is None:
            rows.append(unsent_row(trip))
            continue
        first_s, last_s, gaps = _token_times(trip, ends[decision.decode_worker])
        statistics = _gap_statistics(first_s, last_s, gaps)
        kept = gaps.tolist() if keep_gaps else None
        rows.append(sent_row(trip, decision, names, first_s, last_s, statistics, kept, bytes_per_token))
    for position, name in enumerate(RECORD_FIELDS[len(columns) :]):
        columns[name] = [row[position] for row in rows]
    return columns


_NO_GAPS: Floats = np.empty(0)


def _token_times(trip: Trip, worker_ends: WorkerEnds) -> tuple[float | None, float | None, Floats]:
    """First and last token instants, and the gaps between tokens that reached the client."""
    seq = trip.decode
    if seq is None or trip.generated_tokens == 0:
        return None, None, _NO_GAPS
    ends, gaps = worker_ends
    first, last = seq.first_step, trip.last_step
    if seq.n_preempted == 0:
        return ends[first], ends[last], gaps[first:last]
    spans = seq.spans if len(seq.spans) % 2 == 0 else [*seq.spans, last]
    pieces = [ends[a : b + 1] for a, b in zip(spans[::2], spans[1::2], strict=True)]
    times = [time_s for piece in pieces for time_s in piece][: trip.generated_tokens]
    return times[0], times[-1], np.diff(times)


def _gap_statistics(first_s: float | None, last_s: float | None, gaps: Floats) -> GapStatistics:
    """Count, mean, p99 (linear interpolation) and max of the gaps; nulls without any."""
    n = len(gaps)
    if n == 0 or first_s is None or last_s is None:
        return 0, None, None, None
    ordered = gaps.copy()
    ordered.sort()
    position = P99_POSITION * (n - 1)
    low = int(position)
    below = ordered.item(low)
    p99 = below + (ordered.item(min(low + 1, n - 1)) - below) * (position - low)
    return n, (last_s - first_s) / n, p99, ordered.item(n - 1)
