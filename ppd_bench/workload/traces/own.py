"""Our own form of a trace, lossless for ``TraceRow``: JSON lines or Parquet.

JSON lines: the first is ``{"ppd_bench_trace": 1, "format": {...}, "notes": [...]}`` with the fields of
``core.trace.TraceFormat``; each other is one row with the fields of ``core.trace.TraceRow``; nulls and empty block ids may be
left out.

Parquet: the columns of ``PARQUET_SCHEMA``, which are the same fields; ``format`` and ``notes`` are in the file's metadata under
``ppd_bench_trace`` as the same JSON. Block ids are signed 64-bit integers in a list column.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import numpy as np
import orjson
import pyarrow as pa

from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.reader import Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Entry, Head, Source, SourceFile, json_value
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import block_ids, seconds, tokens

MARK = "ppd_bench_trace"
VERSION = 1
PARQUET_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("session_id", pa.string()),
        pa.field("turn", pa.int32()),
        pa.field("arrival_s", pa.float64(), metadata={"unit": "s"}),
        pa.field("delay_s", pa.float64(), metadata={"unit": "s"}),
        pa.field("prompt_tokens", pa.int64(), nullable=False, metadata={"unit": "tokens"}),
        pa.field("output_tokens", pa.int64(), nullable=False, metadata={"unit": "tokens"}),
        pa.field("block_ids", pa.list_(pa.int64()), nullable=False),
        pa.field("parent_id", pa.string()),
    ]
)
NOT_A_ROW = "not a row of a trace"
BATCH_ROWS = 4096
_HEADER_ADVICE = "write it anew with `ppd-bench trace convert`"


def header(declared: TraceFormat, notes: list[str]) -> dict[str, object]:
    """What a file says of itself before its rows."""
    return {MARK: VERSION, "format": dataclasses.asdict(declared), "notes": notes}


def row_json(row: TraceRow) -> bytes:
    """One line, without its end."""
    given = {key: value for key, value in row._asdict().items() if value is not None and key != "block_ids"}
    if len(row.block_ids):
        # orjson writes numpy arrays without making a Python integer per id.
        given["block_ids"] = np.asarray(row.block_ids, dtype=np.int64)
    return orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY)


def format_of(value: object, shown: str) -> tuple[TraceFormat, tuple[str, ...]]:
    """Format and notes of a header.

    Raises:
        SpecError: another version, or fields that are not those of a format.
    """
    if not isinstance(value, dict) or value.get(MARK) != VERSION:
        version = value.get(MARK) if isinstance(value, dict) else None
        raise SpecError(f"{shown}: version {version!r} of the trace form; this one reads {VERSION}; {_HEADER_ADVICE}")
    given, notes = value.get("format"), value.get("notes") or []
    hints = get_type_hints(TraceFormat)
    if not isinstance(given, dict) or set(given) != set(hints):
        raise SpecError(f"{shown}: format must have the fields {', '.join(hints)}; {_HEADER_ADVICE}")
    wrong = [f"{name}={given[name]!r}" for name, hint in hints.items() if not _allowed(given[name], hint)]
    if wrong:
        raise SpecError(f"{shown}: format has values that are not allowed: {', '.join(wrong)}; {_HEADER_ADVICE}")
    return TraceFormat(**given), tuple(str(note) for note in notes)


def _allowed(value: object, hint: Any) -> bool:
    choices = [c for option in (get_args(hint) or (hint,)) for c in (get_args(option) or (option,))]
    return any(value == c or (isinstance(c, type) and type(value) is c) for c in choices)


def matches_jsonl(head: Head) -> bool:
    return head.kind == "lines" and MARK in head.first


def matches_parquet(head: Head) -> bool:
    return head.kind == "parquet" and head.keys >= {"request_id", "prompt_tokens", "output_tokens", "block_ids"}


def open_jsonl(source: Source, _options: ReadOptions) -> Trace:
    formats = [format_of(next((v for _, v in file.entries()), None), file.shown) for file in source.files]
    declared, notes = _one_format(formats, source)
    return Trace(source=source.shown, format=declared, read=lambda met: _json_rows(source, met), standing_notes=notes)


def _one_format(
    formats: list[tuple[TraceFormat, tuple[str, ...]]], source: Source
) -> tuple[TraceFormat, tuple[str, ...]]:
    declared, notes = formats[0]
    for (other, _), file in zip(formats, source.files, strict=True):
        if other != declared:
            raise SpecError(f"{file.shown}: another format than {source.files[0].shown} declares; read them apart")
    return declared, notes


def _json_rows(source: Source, met: Pass) -> Iterator[TraceRow]:
    for file, number, entry in source.mappings(met):
        if MARK in entry:
            continue
        try:
            given = _row(entry)
        except BadRow as bad:
            met.drop(str(bad), file.place(number))
            continue
        met.keep()
        yield given


def _row(entry: Entry) -> TraceRow:
    turn = entry.get("turn")
    return TraceRow(
        tokens(entry, "row"),
        _text(entry, "request_id") or _missing("request_id"),
        _text(entry, "session_id"),
        None if turn is None else tokens(entry, "turn", least=1),
        _seconds(entry, "arrival_s"),
        _seconds(entry, "delay_s"),
        tokens(entry, "prompt_tokens", least=1),
        tokens(entry, "output_tokens"),
        block_ids(entry, "block_ids") if entry.get("block_ids") else array("q"),
        _text(entry, "parent_id"),
    )


def _text(entry: Entry, key: str) -> str | None:
    value = entry.get(key)
    if value is None or isinstance(value, str):
        return value
    raise BadRow(f"{key} is not a text")


def _missing(key: str) -> str:
    raise BadRow(f"{key} is missing")


def _seconds(entry: Entry, key: str) -> float | None:
    return None if entry.get(key) is None else seconds(entry, key)


def open_parquet(source: Source, _options: ReadOptions) -> Trace:
    formats = []
    for file in source.files:
        schema = file.schema()
        _check_columns(schema, file)
        formats.append(format_of(json_value((schema.metadata or {}).get(MARK.encode(), b"null")), file.shown))
    declared, notes = _one_format(formats, source)
    return Trace(
        source=source.shown, format=declared, read=lambda met: _parquet_rows(source, met), standing_notes=notes
    )


def _check_columns(schema: pa.Schema, file: SourceFile) -> None:
    wrong = [f.name for f in PARQUET_SCHEMA if f.name not in schema.names or schema.field(f.name).type != f.type]
    if wrong:
        raise SpecError(f"{file.shown}: columns missing or of another type: {', '.join(wrong)}; {_HEADER_ADVICE}")


def _parquet_rows(source: Source, met: Pass) -> Iterator[TraceRow]:
    for file in source.files:
        for batch in file.batches(PARQUET_SCHEMA.names, BATCH_ROWS):
            yield from _batch_rows(batch, met)


def _batch_rows(batch: pa.RecordBatch, met: Pass) -> Iterator[TraceRow]:
    """Rows of a batch; ids go from Arrow's buffer to arrays without a Python integer each."""
    columns: Mapping[str, list[Any]] = {
        name: batch.column(name).to_pylist() for name in PARQUET_SCHEMA.names if name != "block_ids"
    }
    lists = batch.column("block_ids")
    offsets = lists.offsets.to_numpy().tolist()
    flat = lists.values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    for index, (*others, parent_id) in enumerate(zip(*columns.values(), strict=True)):
        ids = array("q", flat[offsets[index] : offsets[index + 1]].tobytes())
        met.keep()
        yield TraceRow._make((*others, ids, parent_id))


PPD_JSONL = Reader(
    name="ppd_jsonl",
    describes="our own JSON lines, as `trace convert` writes them",
    takes=frozenset(),
    matches=matches_jsonl,
    open=open_jsonl,
)
PPD_PARQUET = Reader(
    name="ppd_parquet",
    describes="our own Parquet, as `trace convert` writes it",
    takes=frozenset(),
    matches=matches_parquet,
    open=open_parquet,
)
