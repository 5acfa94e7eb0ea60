"""Files of records: how points become one, and how a damaged one is told from a whole one.

A segment is ``NNNNNN-<digest>.parquet``. The digest of its bytes is part of the name, so one rename makes content and
checksum durable together, and a flipped byte shows wherever it lies, the footer included.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ppd_bench.core.errors import SchemaMismatch, StoreError
from ppd_bench.core.record import Columns
from ppd_bench.store.atomic import bytes_digest, explained, file_digest, sync_folder, write_bytes
from ppd_bench.store.layout import DAMAGED_SUFFIX, RECORDS, SEGMENTS
from ppd_bench.store.manifest import Manifest
from ppd_bench.store.schema import PointRows, check_schema, points_of, record_schema, records_metadata


@dataclass(frozen=True, slots=True)
class Segment:
    """A whole, verified file of records and the points it holds, in row order."""

    path: Path
    points: PointRows


def points_table(points: Sequence[Columns]) -> pa.Table:
    """One Arrow table of the given points, in order. NaN becomes null.

    Raises:
        ValueError: a value does not fit its column, or a null where the schema has none.
    """
    arrays = [_array(field, [columns[field.name] for columns in points]) for field in record_schema()]
    return pa.table(arrays, schema=record_schema())


def open_writer(file: BinaryIO | pa.BufferOutputStream, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of records with the settings that every file of records shares."""
    # Times rarely repeat: trying dictionaries on them costs time and gains nothing.
    repeating = [field.name for field in schema if not pa.types.is_floating(field.type)]
    return pq.ParquetWriter(
        file, schema, compression="zstd", compression_level=1, use_dictionary=repeating, write_page_checksum=True
    )


def write_segment(folder: Path, number: int, executor: str, points: PointRows, table: pa.Table) -> Segment:
    """Write ``table`` as segment ``number`` of the run in ``folder``, atomically.

    Raises:
        StoreError: it cannot be written.
    """
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata(records_metadata(executor, points))
    with open_writer(sink, schema) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))
    data = sink.getvalue().to_pybytes()
    path = folder / SEGMENTS / _segment_name(number, bytes_digest(data))
    write_bytes(path, data)
    return Segment(path, points)


def next_number(folder: Path) -> int:
    """1 more than the highest number in the segments folder, damaged ones included."""
    numbers = (path.name.partition("-")[0] for path in (folder / SEGMENTS).glob("*-*"))
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)


def record_files(folder: Path, manifest: Manifest) -> list[tuple[Path, str]]:
    """The files that hold the run's records, each with the digest it must have.

    ``records.parquet`` counts only once the manifest says ``complete``: until then the segments are all there, and the
    file is at most the trace of a crash between writing it and saying so.
    """
    records = folder / RECORDS
    if manifest.state == "complete" and records.exists():
        return [(records, manifest.records_digest or "")]
    return [(path, path.stem.partition("-")[2]) for path in sorted((folder / SEGMENTS).glob("*-*.parquet"))]


def verified(path: Path, digest: str, advice: str) -> Segment:
    """Check every byte of a file of records and read which points it holds.

    Raises:
        StoreError: the file is damaged; the message ends with ``advice``.
        SchemaMismatch: it is whole but of another version.
    """
    if file_digest(path) != digest:
        raise StoreError(f"{path}: damaged (its content does not fit its checksum); {advice}")
    with explained(path, "read"):
        schema = pq.read_schema(path)
    check_schema(schema, path)
    return Segment(path, points_of(schema))


def sound_segments(folder: Path, manifest: Manifest) -> tuple[list[Segment], list[str]]:
    """All whole record files of a run, and one notice for each damaged segment, which is set aside.

    Raises:
        StoreError: ``records.parquet`` is damaged.
    """
    segments, notices = [], []
    for path, digest in record_files(folder, manifest):
        try:
            segments.append(verified(path, digest, damage_advice(path)))
        except SchemaMismatch:
            raise
        except StoreError as error:
            if path.name == RECORDS:
                raise
            notices.append(_set_aside(path, error))
    return segments, notices


def damage_advice(path: Path) -> str:
    """What to do about a damaged file of records."""
    if path.name == RECORDS:
        return (
            "restore it from a copy, or delete it and give the same `ppd-bench sweep` command again: all points rerun"
        )
    return "give the same `ppd-bench sweep` command again: it sets this file aside and runs its points again"


def demote(folder: Path, manifest: Manifest, segment: Segment) -> Segment:
    """Turn ``records.parquet`` of a finished run into a segment, so that points can be added."""
    number = next_number(folder)
    path = folder / SEGMENTS / _segment_name(number, manifest.records_digest or file_digest(segment.path))
    with explained(path):
        os.replace(segment.path, path)
        sync_folder(folder)
        sync_folder(path.parent)
    return Segment(path, segment.points)


def remove_segments(folder: Path) -> None:
    """Remove merged segments. Damaged ones that were set aside stay for whoever wants to know why."""
    segments = folder / SEGMENTS
    if not segments.is_dir():
        return
    with explained(segments, "remove merged segments"):
        for path in segments.glob("*-*.parquet"):
            path.unlink(missing_ok=True)
        if not any(segments.iterdir()):
            segments.rmdir()


def _segment_name(number: int, digest: str) -> str:
    return f"{number:06d}-{digest}.parquet"


def _set_aside(path: Path, error: StoreError) -> str:
    aside = path.with_name(f"{path.name}{DAMAGED_SUFFIX}")
    with explained(path, "rename"):
        os.replace(path, aside)
    reason = str(error).removeprefix(f"{path}: ").partition(";")[0]
    return f"{path}: {reason}; renamed to {aside.name}, and its points run again"


def _array(field: pa.Field, parts: list[Any]) -> pa.Array:
    packed = all(isinstance(part, np.ndarray) for part in parts)
    values = np.concatenate(parts) if packed else list(itertools.chain.from_iterable(parts))
    try:
        array = pa.array(values, type=field.type, from_pandas=True)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(f"column {field.name} ({field.type}): {error}") from error
    if array.null_count and not field.nullable:
        raise ValueError(f"column {field.name} has {array.null_count} nulls, but its schema allows none")
    return array
