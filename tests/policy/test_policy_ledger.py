"""What a router knows: counts in flight, conversations, known tokens and the conversation rate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.events import Event, Finished, PrefillDone, Sent, WorkerReset, WorkerSnapshot
from ppd_bench.policy.ledger import Ledger

TOPOLOGY = parse_topology("1R_2P_2D")
R0, P0, P1, D0, D1 = range(5)


def pd(prefill: int = P0, decode: int = D0) -> Decision:
    return Decision(route=Route.PD, prefill_worker=prefill, decode_worker=decode, reason="test")


def here(worker: int, route: Route = Route.LOCAL) -> Decision:
    return Decision(route=route, prefill_worker=worker, decode_worker=worker, reason="test")


def sent(
    time_s: float, name: str, decision: Decision, *, turn: int = 1, prompt: int = 100, cap: int = 50, request: str = ""
) -> Sent:
    return Sent(time_s, request or f"{name}.t{turn}", name, turn, prompt, cap, decision)


def ledger_of(*events: Event, **settings: float) -> Ledger:
    ledger = Ledger(TOPOLOGY, **settings)
    for event in events:
        ledger.observe(event)
    return ledger


def test_a_turn_through_p_counts_on_p_until_its_prefill_is_done_and_on_d_from_the_start() -> None:
    ledger = ledger_of(sent(0.0, "a", pd()))
    assert ledger.view(0.0, "a").n_inflight == (0, 1, 0, 1, 0)
    assert ledger.view(0.0, "a").inflight_tokens == (0, 150, 0, 150, 0)
    ledger.observe(PrefillDone(0.5, "a.t1"))
    assert ledger.view(0.5, "a").n_inflight == (0, 0, 0, 1, 0)
    ledger.observe(Finished(1.0, "a.t1", True, 20))
    view = ledger.view(1.0, "a")
    assert (view.n_inflight, view.inflight_tokens) == ((0,) * 5, (0,) * 5)
    assert (view.n_legs, view.n_first_legs) == ((0, 1, 0, 1, 0), (0, 1, 0, 1, 0))


def test_a_turn_in_one_place_counts_there_alone() -> None:
    view = ledger_of(sent(0.0, "a", here(D1)), sent(0.0, "b", here(R0, Route.REPLICA), turn=2)).view(0.0, "a")
    assert view.n_inflight == (1, 0, 0, 0, 1)
    assert view.n_legs == (1, 0, 0, 0, 1)
    assert view.n_first_legs == (0, 0, 0, 0, 1)


def test_a_turn_that_fails_before_its_prefill_is_done_leaves_both_places() -> None:
    view = ledger_of(sent(0.0, "a", pd()), Finished(1.0, "a.t1", False, 0), PrefillDone(1.1, "a.t1")).view(2.0, "a")
    assert view.n_inflight == (0,) * 5
    assert view.session is None


def test_expected_output_is_the_mean_of_earlier_answers_below_the_declared_cap() -> None:
    first = [sent(0.0, "a", here(D0)), Finished(1.0, "a.t1", True, 20)]
    second = [sent(2.0, "a", here(D0), turn=2), Finished(3.0, "a.t2", True, 31)]
    assert ledger_of(*first, *second[:1]).view(2.0, "a").inflight_tokens[D0] == 120
    third = sent(4.0, "a", here(D0), turn=3)
    ledger = ledger_of(*first, *second, third)
    assert ledger.view(4.0, "a").inflight_tokens[D0] == 125  # (20 + 31) // 2
    session = ledger.view(4.0, "a").session
    assert session is not None
    assert (session.n_finished, session.mean_output_tokens) == (2, 25.5)
    capped = ledger_of(sent(0.0, "a", here(D0)), Finished(1.0, "a.t1", True, 80), sent(2.0, "a", here(D0), turn=2))
    assert capped.view(2.0, "a").inflight_tokens[D0] == 150


def test_workers_are_believed_to_hold_what_they_computed() -> None:
    """D the prompt and the answer, P the prompt only; a later turn on another D leaves the first one's belief."""
    events: list[Event] = [
        sent(0.0, "a", pd(P0, D0), prompt=100),
        Finished(1.0, "a.t1", True, 20),
        sent(2.0, "a", pd(P1, D1), turn=2, prompt=150),
        Finished(3.0, "a.t2", True, 30),
    ]
    session = ledger_of(*events).view(3.0, "a").session
    assert session is not None
    assert session.known_tokens == (0, 100, 150, 120, 180)
    assert session.decode_worker == D1


def test_a_failed_turn_teaches_nothing() -> None:
    events: list[Event] = [
        sent(0.0, "a", pd(P0, D0)),
        Finished(1.0, "a.t1", True, 20),
        sent(2.0, "a", pd(P1, D1), turn=2, prompt=150),
        Finished(3.0, "a.t2", False, 5),
    ]
    session = ledger_of(*events).view(3.0, "a").session
    assert session is not None
    assert (session.decode_worker, session.known_tokens) == (D0, (0, 100, 0, 120, 0))


def test_a_worker_that_was_reset_holds_nothing() -> None:
    events: list[Event] = [
        sent(0.0, "a", pd(P0, D0)),
        Finished(1.0, "a.t1", True, 20),
        WorkerSnapshot(1.0, D0, 0.4),
        WorkerSnapshot(1.0, D1, 0.3),
        WorkerReset(2.0, D0),
    ]
    view = ledger_of(*events).view(2.0, "a")
    assert view.session is not None
    assert view.session.known_tokens == (0, 100, 0, 0, 0)
    assert view.kv_usage_ratio == (None, None, None, None, 0.3)


def test_conversations_do_not_see_each_other() -> None:
    ledger = ledger_of(sent(0.0, "a", here(D0)), Finished(1.0, "a.t1", True, 20))
    assert ledger.view(1.0, "b").session is None


def test_a_conversation_is_forgotten_after_its_time_to_live() -> None:
    ledger = ledger_of(sent(0.0, "a", here(D0)), Finished(1.0, "a.t1", True, 20), session_ttl_s=100.0)
    assert ledger.view(99.9, "a").session is not None
    assert ledger.view(100.0, "a").session is None
    ledger.observe(sent(150.0, "a", here(D1), turn=2))  # and does not come back with what it knew
    ledger.observe(Finished(151.0, "a.t2", True, 5))
    session = ledger.view(151.0, "a").session
    assert session is not None
    assert (session.n_finished, session.known_tokens[D0]) == (1, 0)


def test_old_conversations_leave_when_young_ones_come_so_that_memory_is_bounded() -> None:
    ledger = Ledger(TOPOLOGY, session_ttl_s=10.0)
    most = 0
    for i in range(1000):
        ledger.observe(sent(float(i), f"s{i}", here(D0)))
        most = max(most, ledger.n_sessions)
    assert most <= 11


def test_a_turn_keeps_its_conversation_young() -> None:
    ledger = Ledger(TOPOLOGY, session_ttl_s=10.0)
    for i in range(8):
        ledger.observe(sent(4.0 * i, "old", here(D0), turn=i + 1))
        ledger.observe(Finished(4.0 * i + 1, f"old.t{i + 1}", True, 1))
        ledger.observe(sent(4.0 * i, f"other{i}", here(D0)))
    session = ledger.view(29.0, "old").session
    assert session is not None
    assert session.n_finished == 8


def test_the_rate_follows_a_step_within_one_window() -> None:
    """Idle for 10 minutes after one conversation, then 20 per second."""
    ledger = ledger_of(sent(0.0, "first", here(D0)))
    assert ledger.view(600.0, "x").session_rps == 0.0
    rates = []
    for i in range(300):
        now_s = 600.0 + 0.05 * (i + 1)
        ledger.observe(sent(now_s, f"s{i}", here(D0)))
        rates.append((now_s - 600.0, ledger.view(now_s, "x").session_rps))
    assert all(rate == pytest.approx(20.0, rel=0.01) for t, rate in rates if t > 10.0)
    assert all(rate == pytest.approx(2.0 * t, abs=0.11) for t, rate in rates if t < 9.9)  # a ramp of one window


def test_the_rate_is_known_early_and_the_first_arrival_is_not_an_infinite_one() -> None:
    ledger = ledger_of(sent(0.0, "a", here(D0)))
    assert ledger.view(0.0, "b").session_rps == 1.0  # over the shortest window, 1 s
    for i in range(1, 20):
        ledger.observe(sent(0.25 * i, f"s{i}", here(D0)))
    assert ledger.view(5.0, "b").session_rps == pytest.approx(4.0)


def test_only_first_turns_count_as_conversations() -> None:
    ledger = ledger_of(*[sent(0.1 * i, "a", here(D0), turn=i + 1) for i in range(20)])
    assert ledger.view(2.0, "b").session_rps == 0.5


def test_a_request_that_is_sent_again_replaces_its_first_attempt() -> None:
    ledger = ledger_of(sent(0.0, "a", pd(P0, D0)), sent(1.0, "a", pd(P1, D1)))
    assert ledger.view(1.0, "a").n_inflight == (0, 0, 1, 0, 1)
    assert ledger.view(2.0, "a").session_rps == 0.5
    ledger.observe(Finished(3.0, "a.t1", True, 5))
    assert ledger.view(3.0, "a").n_inflight == (0,) * 5


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "prefilled", "ok", "failed", "reset", "snapshot"]),
        st.integers(0, 7),
        st.sampled_from([pd(P0, D0), pd(P1, D1), here(D0), here(D1), here(R0, Route.REPLICA)]),
        st.floats(0.0, 40.0),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_counts_in_flight_return_to_zero_after_any_mix(steps: list[tuple[str, int, Decision, float]]) -> None:
    """Repeated, unknown and out-of-order events included; counts never go below zero on the way."""
    ledger = Ledger(TOPOLOGY, session_ttl_s=50.0)
    now_s = 0.0
    for kind, i, decision, wait_s in steps:
        now_s += wait_s
        event: Event = {
            "send": sent(now_s, f"s{i % 4}", decision, turn=1 + i // 4, request=f"r{i}"),
            "prefilled": PrefillDone(now_s, f"r{i}"),
            "ok": Finished(now_s, f"r{i}", True, 10),
            "failed": Finished(now_s, f"r{i}", False, 0),
            "reset": WorkerReset(now_s, i % 5),
            "snapshot": WorkerSnapshot(now_s, i % 5, 0.5),
        }[kind]
        ledger.observe(event)
        view = ledger.view(now_s, "s0")
        assert min(view.n_inflight) >= 0
        assert min(view.inflight_tokens) >= 0
    for i in range(8):
        ledger.observe(Finished(now_s, f"r{i}", True, 1))
    view = ledger.view(now_s, "s0")
    assert (view.n_inflight, view.inflight_tokens) == ((0,) * 5, (0,) * 5)
