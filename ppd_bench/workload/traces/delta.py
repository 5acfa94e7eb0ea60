"""Delta traces: later rows of a session carry only the new tokens, with ``delay`` (ms) in place of ``timestamp`` (ms).

As ai-dynamo/aiperf reads multi-turn Mooncake traces: ``session_id``, ``input_length``, ``output_length``, ``hash_ids`` of the
new tokens (512-token blocks, the partial last one has an id). A row given here is a full prompt: everything sent and generated
before it in its session, then the new tokens. Its block ids are made here, over full blocks only (tail rule floor): recorded
content is shared where recorded ids are equal at equal places, generated tokens belong to their session alone. The last prompt
of every session is in memory, as ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ppd_bench.core.errors import SpecError
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
from ppd_bench.workload.traces.hashing import PartBlocks, text_id
from ppd_bench.workload.traces.reader import HASH_OPTIONS, Reader, ReadOptions, Unit
from ppd_bench.workload.traces.source import BadRow, Entry, Head, Source
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import UNITS_PER_S, block_ids, n_blocks, seconds, tokens

KEYS = {"session_id", "input_length", "output_length", "delay"}
RECORDED, GENERATED, UNNAMED = 0, 1, 2
"""Kinds of content: of a recorded id, of an answer, of a tail without an id."""
BROKEN = "an earlier row of its session was dropped"
UNTIMED = "has neither timestamp nor delay"


def matches(head: Head) -> bool:
    return head.keys >= KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """Of the ids in the source, which are not those of the rows given."""

    block_tokens: int
    tail: str
    unit: Unit
    origin: float


@dataclass(slots=True, kw_only=True)
class _Session:
    blocks: PartBlocks
    turn: int = 0
    broken: bool = False


@dataclass(slots=True)
class _Sessions:
    recorded: _Recorded
    by_id: dict[str, _Session] = field(default_factory=dict)

    def of(self, session_id: str) -> _Session:
        if session_id not in self.by_id:
            self.by_id[session_id] = _Session(blocks=PartBlocks(self.recorded.block_tokens))
        return self.by_id[session_id]


def open_delta(source: Source, options: ReadOptions) -> Trace:
    recorded_tail = options.tail or "ceil"
    unit, block_tokens = options.time_unit or "ms", options.block_tokens or 512
    declared = TraceFormat(
        name="delta",
        time_unit=unit,
        block_tokens=block_tokens,
        tail="floor",
        id_scope="global",
        row_means="delta",
        loop="completion",
        token_count="recorded",
    )
    samples = head_samples(source, _sample)
    check_blocks(samples, block_tokens, recorded_tail)
    check_unit(samples, unit, stated=options.time_unit is not None)
    recorded = _Recorded(block_tokens=block_tokens, tail=recorded_tail, unit=unit, origin=origin_of(samples))

    return Trace(
        source=source.shown,
        format=declared,
        read=lambda met: _rows(source, recorded, met),
        standing_notes=(
            "rows of the source are deltas; given here are full prompts: what was sent and generated before in the session, "
            "then the new tokens; block ids are made from the recorded ones, of full blocks only",
        ),
    )


def _sample(entry: Entry, place: str) -> Sample:
    time = seconds(entry, "timestamp") if entry.get("timestamp") is not None else None
    n_ids = len(block_ids(entry, "hash_ids")) if entry.get("hash_ids") is not None else None
    return Sample(place, time, tokens(entry, "input_length"), n_ids)


def _rows(source: Source, recorded: _Recorded, met: Pass) -> Iterator[TraceRow]:
    sessions = _Sessions(recorded)
    clock = Clock(recorded.origin, UNITS_PER_S[recorded.unit])
    for file, number, entry in source.mappings(met):
        row, place = met.counts.n_read, file.place(number)
        session_id = entry.get("session_id")
        if session_id is None:
            met.drop("session_id is missing", place)
            continue
        session = sessions.of(str(session_id))
        try:
            if session.broken:
                raise BadRow(BROKEN)
            given = _row(entry, row, str(session_id), session, recorded, clock, place)
        except BadRow as bad:
            session.broken = True
            met.drop(str(bad), place)
            continue
        if given.arrival_s is None and given.delay_s is None:
            met.remark(UNTIMED, place)
        if given.arrival_s is not None and clock.went_back:
            met.remark(Clock.BACK, place)
        met.keep()
        yield given


def _row(
    entry: Entry, row: int, session_id: str, session: _Session, recorded: _Recorded, clock: Clock, place: str
) -> TraceRow:
    """
    Raises:
        BadRow: a value that cannot be used.
        SpecError: a later row with a timestamp, which is not known to be a delta.
    """
    n_new, n_output = tokens(entry, "input_length", least=1), tokens(entry, "output_length")
    later = session.turn > 0
    if later and entry.get("timestamp") is not None:
        raise SpecError(
            f"{place}: a later row of session {session_id!r} has a timestamp: in a delta trace it has a delay, "
            "and only its new tokens; if every row is a full prompt, remove the delays and read it with --format mooncake"
        )
    arrival_s = clock.since_start(seconds(entry, "timestamp")) if entry.get("timestamp") is not None else None
    delay_s = seconds(entry, "delay", UNITS_PER_S[recorded.unit]) if later and entry.get("delay") is not None else None
    request_id = f"{session_id}.t{session.turn + 1}"
    _add_new(session.blocks, entry, n_new, recorded, request_id)
    session.turn += 1
    given = TraceRow(
        row,
        request_id,
        session_id,
        session.turn,
        arrival_s,
        delay_s,
        session.blocks.n_tokens,
        n_output,
        session.blocks.ids[:],
    )
    session.blocks.extend(GENERATED, text_id(request_id), n_output)
    return given


def _add_new(blocks: PartBlocks, entry: Entry, n_new: int, recorded: _Recorded, request_id: str) -> None:
    ids = block_ids(entry, "hash_ids") if entry.get("hash_ids") is not None else None
    if ids is not None and len(ids) != n_blocks(n_new, recorded.block_tokens, recorded.tail):
        raise BadRow(TAIL_MISMATCH)
    left = n_new
    for block_id in ids or ():
        taken = min(left, recorded.block_tokens)
        blocks.extend(RECORDED, block_id, taken)
        left -= taken
    if left:
        blocks.extend(UNNAMED, text_id(request_id), left)


DELTA = Reader(
    name="delta",
    describes="delta JSON lines: session_id, timestamp or delay (ms), lengths and hash_ids of the new tokens only",
    takes=HASH_OPTIONS,
    matches=matches,
    open=open_delta,
)
