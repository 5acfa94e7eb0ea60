"""The router's own /metrics, in a registry of its own: decisions by reason, stages, overhead, fallbacks, breakers, sessions.

A turn adds to plain counts and buckets; Prometheus' own objects are made of them when somebody scrapes. Its metric objects take a
lock and a look-up for each of a turn's dozen figures, and together a tenth of what the router spends on a turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"

_SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_LONG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReading:
    """One worker at the moment of a scrape. ``breaker``: its state's name. ``kv_usage_ratio``: null before the first scrape."""

    worker_id: str
    available: bool
    breaker: str
    n_inflight: int
    kv_usage_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is read at the moment of a scrape, by name: ``gauges`` go up and down, ``totals`` only grow."""

    workers: Sequence[WorkerReading]
    gauges: Mapping[str, float]
    totals: Mapping[str, float]
    table: Mapping[str, str]


GAUGES = {
    "sessions": "Conversations in the ledger.",
    "identities": "Conversations that can be recognised.",
    "open_requests": "Requests whose answer has not ended.",
    "session_rps": "Conversations started per second over the sliding window, as the table sees it.",
    "decision_log_waiting_rows": "Rows of the decision log that are not written yet.",
}
TOTALS = {
    "decision_log_rows": "Rows of the decision log that were written.",
    "decision_log_dropped_rows": "Rows of the decision log that were lost.",
    "table_reloads": "Decision tables taken into use after the first.",
    "table_refusals": "Decision tables that were refused at a reload.",
}
PREFIX = "ppd_router_"


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class _Counts:
    """A counter with labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._about = (f"{PREFIX}{name}", text)
        self._labels = labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0) + 1

    def family(self) -> Family:
        found = CounterMetricFamily(*self._about, labels=self._labels)
        for labels, value in self._values.items():
            found.add_metric(labels, value)
        return found


class _Durations:
    """A histogram of seconds, with labels."""

    def __init__(self, name: str, text: str, edges_s: Sequence[float], labels: Sequence[str] = ()) -> None:
        self._about = (f"{PREFIX}{name}", text)
        self._edges_s = edges_s
        self._labels = labels
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums_s: dict[tuple[str, ...], float] = {}

    def add(self, seconds: float, *labels: str) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._edges_s) + 1)
            self._sums_s[labels] = 0.0
        counts[bisect_left(self._edges_s, seconds)] += 1
        self._sums_s[labels] += seconds

    def family(self) -> Family:
        found = HistogramMetricFamily(*self._about, labels=self._labels)
        names = [*map(floatToGoString, self._edges_s), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            found.add_metric(labels, buckets=buckets, sum_value=self._sums_s[labels])
        return found


class RouterMetrics(Collector):
    """Counts turns as they end; ``read`` is asked for everything else when somebody scrapes."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._requests = _Counts("requests", "Requests by path and status.", ["path", "status"])
        self._decisions = _Counts("decisions", "Decisions by route and reason.", ["route", "reason"])
        self._turns = _Counts("turns", "Turns by the path that they took and how they ended.", ["path", "outcome"])
        self._evidence = _Counts("table_decisions", "Decisions of the table by evidence.", ["evidence", "off_grid"])
        self._events = _Counts(
            "events", "What went otherwise than usual: fallbacks, refused hand-offs, shed turns.", ["event"]
        )
        self._failures = _Counts("failures", "Turns that failed, by kind.", ["kind"])
        self._stages = _Durations("stage_seconds", "Parts of a turn.", _LONG_S, ["stage"])
        self._overhead = _Durations(
            "overhead_seconds", "Time that the router itself spent, of turns without a retry.", _SHORT_S
        )
        self._decision = _Durations("decision_seconds", "Recognising, sizing and deciding.", _SHORT_S)
        self._first_byte = _Durations(
            "first_byte_seconds", "Received to first byte, ok turns, by the path that they took.", _LONG_S, ["path"]
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def on_request(self, path: str, status: int) -> None:
        """A request was answered. ``path``: one that is served, or a word for all others."""
        self._requests.add(path, str(status))

    def on_decision(self, route: str, reason: str, evidence: str | None, off_grid: bool, seconds: float) -> None:
        """A turn was decided; ``evidence`` is null where no table did it."""
        self._decisions.add(route, reason)
        self._decision.add(seconds)
        if evidence is not None:
            self._evidence.add(evidence, "yes" if off_grid else "no")

    def on_event(self, event: str) -> None:
        """Something went otherwise than usual."""
        self._events.add(event)

    def on_turn(self, path: str, outcome: str, failure: str | None) -> None:
        """A turn ended."""
        self._turns.add(path, outcome)
        if failure is not None:
            self._failures.add(failure)

    def on_stages(self, stages: Mapping[str, float], overhead_s: float | None) -> None:
        """How long a turn's parts took."""
        for name, seconds in stages.items():
            self._stages.add(seconds, name)
        if overhead_s is not None:
            self._overhead.add(overhead_s)

    def on_first_byte(self, path: str, seconds: float) -> None:
        """An ok turn's first byte went to its client so long after it was received."""
        self._first_byte.add(seconds, path)

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    # -- for the registry --------------------------------------------------------------------------------------------

    def describe(self) -> Iterator[Family]:
        """Nothing: else registering would read a router that is still being put together."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """All families as they are now."""
        for counted in (self._requests, self._decisions, self._turns, self._evidence, self._events, self._failures):
            yield counted.family()
        for timed in (self._stages, self._overhead, self._decision, self._first_byte):
            yield timed.family()
        reading = self._read()
        for name, value in reading.gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", GAUGES[name], value=value)
        for name, value in reading.totals.items():
            yield CounterMetricFamily(f"{PREFIX}{name}", TOTALS[name], value=value)
        table = GaugeMetricFamily(f"{PREFIX}table_info", "The table in use.", labels=list(reading.table))
        if reading.table:
            table.add_metric(list(reading.table.values()), 1.0)
            yield table
        yield from _of_workers(reading.workers)


def _of_workers(workers: Sequence[WorkerReading]) -> Iterator[GaugeMetricFamily]:
    available = GaugeMetricFamily(f"{PREFIX}worker_available", "1 where turns may be sent.", labels=["worker"])
    breaker = GaugeMetricFamily(f"{PREFIX}worker_breaker", "1 for the state it is in.", labels=["worker", "state"])
    inflight = GaugeMetricFamily(f"{PREFIX}worker_inflight", "Turns dispatched and not ended.", labels=["worker"])
    usage = GaugeMetricFamily(f"{PREFIX}worker_kv_usage_ratio", "KV cache usage, last scrape.", labels=["worker"])
    for worker in workers:
        available.add_metric([worker.worker_id], float(worker.available))
        breaker.add_metric([worker.worker_id, worker.breaker], 1.0)
        inflight.add_metric([worker.worker_id], worker.n_inflight)
        if worker.kv_usage_ratio is not None:
            usage.add_metric([worker.worker_id], worker.kv_usage_ratio)
    yield from (available, breaker, inflight, usage)
