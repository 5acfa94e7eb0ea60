"""What policies over N instances leave of the reuse: known values, the placements themselves, and caches of every size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reuse_cases import B, blocks_of, mooncake_rows, prompts_of, random_traces, slow_lru_tokens

from ppd_bench.analysis.reuse import reuse
from ppd_bench.analysis.reuse_instances import (
    POLICIES,
    InstanceReuse,
    Service,
    assign,
    default_sees,
    instance_reuse,
)
from ppd_bench.analysis.trace_blocks import TraceBlocks, number_blocks
from ppd_bench.core.errors import SpecError

SERVICE = Service()


def possible(trace: TraceBlocks) -> float:
    return reuse(trace).hit_ratio


@pytest.fixture(scope="module")
def mooncake(shared: Path) -> TraceBlocks:
    return number_blocks(mooncake_rows(shared / "data/mooncake/conversation_trace.jsonl"), block_tokens=512)


def unbound(trace: TraceBlocks, policy: str, n: int) -> InstanceReuse:
    return instance_reuse(trace, policy, n, possible_ratio=possible(trace))[0]


@pytest.mark.parametrize(("n", "known"), [(2, 0.276), (4, 0.196), (8, 0.139)])
def test_round_robin_over_the_mooncake_trace_leaves_the_known_reuse(
    mooncake: TraceBlocks, n: int, known: float
) -> None:
    found = unbound(mooncake, "round_robin", n)
    assert round(found.hit_ratio, 3) == known
    assert found.sees is None
    assert found.share_of_possible_ratio == pytest.approx(found.hit_ratio / 0.37362, rel=1e-4)


def test_a_cache_aware_router_that_sees_ids_keeps_most_of_it(mooncake: TraceBlocks) -> None:
    found = unbound(mooncake, "cache_aware", 8)
    assert found.sees == "ids"
    assert found.hit_ratio > 0.85 * 0.3736
    assert found.busiest_ratio < 1.2


@pytest.mark.parametrize("policy", POLICIES)
def test_one_instance_realises_all_that_is_possible(policy: str) -> None:
    trace = blocks_of(("s", "AB"), ("t", "ABC"), ("s", "ABCD"), "ABc")
    found = unbound(trace, policy, 1)
    assert found.hit_ratio == pytest.approx(possible(trace))
    assert (found.share_of_possible_ratio, found.busiest_ratio) == (pytest.approx(1.0), 1.0)


def test_round_robin_takes_turns_and_affinity_keeps_sessions_together() -> None:
    trace = blocks_of(*[(f"s{k % 5}", "AB" + "C" * (k // 5)) for k in range(40)])
    assert assign(trace, "round_robin", 3, service=SERVICE).tolist() == [k % 3 for k in range(40)]
    kept = assign(trace, "session_affinity", 3, service=SERVICE)
    assert all(len(set(kept[trace.session == session])) == 1 for session in set(trace.session.tolist()))


def test_cache_aware_follows_the_prefix_only_where_the_router_sees_ids() -> None:
    """No sessions; families of prompts. Long gaps: every request is alone, so load decides nothing."""
    trace = blocks_of(*["ABCDEFGH"[k % 4] * 3 + chr(ord("I") + k % 16) for k in range(64)])
    slow = Service(prefill_tokens_per_s=1e9, decode_tokens_per_s=1e9)
    by_ids = assign(trace, "cache_aware", 4, service=slow, sees="ids")
    families = np.arange(64) % 4
    assert all(len(set(by_ids[families == family])) == 1 for family in range(4))
    blind = assign(trace, "cache_aware", 4, service=slow, sees="conversations")
    assert any(len(set(blind[families == family])) > 1 for family in range(4))


@given(random_traces(), st.sampled_from(POLICIES), st.integers(1, 4), st.integers(1, 12))
def test_each_instance_is_an_lru_cache_of_its_own(trace: TraceBlocks, policy: str, n: int, blocks: int) -> None:
    results = instance_reuse(
        trace, policy, n, possible_ratio=possible(trace), capacities_tokens=(float(B * blocks), 1e9)
    )
    instance = assign(trace, policy, n, service=SERVICE, sees=default_sees(trace))
    assert len(list(prompts_of(trace))) == instance.size
    assert set(instance.tolist()) <= set(range(n))
    saved = sum(slow_lru_tokens(trace.select(np.flatnonzero(instance == k)), blocks) for k in range(n))
    bounded = {r.capacity_tokens: r.hit_ratio for r in results}
    assert bounded[B * blocks] == pytest.approx(saved / int(trace.prompt_tokens.sum()))
    assert bounded[1e9] == pytest.approx(bounded[None])
    assert bounded[None] <= possible(trace) + 1e-12


def test_load_in_flight_spreads_what_arrives_at_once() -> None:
    trace = blocks_of(*["ABCDEFGHIJKL"[k] for k in range(12)])
    busy = assign(trace, "least_inflight", 4, service=Service(prefill_tokens_per_s=0.001, decode_tokens_per_s=0.001))
    assert np.bincount(busy).tolist() == [3, 3, 3, 3]


def test_policies_that_a_trace_cannot_serve_are_refused() -> None:
    with pytest.raises(SpecError, match="'least_kv_usage' cannot be used on a trace; allowed: round_robin"):
        assign(blocks_of("AB"), "least_kv_usage", 2, service=SERVICE)
    with pytest.raises(SpecError, match="'nonsense'"):
        assign(blocks_of("AB"), "nonsense", 2, service=SERVICE)
