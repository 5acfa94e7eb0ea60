"""Where a leg is placed, by hand, and over many conversations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_bench.core.enums import Route
from ppd_bench.core.point import PlacementSpec, PolicySpec
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.events import Finished, Sent
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.placements import (
    PLACEMENTS,
    Ask,
    cache_aware,
    hit_ratio,
    least_inflight,
    least_kv_usage,
    least_tokens,
    round_robin,
    session_affinity,
)
from ppd_bench.policy.policy import make_policy
from ppd_bench.policy.query import Fleet, RouteQuery, RouterView, SessionView, fleet_of


def query(name: str = "a", *, turn: int = 1, context: int = 0, new: int = 100) -> RouteQuery:
    return RouteQuery(
        request_id=f"{name}.t{turn}",
        session_id=name,
        turn=turn,
        context_tokens=context,
        input_tokens=new,
        max_output_tokens=50,
    )


def view(
    n: int = 3,
    *,
    inflight: tuple[int, ...] = (),
    tokens: tuple[int, ...] = (),
    usage: tuple[float | None, ...] = (),
    session: SessionView | None = None,
) -> RouterView:
    zeros = (0,) * n
    return RouterView(
        now_s=0.0,
        n_inflight=inflight or zeros,
        inflight_tokens=tokens or zeros,
        n_legs=zeros,
        n_first_legs=zeros,
        kv_usage_ratio=usage or (None,) * n,
        session_rps=0.0,
        session=session,
    )


def ask(
    question: RouteQuery,
    seen: RouterView,
    *,
    n: int = 3,
    placed: tuple[int, ...] = (),
    params: dict[str, float] | None = None,
) -> Ask:
    fleet = fleet_of(parse_topology(f"{n}R"))
    return Ask(question, seen, tuple(range(n)), placed or (0,) * n, fleet, 0, params or {})


def held(worker: int, *known: int) -> SessionView:
    return SessionView(n_finished=1, decode_worker=worker, known_tokens=known, mean_output_tokens=10.0)


def test_round_robin_takes_the_next_in_turn() -> None:
    assert [round_robin(ask(query(), view(), placed=p)) for p in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1))] == [
        0,
        1,
        2,
        0,
    ]


def test_least_inflight_takes_the_fewest_requests() -> None:
    assert least_inflight(ask(query(), view(inflight=(3, 1, 2)))) == 1


def test_least_tokens_takes_the_fewest_tokens() -> None:
    assert least_tokens(ask(query(), view(inflight=(0, 5, 5), tokens=(900, 800, 700)))) == 2


def test_least_kv_usage_takes_the_emptiest_and_among_equals_the_least_loaded() -> None:
    assert least_kv_usage(ask(query(), view(usage=(0.5, 0.2, 0.4), inflight=(0, 9, 0)))) == 1
    assert least_kv_usage(ask(query(), view(usage=(0.5, 0.5, 0.5), inflight=(4, 3, 5)))) == 1
    assert least_kv_usage(ask(query(), view(usage=(0.1, None, 0.2), inflight=(0, 9, 0)))) == 1  # unknown is empty


@pytest.mark.parametrize("place", [least_inflight, least_tokens, least_kv_usage, cache_aware])
def test_ties_are_spread_evenly_over_the_tied(place: object) -> None:
    """3,000 draws over 3: a share within 5 standard errors of 1,000 (26)."""
    chosen = Counter(PLACEMENTS[place.__name__](ask(query(f"s{i}"), view())) for i in range(3000))  # type: ignore[attr-defined]
    assert set(chosen) == {0, 1, 2}
    assert all(abs(n - 1000) < 130 for n in chosen.values())


def test_a_tie_is_broken_among_the_tied_only_and_always_the_same_way() -> None:
    chosen = [least_inflight(ask(query(f"s{i}"), view(inflight=(1, 0, 0)))) for i in range(100)]
    assert set(chosen) == {1, 2}
    assert chosen == [least_inflight(ask(query(f"s{i}"), view(inflight=(1, 0, 0)))) for i in range(100)]


# -- cache_aware: load / mean load - alpha * hit ratio ------------------------------------------------------------------


def test_cache_aware_scores_by_hand() -> None:
    """Prompt 200; tokens 300, 100, 200 (mean 200): loads 1.5, 0.5, 1.0; known 160, 0, 100: hits 0.8, 0, 0.5.

    alpha 1: 0.7, 0.5, 0.5 with a tie; alpha 1.1: 0.62, 0.5, 0.45; alpha 2: -0.1, 0.5, 0; alpha 0: the least loaded.
    The session decoded on a worker that is no candidate, so affinity has no say.
    """
    question = query(turn=2, context=150, new=50)
    seen = view(tokens=(300, 100, 200), session=held(7, 160, 0, 100))
    assert [cache_aware(ask(question, seen, params={"alpha": alpha})) for alpha in (0.0, 0.9, 1.1, 2.0)] == [1, 1, 2, 0]


def test_cache_aware_keeps_a_conversation_while_its_worker_is_not_overloaded() -> None:
    """Loads 1.8, 0.6, 0.6 and 2.4, 0.3, 0.3 of the mean; the bound is 2 unless said."""
    question = query(turn=2, context=150, new=50)
    session = held(0, 0, 0, 0)
    assert cache_aware(ask(question, view(tokens=(180, 60, 60), session=session))) == 0
    assert cache_aware(ask(question, view(tokens=(240, 30, 30), session=session))) in (1, 2)
    strict = {"affinity_max_load": 1.5}
    assert cache_aware(ask(question, view(tokens=(180, 60, 60), session=session), params=strict)) in (1, 2)


def test_cache_aware_on_an_idle_fleet_follows_the_cache() -> None:
    question = query(turn=2, context=150, new=50)
    assert cache_aware(ask(question, view(session=held(7, 0, 150, 0)))) == 1


def test_the_hit_ratio_is_the_share_of_the_prompt_that_is_known() -> None:
    question = query(turn=2, context=150, new=50)
    assert [hit_ratio(question, view(session=held(0, 50, 0, 400)), w) for w in range(3)] == [0.25, 0.0, 1.0]
    assert hit_ratio(question, view(), 0) == 0.0
    assert hit_ratio(query(new=0), view(session=held(0, 50, 0, 0)), 0) == 0.0


# -- rendezvous hashing -------------------------------------------------------------------------------------------------


def _fleet(ids: tuple[str, ...]) -> Fleet:
    everyone = tuple(range(len(ids)))
    return Fleet(worker_ids=ids, replicas=everyone, prefillers=(), decoders=(), local_decoders=frozenset())


def _home(name: str, ids: tuple[str, ...]) -> str:
    everyone = tuple(range(len(ids)))
    seen = view(len(ids))
    return ids[session_affinity(Ask(query(name), seen, everyone, (0,) * len(ids), _fleet(ids), 0, {}))]


def test_when_a_worker_leaves_only_its_conversations_move() -> None:
    before = {f"s{i}": _home(f"s{i}", ("R0", "R1", "R2", "R3")) for i in range(1000)}
    after = {name: _home(name, ("R0", "R1", "R3")) for name in before}
    assert all(after[name] == home for name, home in before.items() if home != "R2")
    orphans = Counter(after[name] for name, home in before.items() if home == "R2")
    assert set(orphans) == {"R0", "R1", "R3"}
    assert all(abs(n - 250) < 5 * 14 for n in Counter(before.values()).values())


def test_affinity_depends_on_the_worker_and_not_on_its_position() -> None:
    assert all(_home(f"s{i}", ("R0", "R1", "R2")) == _home(f"s{i}", ("R2", "R0", "R1")) for i in range(200))


# -- the composed policy ------------------------------------------------------------------------------------------------


def _play(
    topology: str, n: int, *, sticky: bool, name: str = "round_robin", turns: int = 3
) -> list[list[tuple[str, int, int]]]:
    """Decisions (route, prefill, decode) per turn number of ``n`` conversations that take their turns one after another."""
    fleet = parse_topology(topology)
    spec = PlacementSpec(prefill=name, decode=name, replica=name, sticky=sticky)
    policy, ledger = make_policy(fleet, PolicySpec(), spec, 0), Ledger(fleet)
    found: list[list[tuple[str, int, int]]] = []
    for turn in range(1, turns + 1):
        found.append([])
        for i in range(n):
            now_s = turn * 100.0 + i
            question = query(f"s{i}", turn=turn, context=150 * (turn - 1))
            decision = policy.decide(question, ledger.view(now_s, question.session_id))
            prompt = question.prompt_tokens
            ledger.observe(Sent(now_s, question.request_id, f"s{i}", turn, prompt, 50, decision))
            ledger.observe(Finished(now_s, question.request_id, True, 50))
            found[-1].append((decision.route.value, decision.prefill_worker, decision.decode_worker))
    return found


def test_round_robin_is_exact_and_sticky_turns_stay() -> None:
    first, second, third = _play("2P_3D", 30, sticky=True)
    assert [decode for _, _, decode in first] == [2, 3, 4] * 10
    assert [prefill for _, prefill, _ in first] == [0, 1] * 15
    assert [decode for _, _, decode in second] == [decode for _, _, decode in first]
    assert [prefill for _, prefill, _ in second + third] == [0, 1] * 30
    assert {route for route, _, _ in second} == {"pd"}


def test_round_robin_is_exact_over_all_turns_without_stickiness() -> None:
    decisions = [d for turn in _play("2P_3D", 31, sticky=False) for d in turn]
    assert [decode for _, _, decode in decisions] == ([2, 3, 4] * 31)[:93]
    assert [prefill for _, prefill, _ in decisions] == ([0, 1] * 47)[:93]


def test_local_turns_do_not_upset_the_round_robin_of_p() -> None:
    """D goes through P, pD does not: P legs alternate all the same."""
    decisions = [d for turn in _play("2P_1D_1pD", 20, sticky=True) for d in turn]
    legs = [prefill for route, prefill, _ in decisions if route == "pd"]
    assert legs == ([0, 1] * len(legs))[: len(legs)]
    assert Counter(route for route, _, _ in decisions) == {"pd": 20 + 2 * 10, "local": 2 * 10}


def test_a_hybrid_sends_its_share_of_conversations_to_the_replicas_for_good() -> None:
    """2 R and 1 D: two thirds of 1,500, within 5 standard errors (18)."""
    first, second, third = _play("2R_1P_1D", 1500, sticky=True)
    on_replica = [route == "replica" for route, _, _ in first]
    assert abs(sum(on_replica) - 1000) < 5 * 18.3
    assert on_replica == [route == "replica" for route, _, _ in second] == [route == "replica" for route, _, _ in third]
    replicas = [decode for route, _, decode in first if route == "replica"]
    assert replicas == ([0, 1] * 1000)[: len(replicas)]


@pytest.mark.parametrize("topology", ["4R", "1R_1P_2D"])
def test_a_replica_prefills_where_it_decodes(topology: str) -> None:
    decisions = [d for turn in _play(topology, 50, sticky=True) for d in turn]
    assert all(prefill == decode for route, prefill, decode in decisions if route == "replica")
    assert ("replica" in {route for route, _, _ in decisions}) is True


def test_only_least_kv_usage_asks_for_snapshots() -> None:
    fleet = parse_topology("1P_1D")
    for name in PLACEMENTS:
        policy = make_policy(fleet, PolicySpec(), PlacementSpec(decode=name), 0)
        assert policy.needs_snapshots == (name == "least_kv_usage")


NUMBERS = st.lists(st.integers(0, 10**6), min_size=3, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(PLACEMENTS)),
    st.text(max_size=8),
    NUMBERS,
    NUMBERS,
    st.lists(st.none() | st.floats(0.0, 1.0), min_size=3, max_size=3).map(tuple),
    st.none() | st.integers(0, 4).map(lambda w: held(w, 5, 0, 10**7)),
    st.integers(0, 10**6),
)
def test_every_placement_answers_every_question_with_a_candidate_and_the_same_one_again(
    name: str,
    session_id: str,
    inflight: tuple[int, ...],
    tokens: tuple[int, ...],
    usage: tuple[float | None, ...],
    session: SessionView | None,
    new: int,
) -> None:
    seen = view(inflight=inflight, tokens=tokens, usage=usage, session=session)
    question = ask(query(session_id, new=new), seen, placed=inflight)
    assert PLACEMENTS[name](question) in (0, 1, 2)
    assert PLACEMENTS[name](question) == PLACEMENTS[name](question)


def test_route_names_are_those_of_the_decision() -> None:
    assert {route for turn in _play("1R_1P_1D_1pD", 60, sticky=True) for route, _, _ in turn} == {
        Route.REPLICA.value,
        Route.PD.value,
        Route.LOCAL.value,
    }
