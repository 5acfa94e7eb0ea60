"""The Ledger: a sans-IO state machine of what a router knows. ``observe(event)`` in, ``view(now_s, session_id)`` out.

Simulator, load generator and router each feed one Ledger; replaying the log of any of them through a fresh Ledger and policy
reproduces its decisions (I7).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ppd_bench.core.enums import Route
from ppd_bench.core.topology import Topology
from ppd_bench.policy.events import Event, Finished, PrefillDone, Sent, WorkerReset, WorkerSnapshot
from ppd_bench.policy.query import RouterView, SessionView

QPS_WINDOW_S = 10.0
"""Sliding window of the conversation rate (ROUTER.md B27: 10 to 30 s)."""
MIN_RATE_WINDOW_S = 1.0
"""Shortest window a rate is computed over, so that the first arrival is not an infinite rate."""
SESSION_TTL_S = 3600.0
"""A conversation is forgotten after this long without a turn (paper, B.3: 60 minutes)."""


@dataclass(slots=True)
class _Session:
    last_s: float
    decode_worker: int = -1
    n_finished: int = 0
    sum_output_tokens: int = 0
    known_tokens: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Inflight:
    sent: Sent
    tokens: int
    on_prefill: bool


class Ledger:
    """Counts in flight, conversations and the arrival rate of one topology.

    A ``pd`` turn counts on its P until ``PrefillDone`` and on its D from dispatch to the end, since D is committed from the
    start. ``known_tokens`` grows only with ok turns (B23) and is dropped on ``WorkerReset`` (B24).
    """

    def __init__(
        self, topology: Topology, *, session_ttl_s: float = SESSION_TTL_S, qps_window_s: float = QPS_WINDOW_S
    ) -> None:
        n = topology.n_workers
        self._n_workers = n
        self._session_ttl_s = session_ttl_s
        self._qps_window_s = qps_window_s
        self._n_inflight = [0] * n
        self._inflight_tokens = [0] * n
        self._n_legs = [0] * n
        self._n_first_legs = [0] * n
        self._kv_usage: list[float | None] = [None] * n
        self._inflight: dict[str, _Inflight] = {}
        self._sessions: dict[str, _Session] = {}  # ordered by last access, for O(1) eviction
        self._starts: deque[float] = deque()
        self._first_start_s: float | None = None

    @property
    def n_sessions(self) -> int:
        return len(self._sessions)

    def observe(self, event: Event) -> None:
        """Take one event. Events of unknown requests are ignored (a retry may report twice).

        A request that is sent again while it is in flight replaces its first attempt.
        """
        if isinstance(event, Sent):
            self._on_sent(event)
        elif isinstance(event, PrefillDone):
            self._on_prefill_done(event)
        elif isinstance(event, Finished):
            self._on_finished(event)
        elif isinstance(event, WorkerSnapshot):
            self._kv_usage[event.worker] = event.kv_usage_ratio
        else:
            self._on_reset(event)

    def view(self, now_s: float, session_id: str) -> RouterView:
        """The knowledge a policy may use now. O(workers)."""
        return RouterView(
            now_s=now_s,
            n_inflight=tuple(self._n_inflight),
            inflight_tokens=tuple(self._inflight_tokens),
            n_legs=tuple(self._n_legs),
            n_first_legs=tuple(self._n_first_legs),
            kv_usage_ratio=tuple(self._kv_usage),
            session_rps=self._session_rps(now_s),
            session=self._session_view(session_id, now_s),
        )

    def _session_view(self, session_id: str, now_s: float) -> SessionView | None:
        session = self._sessions.get(session_id)
        if session is None or session.n_finished == 0 or self._is_over(session, now_s):
            return None
        known = session.known_tokens
        return SessionView(
            n_finished=session.n_finished,
            decode_worker=session.decode_worker,
            known_tokens=tuple([known.get(worker, 0) for worker in range(self._n_workers)]),
            mean_output_tokens=session.sum_output_tokens / session.n_finished,
        )

    def _session_rps(self, now_s: float) -> float:
        starts = self._starts
        while starts and starts[0] <= now_s - self._qps_window_s:
            starts.popleft()
        if self._first_start_s is None:
            return 0.0
        window_s = min(self._qps_window_s, max(now_s - self._first_start_s, MIN_RATE_WINDOW_S))
        return len(starts) / window_s

    def _on_sent(self, event: Sent) -> None:
        decision = event.decision
        replaced = self._inflight.pop(event.request_id, None)
        if replaced is not None:
            self._leave(replaced)
        pd = decision.route in (Route.PD, Route.PD_READBACK)
        session = self._touch(event.session_id, event.time_s)
        expected = event.max_output_tokens
        if session.n_finished:
            expected = min(expected, session.sum_output_tokens // session.n_finished)
        tokens = event.prompt_tokens + expected
        self._inflight[event.request_id] = _Inflight(event, tokens, pd)
        for worker in (decision.decode_worker, decision.prefill_worker) if pd else (decision.decode_worker,):
            self._n_inflight[worker] += 1
            self._inflight_tokens[worker] += tokens
            self._n_legs[worker] += 1
            self._n_first_legs[worker] += event.turn == 1
        if event.turn == 1 and replaced is None:
            self._starts.append(event.time_s)
            if self._first_start_s is None:
                self._first_start_s = event.time_s

    def _touch(self, session_id: str, now_s: float) -> _Session:
        """The session, moved to the young end of the table; the oldest leave when their time is over."""
        session = self._sessions.pop(session_id, None)
        if session is None or self._is_over(session, now_s):
            session = _Session(now_s)
        session.last_s = now_s
        self._sessions[session_id] = session
        while (oldest := next(iter(self._sessions))) != session_id:
            if not self._is_over(self._sessions[oldest], now_s):
                break
            del self._sessions[oldest]
        return session

    def _is_over(self, session: _Session, now_s: float) -> bool:
        return session.last_s <= now_s - self._session_ttl_s

    def _on_prefill_done(self, event: PrefillDone) -> None:
        inflight = self._inflight.get(event.request_id)
        if inflight is not None and inflight.on_prefill:
            self._leave_prefill(inflight)

    def _leave_prefill(self, inflight: _Inflight) -> None:
        inflight.on_prefill = False
        worker = inflight.sent.decision.prefill_worker
        self._n_inflight[worker] -= 1
        self._inflight_tokens[worker] -= inflight.tokens

    def _leave(self, inflight: _Inflight) -> None:
        if inflight.on_prefill:
            self._leave_prefill(inflight)
        worker = inflight.sent.decision.decode_worker
        self._n_inflight[worker] -= 1
        self._inflight_tokens[worker] -= inflight.tokens

    def _on_finished(self, event: Finished) -> None:
        inflight = self._inflight.pop(event.request_id, None)
        if inflight is None:
            return
        self._leave(inflight)
        sent = inflight.sent
        session = self._sessions.get(sent.session_id)
        if event.ok and session is not None:
            self._learn(session, sent, event.generated_tokens)

    def _learn(self, session: _Session, sent: Sent, generated_tokens: int) -> None:
        decision = sent.decision
        session.n_finished += 1
        session.sum_output_tokens += generated_tokens
        session.decode_worker = decision.decode_worker
        # The last sampled token's KV is never computed, but the next prompt carries it; one token is below any block.
        session.known_tokens[decision.decode_worker] = sent.prompt_tokens + generated_tokens
        if decision.prefill_worker != decision.decode_worker:
            session.known_tokens[decision.prefill_worker] = sent.prompt_tokens

    def _on_reset(self, event: WorkerReset) -> None:
        self._kv_usage[event.worker] = None
        for session in self._sessions.values():
            session.known_tokens.pop(event.worker, None)
