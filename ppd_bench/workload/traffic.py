"""From recorded requests to the conversations of a point: what can be played, when it begins, and what follows on what.

``record`` chooses the requests and joins them; ``traffic_sessions`` gives them their instants. Nothing is left out silently: rows
read = kept + dropped, by named reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import canonical_json, plain
from ppd_bench.core.trace import RowCounts, TraceRow
from ppd_bench.core.workload import Session, TrafficFigures, TrafficSpec, Turn
from ppd_bench.workload.generate import poisson_arrivals, uniforms

NO_PROMPT = "no prompt tokens"
NO_OUTPUT = "no output tokens: nothing was generated"
TOO_LONG = "prompt and answer over the token cap"
SHRUNK = "prompt shorter than the conversation before it, and no block ids to tell what is left"
NO_PARENT = "started by a request that was left out"
OVER_REQUESTS = "after the wanted number of requests"

_SENDABLE = re.compile(r"[\x21-\x7e]{1,120}")

_COPY_STEP = 0x9E3779B97F4A7C15
"""Added to the block ids of each further copy of a conversation, wrapping at 64 bits: another content, the same sharing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """Where recorded traffic lies and how it is read; null leaves that to the format. Travels beside points, which hold its
    hash."""

    sha256: str
    path: str
    format: str | None = None
    tokenizer: str | None = None
    block_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """Requests of one conversation in order. ``after``: the request of another thread that starts it, null for a root."""

    session_id: str
    rows: tuple[TraceRow, ...]
    after: str | None = None


Family = tuple[Thread, ...]
"""A conversation that arrives, and behind it those that its requests start (sub-agents, branches), starters first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What of a trace can be played. ``block_tokens``: of its block ids, null without any."""

    families: tuple[Family, ...]
    block_tokens: int | None
    counts: RowCounts

    @property
    def figures(self) -> TrafficFigures:
        """
        Raises:
            SpecError: nothing is left to play.
        """
        rows = [row for family in self.families for thread in family for row in thread.rows]
        if not rows:
            told = "; ".join(f"{n:,} x {reason}" for reason, n in self.counts.dropped.items()) or "the trace is empty"
            raise SpecError(
                f"no request of the trace can be played: {told}; 'ppd-bench trace describe' shows what lengths it has"
            )
        instants = [row.arrival_s for row in rows if row.arrival_s is not None]
        return TrafficFigures(
            n_sessions=len(self.families),
            n_requests=len(rows),
            duration_s=max(instants) - min(instants) if instants else 0.0,
            prompt_tokens=sum(row.prompt_tokens for row in rows) / len(rows),
            output_tokens=sum(row.output_tokens for row in rows) / len(rows),
            longest_tokens=max(row.prompt_tokens + row.output_tokens for row in rows),
            followup=self._followup(),
        )

    def _followup(self) -> tuple[int, int, int] | None:
        """Mean context, new input (at least 1) and output tokens of turns 2 and later."""
        lengths = []
        for thread in (thread for family in self.families for thread in family):
            for before, row in itertools.pairwise(thread.rows):
                context = _context_tokens(row, before, self.block_tokens)
                lengths.append((context, row.prompt_tokens - context, row.output_tokens))
        if not lengths:
            return None
        context, new, output = (round(sum(column) / len(lengths)) for column in zip(*lengths, strict=True))
        return context, max(new, 1), max(output, 1)


def record(
    rows: Iterable[TraceRow],
    *,
    block_tokens: int | None,
    max_request_tokens: int | None = None,
    max_requests: int | None = None,
) -> Recording:
    """Choose what can be played and join it into conversations, in order of their first request.

    A request that is left out leaves its conversation one turn shorter; what a left-out request started is left out too.
    """
    counts = RowCounts()
    chosen = _Threads()
    for row in rows:
        counts.n_read += 1
        wrong = _unusable(row, max_request_tokens)
        if wrong is None:
            chosen.add(row)
        else:
            counts.drop(wrong)
    families = _limited(_families(_without_shrunk(chosen.in_order(), counts), counts), max_requests, counts)
    counts.n_kept = counts.n_read - counts.n_dropped
    return Recording(families=tuple(families), block_tokens=block_tokens, counts=counts)


def _unusable(row: TraceRow, max_request_tokens: int | None) -> str | None:
    if row.prompt_tokens < 1:
        return NO_PROMPT
    if row.output_tokens < 1:
        return NO_OUTPUT
    if max_request_tokens is not None and row.prompt_tokens + row.output_tokens > max_request_tokens:
        return TOO_LONG
    return None


@dataclass(slots=True)
class _Threads:
    """Rows by conversation; a row without one is a conversation of its own."""

    rows: dict[str, list[TraceRow]] = field(default_factory=dict)

    def add(self, row: TraceRow) -> None:
        self.rows.setdefault(row.session_id if row.session_id is not None else row.request_id, []).append(row)

    def in_order(self) -> list[Thread]:
        """By first arrival, those without one behind, in the source's order."""
        threads = [_thread(session_id, rows) for session_id, rows in self.rows.items()]
        return sorted(threads, key=lambda t: float("inf") if t.rows[0].arrival_s is None else t.rows[0].arrival_s)


def _thread(session_id: str, rows: list[TraceRow]) -> Thread:
    ordered = tuple(sorted(rows, key=lambda row: row.turn or 0))
    return Thread(session_id=session_id, rows=ordered, after=ordered[0].parent_id)


def _without_shrunk(threads: list[Thread], counts: RowCounts) -> list[Thread]:
    """Private content can only grow: without block ids nobody knows what a shorter prompt kept of the one before."""
    found = []
    for thread in threads:
        kept: list[TraceRow] = []
        for row in thread.rows:
            if kept and not row.block_ids and row.prompt_tokens <= kept[-1].prompt_tokens + kept[-1].output_tokens:
                counts.drop(SHRUNK)
            else:
                kept.append(row)
        found.append(dataclasses.replace(thread, rows=tuple(kept)))
    return found


def _families(threads: list[Thread], counts: RowCounts) -> list[Family]:
    started: dict[str, list[Thread]] = {}
    for thread in threads:
        if thread.after is not None:
            started.setdefault(thread.after, []).append(thread)
    families = [tuple(_with_started(thread, started)) for thread in threads if thread.after is None]
    n_orphans = sum(len(thread.rows) for orphans in started.values() for thread in orphans)
    if n_orphans:
        counts.drop(NO_PARENT, n_orphans)
    return families


def _with_started(thread: Thread, started: dict[str, list[Thread]]) -> Iterator[Thread]:
    """A thread and what its requests start, which leaves ``started``."""
    yield thread
    for row in thread.rows:
        for child in started.pop(row.request_id, ()):
            yield from _with_started(child, started)


def _limited(families: list[Family], max_requests: int | None, counts: RowCounts) -> list[Family]:
    if max_requests is None:
        return families
    kept: list[Family] = []
    n_requests = n_over = 0
    for family in families:
        n = sum(len(thread.rows) for thread in family)
        if n_requests < max_requests:
            kept.append(family)
            n_requests += n
        else:
            n_over += n
    if n_over:
        counts.drop(OVER_REQUESTS, n_over)
    return kept


def traffic_sessions(
    recording: Recording,
    traffic: TrafficSpec,
    *,
    qps: float,
    duration_s: float,
    think_time_s: float,
    seed: int,
    repeat: int,
    max_output_tokens: int,
) -> tuple[Session, ...]:
    """The conversations of a point. ``think_time_s``: before follow-up turns whose recorded time is not known.

    With ``arrivals: poisson`` conversations are drawn without return until all have been used, then anew with contents of their
    own, and those that arrive in [0, ``duration_s``) are played; ``qps`` and ``duration_s`` mean nothing else here.

    Raises:
        SpecError: the trace has no instants where the traffic needs them, or limits that contradict the loop.
    """
    check_playable(recording, traffic)
    plan = _Plan(recording, traffic, think_time_s, max_output_tokens)
    if traffic.arrivals == "recorded":
        origin_s = min((start for start in map(_start_s, recording.families) if start is not None), default=0.0)
        starts = [((_start_s(family) or origin_s) - origin_s) / traffic.time_scale for family in recording.families]
        placed = zip(recording.families, starts, range(len(starts)), strict=True)
        return tuple(session for family, start_s, _ in placed for session in plan.sessions(family, start_s, 0))
    material = {"traffic": plain(traffic), "qps": qps, "duration_s": duration_s, "seed": seed, "repeat": repeat}
    entropy = int.from_bytes(hashlib.sha256(canonical_json(material).encode()).digest(), "big")
    draws = uniforms(entropy)
    arrivals = list(poisson_arrivals(qps, duration_s, draws))
    drawn = _drawn(len(recording.families), len(arrivals), draws)
    return tuple(
        session
        for start_s, (index, copy) in zip(arrivals, drawn, strict=True)
        for session in plan.sessions(recording.families[index], start_s, copy)
    )


def _start_s(family: Family) -> float | None:
    return family[0].rows[0].arrival_s


def check_playable(recording: Recording, traffic: TrafficSpec) -> None:
    """Whether the recording has the times that this way of playing it needs.

    Raises:
        SpecError: it has not, or two wishes contradict each other.
    """
    instants = [row.arrival_s is not None for family in recording.families for thread in family for row in thread.rows]
    starts = [_start_s(family) is not None for family in recording.families]
    problems = []
    if traffic.loop == "timestamps" and not all(instants):
        problems.append(
            f"{traffic.source}: not every request has an instant, so its loop is completion (--loop completion; in a sweep file "
            "loop: completion)"
        )
    if traffic.arrivals == "recorded" and not all(starts) and traffic.max_inflight_sessions is None:
        problems.append(
            f"{traffic.source}: conversations have no arrival times: give a rate to draw them at (--qps; in a sweep file "
            "arrivals: poisson), or how many are to be under way at a time (--max-inflight-sessions; in a sweep file "
            "max_inflight_sessions)"
        )
    if traffic.loop == "timestamps" and traffic.max_inflight_sessions is not None:
        problems.append(
            f"{traffic.source}: max_inflight_sessions holds conversations back, and an open loop sends every request at its own "
            "time: take one of them, or loop completion (--loop completion; in a sweep file loop: completion)"
        )
    if problems:
        raise SpecError(problems)


def _drawn(n: int, n_wanted: int, draws: Iterator[float]) -> Iterator[tuple[int, int]]:
    """Places in a list of ``n`` and how often all were used before: a shuffle, and another, as long as wanted."""
    given = copy = 0
    while given < n_wanted:
        order = sorted(range(n), key=[next(draws) for _ in range(n)].__getitem__)
        for index in order[: n_wanted - given]:
            yield index, copy
        given += n
        copy += 1


@dataclass(frozen=True, slots=True)
class _Plan:
    recording: Recording
    traffic: TrafficSpec
    think_time_s: float
    max_output_tokens: int

    def sessions(self, family: Family, start_s: float, copy: int) -> Iterator[Session]:
        """One family's conversations, the first of which begins at ``start_s``."""
        origin_s = _start_s(family)
        for thread in family:
            before: TraceRow | None = None
            turns = []
            for number, row in enumerate(thread.rows, 1):
                due_s = None if row.arrival_s is None or origin_s is None else row.arrival_s - origin_s
                at_s = None if due_s is None else start_s + due_s / self.traffic.time_scale
                if number == 1 and thread.after is None:
                    at_s = start_s
                turns.append(self._turn(thread, row, before, number, at_s, copy))
                before = row
            yield tuple(turns)

    def _turn(
        self, thread: Thread, row: TraceRow, before: TraceRow | None, number: int, at_s: float | None, copy: int
    ) -> Turn:
        prefix = f"c{copy}." if copy else ""
        after = prefix + _sendable(thread.after) if thread.after is not None and number == 1 else None
        follows = before is not None or after is not None
        scheduled_s, think_time_s = self._times(row, at_s, follows)
        context = _context_tokens(row, before, self.recording.block_tokens)
        return Turn(
            request_id=prefix + _sendable(row.request_id),
            session_id=prefix + _sendable(thread.session_id),
            turn=number,
            scheduled_s=scheduled_s,
            think_time_s=think_time_s,
            context_tokens=context,
            input_tokens=row.prompt_tokens - context,
            output_tokens=row.output_tokens,
            max_output_tokens=self.max_output_tokens,
            block_ids=_copied(row.block_ids, copy) if self.recording.block_tokens is not None else None,
            block_tokens=self.recording.block_tokens,
            after=after,
        )

    def _times(self, row: TraceRow, at_s: float | None, follows: bool) -> tuple[float | None, float | None]:
        """When the turn is due: instant, and seconds after the turn before it."""
        if not follows or self.traffic.loop == "timestamps":
            return at_s, None
        if row.delay_s is not None:
            return None, row.delay_s / self.traffic.time_scale
        return at_s, 0.0 if at_s is not None else self.think_time_s


def _sendable(name: str) -> str:
    """The name itself where it can stand in an HTTP header, else one that is made from it."""
    if _SENDABLE.fullmatch(name):
        return name
    return f"id-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _context_tokens(row: TraceRow, before: TraceRow | None, block_tokens: int | None) -> int:
    """Tokens of history that the prompt begins with: all of the turn before, or, where ids say that less is left, so much."""
    if before is None:
        return 0
    whole = before.prompt_tokens + before.output_tokens
    if block_tokens is not None:
        n_full = before.prompt_tokens // block_tokens
        n_common = _n_common(before.block_ids[:n_full], row.block_ids)
        whole = whole if n_common >= len(before.block_ids[:n_full]) else n_common * block_tokens
    return min(whole, row.prompt_tokens - 1)


def _n_common(first: Sequence[int], second: Sequence[int]) -> int:
    n = min(len(first), len(second))
    same = np.asarray(first[:n], dtype=np.int64) == np.asarray(second[:n], dtype=np.int64)
    return n if same.all() else int(np.argmin(same))


def _copied(block_ids: Sequence[int], copy: int) -> Sequence[int]:
    if not copy:
        return block_ids
    step = np.uint64(_COPY_STEP * copy % (1 << 64)).astype(np.int64)
    moved: Sequence[int] = (np.asarray(block_ids, dtype=np.int64) + step).tolist()
    return moved
