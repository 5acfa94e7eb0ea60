"""What a running router says of itself: for ``/status``, and for ``/metrics`` at the moment of a scrape."""

from __future__ import annotations

from typing import Any

from ppd_bench import __version__
from ppd_bench.router.metrics import Reading, WorkerReading
from ppd_bench.router.state import RouterState


def status_of(state: RouterState) -> dict[str, Any]:
    """Everything an operator asks first, as JSON content. No key, no prompt, no conversation's content."""
    box, log = state.policies, state.log
    reading = reading_of(state)
    return {
        "version": __version__,
        "router": state.name,
        "topology": state.topology.name,
        "uptime_s": state.now_s(),
        "policy": {"decider": box.decider, "placement": box.placement},
        "table": {**box.now.info, "n_reloads": box.n_reloads, "n_refusals": box.n_refusals, "problem": box.problem},
        "workers": [
            {
                "worker_id": worker.worker_id,
                "available": worker.available,
                "breaker": worker.breaker,
                "n_inflight": worker.n_inflight,
                "kv_usage_ratio": worker.kv_usage_ratio,
            }
            for worker in reading.workers
        ],
        "engines": state.fleet.status(),
        "gauges": dict(reading.gauges),
        "totals": dict(reading.totals),
        "log": None if log is None else {"folder": str(log.folder), "problem": log.problem},
    }


def reading_of(state: RouterState) -> Reading:
    """What is read when somebody scrapes."""
    view = state.ledger.view(state.now_s(), "")
    log = state.log
    return Reading(
        workers=[
            WorkerReading(
                worker_id=worker.worker_id,
                available=state.fleet.available(index),
                breaker=state.fleet.breaker_state(index),
                n_inflight=view.n_inflight[index],
                kv_usage_ratio=view.kv_usage_ratio[index],
            )
            for index, worker in enumerate(state.topology.workers)
        ],
        gauges={
            "sessions": state.ledger.n_sessions,
            "identities": state.identifier.n_sessions,
            "open_requests": len(state.open_turns),
            "session_rps": view.session_rps,
            "decision_log_waiting_rows": 0 if log is None else log.n_waiting,
        },
        totals={
            "decision_log_rows": 0 if log is None else log.n_written,
            "decision_log_dropped_rows": 0 if log is None else log.n_dropped,
            "table_reloads": state.policies.n_reloads,
            "table_refusals": state.policies.n_refusals,
        },
        table=state.policies.now.info,
    )
