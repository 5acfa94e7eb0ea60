"""Azure LLM inference traces: CSV of ``TIMESTAMP`` (a date with 7 fractional digits), ``ContextTokens``, ``GeneratedTokens``.

Source: Azure/AzurePublicDataset, 2023 and 2024. Dates without a zone are taken as UTC, to 100 ns. No sessions, no block ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.checks import Clock, origin_of
from ppd_bench.workload.traces.csv_rows import Cells, cells, csv_samples
from ppd_bench.workload.traces.reader import Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Head, Source
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import date_seconds, tokens_in

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TICKS_PER_S = 10_000_000
DECLARED = TraceFormat(
    name="azure",
    time_unit="date",
    block_tokens=None,
    tail=None,
    id_scope=None,
    row_means="full_prompt",
    loop="timestamps",
    token_count="recorded",
)


def matches(head: Head) -> bool:
    return head.kind == "csv" and head.keys >= set(COLUMNS)


def open_azure(source: Source, _options: ReadOptions) -> Trace:
    origin = origin_of(csv_samples(source, COLUMNS, _ticks))
    return Trace(source=source.shown, format=DECLARED, read=lambda met: _rows(source, Clock(origin, TICKS_PER_S), met))


def _ticks(row: Cells) -> int:
    """Exact in units of 100 ns, which a float of seconds since 1970 is not."""
    whole, fraction = date_seconds(row["TIMESTAMP"])
    return whole * TICKS_PER_S + fraction


def _rows(source: Source, clock: Clock, met: Pass) -> Iterator[TraceRow]:
    for file, number, cell in cells(source, COLUMNS, met):
        row = met.counts.n_read
        try:
            n_prompt = tokens_in(cell["ContextTokens"], "ContextTokens", least=1)
            n_output = tokens_in(cell["GeneratedTokens"], "GeneratedTokens")
            arrival_s = clock.since_start(_ticks(cell))
        except BadRow as bad:
            met.drop(str(bad), file.place(number))
            continue
        if clock.went_back:
            met.remark(Clock.BACK, file.place(number))
        met.keep()
        yield TraceRow(row, f"r{row}", None, None, arrival_s, None, n_prompt, n_output, array("q"))


AZURE = Reader(
    name="azure",
    describes="Azure CSV: TIMESTAMP (a date), ContextTokens, GeneratedTokens",
    takes=frozenset(),
    matches=matches,
    open=open_azure,
)
