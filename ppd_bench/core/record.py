"""The one record: what is known of one turn, whoever ran it.

``RequestRecord`` is the schema. Its fields, in order, with unit and meaning in their metadata, define the Parquet columns
(``store.schema``), what the simulator and the load generator produce, and what ``analysis`` reads. No derived latency is
stored: TTFT, TPOT, ITL and E2E have one formula each, in ``analysis``. Missing is null, never 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


def column(unit: str, meaning: str) -> Any:
    """A dataclass field that carries its unit and meaning ('1' for counts and ratios, '' for labels)."""
    return field(metadata={"unit": unit, "meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One turn. Times are seconds since the point's start on one monotonic clock."""

    point_id: str = column("", "hash of the point that this turn belongs to")
    executor: str = column("", "sim or live")
    topology: str = column("", "configuration name")
    workload: str = column("", "workload name")
    qps: float = column("1/s", "conversation arrivals per second offered")
    repeat: int = column("1", "repeat number of the point")
    request_id: str = column("", "unique within the point")
    session_id: str = column("", "conversation; the same in every configuration of a (workload, qps, repeat)")
    turn: int = column("1", "1-based turn number")
    context_tokens: int = column("tokens", "history before this turn")
    input_tokens: int = column("tokens", "new prompt tokens of this turn")
    output_tokens: int = column("tokens", "output length asked of the engine")
    max_output_tokens: int = column("tokens", "output length declared by the client, as a policy saw it")
    generated_tokens: int = column("tokens", "tokens that reached the client")
    route: str | None = column("", "pd, pd_readback, local or replica; null when unsent")
    prefill_worker: str | None = column("", "worker that prefilled the prompt")
    decode_worker: str | None = column("", "worker that generated the tokens")
    reason: str | None = column("", "why the policy decided so")
    scheduled_s: float | None = column("s", "planned send instant; null when the turn before it failed")
    sent_s: float | None = column("s", "instant the turn left the client, before any prefill")
    prefill_start_s: float | None = column("s", "first step on P that worked on this turn; null without a P leg")
    prefill_done_s: float | None = column("s", "P had computed the prompt; null without a P leg")
    transfer_start_s: float | None = column("s", "KV transfer started; null without one")
    transfer_done_s: float | None = column("s", "KV transfer finished; null without one")
    decode_start_s: float | None = column("s", "first step of this turn on the worker that generates")
    first_token_s: float | None = column("s", "first generated token reached the client")
    last_token_s: float | None = column("s", "last generated token that reached the client")
    end_s: float | None = column("s", "instant the turn ended, in whatever status")
    itl_count: int = column("1", "gaps between successive tokens")
    itl_mean_s: float | None = column("s", "mean gap")
    itl_p99_s: float | None = column("s", "99th percentile gap")
    itl_max_s: float | None = column("s", "largest gap")
    itl_s: list[float] | None = column("s", "all gaps, where they were kept (live, or --token-gaps)")
    prefill_cached_tokens: int | None = column(
        "tokens", "prompt tokens found in P's prefix cache; null without a P leg"
    )
    cached_tokens: int | None = column("tokens", "prompt tokens found in the generating worker's own prefix cache")
    transferred_tokens: int | None = column("tokens", "prompt tokens whose KV was pulled or pushed from P")
    transfer_bytes: int | None = column("bytes", "KV bytes moved for this turn")
    n_preemptions: int = column("1", "times this turn was preempted and recomputed")
    status: str = column("", "ok, timeout, error, aborted or unsent")
    message: str | None = column("", "what went wrong, for people")


RECORD_FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(RequestRecord))
"""Column names in schema order."""

POINT_FIELDS: tuple[str, ...] = ("point_id", "executor", "topology", "workload", "qps", "repeat")
"""Columns that are constant within a point."""

Columns = dict[str, Any]
"""Records of one point, by column: every name of ``RECORD_FIELDS`` to a list of equal length, or, for columns of numbers, a
numpy array whose NaN means null."""
