"""A policy: a route decider composed with placements. Total, deterministic, silent and stateless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import PlacementSpec, PolicySpec
from ppd_bench.core.topology import Topology
from ppd_bench.policy.deciders import DECIDERS, Decider
from ppd_bench.policy.placements import NEED_SNAPSHOTS, PLACEMENTS, Ask, Placement
from ppd_bench.policy.query import Fleet, RouteQuery, RouterView, fleet_of, stable_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """``decide`` picks the decode worker first, then the route, then a prefill worker if the route needs one.

    Turn 1, and every turn whose KV the decode worker is not believed to hold, goes through P; turns on R are ``replica``.
    Only available workers are picked, where there are any. With ``max_kv_usage_ratio`` a decode worker or replica above it, or
    with requests that wait for KV room, is avoided while another is free (ROUTER.md B28). A reason ends with what overrode the
    usual choice: ``pinned-gone``, ``pinned-pressed``, or ``kv-pressed`` where every candidate is under pressure.
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
    max_kv_usage_ratio: float | None = None

    def decide(self, query: RouteQuery, view: RouterView) -> Decision:
        """Route one turn. Raises nothing for any query and view of this fleet."""
        if self._goes_to_replica(query, view):
            candidates, note = self._usable(self.fleet.replicas, view)
            worker = self._place(self.replica, candidates, query, view)
            return Decision(route=Route.REPLICA, prefill_worker=worker, decode_worker=worker, reason="replica" + note)
        candidates, note = self._usable(self.fleet.decoders, view)
        decoder = self._place(self.decode, candidates, query, view)
        route, reason = self._route(query, view, decoder)
        reason += note
        if route is Route.LOCAL:
            return Decision(route=route, prefill_worker=decoder, decode_worker=decoder, reason=reason)
        ask = self._ask(_available(self.fleet.prefillers, view), view.n_legs, query, view)
        return Decision(route=route, prefill_worker=self.prefill(ask), decode_worker=decoder, reason=reason)

    def _usable(self, candidates: tuple[int, ...], view: RouterView) -> tuple[tuple[int, ...], str]:
        """The workers to choose from, and what to add to the reason."""
        if self.max_kv_usage_ratio is None and False not in view.available:
            return candidates, ""
        there = _available(candidates, view)
        free = tuple([c for c in there if not self._is_pressed(c, view)])
        pinned = view.session.decode_worker if self.sticky and view.session is not None else -1
        if pinned in candidates and pinned not in there:
            note = NOTE_PINNED_GONE
        elif pinned in there and free and pinned not in free:
            note = NOTE_PINNED_PRESSED
        else:
            note = ""
        return (free, note) if free else (there, note + NOTE_KV_PRESSED)

    def _is_pressed(self, worker: int, view: RouterView) -> bool:
        limit = self.max_kv_usage_ratio
        if limit is None:
            return False
        usage = view.kv_usage_ratio[worker]
        return (usage is not None and usage > limit) or (
            worker < len(view.n_waiting_capacity) and view.n_waiting_capacity[worker] > 0
        )

    def _route(self, query: RouteQuery, view: RouterView, decoder: int) -> tuple[Route, str]:
        if query.turn == 1:
            return Route.PD, "turn-1"
        if view.session is None or not view.session.known_tokens[decoder]:
            return Route.PD, "no-kv"
        if view.session.n_inflight:
            return Route.PD, "concurrent"
        return self.decider(query, view, decoder)

    def _goes_to_replica(self, query: RouteQuery, view: RouterView) -> bool:
        n_replicas, n_decoders = len(self.fleet.replicas), len(self.fleet.decoders)
        if not n_replicas or not n_decoders:
            return n_decoders == 0
        if False in view.available:
            has_replica = _has_any(self.fleet.replicas, view)
            if has_replica != (_has_any(self.fleet.decoders, view) and _has_any(self.fleet.prefillers, view)):
                return has_replica
        return stable_unit(self.seed, "hybrid", query.session_id) < n_replicas / (n_replicas + n_decoders)

    def _place(self, placement: Placement, candidates: tuple[int, ...], query: RouteQuery, view: RouterView) -> int:
        if self.sticky and view.session is not None and view.session.decode_worker in candidates:
            return view.session.decode_worker
        n_placed = view.n_first_legs if self.sticky else view.n_legs
        return placement(self._ask(candidates, n_placed, query, view))

    def _ask(self, candidates: tuple[int, ...], n_placed: tuple[int, ...], query: RouteQuery, view: RouterView) -> Ask:
        return Ask(query, view, candidates, n_placed, self.fleet, self.seed, self.params)


NOTE_PINNED_GONE = " pinned-gone"
NOTE_PINNED_PRESSED = " pinned-pressed"
NOTE_KV_PRESSED = " kv-pressed"
GUARD_PARAM = "max_kv_usage_ratio"
"""Parameter of a placement: the KV usage above which a worker is avoided; absent, there is no such guard."""


def _available(candidates: tuple[int, ...], view: RouterView) -> tuple[int, ...]:
    """Those that are there; all of them where none is, for somebody has to be named."""
    if False not in view.available:
        return candidates
    return tuple([c for c in candidates if view.available[c]]) or candidates


def _has_any(candidates: tuple[int, ...], view: RouterView) -> bool:
    return any(view.available[c] for c in candidates)


def _guard(spec: PlacementSpec) -> float | None:
    limit = dict(spec.params).get(GUARD_PARAM)
    if limit is None:
        return None
    if isinstance(limit, str | bool) or not 0.0 < limit <= 1.0:
        raise SpecError(f"placement.{GUARD_PARAM} is {limit!r}; allowed: above 0, up to 1")
    return float(limit)


def make_policy(topology: Topology, policy: PolicySpec, placement: PlacementSpec, seed: int) -> Policy:
    """Build a policy from its spec.

    Raises:
        SpecError: a missing or unusable parameter.
        TableError: the spec carries a damaged decision table.
    """
    fleet = fleet_of(topology)
    limit = _guard(placement)
    read = {placement.prefill, placement.decode, placement.replica}
    return Policy(
        fleet=fleet,
        decider=DECIDERS[policy.decider](policy, fleet, seed),
        prefill=PLACEMENTS[placement.prefill],
        decode=PLACEMENTS[placement.decode],
        replica=PLACEMENTS[placement.replica],
        sticky=placement.sticky,
        params=dict(placement.params),
        seed=seed,
        needs_snapshots=limit is not None or not NEED_SNAPSHOTS.isdisjoint(read),
        max_kv_usage_ratio=limit,
    )
