"""A stored run, opened for reading: its manifest, its sweep and its points."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import StoreError
from ppd_bench.core.point import Point, content_hash
from ppd_bench.store.manifest import Manifest, read_manifest
from ppd_bench.sweep.expand import expand
from ppd_bench.sweep.spec import SweepSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder and what it was made from."""

    path: Path
    manifest: Manifest
    spec: SweepSpec
    points: tuple[Point, ...]

    @property
    def executor(self) -> Executor:
        return self.manifest.executor

    @property
    def evidence(self) -> str:
        """``simulated`` or ``measured``."""
        return self.executor.evidence


def stored_spec(spec: SweepSpec, engine_version: str, profile_hash: str) -> dict[str, Any]:
    """What a manifest keeps: enough to make the same points again. A refined run adds ``repeats``, see ``chosen_points``."""
    return {"sweep": spec.effective(), "engine_version": engine_version, "profile_hash": profile_hash}


def chosen_points(points: tuple[Point, ...], repeats: list[list[Any]] | None) -> tuple[Point, ...]:
    """The points of a refined run among all of its sweep's.

    ``repeats``: (topology, workload, QPS, repeats) of those with more than one; null where the run was not refined.
    """
    if repeats is None:
        return points
    given = {(topology, workload, float(qps)): n for topology, workload, qps, n in repeats}
    return tuple(p for p in points if p.repeat < given.get((p.topology, p.workload.name, float(p.qps)), 1))


def open_run(path: Path) -> Run:
    """Open a run folder.

    Raises:
        StoreError: not a run folder, damaged, or made by a version that numbers its points otherwise.
    """
    manifest = read_manifest(path)
    stored = manifest.spec
    try:
        spec = TypeAdapter(SweepSpec).validate_python(stored["sweep"])
        points = expand(
            spec,
            executor=manifest.executor,
            engine_version=stored["engine_version"],
            profile_hash=stored["profile_hash"],
        )
        points = chosen_points(points, stored.get("repeats"))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: the manifest's sweep cannot be read; it was written by another version") from error
    if content_hash([point.point_id for point in points]) != manifest.points_hash:
        raise StoreError(f"{path}: the manifest's points differ from its sweep's; it was written by another version")
    return Run(path=path, manifest=manifest, spec=spec, points=points)
