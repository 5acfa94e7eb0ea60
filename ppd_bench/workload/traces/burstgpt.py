"""BurstGPT: CSV of ``Timestamp`` (s), ``Model``, ``Request tokens``, ``Response tokens``, ``Total tokens``, ``Log Type``.

Source: HPMLL/BurstGPT. A response of 0 tokens is a failed request, as its authors say, and is dropped by name. Later releases
have ``Session ID``, which is taken; there are no block ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.checks import Clock, check_unit, origin_of
from ppd_bench.workload.traces.csv_rows import cells, csv_samples
from ppd_bench.workload.traces.reader import Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Head, Source
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import UNITS_PER_S, tokens_in

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
FAILED = "failed request (0 response tokens)"
TOTAL = "Total tokens is not the sum of request and response"


def matches(head: Head) -> bool:
    return head.kind == "csv" and head.keys >= set(COLUMNS)


def open_burstgpt(source: Source, options: ReadOptions) -> Trace:
    unit = options.time_unit or "s"
    declared = TraceFormat(
        name="burstgpt",
        time_unit=unit,
        block_tokens=None,
        tail=None,
        id_scope=None,
        row_means="full_prompt",
        loop="timestamps",
        token_count="recorded",
    )
    samples = csv_samples(source, COLUMNS, lambda row: number_in(row["Timestamp"]))
    check_unit(samples, unit, stated=options.time_unit is not None)
    origin = origin_of(samples)

    def read(met: Pass) -> Iterator[TraceRow]:
        return _rows(source, Clock(origin, UNITS_PER_S[unit]), met)

    return Trace(source=source.shown, format=declared, read=read)


def number_in(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadRow("Timestamp is not a number") from None


def _rows(source: Source, clock: Clock, met: Pass) -> Iterator[TraceRow]:
    turns: dict[str, int] = {}
    for file, number, cell in cells(source, COLUMNS, met):
        row = met.counts.n_read
        try:
            n_prompt, n_output = (
                tokens_in(cell["Request tokens"], "Request tokens"),
                tokens_in(cell["Response tokens"], "Response tokens"),
            )
            if n_output == 0:
                raise BadRow(FAILED)
            if n_prompt == 0:
                raise BadRow("Request tokens is not a whole number of at least 1")
            if cell.get("Total tokens") and tokens_in(cell["Total tokens"], "Total tokens") != n_prompt + n_output:
                raise BadRow(TOTAL)
            arrival_s = clock.since_start(number_in(cell["Timestamp"]))
        except BadRow as bad:
            met.drop(str(bad), file.place(number))
            continue
        if clock.went_back:
            met.remark(Clock.BACK, file.place(number))
        session_id = cell.get("Session ID") or None
        turn = None
        if session_id:
            turn = turns[session_id] = turns.get(session_id, 0) + 1
        met.keep()
        yield TraceRow(row, f"r{row}", session_id, turn, arrival_s, None, n_prompt, n_output, array("q"))


BURSTGPT = Reader(
    name="burstgpt",
    describes="BurstGPT CSV: Timestamp (s), request and response tokens",
    takes=frozenset({"time_unit"}),
    matches=matches,
    open=open_burstgpt,
)
