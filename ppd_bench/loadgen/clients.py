"""Several client processes for one point: one schedule, one start, one Ledger.

Conversations are dealt to the processes in turn, in order of arrival, and keep their places of the one schedule; all processes
read one monotonic clock and start at one instant of it. Routes are decided by the first process alone: it holds the only Ledger,
answers every client's question and takes in every client's events, in the order in which they reach it. So a policy decides on
all turns in flight, as a router in front of the engines would, and every policy works. A question costs a turn some tenths of a
millisecond, once; the wait is measured (``ClientLateness.decision``).

Rejected: a Ledger per process. Round robin, least in flight and the arrival rate would each see a part of the load; only
policies that hash would be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

from ppd_bench.core.errors import PpdBenchError
from ppd_bench.core.point import Point
from ppd_bench.core.record import Columns
from ppd_bench.core.workload import Session
from ppd_bench.engine.client import Clock
from ppd_bench.engine.dispatch import Engines
from ppd_bench.loadgen.channel import Channel
from ppd_bench.loadgen.client_process import Collect, Done, Ready, Refusal, Routed, Share, Start, run_client
from ppd_bench.loadgen.lateness import ClientLateness, LoopProbe, lateness_of, worst_of
from ppd_bench.loadgen.player import LiveResult, OnTurn, PlayedPart, PlaySettings, Target, following_gauges
from ppd_bench.loadgen.routing import LedgerRouting, Scrape
from ppd_bench.loadgen.rows import TurnEnd
from ppd_bench.policy.query import RouteQuery

CHUNKS_PER_S = 20_000.0
"""Streamed chunks per second that one client process takes in well (measured: tests/benchmarks/bench_client.py)."""

START_MARGIN_S = 0.1
"""From telling the clients to the start, so that all have heard."""

LEAVE_S = 5.0
"""How long a client may take to end by itself."""


def clients_needed(point: Point) -> int:
    """Processes that the point's offered tokens take, one chunk each: the most that engines which keep up would stream."""
    tokens = point.workload.output_tokens_per_session
    return max(1, math.ceil(point.qps * tokens / CHUNKS_PER_S))


def dealt_to(number: int, n_clients: int, sessions: Sequence[Session]) -> list[Session]:
    """One client's share: conversations in turn, each with those that its requests start."""
    dealt: list[Session] = []
    family_of: dict[str, int] = {}
    n_families = 0
    for session in sessions:
        family = family_of.get(session[0].after or "")
        if family is None:
            family = n_families
            n_families += 1
        family_of.update((turn.request_id, family) for turn in session)
        if family % n_clients == number:
            dealt.append(session)
    return dealt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    process: SpawnProcess
    channel: Channel
    number: int


class ClientPool:
    """Client processes that stay for many points. Use as an async context manager; leaving it ends them, playing or not."""

    def __init__(self, n_clients: int) -> None:
        self.n_clients = n_clients
        self._members: list[_Member] = []

    @property
    def pids(self) -> tuple[int | None, ...]:
        return tuple(member.process.pid for member in self._members)

    async def __aenter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for number in range(self.n_clients):
            ours, theirs = socket.socketpair()
            process = context.Process(target=run_client, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append(_Member(process=process, channel=await Channel.of(ours), number=number))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members:
            member.channel.close()
            if error is not None:
                member.process.kill()
        await asyncio.gather(*(asyncio.to_thread(_end, member.process) for member in self._members))
        self._members.clear()

    async def play_point(
        self,
        point: Point,
        sessions: Sequence[Session],
        target: Target,
        *,
        clock: Clock,
        settings: PlaySettings,
        n_clients: int | None = None,
        scrape: Scrape | None = None,
        on_turn: OnTurn | None = None,
    ) -> LiveResult:
        """``loadgen.player.play_point`` with the first ``n_clients`` processes (null: all). ``clock``: ``time.monotonic``, or
        another function that can be pickled and reads one clock in all processes.

        Raises:
            SpecError, LaunchError: as in ``loadgen.player.play_point``.
            PpdBenchError: a client process died.
        """
        routing = LedgerRouting(point)
        if isinstance(target, Engines):
            routing.check(point, target, scrape)
        members = self._members[:n_clients]
        for member in members:
            dealt = dealt_to(member.number, len(members), sessions)
            member.channel.send(Share(point=point, sessions=dealt, target=target, settings=settings, clock=clock))
        await _all(_until_ready(member) for member in members)
        start_s = clock() + START_MARGIN_S
        for member in members:
            member.channel.send(Start(start_s))
        gauges = following_gauges(routing, target, scrape, lambda: clock() - start_s, settings.snapshot_interval_s)
        async with LoopProbe(clock) as probe, gauges:
            await _all(_attend(member, routing, clock, start_s, on_turn) for member in members)
        parts = await _all(_collected(member) for member in members)
        return _merged(parts, routing, sessions, probe)


def _end(process: SpawnProcess) -> None:
    process.join(LEAVE_S)
    if process.is_alive():
        process.kill()
        process.join(LEAVE_S)


async def _all(work: Any) -> list[Any]:
    """All results in order; the first error ends the others."""
    async with _first_error(), asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def _first_error() -> AsyncIterator[None]:
    """The error itself in place of the group that holds it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _receive(member: _Member) -> Any:
    try:
        message = await member.channel.receive()
    except EOFError as error:
        raise PpdBenchError(
            f"client process {member.number + 1} died (out of memory, or killed); give the same command again to go on, "
            "with fewer --clients if memory is short"
        ) from error
    if isinstance(message, Refusal):
        raise message.error
    return message


async def _until_ready(member: _Member) -> None:
    assert isinstance(await _receive(member), Ready)


async def _attend(
    member: _Member, routing: LedgerRouting, clock: Clock, start_s: float, on_turn: OnTurn | None
) -> None:
    """Answer one client's questions and take in its events, stamped as they come, until it is done."""
    while not isinstance(message := await _receive(member), Done):
        now_s = clock() - start_s
        if isinstance(message, RouteQuery):
            member.channel.send(Routed(message.request_id, routing.decide(message, now_s)))
        elif isinstance(message, TurnEnd):
            if on_turn is not None:
                on_turn(message)
        else:
            routing.observe(message._replace(time_s=now_s))


async def _collected(member: _Member) -> PlayedPart:
    member.channel.send(Collect())
    part: PlayedPart = await _receive(member)
    return part


def _merged(
    parts: Sequence[PlayedPart], routing: LedgerRouting, sessions: Sequence[Session], probe: LoopProbe
) -> LiveResult:
    return LiveResult(
        columns=_in_order(parts, sessions),
        lateness=ClientLateness(
            send=worst_of(part.lateness.send for part in parts),
            loop=worst_of([*(part.lateness.loop for part in parts), lateness_of(probe.samples_s)]),
            decision=worst_of(part.lateness.decision for part in parts),
        ),
        misanswers=tuple(line for part in parts for line in part.misanswers),
        log=routing.log,
    )


def _in_order(parts: Sequence[PlayedPart], sessions: Sequence[Session]) -> Columns:
    """The rows of all parts in the order of the conversations, as one process would give them."""
    place = {session[0].session_id: number for number, session in enumerate(sessions)}
    joined = {name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns}
    keys = [(place[session], turn) for session, turn in zip(joined["session_id"], joined["turn"], strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return {name: [values[i] for i in order] for name, values in joined.items()}
