"""Samples are whole sessions, drawn by a seed, and keep what a session's reuse is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reuse_cases import B, blocks_of, mooncake_rows, random_traces, rows_of

from ppd_bench.analysis.sampling import SampleTarget, sample_figures, sample_sessions
from ppd_bench.analysis.trace_blocks import TraceBlocks, number_blocks
from ppd_bench.analysis.trace_sessions import ChainSessions
from ppd_bench.core.errors import SpecError


@pytest.fixture(scope="module")
def mooncake(shared: Path) -> TraceBlocks:
    derived = ChainSessions(512)
    rows = mooncake_rows(shared / "data/mooncake/conversation_trace.jsonl")
    return number_blocks((r._replace(session_id=f"{derived.add(r)}") for r in rows), block_tokens=512)


@given(random_traces(), st.integers(1, 30), st.integers(0, 99))
def test_a_session_is_in_the_sample_whole_or_not_at_all(trace: TraceBlocks, wanted: int, seed: int) -> None:
    chosen = sample_sessions(trace, SampleTarget(n_requests=wanted, seed=seed))
    inside = set(trace.session[chosen].tolist())
    assert chosen.tolist() == [k for k in range(trace.n_requests) if int(trace.session[k]) in inside]
    assert chosen.tolist() == sample_sessions(trace, SampleTarget(n_requests=wanted, seed=seed)).tolist()
    assert chosen.size > 0


@given(random_traces(), st.integers(1, 30), st.integers(1, 30), st.integers(0, 9))
def test_a_larger_sample_holds_the_smaller_one(trace: TraceBlocks, one: int, other: int, seed: int) -> None:
    small, large = (
        set(sample_sessions(trace, SampleTarget(n_requests=n, seed=seed)).tolist()) for n in sorted((one, other))
    )
    assert small <= large


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_of_the_mooncake_trace_keeps_the_reuse_inside_sessions(mooncake: TraceBlocks, seed: int) -> None:
    """1,000 rows drawn at random keep 0.07 to 0.14 of 0.374; whole sessions lose what sessions share with each other, no more."""
    original = sample_figures(mooncake)
    chosen = sample_sessions(mooncake, SampleTarget(n_requests=1000, seed=seed))
    sample = sample_figures(mooncake.select(chosen))
    assert sample.n_requests == pytest.approx(1000, abs=20)
    assert sample.intra_session_ratio == pytest.approx(original.intra_session_ratio, abs=0.08)
    assert 0.25 < sample.hit_ratio < original.hit_ratio + 0.04
    assert sample.prompt_mean_tokens == pytest.approx(original.prompt_mean_tokens, rel=0.12)
    assert sample.requests_per_session == pytest.approx(original.requests_per_session, rel=0.12)


def test_the_original_is_what_it_is(mooncake: TraceBlocks) -> None:
    found = sample_figures(mooncake)
    assert (round(found.prompt_mean_tokens, 1), found.prompt_p50_tokens, found.prompt_p90_tokens) == (
        12035.1,
        6909,
        27367,
    )
    assert found.rate_rps == pytest.approx(3.40, abs=0.005)
    assert found.hit_ratio == pytest.approx(0.3736, abs=5e-5)


def test_a_rate_thins_the_sessions_over_the_whole_trace(mooncake: TraceBlocks) -> None:
    sample = sample_figures(mooncake.select(sample_sessions(mooncake, SampleTarget(rate_rps=1.0))))
    assert sample.rate_rps == pytest.approx(1.0, rel=0.02)
    assert sample.duration_s == pytest.approx(3537, rel=0.01)


def test_a_window_takes_sessions_that_begin_in_it_to_their_end() -> None:
    trace = blocks_of(("a", "A"), ("b", "B"), ("c", "C"), ("b", "BB"), ("d", "D"), ("c", "CC"), ("a", "AA"))
    chosen = sample_sessions(trace, SampleTarget(duration_s=2.0, start_s=1.0))
    assert chosen.tolist() == [1, 2, 3, 5]
    thinned = sample_sessions(trace, SampleTarget(duration_s=2.0, start_s=1.0, n_requests=2))
    assert thinned.tolist() in ([1, 3], [2, 5])


def test_a_window_without_a_start_is_where_the_seed_says(mooncake: TraceBlocks) -> None:
    starts = set()
    for seed in range(5):
        chosen = sample_sessions(mooncake, SampleTarget(duration_s=300.0, seed=seed))
        first = mooncake.arrival_s[chosen[0]]
        starts.add(float(first))
        _, begins = np.unique(mooncake.session[chosen], return_index=True)
        assert (mooncake.arrival_s[chosen][begins] < first + 303.0).all()
    assert len(starts) == 5


def test_wishes_that_cannot_be_met_are_all_named() -> None:
    trace = number_blocks(rows_of([("s", "AB"), ("s", "ABC")], step_s=None), block_tokens=B)
    with pytest.raises(SpecError) as raised:
        sample_sessions(trace, SampleTarget(n_requests=1, rate_rps=-1.0, start_s=3.0))
    assert len(raised.value.problems) == 4
    assert "command line: --rate -1; allowed: above 0" in raised.value.problems
    with pytest.raises(SpecError, match="one of --requests, --rate and --duration is needed"):
        sample_sessions(trace, SampleTarget())


def test_a_trace_without_sessions_is_not_drawn_from() -> None:
    with pytest.raises(SpecError, match="rows drawn at random would break its reuse"):
        sample_sessions(blocks_of("AB", "ABC"), SampleTarget(n_requests=1))


def test_a_window_without_a_session_says_so() -> None:
    trace = blocks_of(("a", "A"), ("a", "AB"), ("a", "ABC"))
    with pytest.raises(SpecError, match="no session begins in the window"):
        sample_sessions(trace, SampleTarget(duration_s=1.0, start_s=1.5))
