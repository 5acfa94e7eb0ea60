"""Mooncake traces: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` of 512-token blocks.

Source: kvcache-ai/Mooncake, FAST'25 traces. Ids are global and chained (each stands for its whole prefix), and the partial
last block has one (tail rule ceil). A ``session_id`` is taken where a trace has one; every row is a full prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.checks import Clock
from ppd_bench.workload.traces.hashed import open_hashed, read_hashed
from ppd_bench.workload.traces.reader import HASH_OPTIONS, Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Head, Source
from ppd_bench.workload.traces.trace import Pass, Trace

KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}


def matches(head: Head) -> bool:
    return head.keys >= KEYS and not head.keys & {"chat_id", "delay"}


def open_mooncake(source: Source, options: ReadOptions) -> Trace:
    return open_hashed(source, options, _rows, name="mooncake", time_unit="ms", block_tokens=512)


def _rows(source: Source, declared: TraceFormat, clock: Clock, met: Pass) -> Iterator[TraceRow]:
    turns: dict[str, int] = {}
    for file, number, entry in source.mappings(met):
        row = met.counts.n_read
        try:
            n_prompt, n_output, ids, arrival_s = read_hashed(entry, declared, clock)
        except BadRow as bad:
            met.drop(str(bad), file.place(number))
            continue
        if clock.went_back:
            met.remark(Clock.BACK, file.place(number))
        session_id = entry.get("session_id")
        turn = None
        if session_id is not None:
            session_id = str(session_id)
            turn = turns[session_id] = turns.get(session_id, 0) + 1
        met.keep()
        yield TraceRow(row, f"r{row}", session_id, turn, arrival_s, None, n_prompt, n_output, ids)


MOONCAKE = Reader(
    name="mooncake",
    describes="Mooncake JSON lines: timestamp (ms), lengths, hash_ids of 512-token blocks",
    takes=HASH_OPTIONS,
    matches=matches,
    open=open_mooncake,
)
