"""Traces written in our own form (``own`` says how it looks) to an open file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import BinaryIO, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.own import MARK, PARQUET_SCHEMA, header, row_json

OwnForm = Literal["jsonl", "parquet"]
GROUP_ROWS = 1 << 16
GROUP_IDS = 1 << 22
"""A row group ends at so many rows or block ids, whichever comes first: what reader and writer hold at a time."""
JSONL_BYTES = 1 << 20


def write_rows(
    file: BinaryIO, form: OwnForm, declared: TraceFormat, rows: Iterable[TraceRow], notes: Sequence[str] = ()
) -> int:
    """Write rows as they come and return how many. ``notes``: what holds for the trace as a whole."""
    write = _write_parquet if form == "parquet" else _write_jsonl
    return write(file, declared, rows, list(notes))


def _write_jsonl(file: BinaryIO, declared: TraceFormat, rows: Iterable[TraceRow], notes: list[str]) -> int:
    n_rows = n_bytes = 0
    lines = [orjson.dumps(header(declared, notes))]
    for row in rows:
        n_rows += 1
        lines.append(row_json(row))
        n_bytes += len(lines[-1])
        if n_bytes >= JSONL_BYTES:
            file.write(b"\n".join((*lines, b"")))
            lines.clear()
            n_bytes = 0
    if lines:
        file.write(b"\n".join((*lines, b"")))
    return n_rows


def _write_parquet(file: BinaryIO, declared: TraceFormat, rows: Iterable[TraceRow], notes: list[str]) -> int:
    schema = PARQUET_SCHEMA.with_metadata({MARK: orjson.dumps(header(declared, notes))})
    n_rows = n_ids = 0
    group: list[TraceRow] = []
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        for row in rows:
            n_rows += 1
            group.append(row)
            n_ids += len(row.block_ids)
            if len(group) >= GROUP_ROWS or n_ids >= GROUP_IDS:
                writer.write_table(_table(group, schema))
                group, n_ids = [], 0
        if group:
            writer.write_table(_table(group, schema))
    return n_rows


def _table(rows: Sequence[TraceRow], schema: pa.Schema) -> pa.Table:
    """A row group; block ids go through one flat array."""
    lengths = np.array([len(row.block_ids) for row in rows], dtype=np.int64)
    flat = [np.asarray(row.block_ids, dtype=np.int64) for row in rows if len(row.block_ids)]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(flat) if flat else np.empty(0, np.int64)))
    columns = dict(zip(TraceRow._fields, zip(*rows, strict=True), strict=True))
    arrays = [ids if f.name == "block_ids" else pa.array(columns[f.name], type=f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)
