"""The parts of a running router, put together by its runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppd_bench.core.decision import Decision
from ppd_bench.core.topology import Topology
from ppd_bench.engine.client import Client, Clock
from ppd_bench.policy.events import Event
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.query import RouteQuery
from ppd_bench.router.decision_log import DecisionLog
from ppd_bench.router.fleet import Fleet
from ppd_bench.router.identity import Identifier
from ppd_bench.router.metrics import RouterMetrics
from ppd_bench.router.prompt_size import PromptSizer
from ppd_bench.router.settings import RouterSettings
from ppd_bench.router.tables import PolicyBox
from ppd_bench.router.turn_record import Origin

LogEntry = tuple[RouteQuery, float, Decision] | Event
"""A query with its instant and decision, or an event: what a replay needs (I7)."""


@dataclass(slots=True, kw_only=True)
class RouterState:
    """Everything that a turn needs. ``name`` is unique to this process and begins the ids of its requests (B8)."""

    name: str
    settings: RouterSettings
    topology: Topology
    origin: Origin
    clock: Clock
    wall: Clock
    client: Client
    fleet: Fleet
    ledger: Ledger
    identifier: Identifier
    sizer: PromptSizer
    policies: PolicyBox
    metrics: RouterMetrics
    log: DecisionLog | None
    record: Callable[[LogEntry], None] | None = None
    n_requests: int = 0
    open_turns: set[str] = field(default_factory=set)

    def now_s(self) -> float:
        """Seconds since the router's start: the Ledger's and the policy's time."""
        return self.clock() - self.origin.start_s

    def observe(self, event: Event) -> None:
        """Tell the Ledger, and whoever records what it is told."""
        self.ledger.observe(event)
        if self.record is not None:
            self.record(event)
