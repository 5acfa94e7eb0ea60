"""Through P or locally: what each decider answers, and the rules that stand above them."""

from __future__ import annotations

import hashlib

import pytest

from ppd_bench.core.enums import Route
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Params, PlacementSpec, PolicySpec
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.deciders import DECIDERS
from ppd_bench.policy.policy import Policy, make_policy
from ppd_bench.policy.query import (
    RouteQuery,
    RouterView,
    SessionView,
    expected_output_tokens,
    fleet_of,
    stable_unit,
)

TOPOLOGY = parse_topology("1P_1D_1pD")
P0, D0, PD1 = range(3)


def question(name: str = "a", *, turn: int = 2, context: int = 200, new: int = 50, cap: int = 100) -> RouteQuery:
    return RouteQuery(
        request_id=f"{name}.t{turn}",
        session_id=name,
        turn=turn,
        context_tokens=context,
        input_tokens=new,
        max_output_tokens=cap,
    )


def seen(decode_worker: int | None, known: int = 200, mean: float = 40.0) -> RouterView:
    """A view of a conversation that decoded on a worker, which holds ``known`` tokens of it."""
    session = None
    if decode_worker is not None:
        tokens = tuple(known if w == decode_worker else 0 for w in range(3))
        session = SessionView(n_finished=1, decode_worker=decode_worker, known_tokens=tokens, mean_output_tokens=mean)
    zeros = (0, 0, 0)
    return RouterView(
        now_s=0.0,
        n_inflight=zeros,
        inflight_tokens=zeros,
        n_legs=zeros,
        n_first_legs=zeros,
        kv_usage_ratio=(None, None, None),
        session_rps=1.0,
        session=session,
    )


def policy(decider: str, params: Params = ()) -> Policy:
    return make_policy(TOPOLOGY, PolicySpec(decider=decider, params=params), PlacementSpec(), 0)


@pytest.mark.parametrize(
    ("decider", "worker", "route", "reason"),
    [
        ("node", D0, Route.PD, "node-D"),
        ("node", PD1, Route.LOCAL, "node-pD"),
        ("always_pd", PD1, Route.PD, "always-pd"),
        ("always_local", D0, Route.LOCAL, "always-local"),
    ],
)
def test_deciders_by_node_and_constant_ones(decider: str, worker: int, route: Route, reason: str) -> None:
    decision = policy(decider).decide(question(), seen(worker))
    assert (decision.route, decision.decode_worker, decision.reason) == (route, worker, reason)
    assert decision.prefill_worker == (P0 if route is Route.PD else worker)


@pytest.mark.parametrize("decider", ["always_local", "node", "threshold"])
def test_a_first_turn_goes_through_p_whatever_the_decider(decider: str) -> None:
    decision = policy(decider).decide(question(turn=1, context=0), seen(None))
    assert (decision.route, decision.reason) == (Route.PD, "turn-1")


@pytest.mark.parametrize("view", [seen(None), seen(PD1, known=0)])
def test_a_turn_whose_kv_nobody_holds_goes_through_p(view: RouterView) -> None:
    decision = policy("always_local").decide(question(), view)
    assert (decision.route, decision.reason) == (Route.PD, "no-kv")


@pytest.mark.parametrize(("known", "route"), [(149, Route.PD), (150, Route.LOCAL), (250, Route.LOCAL), (1, Route.PD)])
def test_threshold_counts_the_tokens_that_the_worker_does_not_hold(known: int, route: Route) -> None:
    """Prompt 250, limit 100: 150 known tokens are enough."""
    decider = policy("threshold", (("max_uncached_tokens", 100),))
    assert decider.decide(question(), seen(D0, known=known)).route is route


def test_fraction_sends_its_share_locally_and_a_request_always_the_same_way() -> None:
    """4,000 requests at x = 0.3: 1,200 within 5 standard errors (29)."""
    decider = policy("fraction", (("x", 0.3),))
    routes = [decider.decide(question(f"s{i}"), seen(D0)).route for i in range(4000)]
    assert abs(routes.count(Route.LOCAL) - 1200) < 145
    assert routes == [decider.decide(question(f"s{i}"), seen(D0)).route for i in range(4000)]


@pytest.mark.parametrize(("x", "route"), [(0.0, Route.PD), (1.0, Route.LOCAL)])
def test_fractions_of_0_and_1_are_exact(x: float, route: Route) -> None:
    decider = policy("fraction", (("x", x),))
    assert {decider.decide(question(f"s{i}"), seen(D0)).route for i in range(500)} == {route}


def test_a_larger_fraction_keeps_what_a_smaller_one_sent_locally() -> None:
    """One hash per request: x only moves the line, so that a sweep over x compares like with like."""
    local = [
        {
            i
            for i in range(500)
            if policy("fraction", (("x", x),)).decide(question(f"s{i}"), seen(D0)).route is Route.LOCAL
        }
        for x in (0.2, 0.5, 0.8)
    ]
    assert local[0] < local[1] < local[2]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (PolicySpec(decider="fraction"), "x"),
        (PolicySpec(decider="fraction", params=(("x", 1.5),)), "0 to 1"),
        (PolicySpec(decider="table"), "build-table"),
    ],
)
def test_an_unusable_parameter_is_an_error_that_says_what_to_do(spec: PolicySpec, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make_policy(TOPOLOGY, spec, PlacementSpec(), 0)


def test_expected_output_is_what_finished_answers_say_at_most_what_was_declared() -> None:
    assert expected_output_tokens(question(cap=100), seen(None)) == 100.0
    assert expected_output_tokens(question(cap=100), seen(D0, mean=40.0)) == 40.0
    assert expected_output_tokens(question(cap=30), seen(D0, mean=40.0)) == 30.0


def test_d_and_pd_are_both_decoders_and_only_pd_is_local() -> None:
    fleet = fleet_of(parse_topology("1R_2P_1D_1pD"))
    assert (fleet.replicas, fleet.prefillers, fleet.decoders, fleet.local_decoders) == ((0,), (1, 2), (3, 4), {4})
    assert fleet.worker_ids == ("R0", "P0", "P1", "D0", "D1")


def test_the_stable_hash_is_the_same_everywhere_and_even() -> None:
    """The first value is fixed: it may not change between versions, since placements of old runs hang on it."""
    digest = hashlib.blake2b(b"0\x1fx\x1fs00000.t2", digest_size=7).digest()
    assert stable_unit(0, "x", "s00000.t2") == int.from_bytes(digest, "big") / 2**56 == 0.8847741374328593
    values = [stable_unit(0, i) for i in range(4000)]
    assert 0.0 <= min(values) < 0.002
    assert 0.998 < max(values) < 1.0
    assert abs(sum(values) / 4000 - 0.5) < 5 * 0.2887 / 4000**0.5
    assert stable_unit("a", "bc") != stable_unit("ab", "c")


def test_every_decider_is_tried_here_or_by_the_parity_test() -> None:
    assert set(DECIDERS) == {"node", "always_pd", "always_local", "fraction", "threshold", "table"}
