"""Names inside a run folder, in one place."""

from __future__ import annotations

MANIFEST = "manifest.json"
RECORDS = "records.parquet"
SUMMARIES = "summaries.parquet"
DELTAS = "deltas.parquet"
STEADY_STATE = "steady_state.parquet"
CHECKS = "checks.jsonl"
"""Live runs: per point, what is against it (paths not proven, engines that died, a late client)."""
ENGINE_METRICS = "engine_metrics.parquet"
"""Live runs: gauges and counters of every engine through every point."""
ENGINE_JOURNAL = "engine_metrics.jsonl"
REFINE = "refine.jsonl"
"""Refined runs: which cells got repeats, why, and where every round left the search."""
TABLES = "tables"
"""Folder of decision tables, ``tables/*.json``."""
PLOTS = "plots"
REPORT = "report.html"

SEGMENTS = "segments"
"""Folder of points that are not merged yet, ``segments/NNNNNN-<digest>.parquet``; absent from a finished run."""
LOCK = ".lock"
HOLDER = ".holder.json"
TEMP_SUFFIX = ".tmp"
DAMAGED_SUFFIX = ".damaged"

DERIVED = (SUMMARIES, STEADY_STATE, DELTAS)
"""Files computed from the records of all points: stale, and so removed, when points are added to a finished run."""
