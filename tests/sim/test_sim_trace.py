"""Recorded content on the simulator: what is shared, who waits for whom, how many at a time, and D told at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_points import LLAMA, constant_cost, make_point, rows_of, session, traced, use_blocks, use_cost, workload

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import PlacementSpec, SimSettings
from ppd_bench.core.workload import Session, TrafficFigures, TrafficSpec, Turn
from ppd_bench.sim.chains import chains_of
from ppd_bench.sim.simulate import SimOptions, run_cluster, simulate, simulate_with_gauges

BARE = SimSettings(visit_overhead_s=0.0, router_overhead_s=0.0, step_overhead_s=0.0, sequence_overhead_s=0.0)
FIGURES = TrafficFigures(
    n_sessions=1, n_requests=1, duration_s=0.0, prompt_tokens=1.0, output_tokens=1.0, longest_tokens=1
)


def _turn(name: str, ids: tuple[int, ...], n_in: int, n_out: int = 1, block_tokens: int | None = None) -> Session:
    (one,) = traced(name, 0.0, ids, n_in, n_out)
    return (dataclasses.replace(one, block_tokens=block_tokens),)


def _shared(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    """Leading blocks that two chains have in common."""
    one, two = ([i for start, end in chain for i in range(start, end)] for chain in (first, second))
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_a_traces_block_is_so_many_engine_blocks() -> None:
    (one,), (two,) = chains_of(
        [_turn("a", (7, 8), 1024, block_tokens=512), _turn("b", (7, 9), 1024, block_tokens=512)], 16
    )
    assert _shared(one, two) == 32


def test_several_trace_blocks_to_one_engine_block_are_told_apart_by_the_last() -> None:
    a = _turn("a", (1, 2, 3, 4), 64, block_tokens=16)
    b = _turn("b", (1, 2, 3, 5), 64, block_tokens=16)
    (one,), (two,) = chains_of([a, b], 32)
    assert _shared(one, two) == 1


def test_a_partial_last_block_shares_its_own_tokens_only() -> None:
    whole, part = _turn("a", (7, 8), 1024, block_tokens=512), _turn("b", (7, 8), 700, block_tokens=512)
    (one,), (two,) = chains_of([whole, part], 16)
    assert _shared(one, two) == 700 // 16


def test_block_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SpecError, match="a divisor or a multiple of 24"):
        chains_of([_turn("a", (1,), 24, block_tokens=24)], 16)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8), st.booleans())
def test_equal_prefixes_are_equal_blocks_and_nothing_else_is(prompts: list[list[int]], chained: bool) -> None:
    """Whether the ids stand for their whole prefix (recorded ones do) or for their block alone."""
    known: dict[tuple[int, ...], int] = {}
    given_ids = [
        tuple(
            known.setdefault(tuple(prompt[: k + 1]), 100 + len(known)) if chained else prompt[k]
            for k in range(len(prompt))
        )
        for prompt in prompts
    ]
    sessions = [_turn(f"s{i}", ids, 16 * len(ids)) for i, ids in enumerate(given_ids)]
    chains = [chain for (chain,) in chains_of(sessions, 16)]
    for first, one in zip(prompts, chains, strict=True):
        for second, two in zip(prompts, chains, strict=True):
            same = next(
                (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
            )
            assert _shared(one, two) == same or one is two
        ends = [end for _, end in one]
        assert all(start != end for (start, _), end in zip(one[1:], ends, strict=False)), (
            "consecutive ids are one range"
        )


def _started_by(parent: str, name: str, think_time_s: float) -> Session:
    (one,) = session(name, 0.0, (10, 2))
    return (dataclasses.replace(one, scheduled_s=None, think_time_s=think_time_s, after=parent),)


def _rows(sessions: list[Session], topology: str = "1R", **settings: Any) -> dict[str, dict[str, Any]]:
    inflight = settings.pop("inflight", None)
    work = workload((1, 1))
    if inflight is not None:
        work = dataclasses.replace(work, traffic=_traffic(inflight))
    point = make_point(topology, work, sim=BARE, **settings)
    return {row["request_id"]: row for row in rows_of(simulate(point, sessions, LLAMA))}


def _traffic(inflight: int) -> TrafficSpec:
    return TrafficSpec(
        source="t", sha256="0", reading="t", sessions="none", loop="completion", figures=FIGURES,
        max_inflight_sessions=inflight,
    )  # fmt: skip


def test_a_request_of_another_conversation_starts_one_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, constant_cost(0.01))
    rows = _rows([session("a", 1.0, (10, 5), (10, 5), think_time_s=9.0), _started_by("a.t1", "b", 2.0)])
    assert rows["b.t1"]["scheduled_s"] == pytest.approx(rows["a.t1"]["last_token_s"] + 2.0)
    assert rows["a.t2"]["scheduled_s"] == pytest.approx(rows["a.t1"]["last_token_s"] + 9.0)


def test_what_a_failed_request_would_have_started_is_unsent() -> None:
    rows = _rows([session("a", 0.0, (100, 4000), (1, 1)), _started_by("a.t1", "b", 0.0)], timeout_s=0.5)
    assert [rows[name]["status"] for name in ("a.t1", "a.t2", "b.t1")] == ["timeout", "unsent", "unsent"]


def test_in_an_open_loop_a_turn_does_not_wait_for_the_one_before_nor_for_its_success() -> None:
    one, two = session("a", 0.0, (100, 4000), (50, 2))
    rows = _rows([(one, dataclasses.replace(two, scheduled_s=0.25, think_time_s=None))], timeout_s=0.5)
    assert (rows["a.t1"]["status"], rows["a.t2"]["status"], rows["a.t2"]["sent_s"]) == ("timeout", "ok", 0.25)


def test_a_turn_with_an_instant_and_a_pause_takes_the_later(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, constant_cost(0.01))
    turns = session("a", 0.0, (10, 2), (10, 2), (10, 2))
    later = [
        dataclasses.replace(turn, scheduled_s=at, think_time_s=0.0)
        for turn, at in zip(turns[1:], (5.0, 0.0), strict=True)
    ]
    rows = _rows([(turns[0], *later)])
    assert rows["a.t2"]["sent_s"] == 5.0
    assert rows["a.t3"]["sent_s"] == rows["a.t2"]["last_token_s"]


def test_a_conversation_that_is_held_back_says_so_by_its_instants(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, constant_cost(0.01))
    sessions = [session(name, 0.1 * k, (10, 11), (10, 11)) for k, name in enumerate("abc")]
    rows = _rows(sessions, inflight=2)
    assert [rows[f"{name}.t1"]["scheduled_s"] for name in "abc"] == [0.0, 0.1, 0.2]
    assert rows["b.t1"]["sent_s"] == 0.1
    assert rows["c.t1"]["sent_s"] == rows["a.t2"]["last_token_s"] > 0.2


def test_a_conversation_keeps_its_place_until_those_that_it_started_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, constant_cost(0.01))
    sessions = [session("a", 0.0, (10, 2)), _started_by("a.t1", "b", 3.0), session("c", 0.5, (10, 2))]
    rows = _rows(sessions, inflight=1)
    assert rows["c.t1"]["sent_s"] == rows["b.t1"]["last_token_s"] > 3.0


@settings(max_examples=40)
@given(st.integers(1, 4), st.lists(st.floats(0.0, 2.0), min_size=1, max_size=12), st.sampled_from([0.2, 30.0]))
def test_never_more_conversations_are_under_way_than_allowed_and_all_end(
    limit: int, starts: list[float], timeout_s: float
) -> None:
    sessions = [session(f"s{i}", start, (200, 40), (20, 30)) for i, start in enumerate(starts)]
    rows = _rows(sessions, inflight=limit, timeout_s=timeout_s).values()
    spans: dict[str, list[float]] = {}
    for row in rows:
        if row["sent_s"] is not None:
            spans.setdefault(row["session_id"], []).extend([row["sent_s"], row["end_s"]])
    assert len(spans) == len(starts)
    for instants in spans.values():
        assert sum(min(s) <= min(instants) < max(s) for s in spans.values()) <= limit


TOLD = {"handoff": "pull_async", "kv_lease_s": 480.0}


def _pd(sessions: list[Session], dispatch: str, **settings: Any) -> dict[str, dict[str, Any]]:
    return _rows(sessions, topology="1P_1D", dispatch=dispatch, **TOLD, **settings)


def test_telling_d_at_once_spares_its_visit_and_holds_its_memory_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_cost(monkeypatch, constant_cost(0.5))
    point = make_point("1P_1D", workload((1, 1)), sim=BARE, dispatch="fire_and_forget", **TOLD)
    _, gauges = simulate_with_gauges(point, [session("a", 0.0, (160, 2))], LLAMA, SimOptions(gauge_interval_s=0.25))
    d = [
        (time_s, usage > 0.0, waiting)
        for worker, time_s, usage, waiting in zip(
            gauges["worker_id"], gauges["time_s"], gauges["kv_cache_usage_ratio"], gauges["n_waiting"], strict=True
        )
        if worker == "D0"
    ]
    assert d[0] == (0.25, True, 1)


@pytest.mark.parametrize("dispatch", ["await", "fire_and_forget"])
def test_every_block_is_given_back_whatever_happens(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_blocks(monkeypatch, 24)
    sessions = [session(f"s{i}", 0.01 * i, (100 + 40 * i, 60), (20, 9)) for i in range(5)]
    point = make_point(
        "1P_1D", workload((1, 1)), sim=BARE, dispatch=dispatch, timeout_s=0.6, max_model_len=100_000, **TOLD
    )
    cluster = run_cluster(point, sessions, LLAMA, SimOptions())
    assert {trip.status.value for trip in cluster.trips} > {"ok"}
    for worker in cluster.workers:
        worker.pool.check()
        assert worker.pool.used == 0
        assert worker.n_pulling == 0


def test_a_short_request_waits_in_d_for_the_memory_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head-of-line waiting: D has 19 blocks, the long turn holds at least 17 of them, and the short one needs 3."""
    use_cost(monkeypatch, constant_cost(0.01))
    use_blocks(monkeypatch, 19)
    sessions = [session("long", 0.0, (17 * 16, 30)), session("short", 0.1, (40, 2)), session("last", 0.12, (5, 2))]
    rows = _pd(sessions, "await", max_model_len=100_000, prefix_caching=False)
    long_s = rows["long.t1"]["last_token_s"]
    assert rows["short.t1"]["prefill_done_s"] < long_s - 0.1
    assert rows["short.t1"]["transfer_start_s"] == long_s
    assert rows["last.t1"]["transfer_start_s"] == long_s, "it would fit, and waits behind the head of the queue"


def test_both_ways_of_telling_d_serve_the_same_turns() -> None:
    sessions = [session(f"s{i}", 0.1 * i, (300, 20), (40, 20)) for i in range(6)]
    for rows in (_pd(sessions, "await"), _pd(sessions, "fire_and_forget")):
        assert {row["status"] for row in rows.values()} == {"ok"}
        assert all(row["transfer_done_s"] is not None for row in rows.values())


def test_fire_and_forget_needs_a_pull() -> None:
    with pytest.raises(SpecError, match=r"needs engine\.handoff pull_async"):
        _rows([session("a", 0.0, (10, 2))], topology="1P_1D", dispatch="fire_and_forget", handoff="push_blocking")


def test_gauges_change_nothing_and_busy_time_is_within_the_time_there_was() -> None:
    sessions = [session(f"s{i}", 0.3 * i, (500, 80), (50, 60)) for i in range(5)]
    point = make_point("1P_1D", workload((1, 1)))
    columns, gauges = simulate_with_gauges(point, sessions, LLAMA, SimOptions(gauge_interval_s=0.05))
    assert columns == simulate(point, sessions, LLAMA)
    assert all(0.0 <= busy <= time_s + 1e-9 for busy, time_s in zip(gauges["busy_s"], gauges["time_s"], strict=True))
    assert max(gauges["busy_s"]) > 0.0


def test_cache_aware_placement_sees_prefixes_of_other_conversations() -> None:
    """Four prompts of two kinds on two replicas: each kind gathers where its prefix is."""
    ids = {"x": tuple(range(1, 41)), "y": tuple(range(101, 141))}
    made = [(kind, f"{kind}{k}") for k in range(3) for kind in "xy"]
    sessions: list[Session] = []
    for start, (kind, name) in enumerate(made):
        (one,) = traced(name, float(start), ids[kind], 16 * 40 + 5, 2)
        sessions.append((one,))
    placement = PlacementSpec(replica="cache_aware", sticky=False)
    rows = _rows(sessions, topology="2R", placement=placement)
    for kind in "xy":
        assert len({rows[f"{kind}{k}.t1"]["decode_worker"] for k in range(3)}) == 1
        assert [rows[f"{kind}{k}.t1"]["cached_tokens"] for k in range(3)] == [0, 640, 640]


def test_the_log_of_traced_content_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: queries carry content ids, and a fresh ledger and policy decide as the first did."""
    from ppd_bench.core.topology import parse_topology
    from ppd_bench.policy.ledger import Ledger
    from ppd_bench.policy.policy import make_policy
    from ppd_bench.policy.query import RouteQuery

    placement = PlacementSpec(prefill="cache_aware", decode="cache_aware", sticky=False)
    point = make_point("2P_2D", workload((1, 1)), placement=placement, handoff="pull_async")
    sessions = [_at(_turn(f"s{i}", tuple(range(i % 3 * 100, i % 3 * 100 + 10)), 170)[0], 0.05 * i) for i in range(12)]
    cluster = run_cluster(point, sessions, LLAMA, SimOptions(keep_log=True))
    topology = parse_topology(point.topology)
    ledger, policy = Ledger(topology), make_policy(topology, point.policy, placement, point.decision_seed)
    n_decided = 0
    for entry in cluster.log or []:
        if isinstance(entry[0], RouteQuery):
            query, now_s, decision = entry
            assert policy.decide(query, ledger.view(now_s, query.session_id, query.block_ids)) == decision
            n_decided += 1
        else:
            ledger.observe(entry)
    assert n_decided == 12


def _at(turn: Turn, start_s: float) -> Session:
    return (dataclasses.replace(turn, scheduled_s=start_s),)
