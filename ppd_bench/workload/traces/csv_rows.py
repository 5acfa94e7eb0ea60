"""CSV files of traces: rows by column name, with the line of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from ppd_bench.core.errors import SpecError
from ppd_bench.workload.traces.checks import Sample
from ppd_bench.workload.traces.source import HEAD_ROWS, NOT_CSV, BadRow, Source, SourceFile
from ppd_bench.workload.traces.trace import Pass

Cells = dict[str, str]


def cells(source: Source, needed: Sequence[str], met: Pass) -> Iterator[tuple[SourceFile, int, Cells]]:
    """Every row as a mapping; rows of another width than the header are dropped by name.

    Raises:
        SpecError: a file without the needed columns.
    """
    for file in source.files:
        rows = file.csv_rows()
        header = [name.strip() for name in next(rows, (0, list[str]()))[1]]
        missing = [name for name in needed if name not in header]
        if missing:
            raise SpecError(f"{file.place(1)}: no column {', '.join(missing)}; it has {', '.join(header) or 'none'}")
        for number, row in rows:
            if len(row) == len(header):
                yield file, number, dict(zip(header, row, strict=True))
            else:
                met.drop(NOT_CSV, file.place(number))


def csv_samples(source: Source, needed: Sequence[str], time: Callable[[Cells], float]) -> list[Sample]:
    """Instants of the first usable rows of every file, in the source's unit."""
    found: list[Sample] = []
    for file in source.files:
        one = Source(shown=source.shown, files=(file,))
        for _, number, row in islice(cells(one, needed, Pass()), HEAD_ROWS):
            try:
                found.append(Sample(file.place(number), time(row), 0, None))
            except BadRow:
                continue
    return found
