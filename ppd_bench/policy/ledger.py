"""The Ledger: a sans-IO state machine of what a router knows. ``observe(event)`` in, ``view(now_s, session_id)`` out.

Simulator, load generator and router each feed one Ledger; replaying the log of any of them through a fresh Ledger and policy
reproduces its decisions (I7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from ppd_bench.core.enums import Route
from ppd_bench.core.topology import Topology
from ppd_bench.policy.events import (
    Event,
    Finished,
    PrefillDone,
    Sent,
    WorkerAvailability,
    WorkerReset,
    WorkerSnapshot,
)
from ppd_bench.policy.prefixes import PrefixIndex
from ppd_bench.policy.query import RouterView, SessionView

QPS_WINDOW_S = 10.0
"""Sliding window of the conversation rate (ROUTER.md B27: 10 to 30 s)."""
MIN_RATE_WINDOW_S = 1.0
"""Shortest window a rate is computed over, so that the first arrival is not an infinite rate."""
SESSION_TTL_S = 3600.0
"""A conversation is forgotten after this long without a turn (paper, B.3: 60 minutes)."""
SWEEPS_PER_TTL = 1000
"""Forgotten conversations leave the table at most so often within their time, in batches where it is full: finding the oldest
walks over the places of those that were touched since, which is cheap only if it is rare."""


Known = tuple[int, ...]
"""What workers hold of a conversation: (worker, tokens, stamp) after one another. A flat tuple takes a third of a dict's memory.

The stamp is the number of resets seen before the turn was sent: what was learnt before a worker's last reset is void.
"""


@dataclass(slots=True)
class _Session:
    last_s: float
    decode_worker: int = -1
    n_finished: int = 0
    sum_output_tokens: int = 0
    n_inflight: int = 0
    known: Known = ()


@dataclass(slots=True)
class _Inflight:
    sent: Sent
    session: _Session
    tokens: int
    stamp: int
    on_prefill: bool


def _with(known: Known, worker: int, tokens: int, stamp: int) -> Known:
    """``known`` with this worker's entry replaced."""
    for i in range(0, len(known), 3):
        if known[i] == worker:
            return (*known[:i], worker, tokens, stamp, *known[i + 3 :])
    return (*known, worker, tokens, stamp)


class Ledger:
    """Counts in flight, conversations and the arrival rate of one topology.

    A ``pd`` turn counts on its P until ``PrefillDone`` and on its D from dispatch to the end, since D is committed from the
    start. ``known_tokens`` grows only with ok turns (B23) and is dropped on ``WorkerReset`` (B24), in O(1). Conversations leave
    after ``session_ttl_s``, the oldest earlier where there are more than ``max_sessions``.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        session_ttl_s: float = SESSION_TTL_S,
        qps_window_s: float = QPS_WINDOW_S,
        max_sessions: int | None = None,
    ) -> None:
        n = topology.n_workers
        self._n_workers = n
        self._session_ttl_s = session_ttl_s
        self._qps_window_s = qps_window_s
        self._max_sessions = max_sessions
        self._n_inflight = [0] * n
        self._inflight_tokens = [0] * n
        self._n_legs = [0] * n
        self._n_first_legs = [0] * n
        self._kv_usage: list[float | None] = [None] * n
        self._n_waiting_capacity = [0] * n
        self._available = [True] * n
        self._n_resets = 0
        self._reset_stamps = [0] * n  # the number of resets seen when the worker's last one was
        self._inflight: dict[str, _Inflight] = {}
        self._sessions: dict[str, _Session] = {}  # ordered by last access, for O(1) eviction
        self._next_sweep_s = 0.0
        self._prefixes = PrefixIndex(n)
        self._starts: deque[float] = deque()
        self._first_start_s: float | None = None

    @property
    def n_inflight(self) -> Sequence[int]:
        """Requests dispatched and not finished, by worker, as they are now."""
        return self._n_inflight

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
            self._n_waiting_capacity[event.worker] = event.n_waiting_capacity
        elif isinstance(event, WorkerAvailability):
            self._available[event.worker] = event.available
        else:
            self._on_reset(event)

    def view(self, now_s: float, session_id: str, block_ids: Sequence[int] = ()) -> RouterView:
        """The knowledge a policy may use now, about prompts with these content ids. O(workers)."""
        return RouterView(
            now_s=now_s,
            n_inflight=tuple(self._n_inflight),
            inflight_tokens=tuple(self._inflight_tokens),
            n_legs=tuple(self._n_legs),
            n_first_legs=tuple(self._n_first_legs),
            kv_usage_ratio=tuple(self._kv_usage),
            session_rps=self._session_rps(now_s),
            session=self._session_view(session_id, now_s),
            n_waiting_capacity=tuple(self._n_waiting_capacity),
            available=tuple(self._available),
            prefix_blocks=self._prefixes.n_known(block_ids) if block_ids else (),
        )

    def _session_view(self, session_id: str, now_s: float) -> SessionView | None:
        session = self._sessions.get(session_id)
        if session is None or session.n_finished == 0 or self._is_over(session, now_s):
            return None
        return SessionView(
            n_finished=session.n_finished,
            decode_worker=session.decode_worker,
            known_tokens=self._known_tokens(session.known),
            mean_output_tokens=session.sum_output_tokens / session.n_finished,
            n_inflight=session.n_inflight,
        )

    def _known_tokens(self, known: Known) -> tuple[int, ...]:
        tokens = [0] * self._n_workers
        for i in range(0, len(known), 3):
            if known[i + 2] >= self._reset_stamps[known[i]]:
                tokens[known[i]] = known[i + 1]
        return tuple(tokens)

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
        session.n_inflight += 1
        self._inflight[event.request_id] = _Inflight(event, session, tokens, self._n_resets, pd)
        for worker in (decision.decode_worker, decision.prefill_worker) if pd else (decision.decode_worker,):
            self._n_inflight[worker] += 1
            self._inflight_tokens[worker] += tokens
            self._n_legs[worker] += 1
            self._prefixes.note(event.block_ids, worker)
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
        if now_s >= self._next_sweep_s:
            self._sweep(now_s)
        if self._max_sessions is not None and len(self._sessions) > self._max_sessions:
            for oldest in list(islice(self._sessions, 1 + self._max_sessions // SWEEPS_PER_TTL)):
                del self._sessions[oldest]
        return session

    def _sweep(self, now_s: float) -> None:
        """Take out conversations whose time is over, and say when the next one's will be at the earliest."""
        over: list[str] = []
        next_s = now_s + self._session_ttl_s
        for session_id, session in self._sessions.items():
            if not self._is_over(session, now_s):
                next_s = session.last_s + self._session_ttl_s
                break
            over.append(session_id)
        for session_id in over:
            del self._sessions[session_id]
        self._next_sweep_s = max(next_s, now_s + self._session_ttl_s / SWEEPS_PER_TTL)

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
        inflight.session.n_inflight -= 1

    def _on_finished(self, event: Finished) -> None:
        inflight = self._inflight.pop(event.request_id, None)
        if inflight is None:
            return
        self._leave(inflight)
        sent = inflight.sent
        session = self._sessions.get(sent.session_id)
        if event.ok and session is not None:
            self._learn(session, inflight, event.prompt_tokens or sent.prompt_tokens, event.generated_tokens)

    def _learn(self, session: _Session, inflight: _Inflight, prompt_tokens: int, generated_tokens: int) -> None:
        decision, stamp = inflight.sent.decision, inflight.stamp
        session.n_finished += 1
        session.sum_output_tokens += generated_tokens
        session.decode_worker = decision.decode_worker
        # The last sampled token's KV is never computed, but the next prompt carries it; one token is below any block.
        session.known = _with(session.known, decision.decode_worker, prompt_tokens + generated_tokens, stamp)
        if decision.prefill_worker != decision.decode_worker:
            session.known = _with(session.known, decision.prefill_worker, prompt_tokens, stamp)

    def _on_reset(self, event: WorkerReset) -> None:
        self._kv_usage[event.worker] = None
        self._n_waiting_capacity[event.worker] = 0
        self._n_resets += 1
        self._reset_stamps[event.worker] = self._n_resets
        self._prefixes.forget(event.worker)
