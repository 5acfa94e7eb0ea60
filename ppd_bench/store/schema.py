"""The Parquet schema of records, derived from ``core.record.RequestRecord``, and its version."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from ppd_bench.core.errors import SchemaMismatch
from ppd_bench.core.record import RequestRecord

# History of SCHEMA_VERSION. Any change of a column of records, summaries or deltas, or of the manifest, takes a new
# version and a line here.
# 1  2026-11-29  first version
SCHEMA_VERSION = 1

RECORDS_KIND = "records"

LABEL_COLUMNS = frozenset(
    (
        "point_id", "executor", "topology", "workload", "route", "prefill_worker", "decode_worker", "reason", "status",
        "message",
    )
)  # fmt: skip
"""Columns with few distinct texts, dictionary encoded."""

PointRows = tuple[tuple[str, int], ...]
"""The points of a file in row order, each with its number of rows (0 for a point without turns)."""

_LABEL = pa.dictionary(pa.int32(), pa.string())
_WIDE_UNITS = ("tokens", "bytes")
_INTEGERS = {unit: pa.int64() for unit in _WIDE_UNITS}


@functools.cache
def record_schema() -> pa.Schema:
    """Arrow schema of records: the fields of ``RequestRecord``, in order, with ``unit`` and ``meaning`` as metadata."""
    hints = typing.get_type_hints(RequestRecord)
    return pa.schema([_arrow_field(field, hints[field.name]) for field in dataclasses.fields(RequestRecord)])


def records_metadata(executor: str, points: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Schema metadata of a file of records; ``points`` as in ``PointRows``."""
    return {**file_metadata(RECORDS_KIND, executor), "points": json.dumps(list(points), separators=(",", ":"))}


def file_metadata(kind: str, executor: str) -> dict[str, str]:
    """Schema metadata that every Parquet file of a run carries."""
    return {"kind": kind, "schema_version": str(SCHEMA_VERSION), "executor": executor}


def decoded_metadata(schema: pa.Schema) -> dict[str, str]:
    """Schema metadata as text."""
    return {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}


def points_of(schema: pa.Schema) -> PointRows:
    """The points that a file of records holds, from its metadata."""
    return tuple((point_id, n_rows) for point_id, n_rows in json.loads(decoded_metadata(schema)["points"]))


def check_kind(found: pa.Schema, file: Path, kind: str) -> None:
    """Refuse a Parquet file of another kind or version.

    Raises:
        SchemaMismatch: names the file, what it holds and what to do.
    """
    metadata = decoded_metadata(found)
    version = metadata.get("schema_version")
    if version is None or "kind" not in metadata:
        raise SchemaMismatch(f"{file}: this Parquet file was not written by ppd-bench; give a file of a run folder")
    if metadata["kind"] != kind:
        raise SchemaMismatch(f"{file}: holds {metadata['kind']!r}, but {kind!r} is needed; give the right file")
    check_version(version, file)


def check_version(version: object, file: Path) -> None:
    """Refuse a file whose schema version is not ours.

    Raises:
        SchemaMismatch: names both versions and what to do.
    """
    if str(version) != str(SCHEMA_VERSION):
        raise SchemaMismatch(
            f"{file}: written with schema version {version}, but this ppd-bench reads version {SCHEMA_VERSION}; use "
            f"the ppd-bench that wrote it (its version is in the manifest), or run the sweep again under another --name"
        )


def check_schema(found: pa.Schema, file: Path) -> None:
    """Refuse a file that does not hold records of exactly this schema.

    Raises:
        SchemaMismatch: kind, version or columns differ.
    """
    check_kind(found, file, RECORDS_KIND)
    if not found.equals(record_schema(), check_metadata=False):
        differing = sorted(set(_described(found)) ^ set(_described(record_schema())))
        raise SchemaMismatch(
            f"{file}: says schema version {SCHEMA_VERSION} but its columns differ ({', '.join(differing) or 'order'}); "
            f"it was written by a modified ppd-bench: run the sweep again under another --name"
        )


def _arrow_field(field: dataclasses.Field[typing.Any], hint: typing.Any) -> pa.Field:
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    nullable = types.NoneType in kinds
    (kind,) = kinds - {types.NoneType}
    metadata = {"unit": field.metadata["unit"], "meaning": field.metadata["meaning"]}
    return pa.field(field.name, _arrow_type(field.name, kind, metadata["unit"]), nullable=nullable, metadata=metadata)


def _arrow_type(name: str, kind: typing.Any, unit: str) -> pa.DataType:
    by_kind = {
        str: _LABEL if name in LABEL_COLUMNS else pa.string(),
        int: _INTEGERS.get(unit, pa.int32()),
        float: pa.float64(),
        list[float]: pa.list_(pa.field("element", pa.float32())),
    }
    return by_kind[kind]


def _described(schema: pa.Schema) -> list[str]:
    return [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema]
