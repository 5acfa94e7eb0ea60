"""Derived tables (summaries, deltas): any DataFrame with a unit for every column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ppd_bench.core.errors import Incomplete, StoreError
from ppd_bench.store.atomic import replacing
from ppd_bench.store.layout import MANIFEST
from ppd_bench.store.manifest import read_manifest
from ppd_bench.store.schema import check_kind, decoded_metadata, file_metadata

_REBUILD = "give the same `ppd-bench sweep` command again: it is made anew from the records, and no point runs again"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameMetadata:
    """What a derived table says of itself; ``units`` has every column."""

    kind: str
    schema_version: int
    executor: str
    units: dict[str, str]


def write_frame(path: Path, frame: pd.DataFrame, units: Mapping[str, str], kind: str, *, executor: str) -> None:
    """Write a derived table as Parquet, atomically. The index is dropped; NaN becomes null.

    Args:
        units: unit of at least every column ('1' for counts and ratios, '' for labels).
        kind: what the table is; ``read_frame`` asks for it.
        executor: who made the records behind it.

    Raises:
        ValueError: columns without a unit.
        StoreError: it cannot be written.
    """
    bare = sorted(set(frame.columns) - set(units))
    if bare:
        raise ValueError(f"{kind}: columns without a unit: {', '.join(bare)}")
    table = pa.Table.from_pandas(frame, preserve_index=False)
    fields = [field.with_metadata({"unit": units[field.name]}) for field in table.schema]
    table = table.cast(pa.schema(fields, metadata=file_metadata(kind, executor)))
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def read_frame(path: Path, kind: str) -> tuple[pd.DataFrame, FrameMetadata]:
    """Read a derived table of a run folder.

    Raises:
        StoreError: no run folder, no such file, or a damaged one.
        Incomplete: the run has not finished, so the table was not made yet.
        SchemaMismatch: the file holds something else, or another version of it.
    """
    if not path.exists():
        raise _absence(path)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise StoreError(
            f"{path}: damaged or not Parquet ({str(error).partition(chr(10))[0]}); delete it; {_REBUILD}"
        ) from error
    check_kind(table.schema, path, kind)
    metadata = decoded_metadata(table.schema)
    units = {field.name: (field.metadata or {}).get(b"unit", b"").decode() for field in table.schema}
    version = int(metadata["schema_version"])
    described = FrameMetadata(kind=kind, schema_version=version, executor=metadata["executor"], units=units)
    return table.to_pandas(), described


def _absence(path: Path) -> StoreError:
    if not path.parent.is_dir() or not (path.parent / MANIFEST).exists():
        read_manifest(path.parent)  # raises: its messages tell a missing folder from a strange one
    if read_manifest(path.parent).state != "complete":
        return Incomplete(
            f"{path}: not made yet, because the run is not finished; give the same `ppd-bench sweep` command again"
        )
    return StoreError(f"{path}: missing; {_REBUILD}")
