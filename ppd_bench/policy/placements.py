"""Placements: which of several equal workers takes a leg. Adding one costs one function and one line in ``PLACEMENTS``.

A placement is ``(Ask) -> worker index``: total, deterministic, stateless. Ties are broken by a stable hash of
(seed, request_id), so that no worker is favoured by its position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ppd_bench.policy.query import Fleet, RouteQuery, RouterView, stable_unit

DEFAULT_ALPHA = 1.0
"""Weight of the hit ratio in ``cache_aware`` (agentic study, Section 2: ongoing_tokens/avg_load - alpha * hit_ratio)."""
DEFAULT_AFFINITY_MAX_LOAD = 2.0
"""``cache_aware`` keeps a conversation on its worker while that worker's load is at most this multiple of the mean."""


class Ask(NamedTuple):
    """What a placement sees. ``n_placed`` counts the legs that it placed before, per worker."""

    query: RouteQuery
    view: RouterView
    candidates: tuple[int, ...]
    n_placed: tuple[int, ...]
    fleet: Fleet
    seed: int
    params: Mapping[str, float | int | str | bool]


Placement = Callable[[Ask], int]


def round_robin(ask: Ask) -> int:
    """The next in turn, by the number of legs placed so far."""
    return ask.candidates[sum(ask.n_placed[c] for c in ask.candidates) % len(ask.candidates)]


def least_inflight(ask: Ask) -> int:
    """The fewest requests in flight."""
    return _least(ask, [float(ask.view.n_inflight[c]) for c in ask.candidates])


def least_tokens(ask: Ask) -> int:
    """The fewest tokens in flight (prompt plus expected output)."""
    return _least(ask, [float(ask.view.inflight_tokens[c]) for c in ask.candidates])


def least_kv_usage(ask: Ask) -> int:
    """The lowest KV usage by the last snapshot (unknown counts as empty), then the fewest requests in flight."""
    usage = [ask.view.kv_usage_ratio[c] or 0.0 for c in ask.candidates]
    busiest = 1.0 + max(ask.view.n_inflight[c] for c in ask.candidates)
    return _least(
        ask, [u + 1e-6 * ask.view.n_inflight[c] / busiest for u, c in zip(usage, ask.candidates, strict=True)]
    )


def session_affinity(ask: Ask) -> int:
    """Rendezvous hashing of the session id over worker ids: stable when other workers come and go (B21)."""
    session_id = ask.query.session_id
    return max(ask.candidates, key=lambda c: stable_unit(ask.seed, session_id, ask.fleet.worker_ids[c]))


def cache_aware(ask: Ask) -> int:
    """The second seed's score, lowest wins: ongoing tokens / mean load - alpha * hit ratio, with session affinity."""
    tokens = [ask.view.inflight_tokens[c] for c in ask.candidates]
    mean = sum(tokens) / len(tokens)
    loads = [t / mean if mean else 0.0 for t in tokens]
    session = ask.view.session
    if session is not None and session.decode_worker in ask.candidates:
        limit = float(ask.params.get("affinity_max_load", DEFAULT_AFFINITY_MAX_LOAD))
        if loads[ask.candidates.index(session.decode_worker)] <= limit:
            return session.decode_worker
    alpha = float(ask.params.get("alpha", DEFAULT_ALPHA))
    hits = [hit_ratio(ask.query, ask.view, c) for c in ask.candidates]
    return _least(ask, [load - alpha * hit for load, hit in zip(loads, hits, strict=True)])


def hit_ratio(query: RouteQuery, view: RouterView, worker: int) -> float:
    """Share of the prompt that the worker is believed to hold, 0 to 1: by content ids where there are any, else by
    conversation."""
    if query.prompt_tokens <= 0:
        return 0.0
    if view.prefix_blocks:
        known = view.prefix_blocks[worker] * query.block_tokens
    elif view.session is not None:
        known = view.session.known_tokens[worker]
    else:
        return 0.0
    return min(1.0, known / query.prompt_tokens)


def _least(ask: Ask, scores: list[float]) -> int:
    best = min(scores)
    tied = [c for c, score in zip(ask.candidates, scores, strict=True) if score == best]
    if len(tied) == 1:
        return tied[0]
    return tied[int(stable_unit(ask.seed, ask.query.request_id) * len(tied))]


PLACEMENTS: dict[str, Placement] = {
    "round_robin": round_robin,
    "least_inflight": least_inflight,
    "least_tokens": least_tokens,
    "least_kv_usage": least_kv_usage,
    "session_affinity": session_affinity,
    "cache_aware": cache_aware,
}

NEED_SNAPSHOTS = frozenset({"least_kv_usage"})
"""Placements that read worker snapshots; executors scrape only for these."""
