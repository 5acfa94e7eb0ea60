"""Bailian traces: ``chat_id``, ``parent_chat_id`` (-1: none), ``timestamp`` (s), lengths, ``hash_ids`` of 16-token blocks.

Source: alibaba-edu/qwen-bailian-usagetraces-anon. Each row is a full prompt; ids are global and the partial last block has one. A
session is a chain of chats: a row goes on with its parent's session. Where several rows have one parent, the first goes on and
each other begins a session of its own, with ``parent_id`` set; a parent that has not been read yet (cut off, or later) begins one
as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.checks import Clock
from ppd_bench.workload.traces.hashed import open_hashed, read_hashed
from ppd_bench.workload.traces.reader import HASH_OPTIONS, Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Head, Source
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import tokens

KEYS = {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"}
NO_PARENT = -1
DUPLICATE = "chat_id occurs a second time"
ABSENT = "names a parent that was not read before it; begins a session"
BRANCH = "has the same parent as an earlier row; begins a session"


def matches(head: Head) -> bool:
    return head.keys >= KEYS


def open_bailian(source: Source, options: ReadOptions) -> Trace:
    return open_hashed(source, options, _rows, name="bailian", time_unit="s", block_tokens=16)


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
    for file, number, entry in source.mappings(met):
        row = met.counts.n_read
        try:
            n_prompt, n_output, ids, arrival_s = read_hashed(entry, declared, clock)
            chat, parent = tokens(entry, "chat_id"), tokens(entry, "parent_chat_id", least=NO_PARENT)
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
