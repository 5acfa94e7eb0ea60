"""The breaker as a state machine (B15): instants come in, states go out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.router.breaker import Breaker, BreakerSettings, BreakerState

SETTINGS = BreakerSettings(n_failures=3, memory_s=60.0, open_s=1.0, max_open_s=8.0)


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(SETTINGS.n_failures):
        breaker.failed(at_s)
    return breaker


def test_b15_it_opens_after_k_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        assert breaker.state is BreakerState.CLOSED
        breaker.succeeded()
    for _ in range(3):
        breaker.failed(1.0)
    assert (breaker.state, breaker.n_opened, breaker.probe_at_s()) == (BreakerState.OPEN, 1, 2.0)


def test_b15_only_a_probes_success_closes_it() -> None:
    breaker = opened()
    breaker.succeeded()  # of a turn that began before
    breaker.probed(0.5)  # without a probe
    assert breaker.state is BreakerState.OPEN
    breaker.probing()
    assert (breaker.state, breaker.probe_at_s()) == (BreakerState.HALF_OPEN, float("inf"))
    breaker.succeeded()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.probed(1.0)
    assert (breaker.is_closed, breaker.n_failures) == (True, 0)


def test_probes_that_fail_come_at_growing_distances_up_to_a_bound() -> None:
    breaker, now_s, waits = opened(), 0.0, []
    for _ in range(6):
        waits.append(breaker.probe_at_s() - now_s)
        now_s = breaker.probe_at_s()
        breaker.probing()
        breaker.probe_failed(now_s)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    breaker.probing()
    breaker.probed(now_s)
    now_s += SETTINGS.memory_s + 1.0
    for _ in range(3):
        breaker.failed(now_s)
    assert breaker.probe_at_s() - now_s == 1.0  # it begins anew


def test_an_engine_that_passes_every_probe_and_fails_every_turn_is_tried_less_and_less() -> None:
    breaker, now_s, waits = opened(), 0.0, []
    for _ in range(5):
        waits.append(breaker.probe_at_s() - now_s)
        now_s = breaker.probe_at_s()
        breaker.probing()
        breaker.probed(now_s)
        for _ in range(3):
            breaker.failed(now_s)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_turns_failure_while_a_probe_is_under_way_does_not_count_against_the_probe() -> None:
    breaker = opened()
    breaker.probing()
    breaker.failed(1.0)
    breaker.probed(1.0)
    assert breaker.is_closed


def test_failures_of_long_ago_are_forgotten() -> None:
    breaker = Breaker(SETTINGS)
    breaker.failed(0.0)
    breaker.failed(1.0)
    breaker.failed(62.0)
    assert (breaker.is_closed, breaker.n_failures) == (True, 1)


STEPS = st.lists(st.sampled_from(["failed", "succeeded", "probing", "probed", "probe_failed", "later"]), max_size=60)


@given(STEPS)
def test_whatever_happens_it_is_never_open_without_a_probe_to_come(steps: list[str]) -> None:
    breaker, now_s = Breaker(SETTINGS), 0.0
    in_a_row = 0
    for step in steps:
        was_closed = breaker.is_closed
        if step == "later":
            now_s += 0.5
        elif step in ("failed", "probe_failed", "probed"):
            getattr(breaker, step)(now_s)
        else:
            getattr(breaker, step)()
        if was_closed:
            in_a_row = in_a_row + 1 if "failed" in step else 0 if step == "succeeded" else in_a_row
            assert breaker.is_closed == (in_a_row < SETTINGS.n_failures)
        if breaker.is_closed and not was_closed:
            assert step == "probed"
            in_a_row = 0
        if breaker.state is BreakerState.OPEN:
            assert now_s <= breaker.probe_at_s() <= now_s + SETTINGS.max_open_s or breaker.probe_at_s() <= now_s
