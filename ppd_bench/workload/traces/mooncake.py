"""Mooncake traces: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` of 512-token blocks.

Source: kvcache-ai/Mooncake, FAST'25 traces. Ids are global and chained (each stands for its whole prefix), and the partial
last block has one (tail rule ceil). A ``session_id`` is taken where a trace has one; every row is a full prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.checks import (
    TAIL_MISMATCH,
    Clock,
    Sample,
    check_blocks,
    check_unit,
    head_samples,
    origin_of,
)
from ppd_bench.workload.traces.reader import HASH_OPTIONS, Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Entry, Head, Source
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import UNITS_PER_S, block_ids, n_blocks, seconds, tokens

KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}


def matches(head: Head) -> bool:
    return head.keys >= KEYS and not head.keys & {"chat_id", "delay"}


def open_mooncake(source: Source, options: ReadOptions) -> Trace:
    unit = options.time_unit or "ms"
    declared = TraceFormat(
        name="mooncake",
        time_unit=unit,
        block_tokens=options.block_tokens or 512,
        tail=options.tail or "ceil",
        id_scope="global",
        row_means="full_prompt",
        loop="timestamps",
        token_count="recorded",
    )
    samples = head_samples(source, _sample)
    check_blocks(samples, declared.block_tokens or 0, declared.tail or "")
    check_unit(samples, unit, stated=options.time_unit is not None)
    origin = origin_of(samples)

    def read(met: Pass) -> Iterator[TraceRow]:
        return _rows(source, declared, Clock(origin, UNITS_PER_S[unit]), met)

    return Trace(source=source.shown, format=declared, read=read)


def _sample(entry: Entry, place: str) -> Sample:
    return Sample(place, seconds(entry, "timestamp"), tokens(entry, "input_length"), len(block_ids(entry, "hash_ids")))


def _rows(source: Source, declared: TraceFormat, clock: Clock, met: Pass) -> Iterator[TraceRow]:
    turns: dict[str, int] = {}
    block_tokens, tail = declared.block_tokens or 0, declared.tail or ""
    for file, number, entry in source.mappings(met):
        row = met.counts.n_read
        try:
            n_prompt, n_output = tokens(entry, "input_length", least=1), tokens(entry, "output_length")
            ids = block_ids(entry, "hash_ids")
            if len(ids) != n_blocks(n_prompt, block_tokens, tail):
                raise BadRow(TAIL_MISMATCH)
            arrival_s = clock.since_start(seconds(entry, "timestamp"))
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
