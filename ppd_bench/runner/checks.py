"""What live points left beside their records: what is against each of them, and every engine's readings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ppd_bench.analysis.summary import SEND_LAG_LIMIT_S
from ppd_bench.engine.metrics import EngineCounters, EngineGauges
from ppd_bench.runner.live import Played
from ppd_bench.runner.runs import Run
from ppd_bench.store import layout
from ppd_bench.store.frames import write_frame
from ppd_bench.store.journal import append_entry, read_entries

CPU_LATENESS_LIMIT_S = 0.5
"""On a CPU the engines share the client's cores and hold them for tenths of a second; such points prove paths only."""

_LABELS = ("point_id", "worker_id")
_READINGS = tuple(f.name for kind in (EngineGauges, EngineCounters) for f in dataclasses.fields(kind))
_SUFFIX_UNITS = {"_tokens": "tokens", "_bytes": "bytes", "_s": "s"}


def record_checks(folder: Path, played: Played) -> None:
    """Keep a point's verdict and readings, on disk before its records are."""
    point_id = played.point.point_id
    append_entry(
        folder / layout.CHECKS,
        {"point_id": point_id, "problems": list(played.problems), "lateness": dataclasses.asdict(played.lateness)},
    )
    append_entry(folder / layout.ENGINE_JOURNAL, {"point_id": point_id, "samples": list(played.samples)})


def lateness_limit_s(run: Run) -> float:
    """How late a client may be, for sending and for waking up, at its 99th percentile, before it measured itself."""
    return CPU_LATENESS_LIMIT_S if run.spec.gpu == "cpu" else SEND_LAG_LIMIT_S


def problems_of(run: Run) -> dict[str, str]:
    """By point id, what is against it; points without anything are left out. The last verdict of a point counts."""
    limit_s = lateness_limit_s(run)
    told = {}
    for entry in read_entries(run.path / layout.CHECKS):
        told[entry["point_id"]] = [*entry["problems"], *_lateness_problems(entry["lateness"], limit_s)]
    return {point_id: "; ".join(problems) for point_id, problems in told.items() if problems}


def _lateness_problems(lateness: Mapping[str, Any], limit_s: float) -> list[str]:
    p99_s = lateness["loop"]["p99_s"]
    if p99_s is None or p99_s <= limit_s:
        return []
    return [f"client late: its event loop woke up {p99_s * 1e3:.0f} ms late at p99 (limit {limit_s * 1e3:.0f})"]


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
