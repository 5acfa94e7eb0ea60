"""Stretches of decode steps computed ahead give exactly what one step at a time gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_cases import CASE, cases
from sim_points import cluster_of, constant_cost, make_point, session, use_blocks, use_cost, workload

from ppd_bench.core.point import Point
from ppd_bench.core.workload import Session
from ppd_bench.sim.recording import to_columns


def _assert_cap_does_not_matter(case: CASE) -> None:
    point, sessions, n_blocks = case
    with pytest.MonkeyPatch.context() as patch:
        use_blocks(patch, n_blocks)
        runs = [_run(point, sessions, cap) for cap in (1, 3, 96)]
    assert runs[1] == runs[0]
    assert runs[2] == runs[0]


def _run(point: Point, sessions: list[Session], cap: int) -> tuple[Any, Any]:
    cluster = cluster_of(point, sessions, cap=cap)
    for worker in cluster.workers:
        worker.pool.check()
        assert worker.pool.used == 0
        assert not worker.running
        assert not worker.waiting
        assert not worker.prefilling
    return to_columns(point, cluster, keep_gaps=True), cluster.log


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(round_numbers=False))
def test_a_stretch_of_decode_steps_gives_the_records_and_the_log_of_single_steps(case: CASE) -> None:
    _assert_cap_does_not_matter(case)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(round_numbers=True), st.sampled_from([1 / 4, 1 / 8, 1 / 64]))
def test_it_does_so_too_where_events_of_all_kinds_fall_on_the_same_instant(case: CASE, step_s: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_cost(patch, constant_cost(step_s))
        _assert_cap_does_not_matter(case)


@pytest.mark.parametrize("handoff", ["push_blocking", "pull_async"])
def test_the_comparison_covers_preemption_timeouts_and_eviction(monkeypatch: pytest.MonkeyPatch, handoff: str) -> None:
    """Not by luck of the draw: this case has all three, and the caps agree on it."""
    use_blocks(monkeypatch, 60)
    sessions = [session(f"s{i}", 0.05 * i, (150, 120), (60, 120)) for i in range(14)]
    point = make_point("1P_2D", workload((1, 1)), timeout_s=1.3, handoff=handoff, max_model_len=1000)
    runs = [_run(point, sessions, cap) for cap in (1, 96)]
    assert runs[0] == runs[1]
    cluster = cluster_of(point, sessions)
    columns = runs[0][0]
    assert sum(columns["n_preemptions"]) > 0
    assert {"ok", "timeout", "unsent"} <= set(columns["status"])
    assert sum(worker.pool.n_evicted for worker in cluster.workers) > 0
