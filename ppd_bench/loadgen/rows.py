"""Records of a played point, in the simulator's columns. What only an engine could tell (steps, transfers) is null here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Status
from ppd_bench.core.point import Point
from ppd_bench.core.record import RECORD_FIELDS, Columns
from ppd_bench.core.workload import Turn
from ppd_bench.engine.dispatch import Dispatched
from ppd_bench.engine.stream import StreamOutcome

P99 = 0.99
"""Linear interpolation, as everywhere."""


class TurnEnd(NamedTuple):
    """A turn that has just ended. Times are seconds since the point's start."""

    request_id: str
    status: Status
    sent_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    end_s: float | None
    generated_tokens: int


@dataclass(slots=True, kw_only=True)
class Trip:
    """One turn as it was played. Times are seconds since the point's start, but those inside ``outcome`` and ``dispatched``."""

    turn: Turn
    status: Status = Status.UNSENT
    message: str | None = "an earlier turn of the conversation failed"
    misanswered: bool = False
    scheduled_s: float | None = None
    released_s: float | None = None
    sent_s: float | None = None
    end_s: float | None = None
    decision: Decision | None = None
    dispatched: Dispatched | None = None
    outcome: StreamOutcome | None = None

    @property
    def send_lag_s(self) -> float | None:
        """Sent - scheduled (GLOSSARY: send lag); null when unsent."""
        return None if self.sent_s is None or self.scheduled_s is None else self.sent_s - self.scheduled_s

    @property
    def client_lag_s(self) -> float | None:
        """How late the client itself was: since the turn was due, or since a conversation that was held back could begin."""
        due_s = self.scheduled_s if self.released_s is None else self.released_s
        return None if self.sent_s is None or due_s is None else self.sent_s - due_s

    def ending(self, start_s: float) -> TurnEnd:
        """The turn for those who watch; ``start_s`` is the point's start on the client's clock."""
        outcome = self.outcome
        first_s, last_s = (outcome.first_token_s, outcome.last_token_s) if outcome else (None, None)
        return TurnEnd(
            request_id=self.turn.request_id,
            status=self.status,
            sent_s=self.sent_s,
            first_token_s=None if first_s is None else first_s - start_s,
            last_token_s=None if last_s is None else last_s - start_s,
            end_s=self.end_s,
            generated_tokens=outcome.n_tokens if outcome else 0,
        )


def to_columns(point: Point, trips: Sequence[Trip], worker_ids: Sequence[str], *, start_s: float) -> Columns:
    """One row per turn in the order of ``trips``; ``start_s`` is the point's start on the client's clock."""
    constant = {
        "point_id": point.point_id,
        "executor": point.executor.value,
        "topology": point.topology,
        "workload": point.workload.name,
        "qps": point.qps,
        "repeat": point.repeat,
    }
    rows = [{**constant, **_row(trip, worker_ids, start_s)} for trip in trips]
    return {name: [row.get(name) for row in rows] for name in RECORD_FIELDS}


def _row(trip: Trip, worker_ids: Sequence[str], start_s: float) -> dict[str, Any]:
    turn = trip.turn
    return {
        "request_id": turn.request_id,
        "session_id": turn.session_id,
        "turn": turn.turn,
        "context_tokens": turn.context_tokens,
        "input_tokens": turn.input_tokens,
        "output_tokens": turn.output_tokens,
        "max_output_tokens": turn.max_output_tokens,
        "generated_tokens": trip.outcome.n_tokens if trip.outcome else 0,
        "scheduled_s": trip.scheduled_s,
        "sent_s": trip.sent_s,
        "end_s": trip.end_s,
        "n_preemptions": 0,
        "status": trip.status.value,
        "message": trip.message,
        **_route(trip, worker_ids, start_s),
        **_tokens(trip.outcome, start_s),
    }


def _route(trip: Trip, worker_ids: Sequence[str], start_s: float) -> dict[str, Any]:
    """Where it went. Behind a hand-off D's ``cached_tokens`` is P's count, so that D's own is unknown."""
    outcome, went, decision = trip.outcome, trip.dispatched, trip.decision
    if went is None or decision is None:
        return {"cached_tokens": outcome.cached_tokens if outcome else None}
    done_s = went.prefill_done_s
    return {
        "route": went.path,
        "prefill_worker": worker_ids[went.prefill_worker],
        "decode_worker": worker_ids[went.decode_worker],
        "reason": decision.reason,
        "prefill_done_s": None if done_s is None else done_s - start_s,
        "prefill_cached_tokens": went.prefill.cached_tokens if went.prefill else None,
        "cached_tokens": went.outcome.cached_tokens if went.prefill is None else None,
    }


def _tokens(outcome: StreamOutcome | None, start_s: float) -> dict[str, Any]:
    """First and last token, and the gaps between tokens where the server's counts tell them."""
    if outcome is None or outcome.first_token_s is None or outcome.last_token_s is None:
        return {"itl_count": 0}
    times_s = outcome.token_times_s
    gaps = np.diff(times_s).tolist() if times_s else []
    return {
        "first_token_s": outcome.first_token_s - start_s,
        "last_token_s": outcome.last_token_s - start_s,
        "itl_count": len(gaps),
        "itl_mean_s": (outcome.last_token_s - outcome.first_token_s) / len(gaps) if gaps else None,
        "itl_p99_s": float(np.quantile(gaps, P99)) if gaps else None,
        "itl_max_s": max(gaps) if gaps else None,
        "itl_s": None if times_s is None else gaps,
    }
