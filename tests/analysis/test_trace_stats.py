"""What recorded traffic looks like: each figure by hand on a few rows, and the known values of public traces elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.analysis.trace_sessions import ChainSessions
from ppd_bench.analysis.trace_stats import (
    SessionSource,
    TraceColumns,
    TraceStats,
    arrivals,
    describe,
    dispersion,
    profile,
)
from ppd_bench.core.trace import TraceRow

NAN = math.nan


def columns(
    prompt: list[int],
    output: list[int],
    *,
    arrival: list[float] | None = None,
    delay: list[float] | None = None,
    session: list[int] | None = None,
    source: SessionSource = "recorded",
    hits: list[int] | None = None,
) -> TraceColumns:
    n = len(prompt)
    return TraceColumns(
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(output),
        arrival_s=np.array(arrival or [NAN] * n),
        delay_s=np.array(delay or [NAN] * n),
        session=np.array(session or list(range(n))),
        session_source=source,
        hit_tokens=None if hits is None else np.array(hits),
    )


def test_lengths_and_ratios_are_those_of_the_study() -> None:
    stats = describe(columns([100, 300, 40_000], [10, 0, 100]))
    assert (stats.n_requests, stats.prompt_tokens_total, stats.output_tokens_total) == (3, 40_400, 110)
    assert stats.io_ratio == pytest.approx(40_400 / 110)
    assert stats.io_ratio_request_p50 == pytest.approx((10 + 400) / 2), "a request without output has no ratio"
    assert stats.n_without_output == 1
    assert stats.prefill_token_ratio == pytest.approx(40_400 / 40_510)
    assert stats.long_request_ratio == pytest.approx(1 / 3)
    assert stats.long_token_ratio == pytest.approx(40_000 / 40_400)
    assert (stats.prompt_tokens.p50, stats.prompt_tokens.max) == (300, 40_000)
    assert stats.profile is None
    assert stats.hit_ratio is None
    assert stats.arrivals is None


def test_follow_ups_are_measured_against_the_turn_before() -> None:
    stats = describe(
        columns(
            [100, 50, 130, 500],
            [10, 5, 20, 1],
            arrival=[0.0, 1.0, 5.0, 9.0],
            delay=[NAN, NAN, 2.5, NAN],
            session=[7, 8, 7, 7],
        )
    )
    sessions = stats.sessions
    assert sessions is not None
    assert (sessions.n_sessions, sessions.n_multi_turn, sessions.single_turn_ratio) == (2, 1, 0.5)
    assert sessions.multi_turn_turns_mean == 3
    assert sessions.new_tokens is not None
    assert (sessions.new_tokens.n, sessions.new_tokens.mean) == (2, pytest.approx((130 - 110 + 500 - 150) / 2))
    assert sessions.turn_gap_s is not None
    assert sessions.turn_gap_s.mean == pytest.approx(4.5)
    assert sessions.think_time_s is not None
    assert (sessions.think_time_s.n, sessions.think_time_s.mean) == (1, 2.5)


def test_turns_count_in_order_of_arrival_however_they_were_read() -> None:
    stats = describe(columns([300, 100], [1, 2], arrival=[9.0, 1.0], session=[1, 1]))
    assert stats.sessions is not None
    assert stats.sessions.new_tokens is not None
    assert stats.sessions.new_tokens.mean == 300 - 102


def test_without_sessions_nothing_is_said_of_them() -> None:
    assert describe(columns([1], [1], source="none")).sessions is None


def test_a_poisson_process_has_a_cv_and_a_dispersion_of_one() -> None:
    rng = np.random.default_rng(7)
    found = arrivals(np.cumsum(rng.exponential(0.25, size=40_000)))
    assert found is not None
    assert found.rate_rps == pytest.approx(4, rel=0.03)
    assert found.gap_cv == pytest.approx(1, abs=0.03)
    assert set(found.dispersion) == {"1", "10", "60"}
    assert found.dispersion["1"] == pytest.approx(1, abs=0.1)
    assert found.dispersion["10"] == pytest.approx(1, abs=0.2)
    assert found.tick_s is None
    assert found.in_order


def test_a_clock_has_no_dispersion_and_bursts_have_much() -> None:
    assert dispersion(np.arange(0.0, 101.0), 10.0) == 0
    assert dispersion(np.repeat(np.arange(0.0, 1001.0, 100.0), 50), 10.0) > 40


def test_rounded_instants_are_seen_and_windows_below_them_left_out() -> None:
    rng = np.random.default_rng(3)
    found = arrivals(np.floor(np.cumsum(rng.exponential(0.3, size=5_000)) / 3) * 3)
    assert found is not None
    assert found.tick_s == 3
    assert "1" not in found.dispersion
    assert "10" in found.dispersion


def test_one_instant_has_no_rate() -> None:
    found = arrivals(np.array([5.0, 5.0]))
    assert found is not None
    assert (found.span_s, found.rate_rps, found.gap_cv, found.dispersion) == (0, None, None, {})


def test_arrivals_out_of_order_are_put_in_order_and_said() -> None:
    found = arrivals(np.array([2.0, 1.0, NAN, 3.0]))
    assert found is not None
    assert (found.in_order, found.span_s, found.gap_cv) == (False, 2.0, 0.0)


def test_buckets_of_the_profile_meet_at_their_edges() -> None:
    prompt = [1000] * 6
    found = {b.name: b for b in profile(np.array(prompt), np.array([1000, 901, 900, 500, 499, 0]))}
    assert {name: b.n_requests for name, b in found.items()} == {"warm": 2, "50-90": 2, "1-50": 1, "cold": 1}
    assert found["warm"].new_tokens_mean == pytest.approx(99 / 2)
    assert found["cold"].new_token_ratio == pytest.approx(1000 / 2200)


@given(st.lists(st.tuples(st.integers(1, 300_000), st.floats(0, 1)), min_size=1, max_size=50))
def test_classes_and_buckets_hold_every_request_once(requests: list[tuple[int, float]]) -> None:
    prompt = [n for n, _ in requests]
    stats: TraceStats = describe(columns(prompt, [1] * len(prompt), hits=[int(n * share) for n, share in requests]))
    assert stats.profile is not None
    for parts in (stats.contexts, stats.profile):
        assert sum(part.n_requests for part in parts) == len(prompt)
        assert sum(part.request_ratio for part in parts) == pytest.approx(1)
    assert sum(c.token_ratio for c in stats.contexts) == pytest.approx(1)


def request(row: int, prompt: int, ids: list[int]) -> TraceRow:
    return TraceRow(row, f"r{row}", None, None, None, None, prompt, 1, ids)


def test_a_session_goes_on_where_a_whole_chain_of_two_blocks_does() -> None:
    chains = ChainSessions(10)
    asked = [
        (25, [1, 2, 3]),
        (15, [1, 9]),
        (38, [1, 2, 4, 5]),
        (38, [1, 2, 4, 5]),
        (45, [1, 2, 4, 6, 7]),
        (47, [1, 2, 4, 6, 8]),
    ]
    found = [chains.add(request(i, n, ids)) for i, (n, ids) in enumerate(asked)]
    # Row 1: one shared block is not enough. Row 3: no longer than row 2, so it goes on from row 0.
    assert found == [0, 1, 0, 0, 0, 0]
    assert list(chains.parent) == [-1, -1, 0, 0, 3, 4]
    assert chains.n_sessions == 2
