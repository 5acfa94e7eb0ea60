"""Route deciders: prefill a follow-up turn through P (x=0) or where its KV lives (x=1).

A decider is ``(query, view, decode_worker) -> (Route.PD | Route.LOCAL, reason)`` and is asked only for turns whose KV the
chosen decode worker is believed to hold. Adding one costs one factory and one line in ``DECIDERS``.
"""

from __future__ import annotations

from collections.abc import Callable

from ppd_bench.core.enums import Route
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import PolicySpec
from ppd_bench.policy.query import Fleet, RouteQuery, RouterView, expected_output_tokens, stable_unit
from ppd_bench.policy.table import DecisionTable

Decider = Callable[[RouteQuery, RouterView, int], tuple[Route, str]]

DEFAULT_THRESHOLD_TOKENS = 512
"""Uncached tokens above which ``threshold`` sends a turn through P."""


def _node(spec: PolicySpec, fleet: Fleet, seed: int) -> Decider:
    """x by node, as in the paper's sweep: pD is always local, D never."""

    def decide(query: RouteQuery, view: RouterView, decode_worker: int) -> tuple[Route, str]:
        return (Route.LOCAL, "node-pD") if decode_worker in fleet.local_decoders else (Route.PD, "node-D")

    return decide


def _always_pd(spec: PolicySpec, fleet: Fleet, seed: int) -> Decider:
    return lambda query, view, decode_worker: (Route.PD, "always-pd")


def _always_local(spec: PolicySpec, fleet: Fleet, seed: int) -> Decider:
    return lambda query, view, decode_worker: (Route.LOCAL, "always-local")


def _fraction(spec: PolicySpec, fleet: Fleet, seed: int) -> Decider:
    """x by request: local with probability x, hashed on the request id."""
    x = float(_param(spec, "x", None))
    if not 0.0 <= x <= 1.0:
        raise SpecError(f"policy.x is {x}; allowed: 0 to 1")

    def decide(query: RouteQuery, view: RouterView, decode_worker: int) -> tuple[Route, str]:
        local = stable_unit(seed, "x", query.request_id) < x
        return (Route.LOCAL, "fraction-local") if local else (Route.PD, "fraction-pd")

    return decide


def _threshold(spec: PolicySpec, fleet: Fleet, seed: int) -> Decider:
    """Local while few tokens are uncached on the decode worker, through P above ``max_uncached_tokens``."""
    limit = float(_param(spec, "max_uncached_tokens", DEFAULT_THRESHOLD_TOKENS))

    def decide(query: RouteQuery, view: RouterView, decode_worker: int) -> tuple[Route, str]:
        known = view.session.known_tokens[decode_worker] if view.session else 0
        few = query.prompt_tokens - known <= limit
        return (Route.LOCAL, "threshold-local") if few else (Route.PD, "threshold-pd")

    return decide


def _table(spec: PolicySpec, fleet: Fleet, seed: int) -> Decider:
    """The compiled decision table; the reason names table, cell, evidence and rule (B29)."""
    if spec.table_json is None:
        raise SpecError("policy.decider is 'table' but no table was given; build one with 'ppd-bench build-table'")
    table = DecisionTable.from_json(spec.table_json)

    def decide(query: RouteQuery, view: RouterView, decode_worker: int) -> tuple[Route, str]:
        asked = {"context_tokens": query.context_tokens, "input_tokens": query.input_tokens}
        output_tokens = round(expected_output_tokens(query, view))
        cell = table.lookup(**asked, output_tokens=output_tokens, qps=view.session_rps)
        near = table.covers(**asked, output_tokens=output_tokens, qps=view.session_rps)
        reason = table.reason(cell) if near else f"{table.reason(cell)} off-grid"
        return (Route.LOCAL if cell.decision == "local" else Route.PD), reason

    return decide


def _param(spec: PolicySpec, name: str, default: float | None) -> float | int | str | bool:
    value = dict(spec.params).get(name, default)
    if value is None:
        raise SpecError(f"policy.decider {spec.decider!r} needs the parameter {name!r}")
    return value


DECIDERS: dict[str, Callable[[PolicySpec, Fleet, int], Decider]] = {
    "node": _node,
    "always_pd": _always_pd,
    "always_local": _always_local,
    "fraction": _fraction,
    "threshold": _threshold,
    "table": _table,
}
