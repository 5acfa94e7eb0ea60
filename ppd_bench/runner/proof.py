"""Proof that turns took the path that their records claim: records against the engines' own prompt-token counters.

vLLM counts every prompt token once, by source: computed here, hit in the local prefix cache, or received from another engine.
A point whose counters contradict its records is invalid, with the reason (ROUTER.md, B37).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppd_bench.core.enums import Route, Status
from ppd_bench.core.record import Columns
from ppd_bench.engine.metrics import EngineCounters

PROOF_COUNTERS = ("local_compute_tokens", "local_cache_hit_tokens", "external_kv_transfer_tokens")


@dataclass(slots=True)
class _Claims:
    """What the records say that one engine did, in prompt tokens: at least (from ok turns) and at most (from sent ones)."""

    received_least: int = 0
    received_most: int = 0
    hit_least: int = 0
    hit_most: int = 0
    prefilled_least: int = 0
    n_pd: int = 0
    n_local: int = 0


def contradictions(
    columns: Columns, counters: Mapping[str, EngineCounters], *, block_size: int, shares_content: bool = False
) -> list[str]:
    """What engines' counters say against the records, one sentence each; empty when the path of every turn is proven.

    ``counters``: by worker id, what each engine did during the point and nothing else. An engine without the counters
    (an old version, or one that restarted) cannot prove anything, which is said too. ``shares_content``: prompts of recorded
    traffic may be found in any cache and need not hold the answers before them, so their hits prove nothing.
    """
    claims = {worker_id: _Claims() for worker_id in counters}
    for turn in _turns(columns):
        _claim(claims, turn, block_size)
    if shares_content:
        for claim in claims.values():
            claim.received_least, claim.hit_least, claim.hit_most = 0, 0, sys.maxsize
    told: list[str] = []
    for worker_id, claim in claims.items():
        found = counters[worker_id]
        missing = [name for name in PROOF_COUNTERS if getattr(found, name) is None]
        told += (
            [f"{worker_id}: path not proven, counters are missing or were reset"]
            if missing
            else _judge(worker_id, claim, found)
        )
    return told


def _turns(columns: Columns) -> list[dict[str, Any]]:
    names = (
        "turn",
        "context_tokens",
        "input_tokens",
        "route",
        "prefill_worker",
        "decode_worker",
        "status",
        "cached_tokens",
    )
    rows = zip(*(columns[name] for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _claim(claims: Mapping[str, _Claims], turn: Mapping[str, Any], block_size: int) -> None:
    if turn["route"] is None:
        return
    ok = turn["status"] == Status.OK.value
    prompt = turn["context_tokens"] + turn["input_tokens"]
    # The last token of the history was sampled and not computed; only full blocks can be found again.
    history = max(0, turn["context_tokens"] - 1) // block_size * block_size
    decoder = claims[turn["decode_worker"]]
    decoder.hit_most += prompt if turn["turn"] > 1 else 0
    if turn["route"] in (Route.LOCAL.value, Route.REPLICA.value):
        decoder.n_local += 1
        decoder.hit_least += history if ok and turn["route"] == Route.LOCAL.value else 0
        return
    decoder.n_pd += 1
    decoder.received_most += prompt
    # What D already holds is not received again: at most the whole history.
    decoder.received_least += max(0, (prompt - 1) // block_size * block_size - history) if ok else 0
    claims[turn["prefill_worker"]].prefilled_least += prompt if ok else 0


def _judge(worker_id: str, claim: _Claims, found: EngineCounters) -> list[str]:
    received = found.external_kv_transfer_tokens or 0.0
    hit = found.local_cache_hit_tokens or 0.0
    worked = received + hit + (found.local_compute_tokens or 0.0)
    checks: Sequence[tuple[bool, str]] = (
        (received < claim.received_least, f"received {received:g} prompt tokens, and {claim.n_pd} pd turns need at least "
         f"{claim.received_least}"),
        (received > claim.received_most, f"received {received:g} prompt tokens, and its {claim.n_pd} pd turns can account "
         f"for {claim.received_most} at most"),
        (hit < claim.hit_least, f"hit {hit:g} prompt tokens in its prefix cache, and its {claim.n_local} local turns need "
         f"at least {claim.hit_least}"),
        (hit > claim.hit_most and not claim.prefilled_least, f"hit {hit:g} prompt tokens in its prefix cache, and "
         f"follow-up turns can account for {claim.hit_most} at most: prompts were not new"),
        (worked < claim.prefilled_least, f"prefilled {worked:g} prompt tokens, and pd turns need {claim.prefilled_least}"),
        (bool(found.n_failed_transfers), f"{found.n_failed_transfers:g} KV transfers failed" if found.n_failed_transfers
         else ""),
        (bool(found.n_expired_requests), f"{found.n_expired_requests:g} KV leases expired" if found.n_expired_requests
         else ""),
    )  # fmt: skip
    return [f"{worker_id}: {told}" for wrong, told in checks if wrong]
