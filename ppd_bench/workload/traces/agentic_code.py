"""Agentic coding sessions: one JSON object per session with its requests, sub-agents nested, block ids local to the session.

``requests`` hold ``t`` (s from the session's start), ``in``, ``out``, ``hash_ids`` of 64-token blocks (the partial tail has
none), ``api_time``, ``think_time`` (s between the end of the request before and this one) and ``type``; an entry of type
``subagent`` holds requests of its own, their ``t`` counted from the sub-agent's start.

Decided here: ids become global by the session's position in the source (the upper 31 bits), so that sessions share nothing and
a session shares what it shared before, also with its sub-agents. A sub-agent is a session of its own, ``SESSION/AGENT``, since
it has a prompt, turns and a cache chain of its own; its first request names in ``parent_id`` the last request of its parent
that began before it, and its ``delay_s`` counts from the end of that one. Sessions have no common clock: ``arrival_s`` is
null, and the loop is completion.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.checks import TAIL_MISMATCH, Sample, check_blocks
from ppd_bench.workload.traces.reader import Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Entry, Head, Source
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import block_ids, n_blocks, seconds, tokens

LOCAL_BITS = 32
KEYS = {"id", "block_size", "hash_id_scope", "requests"}
NO_REQUESTS = "session without requests"
ANOTHER_BLOCK_SIZE = "session with another block size than the first"
DUPLICATE = "session id occurs again; given a number"


def matches(head: Head) -> bool:
    return head.keys >= KEYS


def open_agentic_code(source: Source, options: ReadOptions) -> Trace:
    first = next(((file.place(number), entry) for file, number, entry in source.mappings(Pass())), None)
    if first is None:
        raise SpecError(f"{source.shown}: no session in it")
    place, entry = first
    size, scope = entry.get("block_size"), entry.get("hash_id_scope")
    if not isinstance(size, int) or size < 1 or scope not in ("local", "global"):
        raise SpecError(
            f"{place}: block_size {size!r} and hash_id_scope {scope!r}; needed: a whole number, and local or global"
        )
    declared = TraceFormat(
        name="agentic_code",
        time_unit="s",
        block_tokens=options.block_tokens or size,
        tail=options.tail or "floor",
        id_scope="local" if scope == "local" else "global",
        row_means="full_prompt",
        loop="completion",
        token_count="recorded",
    )
    check_blocks(list(_samples(entry, place)), declared.block_tokens or 0, declared.tail or "")
    return Trace(
        source=source.shown,
        format=declared,
        read=lambda met: _rows(source, declared, size, met),
        standing_notes=(
            "sub-agents are sessions of their own (SESSION/AGENT), started by a request of their parent; "
            "sessions have no common clock, so there are no arrivals",
        ),
    )


def _samples(entry: Entry, place: str) -> Iterator[Sample]:
    requests = entry.get("requests")
    for request in requests if isinstance(requests, list) else []:
        if isinstance(request, dict) and "hash_ids" in request:
            try:
                yield Sample(place, None, tokens(request, "in"), len(block_ids(request, "hash_ids")))
            except BadRow:
                continue


def _rows(source: Source, declared: TraceFormat, block_size: int, met: Pass) -> Iterator[TraceRow]:
    names: dict[str, int] = {}
    for index, (file, number, entry) in enumerate(source.mappings(met)):
        place, requests = file.place(number), entry.get("requests")
        if not isinstance(requests, list) or not requests:
            met.drop(NO_REQUESTS, place)
            continue
        if entry.get("block_size") != block_size:
            met.drop(ANOTHER_BLOCK_SIZE, place)
            continue
        name = str(entry.get("id") or f"s{index}")
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            met.remark(DUPLICATE, place)
            name = f"{name}#{names[name]}"
        offset = index << LOCAL_BITS if declared.id_scope == "local" else 0
        yield from _Agent(name=name, offset=offset, place=place, declared=declared).rows(requests, met)


@dataclass(slots=True, kw_only=True)
class _Agent:
    """One chain of requests: a session, or a sub-agent of one. Times are seconds since the session's start."""

    name: str
    offset: int
    place: str
    declared: TraceFormat
    start_s: float = 0.0
    parent_id: str | None = None
    parent_end_s: float | None = None
    turn: int = 0
    last_id: str | None = None
    last_end_s: float | None = None

    def rows(self, requests: list[object], met: Pass) -> Iterator[TraceRow]:
        for index, request in enumerate(requests, 1):
            place = f"{self.place}: {self.name}: request {index}"
            if not isinstance(request, dict):
                met.drop("request is not an object", place)
            elif request.get("type") == "subagent":
                yield from self._sub_agent(request, index, met, place)
            else:
                try:
                    given = self._row(request, met.counts.n_read)
                except BadRow as bad:
                    met.drop(str(bad), place)
                    continue
                met.keep()
                yield given

    def _sub_agent(self, entry: Entry, index: int, met: Pass, place: str) -> Iterator[TraceRow]:
        requests = entry.get("requests")
        if not isinstance(requests, list) or not requests:
            met.drop("sub-agent without requests", place)
            return
        try:
            start_s = self.start_s + seconds(entry, "t")
        except BadRow as bad:
            met.drop(f"sub-agent's {bad}", place)
            return
        agent = _Agent(
            name=f"{self.name}/{entry.get('agent_id') or f'agent_{index}'}",
            offset=self.offset,
            place=self.place,
            declared=self.declared,
            start_s=start_s,
            parent_id=self.last_id,
            parent_end_s=self.last_end_s,
        )
        yield from agent.rows(requests, met)

    def _row(self, request: Entry, row: int) -> TraceRow:
        n_prompt, n_output = tokens(request, "in", least=1), tokens(request, "out")
        ids = block_ids(request, "hash_ids")
        if len(ids) != n_blocks(n_prompt, self.declared.block_tokens or 0, self.declared.tail or ""):
            raise BadRow(TAIL_MISMATCH)
        at_s = self.start_s + seconds(request, "t")
        delay_s = self._delay(request, at_s)
        self.turn += 1
        request_id = f"{self.name}.t{self.turn}"
        given = TraceRow(
            row, request_id, self.name, self.turn, None, delay_s, n_prompt, n_output, self._global(ids),
            self.parent_id if self.turn == 1 else None,
        )  # fmt: skip
        self.last_id = request_id
        self.last_end_s = at_s + seconds(request, "api_time") if request.get("api_time") is not None else None
        return given

    def _delay(self, request: Entry, at_s: float) -> float | None:
        """Recorded think time, else from instants; of a first request, since the end of the one that started its agent."""
        if self.turn == 0:
            return None if self.parent_end_s is None else max(0.0, at_s - self.parent_end_s)
        if request.get("think_time") is not None:
            return max(0.0, seconds(request, "think_time"))
        return None if self.last_end_s is None else max(0.0, at_s - self.last_end_s)

    def _global(self, ids: array[int]) -> array[int]:
        if not self.offset:
            return ids
        if ids and not 0 <= min(ids) <= max(ids) < 1 << LOCAL_BITS:
            raise BadRow(f"a local block id is not a number of {LOCAL_BITS} bits")
        return array("q", [self.offset + i for i in ids])


AGENTIC_CODE = Reader(
    name="agentic_code",
    describes="agentic coding sessions: one JSON object each, local block ids, sub-agents nested",
    takes=frozenset({"block_tokens", "tail"}),
    matches=matches,
    open=open_agentic_code,
)
