"""Files as streams of entries: JSON lines, JSON arrays, single JSON values, CSV and Parquet, with a place for every entry.

Lines end at LF alone (a U+2028 inside a string is text), CRLF, BOM and a missing last newline do no harm, and nothing but one
entry at a time is in memory. Files may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, cast

import ijson  # type: ignore[import-untyped]
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from ppd_bench.core.errors import SpecError
from ppd_bench.workload.traces.trace import Pass

Kind = Literal["lines", "array", "value", "csv", "parquet"]
Entry = dict[str, object]

BOM = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
HEAD_ROWS = 2000
HEAD_BYTES = 8 << 20
"""What is looked at before a trace counts as understood."""
WHOLE_VALUE_BYTES = 256 << 20
"""A single JSON value is read whole, up to this size."""

NOT_JSON = "not valid JSON"
NOT_AN_OBJECT = "not a JSON object"
NOT_CSV = "not a CSV row of the header's columns"


class BadRow(Exception):
    """A row that cannot be used; the message is the reason under which it is counted."""


class NotJson:
    """Stands for a line that is not JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a trace and how it is read."""

    path: Path
    shown: str
    kind: Kind

    def place(self, number: int) -> str:
        """Where entry ``number`` (1-based; a line number where there are lines) is, for messages."""
        if self.kind in ("lines", "csv"):
            return f"{self.shown}:{number}"
        return self.shown if self.kind == "value" else f"{self.shown}: entry {number}"

    def entries(self) -> Iterator[tuple[int, object]]:
        """Every JSON value of the file with its number; ``NotJson`` for lines that are none."""
        if self.kind == "array":
            yield from _array(self)
        elif self.kind == "value":
            with open_binary(self.path) as file:
                yield 1, json_value(file.read())
        else:
            with open_binary(self.path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, json_value(line)

    def csv_rows(self) -> Iterator[tuple[int, list[str]]]:
        """Header and rows of a CSV file, each with the line on which it ends; empty lines are left out."""
        with open_binary(self.path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
            reader = csv.reader(text)
            while True:
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except csv.Error:
                    row = ["", ""]  # no header's width: counted as such by whoever reads on
                if row:
                    yield reader.line_num, row

    def schema(self) -> pa.Schema:
        """Of a Parquet file.

        Raises:
            SpecError: damaged, or not Parquet.
        """
        with self._explained(), pq.ParquetFile(self.path) as parquet:
            return parquet.schema_arrow

    def batches(self, columns: Sequence[str], n_rows: int) -> Iterator[pa.RecordBatch]:
        """A Parquet file's columns, ``n_rows`` rows at a time; one row group is in memory.

        Raises:
            SpecError: damaged, or not Parquet.
        """
        # With pre_buffer the whole file would be in memory.
        with (
            self._explained(),
            pq.ParquetFile(self.path, pre_buffer=False, page_checksum_verification=True) as parquet,
        ):
            yield from parquet.iter_batches(batch_size=n_rows, columns=list(columns))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise SpecError(f"{self.shown}: damaged, or not Parquet ({reason}); make it anew") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trace's files, in order of their names."""

    shown: str
    files: tuple[SourceFile, ...]

    def mappings(self, met: Pass) -> Iterator[tuple[SourceFile, int, Entry]]:
        """Every JSON object; what is none is dropped by name."""
        for file in self.files:
            for number, value in file.entries():
                if isinstance(value, dict):
                    yield file, number, value
                else:
                    met.drop(NOT_JSON if isinstance(value, NotJson) else NOT_AN_OBJECT, file.place(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What the first entries look like, for telling formats apart: all keys, CSV's header or Parquet's columns."""

    kind: Kind
    keys: frozenset[str]
    first: Entry


def open_source(path: Path) -> Source:
    """A file, or every file of a folder (not of its subfolders) that is not hidden.

    Raises:
        SpecError: nothing there, or files that cannot be read.
    """
    if path.is_dir():
        paths = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in SUFFIXES and p.name[0] != ".")
        if not paths:
            raise SpecError(f"{path}: no trace in this folder; looked for files ending in {', '.join(SUFFIXES)}")
    else:
        paths = [path]
    return Source(shown=str(path), files=tuple(SourceFile(path=p, shown=str(p), kind=kind_of(p)) for p in paths))


SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".gz")


def kind_of(path: Path) -> Kind:
    """How a file is to be read, from its first bytes.

    Raises:
        SpecError: it cannot be read, is empty, or is not UTF-8.
    """
    with open_binary(path) as file:
        start = file.read(4096)
        while start and not start.strip():
            start = file.read(4096)
    if start.startswith(PARQUET_MAGIC):
        return "parquet"
    if start.startswith(UTF16_MARKS):
        raise SpecError(f"{path}: is UTF-16 text; save it as UTF-8")
    if not start:
        raise SpecError(f"{path}: is empty")
    first = start.lstrip()[:1]
    if first == b"[":
        return "array"
    if first != b"{":
        return "csv"
    return "value" if _is_one_value(path) else "lines"


def _is_one_value(path: Path) -> bool:
    """Whether the file is one object over several lines, which no line of it alone is."""
    with open_binary(path) as file:
        line = next(line for line in file if line.strip())
        if not isinstance(json_value(line), NotJson):
            return False
        rest = file.read(WHOLE_VALUE_BYTES)
        return not file.read(1) and not isinstance(json_value(line + rest), NotJson)


def head_of(file: SourceFile) -> Head:
    """The file's first entries, at most ``HEAD_ROWS`` of them and ``HEAD_BYTES`` of lines."""
    if file.kind == "parquet":
        return Head(kind="parquet", keys=frozenset(file.schema().names), first={})
    if file.kind == "csv":
        header = next((row for _, row in file.csv_rows()), [])
        return Head(kind="csv", keys=frozenset(name.strip() for name in header), first={})
    keys: set[str] = set()
    first: Entry = {}
    for value in _first_values(file):
        if isinstance(value, dict):
            first = first or value
            keys.update(value)
    return Head(kind=file.kind, keys=frozenset(keys), first=first)


def _first_values(file: SourceFile) -> Iterator[object]:
    if file.kind != "lines":
        yield from (value for _, value in islice(file.entries(), 20))
        return
    n_bytes = 0
    with open_binary(file.path) as lines:
        for line in islice(lines, HEAD_ROWS):
            yield json_value(line)
            n_bytes += len(line)
            if n_bytes > HEAD_BYTES:
                return


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes behind a BOM, gunzipped where need be.

    Raises:
        SpecError: it cannot be read, or its gzip stream is damaged or cut off.
    """
    try:
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context(open(path, "rb"))
            magic = file.read(2)
            file.seek(0)
            if magic == GZIP_MAGIC:
                file = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))
            if file.read(len(BOM)) != BOM:
                file.seek(0)
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SpecError(f"{path}: its gzip stream is damaged or cut off ({error}); fetch it anew") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error


def json_value(text: bytes) -> object:
    """A JSON value or ``NotJson``. The standard library takes what orjson refuses: lone surrogates, NaN, integers of any size."""
    try:
        return cast(object, orjson.loads(text))
    except orjson.JSONDecodeError:
        try:
            return cast(object, json.loads(text))
        except (ValueError, RecursionError):
            return NotJson()


def _array(file: SourceFile) -> Iterator[tuple[int, object]]:
    """
    Raises:
        SpecError: the array breaks off or is not JSON somewhere; nothing after that place can be read.
    """
    number = 0
    with open_binary(file.path) as stream:
        try:
            for number, value in enumerate(ijson.items(stream, "item", use_float=True), 1):
                yield number, value
        except (ijson.JSONError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise SpecError(
                f"{file.place(number + 1)}: not JSON, or the file breaks off here ({reason}); "
                "repair it, or convert it to JSON lines, of which single ones may be bad"
            ) from error
