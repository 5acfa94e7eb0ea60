"""One turn's row, in schema order after the point's columns. Compiled, for it reads many fields of every trip."""

from __future__ import annotations

from typing import Any

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Status
from ppd_bench.sim.seq import Seq
from ppd_bench.sim.trip import Trip

GapStatistics = tuple[int, float | None, float | None, float | None]
"""Count, mean, p99 and max of the gaps between tokens; nulls without any."""

Row = tuple[Any, ...]


def _head(trip: Trip) -> Row:
    turn = trip.turn
    return (
        turn.request_id,
        turn.session_id,
        turn.turn,
        turn.context_tokens,
        turn.input_tokens,
        turn.output_tokens,
        turn.max_output_tokens,
        trip.generated_tokens,
    )


def sent_row(
    trip: Trip,
    decision: Decision,
    names: list[str],
    first_s: float | None,
    last_s: float | None,
    statistics: GapStatistics,
    gaps: list[float] | None,
    bytes_per_token: int,
) -> Row:
    """The row of a turn that was sent."""
    prefill, decode, transfer = trip.prefill, trip.decode, trip.transfer
    moved = transfer is not None and transfer.start_s >= 0.0
    return (
        *_head(trip),
        decision.route.value,
        names[decision.prefill_worker],
        names[decision.decode_worker],
        decision.reason,
        trip.scheduled_s,
        trip.sent_s,
        _time(prefill.start_s) if prefill is not None else None,
        _time(trip.prefill_done_s),
        _time(transfer.start_s) if transfer is not None else None,
        _time(transfer.done_s) if transfer is not None and transfer.finished else None,
        _time(decode.start_s) if decode is not None else None,
        first_s,
        last_s,
        trip.end_s,
        *statistics,
        gaps,
        _hit(prefill),
        _hit(decode),
        trip.transfer_tokens if moved else None,
        trip.transfer_tokens * bytes_per_token if moved else None,
        (prefill.n_preempted if prefill is not None else 0) + (decode.n_preempted if decode is not None else 0),
        trip.status.value,
        trip.message,
    )


def unsent_row(trip: Trip) -> Row:
    """The row of a turn whose earlier turn failed: nothing is known but that it was due."""
    return (
        *_head(trip),
        *[None] * 14,  # route to end_s
        0,
        *[None] * 4,  # gap statistics and gaps
        *[None] * 4,  # cached and transferred
        0,
        Status.UNSENT.value,
        "an earlier turn of the conversation failed",
    )


def _time(value: float) -> float | None:
    return value if value >= 0.0 else None


def _hit(seq: Seq | None) -> int | None:
    return seq.hit_tokens if seq is not None and seq.hit_tokens >= 0 else None
