"""Play a point's conversations on running engines: open loop, absolute schedule, the policy in the client.

Turn 1 is sent at the instant that the arrival process gave it, whatever the engines are doing; turn k at turn k-1's last token
plus think time. Nothing is tokenised or drawn in the loop. The Ledger is fed as the simulator feeds it, so that the log,
replayed through a fresh Ledger and policy, gives the same decisions (I7).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from ppd_bench.core.enums import Status
from ppd_bench.core.point import Point
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import parse_topology
from ppd_bench.core.workload import Session, Turn
from ppd_bench.engine.client import Client, Clock, Limits
from ppd_bench.engine.dispatch import Engines, LegLimits, Request, dispatch
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.stream import Failure, StreamOutcome
from ppd_bench.loadgen.lateness import NO_LATENESS, ClientLateness, Lateness, LoopProbe, lateness_of
from ppd_bench.loadgen.prompts import TokenRange, completion_body, is_open_loop, new_ids, traced_ids
from ppd_bench.loadgen.routing import SNAPSHOT_INTERVAL_S, LedgerRouting, Log, Routing, Scrape
from ppd_bench.loadgen.rows import Trip, TurnEnd, to_columns
from ppd_bench.policy.events import Finished, PrefillDone
from ppd_bench.policy.query import RouteQuery

Target = Engines | Endpoint
"""The engines of a point's topology, or one router that gets everything."""

OnTurn = Callable[[TurnEnd], None]

PREPARE_S = 0.5
"""So long before its instant a prompt of recorded content is made: all of them at once would not fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """How requests are made. ``served_model``: the name that engines serve the model under.

    ``idle_s`` is the longest silence within an answer (GLOSSARY: timeout), ``connect_s`` the longest wait for a connection.
    """

    served_model: str
    token_ids: TokenRange
    connect_s: float = 10.0
    idle_s: float = float("inf")
    snapshot_interval_s: float = SNAPSHOT_INTERVAL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPart:
    """Conversations as they were played: their records, in the order given, how late the client was, and ``misanswers``:
    answers that ended in order and were not what was asked, one line each."""

    columns: Columns
    lateness: ClientLateness
    misanswers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveResult(PlayedPart):
    """A played point, and the log of its decisions (empty with a router, whose decisions are its own)."""

    log: Log


async def play_point(
    point: Point,
    sessions: Sequence[Session],
    target: Target,
    *,
    clock: Clock,
    settings: PlaySettings,
    start_s: float | None = None,
    scrape: Scrape | None = None,
    on_turn: OnTurn | None = None,
) -> LiveResult:
    """Play every conversation to its end in this process and return its records, in order of (session, turn).

    ``start_s`` on ``clock`` is the point's start (now when null). ``on_turn`` is called as each turn ends.
    ``loadgen.clients.ClientPool`` does the same with several processes.

    Raises:
        SpecError: the policy reads gauges and ``scrape`` is null; engines and topology do not match.
        LaunchError: no hand-off is known for the engines' connector.
    """
    routing = LedgerRouting(point)
    if isinstance(target, Engines):
        routing.check(point, target, scrape)
    ready = prepare_part(point, sessions, settings)
    with no_long_collections():
        start_s = clock() if start_s is None else start_s
        async with following_gauges(routing, target, scrape, lambda: clock() - start_s, settings.snapshot_interval_s):
            part = await play_part(ready, target, routing, clock=clock, start_s=start_s, on_turn=on_turn)
    return LiveResult(columns=part.columns, lateness=part.lateness, misanswers=part.misanswers, log=routing.log)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyPart:
    """Conversations whose prompts are drawn: everything that can be done before the start."""

    point: Point
    settings: PlaySettings
    trips: list[list[Trip]]
    prompts: list[list[list[int]]]


def prepare_part(point: Point, sessions: Sequence[Session], settings: PlaySettings) -> ReadyPart:
    """Draw what can be drawn before the start; prompts of recorded content are made shortly before they are sent."""
    return ReadyPart(
        point=point,
        settings=settings,
        trips=[[Trip(turn=turn) for turn in session] for session in sessions],
        prompts=[new_ids(session, point_id=point.point_id, ids=settings.token_ids) for session in sessions],
    )


async def play_part(
    part: ReadyPart,
    target: Target,
    routing: Routing,
    *,
    clock: Clock,
    start_s: float,
    on_turn: OnTurn | None = None,
) -> PlayedPart:
    """Play these conversations; what decides their turns is ``routing``, which several processes may share."""
    async with Client(clock) as client, LoopProbe(clock) as probe:
        player = _Player(part, target, routing, client, start_s, on_turn)
        await player.play()
    flat = [trip for session in part.trips for trip in session]
    lags = [trip.client_lag_s for trip in flat if trip.client_lag_s is not None]
    workers = [worker.worker_id for worker in parse_topology(part.point.topology).workers]
    return PlayedPart(
        columns=to_columns(part.point, flat, workers, start_s=start_s),
        lateness=ClientLateness(send=lateness_of(lags), loop=lateness_of(probe.samples_s), decision=NO_LATENESS),
        misanswers=tuple(f"{trip.turn.request_id}: {trip.message}" for trip in flat if trip.misanswered),
    )


def with_decision_waits(part: PlayedPart, waits: Lateness) -> PlayedPart:
    """The part, with how long its turns waited for another process to decide."""
    return dataclasses.replace(part, lateness=dataclasses.replace(part.lateness, decision=waits))


@contextmanager
def no_long_collections() -> Iterator[None]:
    """Keep what lives already (libraries, prompts) out of the cycle collector, whose full pass would stall every stream."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def following_gauges(
    routing: LedgerRouting, target: Target, scrape: Scrape | None, now: Callable[[], float], interval_s: float
) -> AsyncIterator[None]:
    """Scrape gauges beside the play where the policy reads them."""
    if scrape is None or not routing.needs_snapshots or not isinstance(target, Engines):
        yield
        return
    async with asyncio.TaskGroup() as group:
        task = group.create_task(routing.follow_gauges(target.endpoints, scrape, now, interval_s=interval_s))
        yield
        task.cancel()


class _Talk(NamedTuple):
    """A conversation: its turns, and what each adds to the prompt (nothing for recorded content)."""

    trips: list[Trip]
    fresh: list[list[int]]


class _Player:
    """Conversations under way."""

    def __init__(
        self,
        part: ReadyPart,
        target: Target,
        routing: Routing,
        client: Client,
        start_s: float,
        on_turn: OnTurn | None,
    ) -> None:
        self._part = part
        self._point = part.point
        self._settings = part.settings
        self._target = target
        self._routing = routing
        self._client = client
        self._start_s = start_s
        self._on_turn = on_turn
        self._ends: dict[str, asyncio.Future[float | None]] = {}
        traffic = part.point.workload.traffic
        limit = traffic.max_inflight_sessions if traffic is not None else None
        self._places = None if limit is None else asyncio.Semaphore(limit)

    def _now(self) -> float:
        return self._client.clock() - self._start_s

    async def play(self) -> None:
        waited_for = {session[0].turn.after for session in self._part.trips} - {None}
        loop = asyncio.get_running_loop()
        self._ends = {request_id: loop.create_future() for request_id in waited_for if request_id is not None}
        async with asyncio.TaskGroup() as families:
            for family in self._families():
                families.create_task(self._play_family(family))

    def _families(self) -> list[list[_Talk]]:
        """Conversations with those that their requests start, starters first."""
        found: list[list[_Talk]] = []
        family_of: dict[str, list[_Talk]] = {}
        for trips, fresh in zip(self._part.trips, self._part.prompts, strict=True):
            family = family_of.get(trips[0].turn.after or "")
            if family is None:
                family = []
                found.append(family)
            family.append(_Talk(trips, fresh))
            family_of.update((trip.turn.request_id, family) for trip in trips)
        return found

    async def _play_family(self, family: list[_Talk]) -> None:
        first = family[0].trips[0]
        async with contextlib.AsyncExitStack() as stack:
            if self._places is not None:
                first.scheduled_s = first.turn.scheduled_s or 0.0
                await self._sleep_until(first.scheduled_s)
                await stack.enter_async_context(self._places)
                first.released_s = self._now()
            async with asyncio.TaskGroup() as conversations:
                for talk in family:
                    conversations.create_task(self._converse(talk))

    async def _converse(self, talk: _Talk) -> None:
        """All turns at their instants, or turn after turn, until one fails: its later turns stay unsent."""
        try:
            if is_open_loop(tuple(trip.turn for trip in talk.trips)):
                await self._send_at_instants(talk)
            else:
                await self._turn_after_turn(talk)
        finally:
            for trip in talk.trips:
                self._tell_end(trip, None)

    async def _send_at_instants(self, talk: _Talk) -> None:
        prompt: list[int] = []
        async with asyncio.TaskGroup() as turns:
            for index, trip in enumerate(talk.trips):
                prompt = [*prompt, *talk.fresh[index]] if talk.fresh else []
                turns.create_task(self._turn_at(trip, trip.turn.scheduled_s or 0.0, prompt))

    async def _turn_after_turn(self, talk: _Talk) -> None:
        prompt: list[int] = []
        started_by = talk.trips[0].turn.after
        end_s = await self._ends[started_by] if started_by is not None else 0.0
        for index, trip in enumerate(talk.trips):
            if end_s is None:
                return
            think_time_s, scheduled_s = trip.turn.think_time_s, trip.turn.scheduled_s or 0.0
            due_s = scheduled_s if think_time_s is None else max(end_s + think_time_s, scheduled_s)
            prompt = [*prompt, *talk.fresh[index]] if talk.fresh else []
            outcome = await self._turn_at(trip, due_s, prompt)
            ended = trip.status is Status.OK and outcome.last_token_s is not None
            end_s = outcome.last_token_s - self._start_s if ended and outcome.last_token_s is not None else None
            self._tell_end(trip, end_s)
            prompt += outcome.token_ids

    async def _turn_at(self, trip: Trip, due_s: float, prompt: list[int]) -> StreamOutcome:
        """Send at its instant; a prompt of recorded content is made a moment before, beside the loop."""
        trip.scheduled_s = due_s
        if trip.turn.block_ids is not None:
            await self._sleep_until(due_s - PREPARE_S)
            prompt = await asyncio.to_thread(
                traced_ids,
                trip.turn,
                point_id=self._point.point_id,
                block_size=self._point.engine.block_size,
                ids=self._settings.token_ids,
            )
        await self._sleep_until(due_s)
        return await self._take(trip, prompt)

    def _tell_end(self, trip: Trip, end_s: float | None) -> None:
        """To conversations that this turn starts: when it ended, or that it failed."""
        end = self._ends.get(trip.turn.request_id)
        if end is not None and not end.done():
            end.set_result(end_s)

    async def _sleep_until(self, time_s: float) -> None:
        while (left_s := time_s - self._now()) > 0.0:
            await asyncio.sleep(left_s)

    async def _take(self, trip: Trip, prompt: list[int]) -> StreamOutcome:
        """One turn: decide, send, wait, judge."""
        turn = trip.turn
        trip.sent_s = self._now()
        body = completion_body(turn, prompt, model=self._settings.served_model, seed=self._point.seed)
        deadline_s = self._start_s + trip.sent_s + self._point.timeout_s
        if isinstance(self._target, Endpoint):
            trip.outcome = await self._via(self._target, turn, body, deadline_s)
        else:
            trip.outcome = await self._routed(self._target, trip, body, deadline_s)
        trip.end_s = self._now()
        verdict = judge(turn, trip.outcome, trip.sent_s + self._start_s, self._point.timeout_s)
        trip.status, trip.message, trip.misanswered = verdict
        if trip.decision is not None:
            ok = trip.status is Status.OK
            self._routing.observe(Finished(trip.end_s, turn.request_id, ok, trip.outcome.n_tokens))
        if self._on_turn is not None:
            self._on_turn(trip.ending(self._start_s))
        return trip.outcome

    async def _via(self, router: Endpoint, turn: Turn, body: dict[str, object], deadline_s: float) -> StreamOutcome:
        return await self._client.post(
            router.host,
            router.port,
            orjson.dumps(body),
            request_id=self._unique(turn),
            headers={"X-Session-Id": f"{self._point.point_id}.{turn.session_id}"},
            limits=Limits(deadline_s=deadline_s, connect_s=self._settings.connect_s, idle_s=self._settings.idle_s),
        )

    async def _routed(self, engines: Engines, trip: Trip, body: dict[str, object], deadline_s: float) -> StreamOutcome:
        turn = trip.turn
        trip.decision = decision = await self._routing.take(
            _query(turn, self._point.engine.block_size), trip.sent_s or 0.0
        )
        trip.dispatched = await dispatch(
            self._client,
            engines,
            decision,
            Request(request_id=self._unique(turn), body=body),
            limits=LegLimits(deadline_s=deadline_s, connect_s=self._settings.connect_s, idle_s=self._settings.idle_s),
            on_prefilled=lambda _: self._routing.observe(PrefillDone(self._now(), turn.request_id)),
        )
        return trip.dispatched.outcome

    def _unique(self, turn: Turn) -> str:
        return f"{self._point.point_id}.{turn.request_id}"


def _query(turn: Turn, block_size: int) -> RouteQuery:
    return RouteQuery(
        request_id=turn.request_id,
        session_id=turn.session_id,
        turn=turn.turn,
        context_tokens=turn.context_tokens,
        input_tokens=turn.input_tokens,
        max_output_tokens=turn.max_output_tokens,
        block_ids=turn.block_ids or (),
        block_tokens=turn.block_tokens or block_size,
    )


class Verdict(NamedTuple):
    """``misanswered``: the answer ended in order and is not what was asked, which no load explains."""

    status: Status
    message: str | None
    misanswered: bool = False


def judge(turn: Turn, outcome: StreamOutcome, sent_s: float, timeout_s: float) -> Verdict:
    """The turn's status and message: an answer counts only with the length that was asked (GLOSSARY: success, timeout)."""
    late = outcome.last_token_s is not None and outcome.last_token_s - sent_s > timeout_s
    if outcome.status is Status.TIMEOUT or late:
        detail = f"; {outcome.message}" if outcome.message else ""
        return Verdict(Status.TIMEOUT, f"no last token within {timeout_s:g} s of sending{detail}")
    if not outcome.ok:
        return Verdict(outcome.status, outcome.message, outcome.failure is Failure.EMPTY)
    wrong = _difference(turn, outcome)
    return Verdict(Status.OK, None) if wrong is None else Verdict(Status.ERROR, wrong, True)


def _difference(turn: Turn, outcome: StreamOutcome) -> str | None:
    """What is other than asked."""
    if outcome.n_tokens != turn.output_tokens:
        return f"{outcome.n_tokens} of {turn.output_tokens} tokens, finish_reason {outcome.finish_reason!r}"
    if len(outcome.token_ids) != outcome.n_tokens:
        return f"{len(outcome.token_ids)} token ids for {outcome.n_tokens} tokens: is return_token_ids known?"
    if outcome.prompt_tokens != turn.prompt_tokens:
        return f"the server counted {outcome.prompt_tokens} prompt tokens of {turn.prompt_tokens} sent"
    return None
