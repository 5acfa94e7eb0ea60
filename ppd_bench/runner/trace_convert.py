"""``ppd-bench trace convert`` and ``trace anonymise``: any trace in our own form, as JSON lines or Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import RowCounts, TraceFormat, TraceRow
from ppd_bench.store.atomic import make_folder, replacing
from ppd_bench.workload.traces import Trace
from ppd_bench.workload.traces.anonymise import anonymous_rows
from ppd_bench.workload.traces.writer import OwnForm, write_rows

FORMS: dict[str, OwnForm] = {".jsonl": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was written: rows, and what reading the source met."""

    path: Path
    n_rows: int
    counts: RowCounts
    notes: tuple[str, ...]


def convert_trace(trace: Trace, out: Path) -> Converted:
    """Write a trace to ``out``, whose ending says which form; lossless for every field of a row.

    Raises:
        SpecError: another ending, the trace itself, or what the reader raises; ``out`` is as before.
        StoreError: it cannot be written.
    """
    refuse_source(out, trace)
    n_rows = write_trace(out, trace.format, trace.rows(), trace.standing_notes)
    return Converted(path=out, n_rows=n_rows, counts=trace.counts, notes=tuple(trace.notes))


def anonymise_trace(trace: Trace, out: Path, salt: bytes) -> Converted:
    """The same with salted ids; texts never leave a reader, and the source's name and notes are not written. The salt is not
    stored.

    Raises:
        SpecError: a salt of less than 16 or more than 64 bytes, and as ``convert_trace``.
        StoreError: it cannot be written.
    """
    refuse_source(out, trace)
    n_rows = write_trace(out, trace.format, anonymous_rows(trace.rows(), salt))
    return Converted(path=out, n_rows=n_rows, counts=trace.counts, notes=tuple(trace.notes))


def refuse_source(out: Path, trace: Trace) -> None:
    """Recorded traffic is never written over, neither the file that is read nor one of the folder that is.

    Raises:
        SpecError: ``out`` is what is read.
    """
    source, target = Path(trace.source).resolve(), out.resolve()
    if target == source or (source.is_dir() and source in target.parents and target.exists()):
        raise SpecError(f"{out}: is the trace itself, which would be lost; write to another file")


def write_trace(out: Path, declared: TraceFormat, rows: Iterable[TraceRow], notes: Sequence[str] = ()) -> int:
    """Write rows in our own form, atomically, and return how many.

    Raises:
        SpecError: an ending that is neither .jsonl nor .parquet.
        StoreError: it cannot be written.
    """
    form = FORMS.get(out.suffix)
    if form is None:
        raise SpecError(f"{out}: the form of a trace is told by its ending; allowed: {', '.join(FORMS)}")
    make_folder(out.parent)
    with replacing(out) as file:
        return write_rows(file, form, declared, rows, notes)
