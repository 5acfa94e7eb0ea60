"""Where turns go: one Ledger and one policy per point, however many processes send its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ppd_bench.core.decision import Decision
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.handoff import find_connector
from ppd_bench.engine.metrics import EngineGauges
from ppd_bench.policy.events import Event, Sent, WorkerSnapshot
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import make_policy
from ppd_bench.policy.query import RouteQuery

Log = list[tuple[RouteQuery, float, Decision] | Event]
"""Queries with their instant and decision, and events, in the order in which the Ledger and the policy met them."""

Scrape = Callable[[Endpoint], Awaitable[EngineGauges | None]]
"""Reads one engine's gauges, null where they could not be read."""

SNAPSHOT_INTERVAL_S = 1.0
"""How often gauges are scraped for policies that read them."""


class Routing(Protocol):
    """What a player asks: ``take`` decides a turn that is sent now, ``observe`` tells what became of it."""

    async def take(self, query: RouteQuery, now_s: float) -> Decision: ...

    def observe(self, event: Event) -> None: ...


class LedgerRouting:
    """The Ledger and the policy of a point, in this process.

    The log, replayed through a fresh Ledger and policy, gives the same decisions (I7).
    """

    def __init__(self, point: Point) -> None:
        topology = parse_topology(point.topology)
        self.log: Log = []
        self._policy = make_policy(topology, point.policy, point.placement, point.decision_seed)
        self._ledger = Ledger(topology)

    @property
    def needs_snapshots(self) -> bool:
        """Whether a placement reads gauges."""
        return self._policy.needs_snapshots

    def check(self, point: Point, engines: Engines, scrape: Scrape | None) -> None:
        """
        Raises:
            SpecError: engines and topology do not match, or the policy reads gauges and nothing scrapes them.
            LaunchError: no hand-off is known for the engines' connector.
        """
        wanted, given = len(self._policy.fleet.worker_ids), len(engines.endpoints)
        if given != wanted:
            raise SpecError(f"topology {point.topology!r} has {wanted} workers, but {given} engines were given")
        if self._policy.fleet.prefillers:
            find_connector(engines.connector)
        if self.needs_snapshots and scrape is None:
            raise SpecError("a placement of this point reads KV usage, but there is nothing that scrapes the engines")

    def decide(self, query: RouteQuery, now_s: float) -> Decision:
        """Decide a turn and take it as sent."""
        decision = self._policy.decide(query, self._ledger.view(now_s, query.session_id, query.block_ids))
        self.log.append((query, now_s, decision))
        declared, prompt = query.max_output_tokens, query.prompt_tokens
        self.observe(
            Sent(now_s, query.request_id, query.session_id, query.turn, prompt, declared, decision, query.block_ids)
        )
        return decision

    async def take(self, query: RouteQuery, now_s: float) -> Decision:
        return self.decide(query, now_s)

    def observe(self, event: Event) -> None:
        self._ledger.observe(event)
        self.log.append(event)

    async def follow_gauges(
        self,
        endpoints: Sequence[Endpoint],
        scrape: Scrape,
        now: Callable[[], float],
        *,
        interval_s: float = SNAPSHOT_INTERVAL_S,
    ) -> None:
        """Feed the Ledger with every engine's gauges until cancelled; ``now`` is seconds since the point's start."""
        while True:
            await asyncio.sleep(interval_s)
            for worker, gauges in enumerate(await asyncio.gather(*map(scrape, endpoints))):
                if gauges is not None and gauges.kv_cache_usage_ratio is not None:
                    waiting = int(gauges.n_waiting_for_capacity or 0)
                    self.observe(WorkerSnapshot(now(), worker, gauges.kv_cache_usage_ratio, waiting))
