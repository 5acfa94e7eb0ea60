"""Play a point's conversations on running engines: open loop, absolute schedule, the policy in the client.

Turn 1 is sent at the instant that the arrival process gave it, whatever the engines are doing; turn k at turn k-1's last token
plus think time. Nothing is tokenised or drawn in the loop. The Ledger is fed as the simulator feeds it, so that the log,
replayed through a fresh Ledger and policy, gives the same decisions (I7).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Status
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import parse_topology
from ppd_bench.core.workload import Session, Turn
from ppd_bench.engine.client import Client, Clock, Limits
from ppd_bench.engine.dispatch import Engines, LegLimits, Request, dispatch
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.handoff import find_connector
from ppd_bench.engine.stream import StreamOutcome
from ppd_bench.loadgen.lateness import ClientLateness, LoopProbe, lateness_of
from ppd_bench.loadgen.prompts import TokenRange, completion_body, new_ids
from ppd_bench.loadgen.rows import Trip, to_columns
from ppd_bench.policy.events import Event, Finished, PrefillDone, Sent, WorkerSnapshot
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import Policy, make_policy
from ppd_bench.policy.query import RouteQuery

Log = list[tuple[RouteQuery, float, Decision] | Event]
"""Queries with their instant and decision, and events, in the order in which the Ledger and the policy met them."""

Scrape = Callable[[Endpoint], Awaitable[float | None]]
"""Reads one engine's KV usage (0 to 1), null where it could not be read."""

SNAPSHOT_INTERVAL_S = 1.0
"""How often gauges are scraped for policies that read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """How requests are made. ``served_model``: the name that engines serve the model under.

    ``idle_s`` is the longest silence within an answer (GLOSSARY: timeout), ``connect_s`` the longest wait for a connection.
    """

    served_model: str
    token_ids: TokenRange
    connect_s: float = 10.0
    idle_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveResult:
    """A played point: records, how late the client was, and the log (empty with a router, whose decisions are its own)."""

    columns: Columns
    lateness: ClientLateness
    log: Log


async def play_point(
    point: Point,
    sessions: Sequence[Session],
    target: Engines | Endpoint,
    *,
    clock: Clock,
    settings: PlaySettings,
    start_s: float | None = None,
    scrape: Scrape | None = None,
    on_turn: Callable[[Trip], None] | None = None,
) -> LiveResult:
    """Play every conversation to its end and return its records, in order of (session, turn).

    ``target``: the engines of the point's topology, or one router that gets everything. ``start_s`` on ``clock`` is the point's
    start (now when null); several processes with one start may share a point by its sessions. ``on_turn`` is called as each
    turn ends.

    Raises:
        SpecError: the policy reads gauges and ``scrape`` is null; engines and topology do not match; a trace with block ids.
        LaunchError: no hand-off is known for the engines' connector.
    """
    topology = parse_topology(point.topology)
    policy = make_policy(topology, point.policy, point.placement, point.decision_seed)
    _check(point, target, policy, scrape)
    prompts = [new_ids(session, point_id=point.point_id, ids=settings.token_ids) for session in sessions]
    trips = [[Trip(turn=turn) for turn in session] for session in sessions]
    with _no_long_collections():
        async with Client(clock) as client, LoopProbe(clock) as probe:
            start_s = clock() if start_s is None else start_s
            player = _Player(point, target, policy, Ledger(topology), client, settings, start_s, on_turn)
            await player.play(trips, prompts, scrape if policy.needs_snapshots else None)
    flat = [trip for session in trips for trip in session]
    lags = [trip.send_lag_s for trip in flat if trip.send_lag_s is not None]
    return LiveResult(
        columns=to_columns(point, flat, [worker.worker_id for worker in topology.workers], start_s=start_s),
        lateness=ClientLateness(send=lateness_of(lags), loop=lateness_of(probe.samples_s)),
        log=player.log,
    )


@contextmanager
def _no_long_collections() -> Iterator[None]:
    """Keep what lives already (libraries, prompts) out of the cycle collector, whose full pass would stall every stream."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check(point: Point, target: Engines | Endpoint, policy: Policy, scrape: Scrape | None) -> None:
    if isinstance(target, Endpoint):
        return
    wanted, given = len(policy.fleet.worker_ids), len(target.endpoints)
    if given != wanted:
        raise SpecError(f"topology {point.topology!r} has {wanted} workers, but {given} engines were given")
    if policy.fleet.prefillers:
        find_connector(target.connector)
    if policy.needs_snapshots and scrape is None:
        raise SpecError("a placement of this point reads KV usage, but there is nothing that scrapes the engines")


class _Player:
    """The running point."""

    def __init__(
        self,
        point: Point,
        target: Engines | Endpoint,
        policy: Policy,
        ledger: Ledger,
        client: Client,
        settings: PlaySettings,
        start_s: float,
        on_turn: Callable[[Trip], None] | None,
    ) -> None:
        self.log: Log = []
        self._point = point
        self._target = target
        self._policy = policy
        self._ledger = ledger
        self._client = client
        self._settings = settings
        self._start_s = start_s
        self._on_turn = on_turn

    def _now(self) -> float:
        return self._client.clock() - self._start_s

    async def play(self, trips: list[list[Trip]], prompts: list[list[list[int]]], scrape: Scrape | None) -> None:
        async with asyncio.TaskGroup() as group:
            scraper = group.create_task(self._scrape(scrape)) if scrape is not None else None
            async with asyncio.TaskGroup() as conversations:
                for session, ids in zip(trips, prompts, strict=True):
                    conversations.create_task(self._converse(session, ids))
            if scraper is not None:
                scraper.cancel()

    async def _converse(self, session: list[Trip], ids: list[list[int]]) -> None:
        """Turn after turn, until one fails: its later turns stay unsent."""
        prompt: list[int] = []
        due_s = session[0].turn.scheduled_s or 0.0
        for trip, fresh in zip(session, ids, strict=True):
            prompt = [*prompt, *fresh]
            trip.scheduled_s = due_s + (trip.turn.think_time_s or 0.0)
            await self._sleep_until(trip.scheduled_s)
            outcome = await self._take(trip, prompt)
            if trip.status is not Status.OK or outcome.last_token_s is None:
                return
            prompt += outcome.token_ids
            due_s = outcome.last_token_s - self._start_s

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
        trip.status, trip.message = judge(turn, trip.outcome, trip.sent_s + self._start_s, self._point.timeout_s)
        if trip.decision is not None:
            ok = trip.status is Status.OK
            self._observe(Finished(trip.end_s, turn.request_id, ok, trip.outcome.n_tokens))
        if self._on_turn is not None:
            self._on_turn(trip)
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
        trip.decision = decision = self._decide(turn, trip.sent_s or 0.0)
        trip.dispatched = await dispatch(
            self._client,
            engines,
            decision,
            Request(request_id=self._unique(turn), body=body),
            limits=LegLimits(deadline_s=deadline_s, connect_s=self._settings.connect_s, idle_s=self._settings.idle_s),
            on_prefilled=lambda _: self._observe(PrefillDone(self._now(), turn.request_id)),
        )
        return trip.dispatched.outcome

    def _unique(self, turn: Turn) -> str:
        return f"{self._point.point_id}.{turn.request_id}"

    def _decide(self, turn: Turn, now_s: float) -> Decision:
        query = RouteQuery(
            request_id=turn.request_id,
            session_id=turn.session_id,
            turn=turn.turn,
            context_tokens=turn.context_tokens,
            input_tokens=turn.input_tokens,
            max_output_tokens=turn.max_output_tokens,
        )
        decision = self._policy.decide(query, self._ledger.view(now_s, turn.session_id))
        self.log.append((query, now_s, decision))
        declared, prompt = turn.max_output_tokens, turn.prompt_tokens
        self._observe(Sent(now_s, turn.request_id, turn.session_id, turn.turn, prompt, declared, decision))
        return decision

    def _observe(self, event: Event) -> None:
        self._ledger.observe(event)
        self.log.append(event)

    async def _scrape(self, scrape: Scrape) -> None:
        assert isinstance(self._target, Engines)
        while True:
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)
            for worker, usage in enumerate(await asyncio.gather(*map(scrape, self._target.endpoints))):
                if usage is not None:
                    self._observe(WorkerSnapshot(self._now(), worker, usage))


def judge(turn: Turn, outcome: StreamOutcome, sent_s: float, timeout_s: float) -> tuple[Status, str | None]:
    """The turn's status and message: an answer counts only with the length that was asked (GLOSSARY: success, timeout)."""
    late = outcome.last_token_s is not None and outcome.last_token_s - sent_s > timeout_s
    if outcome.status is Status.TIMEOUT or late:
        detail = f"; {outcome.message}" if outcome.message else ""
        return Status.TIMEOUT, f"no last token within {timeout_s:g} s of sending{detail}"
    if not outcome.ok:
        return outcome.status, outcome.message
    if outcome.n_tokens != turn.output_tokens:
        return (
            Status.ERROR,
            f"{outcome.n_tokens} of {turn.output_tokens} tokens, finish_reason {outcome.finish_reason!r}",
        )
    if len(outcome.token_ids) != outcome.n_tokens:
        return (
            Status.ERROR,
            f"{len(outcome.token_ids)} token ids for {outcome.n_tokens} tokens: is return_token_ids known?",
        )
    if outcome.prompt_tokens != turn.prompt_tokens:
        return Status.ERROR, f"the server counted {outcome.prompt_tokens} prompt tokens of {turn.prompt_tokens} sent"
    return Status.OK, None
