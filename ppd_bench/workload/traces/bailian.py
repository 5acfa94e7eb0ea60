"""Bailian traces: ``chat_id``, ``parent_chat_id`` (-1: none), ``timestamp`` (s), lengths, ``hash_ids`` of 16-token blocks.

Source: alibaba-edu/qwen-bailian-usagetraces-anon. Each row is a full prompt; ids are global and the partial last block has one. A
session is a chain of chats: a row goes on with its parent's session. Where several rows have one parent, the first goes on and
each other begins a session of its own, with ``parent_id`` set; a parent that has not been read yet (cut off, or later) begins one
as well.
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

KEYS = {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"}
NO_PARENT = -1
DUPLICATE = "chat_id occurs a second time"
ABSENT = "names a parent that was not read before it; begins a session"
BRANCH = "has the same parent as an earlier row; begins a session"


def matches(head: Head) -> bool:
    return head.keys >= KEYS


def open_bailian(source: Source, options: ReadOptions) -> Trace:
    unit = options.time_unit or "s"
    declared = TraceFormat(
        name="bailian",
        time_unit=unit,
        block_tokens=options.block_tokens or 16,
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


class _Chats:
    """Which session and turn a chat belongs to, from the chats read before it."""

    def __init__(self) -> None:
        self._place: dict[int, tuple[int, int]] = {}
        self._continued: set[int] = set()

    def add(self, chat: int, parent: int) -> tuple[int, int, bool, str | None]:
        """Session (its first chat's id), turn, whether ``parent`` began a session of its own, and what is to be remarked.

        Raises:
            BadRow: the chat was there already.
        """
        if chat in self._place:
            raise BadRow(DUPLICATE)
        known = self._place.get(parent) if parent != NO_PARENT else None
        branches = known is not None and parent in self._continued
        remark = BRANCH if branches else None
        if known is None and parent != NO_PARENT:
            remark = ABSENT
        session, turn = (chat, 1) if known is None or branches else (known[0], known[1] + 1)
        if known is not None and not branches:
            self._continued.add(parent)
        self._place[chat] = (session, turn)
        return session, turn, branches, remark


def _rows(source: Source, declared: TraceFormat, clock: Clock, met: Pass) -> Iterator[TraceRow]:
    chats = _Chats()
    block_tokens, tail = declared.block_tokens or 0, declared.tail or ""
    for file, number, entry in source.mappings(met):
        row = met.counts.n_read
        try:
            n_prompt, n_output = tokens(entry, "input_length", least=1), tokens(entry, "output_length")
            ids = block_ids(entry, "hash_ids")
            if len(ids) != n_blocks(n_prompt, block_tokens, tail):
                raise BadRow(TAIL_MISMATCH)
            chat, parent = tokens(entry, "chat_id"), tokens(entry, "parent_chat_id", least=NO_PARENT)
            arrival_s = clock.since_start(seconds(entry, "timestamp"))
            session, turn, branches, remark = chats.add(chat, parent)
        except BadRow as bad:
            met.drop(str(bad), file.place(number))
            continue
        for what in (remark, Clock.BACK if clock.went_back else None):
            if what:
                met.remark(what, file.place(number))
        met.keep()
        yield TraceRow(
            row,
            f"c{chat}",
            f"c{session}",
            turn,
            arrival_s,
            None,
            n_prompt,
            n_output,
            ids,
            f"c{parent}" if branches else None,
        )


BAILIAN = Reader(
    name="bailian",
    describes="Bailian JSON lines: chat_id, parent_chat_id, timestamp (s), lengths, hash_ids of 16-token blocks",
    takes=HASH_OPTIONS,
    matches=matches,
    open=open_bailian,
)
