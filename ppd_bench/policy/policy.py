"""A policy: a route decider composed with placements. Total, deterministic, silent and stateless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route
from ppd_bench.core.point import PlacementSpec, PolicySpec
from ppd_bench.core.topology import Topology
from ppd_bench.policy.deciders import DECIDERS, Decider
from ppd_bench.policy.placements import NEED_SNAPSHOTS, PLACEMENTS, Ask, Placement
from ppd_bench.policy.query import Fleet, RouteQuery, RouterView, fleet_of, stable_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """``decide`` picks the decode worker first, then the route, then a prefill worker if the route needs one.

    Turn 1, and every turn whose KV the decode worker is not believed to hold, goes through P; turns on R are ``replica``.
    """

    fleet: Fleet
    decider: Decider
    prefill: Placement
    decode: Placement
    replica: Placement
    sticky: bool
    params: Mapping[str, float | int | str | bool]
    seed: int
    needs_snapshots: bool

    def decide(self, query: RouteQuery, view: RouterView) -> Decision:
        """Route one turn. Raises nothing for any query and view of this fleet."""
        if self._goes_to_replica(query):
            worker = self._place(self.replica, self.fleet.replicas, query, view)
            return Decision(route=Route.REPLICA, prefill_worker=worker, decode_worker=worker, reason="replica")
        decoder = self._place(self.decode, self.fleet.decoders, query, view)
        route, reason = self._route(query, view, decoder)
        if route is Route.LOCAL:
            return Decision(route=route, prefill_worker=decoder, decode_worker=decoder, reason=reason)
        ask = self._ask(self.fleet.prefillers, view.n_legs, query, view)
        return Decision(route=route, prefill_worker=self.prefill(ask), decode_worker=decoder, reason=reason)

    def _route(self, query: RouteQuery, view: RouterView, decoder: int) -> tuple[Route, str]:
        if query.turn == 1:
            return Route.PD, "turn-1"
        if view.session is None or not view.session.known_tokens[decoder]:
            return Route.PD, "no-kv"
        return self.decider(query, view, decoder)

    def _goes_to_replica(self, query: RouteQuery) -> bool:
        n_replicas, n_decoders = len(self.fleet.replicas), len(self.fleet.decoders)
        if not n_replicas or not n_decoders:
            return n_decoders == 0
        return stable_unit(self.seed, "hybrid", query.session_id) < n_replicas / (n_replicas + n_decoders)

    def _place(self, placement: Placement, candidates: tuple[int, ...], query: RouteQuery, view: RouterView) -> int:
        if self.sticky and view.session is not None and view.session.decode_worker in candidates:
            return view.session.decode_worker
        n_placed = view.n_first_legs if self.sticky else view.n_legs
        return placement(self._ask(candidates, n_placed, query, view))

    def _ask(self, candidates: tuple[int, ...], n_placed: tuple[int, ...], query: RouteQuery, view: RouterView) -> Ask:
        return Ask(query, view, candidates, n_placed, self.fleet, self.seed, self.params)


def make_policy(topology: Topology, policy: PolicySpec, placement: PlacementSpec, seed: int) -> Policy:
    """Build a policy from its spec.

    Raises:
        SpecError: a missing or unusable parameter.
        TableError: the spec carries a damaged decision table.
    """
    fleet = fleet_of(topology)
    return Policy(
        fleet=fleet,
        decider=DECIDERS[policy.decider](policy, fleet, seed),
        prefill=PLACEMENTS[placement.prefill],
        decode=PLACEMENTS[placement.decode],
        replica=PLACEMENTS[placement.replica],
        sticky=placement.sticky,
        params=dict(placement.params),
        seed=seed,
        needs_snapshots=not NEED_SNAPSHOTS.isdisjoint({placement.prefill, placement.decode, placement.replica}),
    )
