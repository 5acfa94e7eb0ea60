"""Records against engine counters: what proves a path, and what contradicts it. Blocks of 32 tokens throughout."""

from __future__ import annotations

from typing import Any

import pytest

from ppd_bench.engine.metrics import EngineCounters
from ppd_bench.runner.proof import contradictions


def turn(
    number: int, context: int, new: int, route: str | None, p: str | None, d: str | None, status: str = "ok"
) -> Any:
    return {
        "turn": number, "context_tokens": context, "input_tokens": new, "route": route, "prefill_worker": p,
        "decode_worker": d, "status": status, "cached_tokens": None,
    }  # fmt: skip


def columns(*turns: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [t[name] for t in turns] for name in turns[0]}


def counted(compute: float, hit: float, received: float, **more: float) -> EngineCounters:
    return EngineCounters(
        local_compute_tokens=compute, local_cache_hit_tokens=hit, external_kv_transfer_tokens=received, **more
    )


# 128 -> 32 through P, then 32 new tokens: 160 of history, of which 159 are computed: 4 full blocks, 128 tokens.
FIRST = turn(1, 0, 128, "pd", "P0", "D0")
THROUGH_P = turn(2, 160, 32, "pd", "P0", "D0")
LOCAL = turn(2, 160, 32, "local", "D0", "D0")


def judged(turns: list[dict[str, Any]], p: EngineCounters, d: EngineCounters) -> list[str]:
    return contradictions(columns(*turns), {"P0": p, "D0": d}, block_size=32)


def test_a_pd_conversation_is_proven_whether_d_pulls_all_or_only_what_it_lacks() -> None:
    p = counted(128 + 64, 128, 0)
    assert judged([FIRST, THROUGH_P], p, counted(0, 0, 128 + 192)) == []
    assert judged([FIRST, THROUGH_P], p, counted(1, 128, 128 + 63)) == []


def test_a_local_turn_must_find_its_history_and_move_nothing() -> None:
    p = counted(128, 0, 0)
    assert judged([FIRST, LOCAL], p, counted(64, 128, 128)) == []
    assert "hit 0 prompt tokens" in judged([FIRST, LOCAL], p, counted(192, 0, 128))[0]
    assert "can account for 128 at most" in judged([FIRST, LOCAL], p, counted(64, 128, 128 + 192))[0]


@pytest.mark.parametrize(
    ("p", "d", "told"),
    [
        (counted(320, 0, 0), counted(320, 0, 0), "D0: received 0 prompt tokens"),
        (counted(0, 0, 0), counted(0, 0, 320), "P0: prefilled 0 prompt tokens"),
        (counted(320, 0, 0), counted(0, 0, 320, n_failed_transfers=1.0), "D0: 1 KV transfers failed"),
        (counted(320, 0, 0, n_expired_requests=2.0), counted(0, 0, 320), "P0: 2 KV leases expired"),
        (counted(320, 0, 0), EngineCounters(), "D0: path not proven"),
    ],
)
def test_b37_each_contradiction_is_named_with_its_engine(p: EngineCounters, d: EngineCounters, told: str) -> None:
    assert any(line.startswith(told) for line in judged([FIRST, THROUGH_P], p, d))


def test_failed_and_unsent_turns_claim_nothing_but_explain_what_moved() -> None:
    failed = turn(2, 160, 32, "pd", "P0", "D0", status="timeout")
    unsent = turn(2, 160, 32, None, None, None, status="unsent")
    for received in (128, 320):
        assert judged([FIRST, failed], counted(320, 0, 0), counted(0, 0, received)) == []
    assert judged([FIRST, unsent], counted(128, 0, 0), counted(0, 0, 128)) == []
    assert judged([FIRST, unsent], counted(128, 0, 0), counted(0, 0, 320)) != []


def test_first_turns_must_be_new_to_every_cache() -> None:
    replica = turn(1, 0, 128, "replica", "R0", "R0")
    one = columns(replica)
    assert contradictions(one, {"R0": counted(128, 0, 0)}, block_size=32) == []
    told = contradictions(one, {"R0": counted(32, 96, 0)}, block_size=32)
    assert "prompts were not new" in told[0]
