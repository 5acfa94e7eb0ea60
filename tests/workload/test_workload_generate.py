"""Arrivals: Poisson, reproducible, and the same for every arm of a comparison."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ppd_bench.core.workload import Session, Turn, TurnLengths, WorkloadSpec
from ppd_bench.workload.generate import generate_sessions


def workload_of(*lengths: tuple[int, int], name: str = "w") -> WorkloadSpec:
    turns = tuple(TurnLengths(input_tokens=i, output_tokens=o) for i, o in lengths)
    return WorkloadSpec(name=name, category="balanced", turns=turns, max_output_tokens=2048)


TWO_TURNS = workload_of((128, 130), (16, 32))
PINNED_S = [
    0.219025364,
    1.03772285,
    2.432628236,
    2.599238481,
    3.412266405,
    4.10655454,
    4.211991321,
    4.376720851,
    4.692454467,
    6.554138082,
    6.954491093,
    7.430673428,
    7.518284294,
    9.871783927,
]


def sessions_of(
    workload: WorkloadSpec = TWO_TURNS, *, qps: float = 2, duration_s: float = 10, seed: int = 0, repeat: int = 0
) -> tuple[Session, ...]:
    return generate_sessions(workload, qps=qps, duration_s=duration_s, think_time_s=1.5, seed=seed, repeat=repeat)


def instants(sessions: tuple[Session, ...]) -> list[float]:
    return [s[0].scheduled_s for s in sessions if s[0].scheduled_s is not None]


def test_turns_carry_lengths_context_and_ids() -> None:
    first, second = sessions_of()[1]
    assert first == Turn(
        request_id="s00001.t1", session_id="s00001", turn=1, scheduled_s=first.scheduled_s, think_time_s=None,
        context_tokens=0, input_tokens=128, output_tokens=130, max_output_tokens=2048,
    )  # fmt: skip
    assert second == Turn(
        request_id="s00001.t2", session_id="s00001", turn=2, scheduled_s=None, think_time_s=1.5,
        context_tokens=258, input_tokens=16, output_tokens=32, max_output_tokens=2048,
    )  # fmt: skip


def test_arrivals_are_the_ones_of_this_very_definition() -> None:
    """Pinned: another stream would silently break the pairing of old runs with new ones."""
    assert instants(sessions_of(qps=1)) == PINNED_S


def test_the_topology_policy_and_executor_cannot_touch_arrivals() -> None:
    taken = set(inspect.signature(generate_sessions).parameters)
    assert taken == {"workload", "qps", "duration_s", "think_time_s", "seed", "repeat"}


def test_whole_and_decimal_rates_are_the_same_rate() -> None:
    assert sessions_of(qps=2, duration_s=10) == sessions_of(qps=2.0, duration_s=10.0)


def test_think_time_leaves_arrivals_alone() -> None:
    other = generate_sessions(TWO_TURNS, qps=2, duration_s=10, think_time_s=0, seed=0, repeat=0)
    assert instants(other) == instants(sessions_of())


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"repeat": 1}, {"qps": 2.5}, {"duration_s": 11}, {"workload": workload_of((128, 130), (16, 33))}],
)
def test_arrivals_differ_between(change: dict[str, object]) -> None:
    base, other = instants(sessions_of()), instants(sessions_of(**change))  # type: ignore[arg-type]
    assert base
    assert other
    assert base[0] != other[0]


def test_seed_zero_is_a_seed() -> None:
    assert sessions_of(seed=0) == sessions_of(seed=0)
    assert instants(sessions_of(seed=0)) != instants(sessions_of(seed=1))


def test_counts_have_the_mean_and_variance_of_a_poisson_process() -> None:
    counts = np.array([len(sessions_of(repeat=repeat)) for repeat in range(400)])
    assert abs(counts.mean() - 20) < 4 * np.sqrt(20 / 400)
    dispersion = ((counts - 20) ** 2).sum() / 20
    assert 0.001 < stats.chi2.cdf(dispersion, df=400) < 0.999


def test_gaps_are_exponential_and_independent() -> None:
    arrivals = np.array(instants(sessions_of(qps=20, duration_s=200)))
    gaps = np.diff(arrivals, prepend=0.0)
    assert stats.kstest(gaps, stats.expon(scale=1 / 20).cdf).pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / np.sqrt(len(gaps))


def test_arrivals_given_their_number_are_uniform_over_the_window() -> None:
    arrivals = itertools.chain.from_iterable(instants(sessions_of(repeat=repeat)) for repeat in range(100))
    assert stats.kstest(list(arrivals), stats.uniform(0, 10).cdf).pvalue > 0.01


def test_a_low_rate_may_draw_no_conversation_at_all() -> None:
    counts = [len(sessions_of(qps=0.05, duration_s=1, repeat=repeat)) for repeat in range(200)]
    assert 0 in counts
    assert 1 in counts


@settings(max_examples=40, deadline=None)
@given(
    qps=st.floats(0.01, 50),
    duration_s=st.floats(0.01, 20),
    seed=st.integers(0, 2**64),
    repeat=st.integers(0, 1000),
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_every_draw_is_ordered_inside_the_window_and_uniquely_named(
    qps: float, duration_s: float, seed: int, repeat: int, lengths: list[tuple[int, int]]
) -> None:
    workload = workload_of(*lengths)
    sessions = sessions_of(workload, qps=qps, duration_s=duration_s, seed=seed, repeat=repeat)
    arrivals = instants(sessions)
    assert arrivals == sorted(arrivals)
    assert all(0 <= instant < duration_s for instant in arrivals)
    assert len({turn.request_id for session in sessions for turn in session}) == len(sessions) * len(lengths)
    assert sessions == sessions_of(workload, qps=qps, duration_s=duration_s, seed=seed, repeat=repeat)
