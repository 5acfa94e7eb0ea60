"""Recorded agent sessions as flattened text: ``timestamp`` (us since 1970), ``session_id``, ``input`` (the whole prompt),
``output``.

Rows of a file are not in order; they are given in order of their timestamps, file by file, with ``row`` their place in the
source. One file at a time is in memory. Prompts are hashed as they are, without framing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.checks import Clock, Sample, check_unit
from ppd_bench.workload.traces.hashing import TokenBlocks
from ppd_bench.workload.traces.reader import Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Entry, Head, Source
from ppd_bench.workload.traces.text_tokens import TextTokens, text_tokens
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import UNITS_PER_S, seconds

KEYS = {"timestamp", "session_id", "input", "output"}


class _Timed(NamedTuple):
    time: float
    row: int
    place: str
    session_id: str
    input: str
    output: str


def matches(head: Head) -> bool:
    return head.keys >= KEYS


def open_flat_sessions(source: Source, options: ReadOptions) -> Trace:
    unit = options.time_unit or "us"
    coder = text_tokens(options.tokenizer)
    declared = TraceFormat(
        name="flat_sessions",
        time_unit=unit,
        block_tokens=options.block_tokens or 16,
        tail="floor",
        id_scope="global",
        row_means="full_prompt",
        loop="timestamps",
        token_count=coder.kind,
    )
    samples = [Sample(one.place, one.time, 0, None) for one in _timed(source, Pass())]
    check_unit(samples, unit, stated=options.time_unit is not None)
    origin = min((s.time for s in samples if s.time is not None), default=0.0)

    def read(met: Pass) -> Iterator[TraceRow]:
        return _rows(source, declared, coder, Clock(origin, UNITS_PER_S[unit]), met)

    return Trace(source=source.shown, format=declared, read=read, standing_notes=(coder.note,))


def _timed(source: Source, met: Pass) -> Iterator[_Timed]:
    """The usable rows, sorted within each file. What is dropped is counted; what is given is not yet."""
    position = 0
    for file in source.files:
        usable = []
        one = Source(shown=source.shown, files=(file,))
        for _, number, entry in one.mappings(met):
            place = file.place(number)
            try:
                usable.append(_Timed(seconds(entry, "timestamp"), position, place, *_texts(entry)))
            except BadRow as bad:
                met.drop(str(bad), place)
            position += 1
        yield from sorted(usable, key=lambda row: (row.time, row.row))


def _texts(entry: Entry) -> tuple[str, str, str]:
    session_id, prompt, answer = entry.get("session_id"), entry.get("input"), entry.get("output")
    if session_id is None:
        raise BadRow("session_id is missing")
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise BadRow("input or output is not a text")
    if not prompt:
        raise BadRow("empty input")
    return str(session_id), prompt, answer


def _rows(source: Source, declared: TraceFormat, coder: TextTokens, clock: Clock, met: Pass) -> Iterator[TraceRow]:
    turns: dict[str, int] = {}
    latest: dict[str, float] = {}
    for one in _timed(source, met):
        if one.time < latest.get(one.session_id, one.time):
            met.drop("earlier than a row of its session in a file before", one.place)
            continue
        latest[one.session_id] = one.time
        prompt, answer = coder.encode([one.input, one.output])
        blocks = TokenBlocks(declared.block_tokens or 0)
        blocks.extend(prompt)
        turn = turns[one.session_id] = turns.get(one.session_id, 0) + 1
        met.keep()
        yield TraceRow(
            row=one.row,
            request_id=f"{one.session_id}.t{turn}",
            session_id=one.session_id,
            turn=turn,
            arrival_s=clock.since_start(one.time),
            delay_s=None,
            prompt_tokens=len(prompt),
            output_tokens=len(answer),
            block_ids=blocks.ids,
        )


FLAT_SESSIONS = Reader(
    name="flat_sessions",
    describes="flattened agent sessions, JSON lines: timestamp (us), session_id, input, output",
    takes=frozenset({"tokenizer", "block_tokens", "time_unit"}),
    matches=matches,
    open=open_flat_sessions,
)
