"""What a run is: ``manifest.json``, the first file that a run folder gets."""

from __future__ import annotations

import dataclasses
import json
import platform
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import ppd_bench
from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import StoreError
from ppd_bench.core.point import content_hash
from ppd_bench.store.atomic import explained, write_bytes
from ppd_bench.store.layout import MANIFEST
from ppd_bench.store.schema import SCHEMA_VERSION, check_version

_GIVE = "give the folder that `ppd-bench sweep` made and printed"

State = Literal["running", "complete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Identity and provenance of a run.

    ``spec`` is the effective spec (JSON values), ``points_hash`` hashes the ordered point ids, ``created`` is ISO 8601.
    ``versions`` and ``machine`` are those of the first session; ``resumed`` lists later sessions where they differed.
    ``records_digest`` is the digest of ``records.parquet`` when ``state`` is ``complete``, else null.
    """

    name: str
    executor: Executor
    spec: dict[str, Any]
    spec_hash: str
    seed: int
    n_points: int
    points_hash: str
    versions: dict[str, str]
    machine: dict[str, Any]
    created: str
    resumed: list[dict[str, Any]] = field(default_factory=list)
    state: State = "running"
    records_digest: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def points_text(self) -> str:
        """For messages: ``3,060 points``."""
        return f"{self.n_points:,} points"


def new_manifest(
    *,
    name: str,
    executor: Executor,
    spec: Mapping[str, Any],
    seed: int,
    points_order: Sequence[str],
    machine: Mapping[str, Any],
    created: str,
    versions: Mapping[str, str] | None = None,
) -> Manifest:
    """Manifest of a run that has not started.

    ``spec`` and ``machine`` hold JSON values; ``versions`` defaults to ``installed_versions()``.
    """
    # Through JSON, so that a tuple equals the list that is read back on resume.
    plain = json.loads(json.dumps({"spec": dict(spec), "machine": dict(machine)}, allow_nan=False))
    return Manifest(
        name=name,
        executor=executor,
        spec=plain["spec"],
        spec_hash=content_hash(plain["spec"]),
        seed=seed,
        n_points=len(points_order),
        points_hash=content_hash(list(points_order)),
        versions=dict(installed_versions() if versions is None else versions),
        machine=plain["machine"],
        created=created,
    )


def installed_versions() -> dict[str, str]:
    """Versions of everything that can change a number or a file."""
    packages = ("numpy", "pandas", "pyarrow", "scipy")
    return {
        "ppd_bench": ppd_bench.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` atomically, keys sorted.

    Raises:
        StoreError: it cannot be written.
    """
    text = json.dumps(dataclasses.asdict(manifest), sort_keys=True, indent=1, allow_nan=False)
    write_bytes(folder / MANIFEST, f"{text}\n".encode())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a run folder.

    Raises:
        StoreError: no such folder, not a run folder, or a damaged manifest.
        SchemaMismatch: written by a version that this one cannot read.
    """
    file = folder / MANIFEST
    if not folder.is_dir():
        raise StoreError(f"{folder}: there is no such run folder; {_GIVE}")
    if not file.exists():
        raise StoreError(f"{folder}: not a run folder ({MANIFEST} is missing); {_GIVE}")
    with explained(file, "read"):
        data = file.read_bytes()
    return _parsed(file, data)


def _parsed(file: Path, data: bytes) -> Manifest:
    try:
        content = json.loads(data)
    except ValueError as error:
        raise _damaged(file, "it is not JSON") from error
    if not isinstance(content, dict) or "schema_version" not in content:
        raise _damaged(file, "it has no schema_version")
    check_version(content["schema_version"], file)
    names = {f.name for f in dataclasses.fields(Manifest)}
    if set(content) != names:
        raise _damaged(file, f"missing or unknown keys: {', '.join(sorted(set(content) ^ names))}")
    try:
        manifest = Manifest(**{**content, "executor": Executor(content["executor"])})
        consistent = manifest.spec_hash == content_hash(manifest.spec)
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    if not consistent:
        raise _damaged(file, "its spec does not fit its hash")
    if manifest.state not in typing.get_args(State):
        raise _damaged(file, f"unknown state {manifest.state!r}")
    return manifest


def _damaged(file: Path, what: str) -> StoreError:
    return StoreError(
        f"{file}: damaged ({what}); restore it from a copy, or delete the folder {file.parent} "
        f"and give the same `ppd-bench sweep` command again"
    )
