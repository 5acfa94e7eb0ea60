"""Points with known content, for tests of the store: every value follows from the point id and the row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppd_bench.core.enums import Executor
from ppd_bench.core.record import RECORD_FIELDS, Columns
from ppd_bench.store.manifest import Manifest, new_manifest
from ppd_bench.store.run_folder import RunFolder


def ids(n_points: int) -> list[str]:
    return [f"point{index:04d}" for index in range(n_points)]


def columns(point_id: str, n_rows: int = 4, *, executor: str = "sim") -> Columns:
    """Even rows went through P (P0 to D0), odd ones ran locally on D1 and have null P columns."""
    rows = range(n_rows)
    special: dict[str, list[Any]] = {
        "point_id": [point_id] * n_rows,
        "executor": [executor] * n_rows,
        "topology": ["1P_2D"] * n_rows,
        "workload": [f"workload{int(point_id[-4:]) % 3}"] * n_rows,
        "request_id": [f"{point_id}-{row}" for row in rows],
        "session_id": [f"session{row // 2}" for row in rows],
        "turn": [1 + row % 2 for row in rows],
        "route": [("pd", "local")[row % 2] for row in rows],
        "prefill_worker": [("P0", None)[row % 2] for row in rows],
        "decode_worker": [("D0", "D1")[row % 2] for row in rows],
        "reason": ["node"] * n_rows,
        "prefill_start_s": [(0.5 + row, None)[row % 2] for row in rows],
        "prefill_cached_tokens": [(16 * row, None)[row % 2] for row in rows],
        "transfer_bytes": [(2**40 + row, None)[row % 2] for row in rows],
        "itl_s": [None] * n_rows,
        "status": ["ok"] * n_rows,
        "message": [None] * n_rows,
    }
    numbers = {name: [float(row) if name.endswith("_s") else row for row in rows] for name in RECORD_FIELDS}
    return {**numbers, "qps": [4.0] * n_rows, **special}


def manifest(points_order: Sequence[str], **changes: Any) -> Manifest:
    content: dict[str, Any] = {
        "name": "paper",
        "executor": Executor.SIM,
        "spec": {"grid": {"qps": [4], "repeats": 1}, "seed": 0},
        "seed": 0,
        "points_order": points_order,
        "machine": {"cpus": 2},
        "created": "2026-01-02T03:04:05Z",
        "versions": {"ppd_bench": "0.1.0", "numpy": "2.0"},
    }
    return new_manifest(**{**content, **changes})


def open_run(path: Path, points_order: Sequence[str], clock: Any = lambda: 0.0, **changes: Any) -> RunFolder:
    """A run whose clock stands still unless said, so that only explicit flushes write."""
    return RunFolder.open(path, manifest=manifest(points_order, **changes), points_order=points_order, clock=clock)


def write_points(path: Path, points_order: Sequence[str], points: Sequence[str], **changes: Any) -> None:
    """Append ``points``, one segment each, without finishing the run."""
    with open_run(path, points_order, **changes) as run:
        for point_id in points:
            run.append(point_id, columns(point_id))
            run.flush()


def finished_run(path: Path, n_points: int = 3) -> Path:
    """A complete run of ``n_points`` points of 4 rows."""
    with open_run(path, ids(n_points)) as run:
        for point_id in ids(n_points):
            run.append(point_id, columns(point_id))
        run.finalise()
    return path
