"""What the event loop keeps of a turn, of an engine at an instant, and of a point's settings."""

from __future__ import annotations

from typing import NamedTuple

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Status
from ppd_bench.core.workload import Turn
from ppd_bench.sim.kv import Chain
from ppd_bench.sim.link import Transfer
from ppd_bench.sim.seq import Seq


class Gauge(NamedTuple):
    """What one engine looked like at an instant. ``n_waiting``: requests without a step yet, those whose KV is under way
    included."""

    time_s: float
    worker: int
    kv_usage_ratio: float
    n_running: int
    n_waiting: int
    busy_s: float


class Trip:
    """One turn on its way through the system."""

    def __init__(self, index: int, turn: Turn, chain: Chain, family: int) -> None:
        self.index = index
        self.turn = turn
        self.chain = chain
        self.family = family  # conversations that start one another have one number
        self.following: list[int] = []  # turns that wait for this one's end
        self.status = Status.UNSENT
        self.message: str | None = None
        self.decision: Decision | None = None
        self.scheduled_s = -1.0
        self.sent_s = -1.0
        self.prefill_done_s = -1.0
        self.end_s = -1.0
        self.generated_tokens = 0
        self.last_step = -1
        self.prefill: Seq | None = None
        self.decode: Seq | None = None
        self.transfer: Transfer | None = None
        self.prefilled = False  # P holds the prompt's KV, for D to take
        self.transfer_tokens = 0


class ClusterSettings:
    """Numbers of one point that the event loop needs."""

    def __init__(
        self,
        *,
        timeout_s: float,
        visit_overhead_s: float,
        router_overhead_s: float,
        push: bool,
        kv_bytes_per_token: int,
        kv_lease_s: float,
        snapshot_interval_s: float,
        snapshot_delay_s: float,
        dispatch_both: bool = False,
        max_inflight_sessions: int = 0,
        gauge_interval_s: float = 0.0,
    ) -> None:
        self.timeout_s = timeout_s
        self.visit_overhead_s = visit_overhead_s
        self.router_overhead_s = router_overhead_s
        self.push = push
        self.dispatch_both = dispatch_both  # D is told of a turn when P is, and not when P is done
        self.max_inflight_sessions = max_inflight_sessions  # 0: no such limit
        self.gauge_interval_s = gauge_interval_s  # 0: no gauges are kept
        self.kv_bytes_per_token = kv_bytes_per_token
        self.kv_lease_s = kv_lease_s
        self.snapshot_interval_s = snapshot_interval_s
        self.snapshot_delay_s = snapshot_delay_s
