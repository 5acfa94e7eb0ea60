"""Workers that are gone or short of KV, conversations whose turns overlap: what the Ledger says, what a policy makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import PlacementSpec, PolicySpec
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.events import Event, Finished, Sent, WorkerAvailability, WorkerReset, WorkerSnapshot
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.placements import PLACEMENTS
from ppd_bench.policy.policy import Policy, make_policy
from ppd_bench.policy.query import RouteQuery

TOPOLOGY = parse_topology("2P_2D")
P0, P1, D0, D1 = range(4)
GUARDED = PlacementSpec(params=(("max_kv_usage_ratio", 0.9),))


def ask(session: str = "a", turn: int = 2, request: str = "") -> RouteQuery:
    return RouteQuery(
        request_id=request or f"{session}.t{turn}",
        session_id=session,
        turn=turn,
        context_tokens=120 if turn > 1 else 0,
        input_tokens=50,
        max_output_tokens=20,
    )


def gone(*workers: int) -> list[Event]:
    return [WorkerAvailability(1.0, worker, False) for worker in workers]


def finished_on(worker: int, session: str = "a") -> list[Event]:
    """A first turn that went well, through P0."""
    decision = Decision(Route.PD, P0, worker, "test")
    return [Sent(0.0, f"{session}.t1", session, 1, 100, 50, decision), Finished(0.5, f"{session}.t1", True, 20)]


def decided(policy: Policy, query: RouteQuery, *events: Event, topology: str = "2P_2D") -> Decision:
    ledger = Ledger(parse_topology(topology))
    for event in events:
        ledger.observe(event)
    return policy.decide(query, ledger.view(2.0, query.session_id))


def policy(decider: str = "always_local", placement: PlacementSpec | None = None, topology: str = "2P_2D") -> Policy:
    return make_policy(parse_topology(topology), PolicySpec(decider=decider), placement or PlacementSpec(), 0)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("sticky", [True, False])
def test_a_worker_that_is_gone_is_not_picked_while_another_is_there(name: str, sticky: bool) -> None:
    spec = PlacementSpec(prefill=name, decode=name, replica=name, sticky=sticky)
    for session in range(40):
        found = decided(policy("always_pd", spec), ask(f"s{session}", turn=1), *gone(P0, D1))
        assert (found.prefill_worker, found.decode_worker) == (P1, D0)


def test_where_all_are_gone_somebody_is_named_all_the_same() -> None:
    found = decided(policy("always_pd"), ask(turn=1), *gone(P0, P1, D0, D1))
    assert (found.prefill_worker in (P0, P1), found.decode_worker in (D0, D1)) == (True, True)


def test_a_worker_that_came_back_is_picked_again_and_still_holds_its_kv() -> None:
    events = [*finished_on(D0), *gone(D0), WorkerAvailability(1.5, D0, True)]
    assert decided(policy(), ask(), *events) == Decision(Route.LOCAL, D0, D0, "always-local")


def test_a_pin_to_a_worker_that_is_gone_does_not_hold_and_the_reason_says_so() -> None:
    found = decided(policy(), ask(), *finished_on(D0), *gone(D0))
    assert (found.route, found.decode_worker, found.reason) == (Route.PD, D1, "no-kv pinned-gone")


@pytest.mark.parametrize(("there", "route"), [((0,), Route.REPLICA), ((1, 2), Route.PD)])
def test_in_a_hybrid_the_side_that_is_there_takes_everything(there: tuple[int, ...], route: Route) -> None:
    away = [WorkerAvailability(0.0, worker, False) for worker in range(3) if worker not in there]
    hybrid = policy("always_pd", topology="1R_1P_1D")
    routes = {decided(hybrid, ask(f"s{i}", turn=1), *away, topology="1R_1P_1D").route for i in range(50)}
    assert routes == {route}


@pytest.mark.parametrize(
    "pressure",
    [WorkerSnapshot(1.0, D0, 0.95), WorkerSnapshot(1.0, D0, 0.2, 3)],
    ids=["above the bound", "requests wait for room"],
)
def test_b28_a_pressed_worker_is_avoided_while_another_is_free(pressure: WorkerSnapshot) -> None:
    for session in range(20):
        assert decided(policy("always_pd", GUARDED), ask(f"s{session}", turn=1), pressure).decode_worker == D1
    pinned = decided(policy(placement=GUARDED), ask(), *finished_on(D0), pressure)
    assert (pinned.route, pinned.decode_worker, pinned.reason) == (Route.PD, D1, "no-kv pinned-pressed")


def test_b28_where_all_are_pressed_the_usual_choice_is_made_and_the_reason_says_so() -> None:
    pressed = [WorkerSnapshot(1.0, D0, 0.95), WorkerSnapshot(1.0, D1, 0.0, 1)]
    found = decided(policy(placement=GUARDED), ask(), *finished_on(D0), *pressed)
    assert found == Decision(Route.LOCAL, D0, D0, "always-local kv-pressed")


def test_b28_without_the_bound_nobody_looks_at_pressure() -> None:
    found = decided(policy(), ask(), *finished_on(D0), WorkerSnapshot(1.0, D0, 1.0, 9))
    assert found == Decision(Route.LOCAL, D0, D0, "always-local")
    assert not policy().needs_snapshots
    assert policy(placement=GUARDED).needs_snapshots


@pytest.mark.parametrize("bound", [0.0, 1.5, -1, "much", True])
def test_b28_a_bound_that_is_no_ratio_is_refused(bound: Any) -> None:
    spec = dataclasses.replace(PlacementSpec(), params=(("max_kv_usage_ratio", bound),))
    with pytest.raises(SpecError, match="above 0, up to 1"):
        policy(placement=spec)


def test_b23_a_turn_beside_another_of_its_conversation_is_decided_as_if_no_kv_were_known() -> None:
    second = Sent(1.0, "a.t2", "a", 2, 170, 20, Decision(Route.LOCAL, D0, D0, "test"))
    beside = decided(policy(), ask(request="a.t2b"), *finished_on(D0), second)
    assert beside == Decision(Route.PD, beside.prefill_worker, D0, "concurrent")
    after = decided(policy(), ask(request="a.t2b"), *finished_on(D0), second, Finished(1.5, "a.t2", False, 0))
    assert after.route is Route.LOCAL


def test_b24_what_was_sent_before_a_reset_teaches_nothing_even_if_it_ends_after_it() -> None:
    sent, ended = finished_on(D0)
    found = decided(policy(), ask(), sent, WorkerReset(0.2, D0), ended)
    assert (found.route, found.reason) == (Route.PD, "no-kv")
    ledger = Ledger(TOPOLOGY)
    for event in (sent, WorkerReset(0.2, D0), ended):
        ledger.observe(event)
    session = ledger.view(2.0, "a").session
    assert session is not None
    assert session.known_tokens == (100, 0, 0, 0)  # P was not reset


def test_the_engines_own_count_of_the_prompt_replaces_an_estimate() -> None:
    sent, _ = finished_on(D0)
    ledger = Ledger(TOPOLOGY)
    ledger.observe(sent)
    ledger.observe(Finished(0.5, "a.t1", True, 20, 130))
    session = ledger.view(1.0, "a").session
    assert session is not None
    assert session.known_tokens == (130, 0, 150, 0)


def test_the_table_of_conversations_never_exceeds_its_bound_and_the_oldest_leave() -> None:
    ledger = Ledger(TOPOLOGY, max_sessions=2000)
    for i in range(6000):
        for event in finished_on(D0, f"s{i}"):
            ledger.observe(event)
        assert ledger.n_sessions <= 2000
    assert ledger.view(1.0, "s5999").session is not None
    assert ledger.view(1.0, "s4100").session is not None
    assert ledger.view(1.0, "s100").session is None
    assert ledger.n_sessions >= 1900


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["reset", "ok"]), st.integers(0, 3)), max_size=30))
def test_b24_a_reset_is_forgotten_by_every_conversation_and_by_no_other_worker(steps: list[tuple[str, int]]) -> None:
    """Against a model that walks over all conversations."""
    ledger, model = Ledger(TOPOLOGY), {f"s{i}": [0, 0, 0, 0] for i in range(4)}
    for number, (kind, which) in enumerate(steps):
        if kind == "reset":
            ledger.observe(WorkerReset(float(number), which))
            for known in model.values():
                known[which] = 0
            continue
        session, decoder = f"s{which}", (D0, D1)[number % 2]
        ledger.observe(Sent(float(number), f"r{number}", session, 1, 50, 9, Decision(Route.PD, P0, decoder, "test")))
        ledger.observe(Finished(float(number), f"r{number}", True, 7))
        model[session][P0], model[session][decoder] = 50, 57
    for session, known in model.items():
        view = ledger.view(100.0, session).session
        assert view is None or list(view.known_tokens) == known
        assert (view is None) <= (known == [0, 0, 0, 0])
