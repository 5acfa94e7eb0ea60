"""What live points left beside their records: what is against each of them, and every engine's readings.

Two things keep a point from winning, and they are not the same.

- **Invalid**: it did not measure what it should. An engine died or was started anew, the counters contradict the records, answers
  ended in order with another length or without a token, the client was late. Such a point is kept and shown with its reasons;
  it wins nothing, and its cell of a decision table is no evidence for either side.
- **Failed**: fewer turns succeeded than ``success_bound`` (0.95 unless the sweep says otherwise: the paper's bound of service
  degradation). Time-outs, refusals and errors of engines that live are what overload looks like, so such a point is a result: it
  wins nothing, and its side loses to one that works (Equation 1, rule 3 of ``analysis.compile_table``). It must not become
  invalid, or a configuration that breaks down would vanish from the comparison that it loses. A point without one
  successful turn counts the same way, although its latencies are undefined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ppd_bench.analysis.summary import SEND_LAG_LIMIT_S
from ppd_bench.engine.gpu import GpuGauges
from ppd_bench.engine.metrics import EngineCounters, EngineGauges
from ppd_bench.runner.live_points import Played
from ppd_bench.runner.runs import Run
from ppd_bench.store import layout
from ppd_bench.store.frames import write_frame
from ppd_bench.store.journal import append_entry, read_entries

CPU_LATENESS_LIMIT_S = 0.5
"""On a CPU the engines share the client's cores and hold them for tenths of a second; such points prove paths only."""

_LABELS = ("point_id", "worker_id", "gpu_ids")
_READINGS = tuple(
    f.name
    for kind in (EngineGauges, EngineCounters, GpuGauges)
    for f in dataclasses.fields(kind)
    if f.name not in _LABELS
)
_SUFFIX_UNITS = {"_tokens": "tokens", "_bytes": "bytes", "_s": "s"}


def record_checks(folder: Path, played: Played) -> None:
    """Keep a point's verdict and readings, on disk before its records are."""
    point_id = played.point.point_id
    entry = {
        "point_id": point_id,
        "problems": list(played.problems),
        "lateness": dataclasses.asdict(played.lateness),
        "n_clients": played.n_clients,
    }
    append_entry(folder / layout.CHECKS, entry)
    append_entry(folder / layout.ENGINE_JOURNAL, {"point_id": point_id, "samples": list(played.samples)})


def lateness_limit_s(run: Run) -> float:
    """How late a client may be, for sending and for waking up, at its 99th percentile, before it measured itself."""
    return limit_for(run.spec.gpu)


def limit_for(gpu: str) -> float:
    """The bound of ``lateness_limit_s`` on engines of this GPU profile."""
    return CPU_LATENESS_LIMIT_S if gpu == "cpu" else SEND_LAG_LIMIT_S


def invalidities(played: Played, limit_s: float) -> list[str]:
    """Everything that makes a point invalid, known as soon as it has been played; what its turns did is not among it."""
    lateness = dataclasses.asdict(played.lateness)
    send_p99_s = played.lateness.send.p99_s
    late = [] if send_p99_s is None or send_p99_s <= limit_s else [_late("turns were sent", send_p99_s, limit_s)]
    return [*played.problems, *late, *_lateness_problems(lateness, limit_s)]


def problems_of(run: Run) -> dict[str, str]:
    """By point id, what is against it; points without anything are left out. The last verdict of a point counts.

    Send lag is judged by ``analysis.summary`` from the records.
    """
    limit_s = lateness_limit_s(run)
    told = {}
    for entry in read_entries(run.path / layout.CHECKS):
        told[entry["point_id"]] = [*entry["problems"], *_lateness_problems(entry["lateness"], limit_s)]
    return {point_id: "; ".join(problems) for point_id, problems in told.items() if problems}


_LATE = {"loop": "its event loop woke up", "decision": "turns got their route"}


def _lateness_problems(lateness: Mapping[str, Any], limit_s: float) -> list[str]:
    """``decision`` is absent from runs of earlier versions, and without samples where one process decides for itself."""
    found = {what: (lateness.get(name) or {}).get("p99_s") for name, what in _LATE.items()}
    return [_late(what, p99_s, limit_s) for what, p99_s in found.items() if p99_s is not None and p99_s > limit_s]


def _late(what: str, p99_s: float, limit_s: float) -> str:
    return f"client late: {what} {p99_s * 1e3:.0f} ms late at p99 (limit {limit_s * 1e3:.0f}); --clients auto may help"


def write_engine_metrics(run: Run) -> list[Path]:
    """``engine_metrics.parquet`` of a live run, from its journal; nothing for a simulated one."""
    last = {entry["point_id"]: entry["samples"] for entry in read_entries(run.path / layout.ENGINE_JOURNAL)}
    rows = [sample for samples in last.values() for sample in samples]
    if not rows:
        return []
    frame = pd.DataFrame(rows, columns=[*_LABELS, "time_s", *_READINGS])
    path = run.path / layout.ENGINE_METRICS
    units = dict.fromkeys(_LABELS, "") | {name: _unit(name) for name in ("time_s", *_READINGS)}
    write_frame(path, frame.astype(dict.fromkeys(_READINGS, float)), units, "engine_metrics", executor=run.executor)
    return [path]


def _unit(name: str) -> str:
    return next((unit for suffix, unit in _SUFFIX_UNITS.items() if name.endswith(suffix)), "1")
