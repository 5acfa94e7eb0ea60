"""The reading side of a run: records as one DataFrame, whether the run is merged yet or not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ppd_bench.core.errors import Incomplete, StoreError
from ppd_bench.core.record import RECORD_FIELDS
from ppd_bench.store.manifest import Manifest, read_manifest
from ppd_bench.store.schema import record_schema
from ppd_bench.store.segments import Segment, damage_advice, record_files, verified


def read_records(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    point_ids: Collection[str] | None = None,
    allow_incomplete: bool = False,
) -> pd.DataFrame:
    """Records of the run in folder ``path``, one row per turn (``core.record.RequestRecord``).

    Labels are categorical; a missing time or count is NaN (nullable counts are float64, whether or not one is missing).
    Rows are in point order when the run is complete, else in the order in which points finished.

    Args:
        columns: names to read, in this order; all by default.
        point_ids: points to read; all by default.
        allow_incomplete: give what is there instead of raising ``Incomplete``.

    Raises:
        StoreError: no run folder, damaged files, or unknown columns.
        Incomplete: points that were asked for have not run yet.
        SchemaMismatch: written with another schema version.
    """
    names = list(RECORD_FIELDS if columns is None else columns)
    _check_names(path, names)
    manifest = read_manifest(path)
    segments = [verified(file, digest, damage_advice(file)) for file, digest in record_files(path, manifest)]
    wanted = None if point_ids is None else frozenset(point_ids)
    if not allow_incomplete:
        _check_complete(path, manifest, segments, wanted)
    schema = pa.schema([record_schema().field(name) for name in names])
    tables = [_read(segment, names, wanted) for segment in segments if _holds(segment, wanted)]
    return _to_pandas(pa.concat_tables([schema.empty_table(), *tables]))


def _check_names(path: Path, names: Sequence[str]) -> None:
    unknown = sorted(set(names) - set(RECORD_FIELDS))
    if unknown:
        raise StoreError(f"{path}: records have no column {', '.join(unknown)}; they have {', '.join(RECORD_FIELDS)}")


def _check_complete(path: Path, manifest: Manifest, segments: Sequence[Segment], wanted: frozenset[str] | None) -> None:
    finished = {point for segment in segments for point, _ in segment.points}
    if wanted is None and len(finished) < manifest.n_points:
        raise Incomplete(
            f"{path}: {len(finished):,} of {manifest.points_text} are finished; give the same `ppd-bench sweep` "
            f"command (run {manifest.name!r}) again to run the rest: finished points are kept"
        )
    missing = (wanted or frozenset()) - finished
    if missing:
        raise Incomplete(
            f"{path}: {len(missing):,} of the {len(wanted or ()):,} points asked for are not there (such as "
            f"{min(missing)}); the run has {len(finished):,} of {manifest.points_text}"
        )


def _holds(segment: Segment, wanted: frozenset[str] | None) -> bool:
    return wanted is None or any(point in wanted for point, _ in segment.points)


def _read(segment: Segment, names: list[str], wanted: frozenset[str] | None) -> pa.Table:
    needed = names if wanted is None or "point_id" in names else [*names, "point_id"]
    try:
        with pq.ParquetFile(segment.path, page_checksum_verification=True) as file:
            table = file.read(columns=needed)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{segment.path}: cannot be read ({error}); {damage_advice(segment.path)}") from error
    if wanted is not None:
        table = table.filter(pc.is_in(table["point_id"].cast(pa.string()), value_set=pa.array(sorted(wanted))))
    return table.select(names)


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    for index, field in enumerate(table.schema):
        if field.nullable and pa.types.is_integer(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(pa.float64()))
    frame: pd.DataFrame = table.unify_dictionaries().to_pandas()
    return frame
