"""Many segments into one file whose bytes depend on the points and their order, not on how the run was interrupted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ppd_bench.core.errors import StoreError
from ppd_bench.store.atomic import replacing
from ppd_bench.store.schema import record_schema, records_metadata
from ppd_bench.store.segments import Segment, damage_advice, open_writer

ROW_GROUP_ROWS = 100_000
"""Target rows of a row group of ``records.parquet``; a group holds whole points."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a point's rows lie."""

    path: Path
    row_group: int
    offset: int
    n_rows: int


def merge(segments: Sequence[Segment], points_order: Sequence[str], executor: str, target: Path) -> None:
    """Write the rows of all points, in the given order, to ``target``, atomically; one row group is in memory.

    Raises:
        StoreError: a segment cannot be read or ``target`` cannot be written.
    """
    places = {point: place for segment in segments for point, place in _places(segment)}
    counts = [(point, places[point].n_rows) for point in points_order]
    schema = record_schema().with_metadata(records_metadata(executor, counts))
    with replacing(target) as file, open_writer(file, schema) as writer:
        for group in _row_groups(counts):
            table = _gathered([places[point] for point in group])
            writer.write_table(table, row_group_size=table.num_rows)


def _places(segment: Segment) -> Iterable[tuple[str, _Place]]:
    metadata = pq.read_metadata(segment.path)
    sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] or [0]
    row_group, offset = 0, 0
    for point, n_rows in segment.points:
        if offset >= sizes[row_group] and n_rows:
            row_group, offset = row_group + 1, 0
        yield point, _Place(segment.path, row_group, offset, n_rows)
        offset += n_rows


def _row_groups(counts: Sequence[tuple[str, int]]) -> Iterable[list[str]]:
    group: list[str] = []
    n_group_rows = 0
    for point, n_rows in counts:
        if n_rows and n_group_rows and n_group_rows + n_rows > ROW_GROUP_ROWS:
            yield group
            group, n_group_rows = [], 0
        if n_rows:
            group.append(point)
        n_group_rows += n_rows
    if group:
        yield group


def _gathered(places: Sequence[_Place]) -> pa.Table:
    """The rows of the given places, in order, with dictionaries in order of first appearance."""
    wanted: dict[tuple[Path, int], list[int]] = defaultdict(list)
    for index, place in enumerate(places):
        wanted[place.path, place.row_group].append(index)
    slices: dict[int, pa.Table] = {}
    for (path, row_group), indices in wanted.items():
        unit = _read_row_group(path, row_group)
        for index in indices:
            slices[index] = unit.slice(places[index].offset, places[index].n_rows)
    table = pa.concat_tables(slices[index] for index in range(len(places)))
    return _canonical(table.unify_dictionaries().combine_chunks())


def _read_row_group(path: Path, row_group: int) -> pa.Table:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read_row_group(row_group)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path}: cannot be read ({error}); {damage_advice(path)}") from error


def _canonical(table: pa.Table) -> pa.Table:
    """Rebuild dictionaries: their values and order must not tell how the run was cut into segments."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            texts = pc.cast(table.column(index), field.type.value_type)
            table = table.set_column(index, field, pc.dictionary_encode(texts))
    return table
