"""Turns on their way through P, link and D: worked out by hand, with a step of 10 ms and no overheads unless said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sim_points import (
    LLAMA,
    cluster_of,
    constant_cost,
    make_point,
    rows_of,
    session,
    traced,
    use_cost,
    watch,
    workload,
)

from ppd_bench.core.point import PolicySpec, SimSettings
from ppd_bench.sim.chains import chains_of
from ppd_bench.sim.cluster import Cluster
from ppd_bench.sim.recording import to_columns
from ppd_bench.sim.simulate import simulate

BARE = SimSettings(step_overhead_s=0.0, sequence_overhead_s=0.0, visit_overhead_s=0.0, router_overhead_s=0.0)
HALF_SECOND_PER_1000 = 1000 * 131072 / 0.5
"""Link rate at which 1,000 tokens of Llama-3.1-8B's KV take half a second."""


@pytest.fixture(autouse=True)
def _ten_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, constant_cost(0.01))


def _rows(topology: str, sessions: list[Any], **settings: Any) -> dict[str, dict[str, Any]]:
    defaults: dict[str, Any] = {"sim": BARE, "kv_link_latency_s": 0.0, "kv_link_bytes_per_s": HALF_SECOND_PER_1000}
    point = make_point(topology, workload((1, 1)), **{**defaults, **settings})
    cluster = cluster_of(point, sessions, cap=1)
    return {row["request_id"]: row for row in rows_of(to_columns(point, cluster, keep_gaps=True))}


@pytest.mark.parametrize(("handoff", "moved"), [("push_blocking", 180), ("pull_async", 180 - 144)])
def test_p_finds_its_earlier_prompt_and_d_everything_it_decoded(handoff: str, moved: int) -> None:
    """Turn 1: 100 + 50. Turn 2: 150 + 30. P kept 6 full blocks of the 100; D 9 of the 149 (the last token has no KV)."""
    rows = _rows("1P_1D", [session("a", 0.0, (100, 50), (30, 20))], handoff=handoff)
    first, second = rows["a.t1"], rows["a.t2"]
    assert (first["prefill_cached_tokens"], first["cached_tokens"], first["transferred_tokens"]) == (0, 0, 100)
    assert (second["prefill_cached_tokens"], second["cached_tokens"]) == (96, 144)
    assert second["transferred_tokens"] == moved
    assert second["transfer_bytes"] == moved * 131072
    assert second["transfer_done_s"] - second["transfer_start_s"] == pytest.approx(moved * 0.0005, rel=1e-9)


def test_a_local_turn_moves_nothing_and_touches_no_p() -> None:
    second = _rows("1P_1pD", [session("a", 0.0, (100, 50), (30, 20))])["a.t2"]
    assert (second["route"], second["prefill_worker"], second["decode_worker"]) == ("local", "D0", "D0")
    assert second["cached_tokens"] == 144
    names = ("prefill_start_s", "prefill_done_s", "transfer_start_s", "transfer_done_s", "prefill_cached_tokens")
    assert [second[name] for name in (*names, "transferred_tokens", "transfer_bytes")] == [None] * 7


@pytest.mark.parametrize(("handoff", "largest_gap"), [("push_blocking", 0.502), ("pull_async", 0.01)])
def test_a_transfer_stops_the_other_decodes_of_d_only_where_its_step_waits(handoff: str, largest_gap: float) -> None:
    """A's 16 tokens take 8 ms, so its steps on D begin at 18 ms + k * 10 ms.

    B is sent at 0.3 and prefilled by 0.31. Pushed, its 1,000 tokens move until 0.81, and D's step that begins at 0.318 takes
    B in and ends at 0.82: a gap of 0.502 s for A. Pulled, they move from that step on, and A's steps go on.
    """
    rows = _rows("1P_1D", [session("a", 0.0, (16, 200)), session("b", 0.3, (1000, 10))], handoff=handoff)
    assert rows["a.t1"]["itl_max_s"] == pytest.approx(largest_gap, abs=1e-9)
    done_s, first_s = {"push_blocking": (0.81, 0.82), "pull_async": (0.818, 0.828)}[handoff]
    assert rows["b.t1"]["transfer_done_s"] == pytest.approx(done_s, abs=1e-9)
    assert rows["b.t1"]["first_token_s"] == pytest.approx(first_s, abs=1e-9)


def test_a_blocked_step_is_counted_as_blocked_time() -> None:
    point = make_point(
        "1P_1D", workload((1, 1)), sim=BARE, kv_link_latency_s=0.0, kv_link_bytes_per_s=HALF_SECOND_PER_1000
    )
    cluster = cluster_of(point, [session("b", 0.0, (1000, 10))])
    assert [worker.blocked_s for worker in cluster.workers] == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize(("handoff", "extra_s"), [("push_blocking", 0.1), ("pull_async", 0.0)])
def test_the_receiver_cost_is_paid_by_the_step_that_receives(handoff: str, extra_s: float) -> None:
    bare = _rows("1P_1D", [session("a", 0.0, (100, 3))], handoff=handoff)["a.t1"]
    sim = dataclasses.replace(BARE, receiver_cost_s=0.1)
    costly = _rows("1P_1D", [session("a", 0.0, (100, 3))], handoff=handoff, sim=sim)["a.t1"]
    assert costly["first_token_s"] - bare["first_token_s"] == pytest.approx(extra_s)
    assert costly["itl_max_s"] == pytest.approx(0.01)


def test_visits_and_router_are_paid_once_per_engine_and_once_per_turn() -> None:
    """P: router + visit + step; D: a second visit, which the transfer (50 ms) outlasts here; then one step."""
    sim = dataclasses.replace(BARE, visit_overhead_s=0.015, router_overhead_s=0.001)
    row = _rows("1P_1D", [session("a", 1.0, (100, 3))], sim=sim)["a.t1"]
    assert row["prefill_start_s"] == pytest.approx(1.016)
    assert row["prefill_done_s"] == pytest.approx(1.026)
    assert row["transfer_start_s"] == pytest.approx(1.026)
    assert row["transfer_done_s"] == pytest.approx(1.076)
    assert row["decode_start_s"] == pytest.approx(1.041)  # D's step begins, and waits
    assert row["first_token_s"] == pytest.approx(1.086)
    assert row["last_token_s"] == pytest.approx(1.106)
    pulled = _rows("1P_1D", [session("a", 1.0, (100, 3))], sim=sim, handoff="pull_async")["a.t1"]
    assert pulled["transfer_start_s"] == pytest.approx(1.041)  # D has to be asked first
    assert pulled["first_token_s"] == pytest.approx(1.101)


WAITING_FOR_D = [session("a", 3.0, (16, 500)), session("b", 3.0, (400, 5))]
"""With one slot per engine B is prefilled by 3.02 s and waits for A, which decodes until its time-out or 8.01 s."""


def _p_usage(monkeypatch: pytest.MonkeyPatch, lease_s: float, timeout_s: float) -> list[tuple[float, int]]:
    """Instants at which the used blocks of P change."""
    seen: list[tuple[float, int]] = [(0.0, 0)]

    def observe(cluster: Cluster) -> None:
        used = cluster.workers[0].pool.used
        if seen[-1][1] != used:
            seen.append((round(cluster.now_s, 3), used))

    watch(monkeypatch, observe)
    settings: dict[str, Any] = {"timeout_s": timeout_s, "kv_lease_s": lease_s, "kv_link_latency_s": 0.0}
    point = make_point("1P_1D", workload((1, 1)), sim=BARE, handoff="pull_async", max_num_seqs=1, **settings)
    cluster_of(point, WAITING_FOR_D)
    return seen


def test_an_abandoned_prefill_keeps_its_blocks_until_the_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """B gives up at 4 s; P has finished, cannot be called back, and frees B's 25 blocks at 3.02 + 2 s."""
    assert _p_usage(monkeypatch, lease_s=2.0, timeout_s=1.0)[-2:] == [(3.01, 25), (5.02, 0)]


def test_p_frees_its_blocks_when_d_has_pulled_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """B is pulled when A ends: 16 tokens pulled at 3.01 s, 500 steps, and the pull of 400 tokens (0.35 ms)."""
    assert _p_usage(monkeypatch, lease_s=30.0, timeout_s=30.0)[-2:] == [(3.01, 25), (8.01, 0)]


def test_a_turn_that_is_not_pulled_within_the_lease_is_computed_by_d(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _p_usage(monkeypatch, lease_s=0.5, timeout_s=30.0)[-2:] == [(3.01, 25), (3.52, 0)]
    monkeypatch.undo()
    use_cost(monkeypatch, constant_cost(0.01))
    rows = _rows("1P_1D", WAITING_FOR_D, handoff="pull_async", kv_lease_s=0.5, max_num_seqs=1)
    row = rows["b.t1"]
    assert (row["status"], row["transfer_start_s"], row["transferred_tokens"]) == ("ok", None, None)
    assert row["first_token_s"] == pytest.approx(rows["a.t1"]["last_token_s"] + 0.01)


def test_traced_prompts_share_blocks_across_conversations_up_to_where_they_differ() -> None:
    sessions = [
        traced("a", 0.0, (7, 8, 9), 50, 1),
        traced("b", 1.0, (7, 8, 5), 50, 1),  # two blocks of a's
        traced("c", 2.0, (8, 9), 40, 1),  # the same content after another prefix is other KV
        traced("d", 3.0, (7, 8, 9, 4), 66, 1),  # three blocks of a's
        traced("e", 4.0, (7, 8, 5), 50, 1),  # b's, but a prompt of 50 has at most 3 full blocks
    ]
    rows = _rows("1R", sessions)
    assert [rows[f"{name}.t1"]["cached_tokens"] for name in "abcde"] == [0, 32, 0, 48, 48]


def test_a_traced_conversation_finds_the_answer_that_it_decoded() -> None:
    """Turn 1: 40 + 30; turn 2's prompt begins with those 70 tokens: 4 full blocks, of which 69 // 16 = 4 are in KV."""
    one, two = session("a", 0.0, (40, 30), (20, 5))
    conversation = (
        dataclasses.replace(one, block_ids=(11, 12)),
        dataclasses.replace(two, block_ids=(11, 12, 13, 14, 15)),
    )
    assert _rows("1R", [conversation])["a.t2"]["cached_tokens"] == 64


def test_a_traced_request_that_was_preempted_finds_its_answer_too() -> None:
    """Prompt and answer have consecutive ids; one range, or a match would stop at the end of the prompt."""
    (chain,) = chains_of([traced("a", 0.0, (5, 6, 7), 48, 40)], 16)[0]
    assert chain == [(0, 3 + 40 // 16 + 2)]


def test_private_conversations_share_nothing() -> None:
    rows = _rows("1R", [session("a", 0.0, (64, 1)), session("b", 1.0, (64, 1))])
    assert rows["b.t1"]["cached_tokens"] == 0


def test_the_gaps_that_are_kept_are_those_that_are_summarised() -> None:
    point = make_point("2R", workload((1, 1)), max_num_batched_tokens=128)
    sessions = [session(f"s{i}", 0.02 * i, (200, 60)) for i in range(10)]
    for row in rows_of(to_columns(point, cluster_of(point, sessions), keep_gaps=True)):
        gaps = sorted(row["itl_s"])
        assert row["itl_count"] == 59
        assert row["itl_max_s"] == gaps[-1]
        assert row["itl_mean_s"] == pytest.approx(sum(gaps) / 59)
        assert row["itl_p99_s"] == pytest.approx(gaps[57] + 0.42 * (gaps[58] - gaps[57]))  # 0.99 * 58 = 57.42
        assert row["last_token_s"] == pytest.approx(row["first_token_s"] + sum(gaps))
    assert simulate(point, sessions, LLAMA)["itl_s"] == [None] * 10


def test_through_p_a_turn_costs_a_visit_a_step_and_a_transfer_more_than_locally() -> None:
    sim = dataclasses.replace(BARE, visit_overhead_s=0.015, router_overhead_s=0.001)
    sessions = [session("a", 0.0, (100, 50), (30, 20))]
    local = _rows("1P_1D", sessions, sim=sim, policy=PolicySpec(decider="always_local"))["a.t2"]
    through = _rows("1P_1D", sessions, sim=sim, policy=PolicySpec(decider="always_pd"))["a.t2"]
    ttft_local, ttft_through = (row["first_token_s"] - row["sent_s"] for row in (local, through))
    assert ttft_local == pytest.approx(0.001 + 0.015 + 0.01)
    assert ttft_through == pytest.approx(0.001 + 0.015 + 0.01 + 180 * 0.0005 + 0.01)
