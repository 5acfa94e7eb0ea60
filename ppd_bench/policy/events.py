"""What a router can observe. The log of these, in order, is all that a Ledger is built from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ppd_bench.core.decision import Decision


class Sent(NamedTuple):
    """A turn was dispatched as decided. ``block_ids``: the prompt's content ids, where the query had them."""

    time_s: float
    request_id: str
    session_id: str
    turn: int
    prompt_tokens: int
    max_output_tokens: int
    decision: Decision
    block_ids: Sequence[int] = ()


class PrefillDone(NamedTuple):
    """The P leg of a turn answered."""

    time_s: float
    request_id: str


class Finished(NamedTuple):
    """A turn ended. ``ok`` false means timeout, error or abort; ``generated_tokens`` is what reached the client.

    ``prompt_tokens``: the engine's count, where the one that was sent with the turn was an estimate; 0 elsewhere.
    """

    time_s: float
    request_id: str
    ok: bool
    generated_tokens: int
    prompt_tokens: int = 0


class WorkerSnapshot(NamedTuple):
    """A scrape of one worker's gauges arrived (it describes a moment a little earlier).

    ``n_waiting_capacity``: requests that wait there because the KV cache has no room for them.
    """

    time_s: float
    worker: int
    kv_usage_ratio: float
    n_waiting_capacity: int = 0


class WorkerReset(NamedTuple):
    """A worker restarted or dropped its prefix cache: it holds nothing any more."""

    time_s: float
    worker: int


class WorkerAvailability(NamedTuple):
    """A worker went away (it does not answer, or its breaker opened), or came back. What it holds is another matter."""

    time_s: float
    worker: int
    available: bool


Event = Sent | PrefillDone | Finished | WorkerSnapshot | WorkerReset | WorkerAvailability
