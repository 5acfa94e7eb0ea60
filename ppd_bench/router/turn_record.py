"""What is known of one turn when it has ended, and the log's row of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Executor, Route, Status
from ppd_bench.engine.dispatch import FALLBACK_LOCAL, Dispatched
from ppd_bench.policy.query import RouteQuery

STAGES = ("decide", "to_prefill", "prefill", "to_decode", "first_byte", "stream")
"""The parts of a turn, in order; those that it has add up to its whole time (ROUTER.md B35).

``decide``: from receiving to the decision. ``to_prefill``: to the P leg that was used, failed ones before it included.
``prefill``: that P leg. ``to_decode``: to the generating leg, failed ones included. ``first_byte``: to the first byte for the
client. ``stream``: to the end.
"""

OFF_GRID = "off-grid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What all turns of a router share. ``start_s`` is its start on the clock that all instants are on."""

    topology: str
    worker_ids: Sequence[str]
    start_s: float


@dataclass(slots=True, kw_only=True)
class TurnRecord:
    """One turn. Instants are seconds on the router's clock, but ``received_unix_s``, on the wall's.

    ``query`` and ``decision`` are null where it did not come to that. ``went`` is null where nothing was dispatched, or the
    client left before that had ended.
    """

    request_id: str
    client_request_id: str
    path: str
    request_bytes: int
    received_unix_s: float
    received_s: float
    identity: str = ""
    query: RouteQuery | None = None
    decision: Decision | None = None
    session_rps: float = 0.0
    decided_s: float | None = None
    went: Dispatched | None = None
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    done_s: float = 0.0
    status: Status = Status.ERROR
    failure: str | None = None
    message: str | None = None
    http_status: int = 0
    answer_bytes: int = 0
    counters: tuple[str, ...] = ()

    @property
    def route(self) -> str | None:
        """What was done; what was decided where the client left; null where nothing was sent to an engine."""
        if self.went is not None:
            return self.went.path
        return self.decision.route.value if self.decision is not None and self.decided_s is not None else None

    def instants(self) -> dict[str, float | None]:
        """The end of each stage, in order; null for those that the turn did not have."""
        went = self.went
        through_p = went is not None and went.path == Route.PD.value and went.prefill_done_s is not None
        return {
            "decide": self.decided_s,
            "to_prefill": went.prefill.sent_s if through_p and went is not None and went.prefill is not None else None,
            "prefill": went.prefill_done_s if through_p and went is not None else None,
            "to_decode": went.decode_sent_s if went is not None else None,
            "first_byte": self.first_byte_s,
            "stream": self.done_s,
        }

    def stages(self) -> dict[str, float]:
        """Seconds of each stage that the turn had."""
        seconds, before_s = {}, self.received_s
        for name, end_s in self.instants().items():
            if end_s is not None:
                seconds[name] = end_s - before_s
                before_s = end_s
        return seconds

    def overhead_s(self, stages: Mapping[str, float]) -> float | None:
        """What the router itself added; null where something was tried twice or did not end."""
        if self.went is None or self.counters or self.went.decode_sent_s is None:
            return None
        own = [stages[name] for name in ("decide", "to_prefill", "to_decode") if name in stages]
        return sum(own) + max(0.0, self.done_s - self.went.outcome.end_s)

    def row(self, origin: Origin) -> dict[str, Any]:
        """The row of the decision log: ``RequestRecord``'s columns and ``ROUTER_COLUMNS``; nulls may be left out."""
        instants = {name: None if at_s is None else at_s - origin.start_s for name, at_s in self.instants().items()}
        sent_s = self.received_s - origin.start_s
        return {
            "executor": Executor.LIVE.value,
            "topology": origin.topology,
            "qps": self.session_rps,
            "repeat": 0,
            "request_id": self.request_id,
            "scheduled_s": sent_s,
            "sent_s": sent_s,
            "end_s": instants["stream"],
            "prefill_done_s": instants["prefill"],
            "itl_count": 0,
            "n_preemptions": 0,
            "status": self.status.value,
            "message": self.message,
            "time_unix_s": self.received_unix_s,
            "t_recv_s": sent_s,
            "t_decided_s": instants["decide"],
            "t_p_sent_s": instants["to_prefill"],
            "t_p_done_s": instants["prefill"],
            "t_d_sent_s": instants["to_decode"],
            "t_first_byte_s": instants["first_byte"],
            "t_done_s": instants["stream"],
            "identity": self.identity or None,
            "client_request_id": self.client_request_id,
            "path": self.path,
            "http_status": self.http_status,
            "failure": self.failure,
            "counters": list(self.counters) or None,
            "request_bytes": self.request_bytes,
            "answer_bytes": self.answer_bytes,
            **self._asked(),
            **self._decided(origin.worker_ids),
            **self._answered(origin.start_s),
        }

    def _asked(self) -> dict[str, Any]:
        query = self.query
        if query is None:
            return {}
        return {
            "session_id": query.session_id,
            "turn": query.turn,
            "context_tokens": query.context_tokens,
            "input_tokens": query.input_tokens,
            "output_tokens": query.max_output_tokens,
            "max_output_tokens": query.max_output_tokens,
        }

    def _decided(self, worker_ids: Sequence[str]) -> dict[str, Any]:
        decision, went = self.decision, self.went
        if decision is None or self.query is None:
            return {}
        prefiller, decoder = decision.prefill_worker, decision.decode_worker
        if went is not None:
            prefiller, decoder = went.prefill_worker, went.decode_worker
        return {
            "route": self.route,
            "decided_route": decision.route.value,
            "prefill_worker": worker_ids[prefiller],
            "decode_worker": worker_ids[decoder],
            "reason": decision.reason,
            "x": _request_x(self.query.turn, self.route),
            **table_part(decision.reason),
        }

    def _answered(self, start_s: float) -> dict[str, Any]:
        """Tokens. Behind a hand-off the generating worker's ``cached_tokens`` is P's count, so that its own is unknown."""
        if self.went is None:
            return {"generated_tokens": 0}
        outcome, prefill = self.went.outcome, self.went.prefill
        first_s, last_s = outcome.first_token_s, outcome.last_token_s
        return {
            "generated_tokens": outcome.n_tokens,
            "first_token_s": None if first_s is None else first_s - start_s,
            "last_token_s": None if last_s is None else last_s - start_s,
            "prefill_cached_tokens": prefill.cached_tokens if prefill is not None else None,
            "cached_tokens": outcome.cached_tokens if prefill is None else None,
        }


def _request_x(turn: int, route: str | None) -> int | None:
    """Request-level x of one turn (GLOSSARY: x)."""
    if turn == 1 or route not in (Route.PD.value, Route.LOCAL.value, FALLBACK_LOCAL):
        return None
    return int(route != Route.PD.value)


def table_part(reason: str) -> dict[str, Any]:
    """Table, cell, evidence and rule of a reason (``DecisionTable.reason``); empty where no table decided."""
    words = reason.split()
    if len(words) < 5 or words[0] != "table":
        return {}
    names = ("table_hash", "cell", "evidence", "rule")
    return {**dict(zip(names, words[1:5], strict=True)), "off_grid": OFF_GRID in words[5:] or None}


def reason_class(reason: str) -> str:
    """The reason without what differs from turn to turn: fit to be a label."""
    words = reason.split()
    if words[0] == "table" and len(words) >= 5:
        return f"table {words[4]}"
    return words[0]
