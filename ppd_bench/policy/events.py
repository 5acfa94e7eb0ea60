"""What a router can observe. The log of these, in order, is all that a Ledger is built from."""

from __future__ import annotations

from typing import NamedTuple

from ppd_bench.core.decision import Decision


class Sent(NamedTuple):
    """A turn was dispatched as decided."""

    time_s: float
    request_id: str
    session_id: str
    turn: int
    prompt_tokens: int
    max_output_tokens: int
    decision: Decision


class PrefillDone(NamedTuple):
    """The P leg of a turn answered."""

    time_s: float
    request_id: str


class Finished(NamedTuple):
    """A turn ended. ``ok`` false means timeout, error or abort; ``generated_tokens`` is what reached the client."""

    time_s: float
    request_id: str
    ok: bool
    generated_tokens: int


class WorkerSnapshot(NamedTuple):
    """A scrape of one worker's gauges arrived (it describes a moment a little earlier)."""

    time_s: float
    worker: int
    kv_usage_ratio: float


class WorkerReset(NamedTuple):
    """A worker restarted or dropped its prefix cache: it holds nothing any more."""

    time_s: float
    worker: int


Event = Sent | PrefillDone | Finished | WorkerSnapshot | WorkerReset
