"""What of a trace's prefix reuse N separate caches realise, when the project's own placements spread the requests over them.

Every request is decided by ``policy.make_policy`` on a topology of N replicas from a ``policy.Ledger``, as a router would, in
order of arrival; then each instance's share of the trace is taken as a trace of its own. A request is in flight for an assumed
time (``Service``): nothing queues here, so the loads that ``cache_aware`` and ``least_*`` see are rough. The simulator is the
place for times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ppd_bench.analysis.reuse import hit_blocks, hit_tokens
from ppd_bench.analysis.reuse_distance import default_rate, reuse_distances
from ppd_bench.analysis.trace_blocks import Ints, TraceBlocks
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import PlacementSpec, PolicySpec
from ppd_bench.core.topology import Topology
from ppd_bench.policy.events import Finished, Sent
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.placements import NEED_SNAPSHOTS, PLACEMENTS
from ppd_bench.policy.policy import make_policy
from ppd_bench.policy.query import RouteQuery

POLICIES = ("round_robin", "session_affinity", "cache_aware")
Sees = Literal["ids", "conversations"]
"""What the router knows of caches: which ids it sent where, or only where each conversation was."""
READ_CACHES = frozenset({"cache_aware"})
"""Placements to which that makes a difference."""
SEES: tuple[Sees, ...] = ("ids", "conversations")
MAX_SEEN_BLOCK_USES = 8_000_000
"""Block uses up to which the router sees ids unless told otherwise: its index takes about 150 bytes a distinct block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """How long a request is taken to be in flight: prompt and output tokens at these rates. Assumed, not measured."""

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 30.0

    def seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        return prompt_tokens / self.prefill_tokens_per_s + output_tokens / self.decode_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReuse:
    """Hit tokens / prompt tokens over N instances, each with a cache of ``capacity_tokens`` (null: without bound).

    ``sees`` is null for placements that look at no cache. ``share_of_possible_ratio``: of the hit ratio of one cache without
    bound. ``busiest_ratio``: prompt tokens of the busiest instance / their mean over instances. ``rate`` below 1: sampled
    (``reuse_distance``).
    """

    policy: str
    sees: Sees | None
    n_instances: int
    capacity_tokens: float | None
    hit_ratio: float
    share_of_possible_ratio: float | None
    busiest_ratio: float
    rate: float


def instance_reuse(
    trace: TraceBlocks,
    policy: str,
    n_instances: int,
    *,
    possible_ratio: float,
    capacities_tokens: tuple[float, ...] = (),
    service: Service | None = None,
    sees: Sees | None = None,
    seed: int = 0,
    rate: float | None = None,
) -> list[InstanceReuse]:
    """One result for caches without bound, then one per capacity. ``possible_ratio``: the hit ratio of one cache without bound.

    Raises:
        SpecError: an unknown policy, one that needs gauges which a trace has not, or no instance.
    """
    seen: Sees | None = (sees or default_sees(trace)) if policy in READ_CACHES else None
    instance = assign(trace, policy, n_instances, service=service or Service(), sees=seen, seed=seed)
    total = int(trace.prompt_tokens.sum())
    rate = rate or default_rate(trace)
    saved, loads = np.zeros(1 + len(capacities_tokens)), np.zeros(n_instances)
    for k in range(n_instances):
        part = trace.select(np.flatnonzero(instance == k))
        loads[k] = part.prompt_tokens.sum()
        if not part.blocks.size:
            continue
        saved[0] += hit_tokens(part, hit_blocks(part)).sum()
        if capacities_tokens:
            distances = reuse_distances(part, rate=rate)
            saved[1:] += distances.hit_ratios(np.array(capacities_tokens, dtype=np.float64)) * loads[k]
    return [
        InstanceReuse(
            policy=policy, sees=seen, n_instances=n_instances, capacity_tokens=capacity, hit_ratio=float(tokens / max(1, total)),
            share_of_possible_ratio=float(tokens / total / possible_ratio) if total and possible_ratio else None,
            busiest_ratio=float(loads.max() / max(1.0, loads.mean())), rate=1.0 if capacity is None else rate,
        )
        for capacity, tokens in zip((None, *capacities_tokens), saved, strict=True)
    ]  # fmt: skip


def default_sees(trace: TraceBlocks) -> Sees:
    """Ids, but for traces whose ids would not fit in memory."""
    return "ids" if trace.blocks.size <= MAX_SEEN_BLOCK_USES else "conversations"


def assign(
    trace: TraceBlocks, policy: str, n_instances: int, *, service: Service, sees: Sees | None = None, seed: int = 0
) -> Ints:
    """The instance of every request, by a placement over N replicas. Without arrival times requests come one after another.

    Raises:
        SpecError: an unknown policy, one that needs gauges which a trace has not, or no instance.
    """
    allowed = [name for name in PLACEMENTS if name not in NEED_SNAPSHOTS]
    if policy not in allowed:
        raise SpecError(f"policy {policy!r} cannot be used on a trace; allowed: {', '.join(allowed)}")
    topology = Topology(n_replica=n_instances)
    spec = PlacementSpec(replica=policy, sticky=False)
    decide, ledger = make_policy(topology, PolicySpec(), spec, seed).decide, Ledger(topology)
    instance = np.empty(trace.n_requests, dtype=np.int64)
    ends: list[tuple[float, int, int]] = []
    timed = trace.has_arrivals
    for k, (now_s, query, output_tokens) in enumerate(_queries(trace, sees)):
        while ends and ends[0][0] <= now_s:
            end_s, done, generated = heapq.heappop(ends)
            ledger.observe(Finished(end_s, str(done), True, generated))
        decision = decide(query, ledger.view(now_s, query.session_id, query.block_ids))
        instance[k] = decision.decode_worker
        ledger.observe(
            Sent(now_s, query.request_id, query.session_id, query.turn, query.prompt_tokens,
                 query.max_output_tokens, decision, query.block_ids)
        )  # fmt: skip
        seconds = service.seconds(query.prompt_tokens, output_tokens) if timed else 0.0
        heapq.heappush(ends, (now_s + seconds, k, output_tokens))
    return instance


def _queries(trace: TraceBlocks, sees: Sees | None) -> Iterator[tuple[float, RouteQuery, int]]:
    """Arrival in seconds (the request's place where none is known), what a router is asked, and the output that comes of it.

    The history is what the session's request before had in prompt and answer. The declared maximum is the true length: a trace
    has no other, and no placement reads it but as load.
    """
    earlier: dict[int, tuple[int, int]] = {}
    columns = (trace.arrival_s.tolist() if trace.has_arrivals else range(trace.n_requests), trace.session.tolist(),
               trace.prompt_tokens.tolist(), trace.output_tokens.tolist())  # fmt: skip
    for k, (now_s, session, prompt, output) in enumerate(zip(*columns, strict=True)):
        turn, history = earlier.get(session, (0, 0))
        context = min(history, prompt)
        ids = trace.blocks[trace.offsets[k] : trace.offsets[k + 1]].tolist() if sees == "ids" else ()
        query = RouteQuery(str(k), str(session), turn + 1, context, prompt - context, output, ids, trace.block_tokens)
        yield (float(now_s), query, output)
        if session >= 0:
            earlier[session] = (turn + 1, prompt + output)
