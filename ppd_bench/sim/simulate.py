"""Run one Point on the simulator: ``simulate(point, sessions, model) -> Columns``. Same inputs, same bytes (I5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point, SimSettings
from ppd_bench.core.profiles import HardwareProfile, ModelProfile
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import Topology, parse_topology
from ppd_bench.core.workload import Session
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import make_policy
from ppd_bench.sim.chains import chains_of
from ppd_bench.sim.cluster import Cluster
from ppd_bench.sim.kv import KvPool
from ppd_bench.sim.link import Link, SerialLink, SharedLink
from ppd_bench.sim.profile import find_hardware, kv_capacity_blocks, link_bytes_per_s, link_latency_s, make_cost
from ppd_bench.sim.recording import to_columns
from ppd_bench.sim.trip import ClusterSettings
from ppd_bench.sim.worker import Worker

GaugeColumns = dict[str, list[Any]]
"""Readings of engines by column, one row per engine and reading."""

STRETCH_CAP = 96
"""Decode steps computed ahead at most. Only speed depends on it; larger wastes more when an arrival cuts the stretch."""

HANDOFFS = ("push_blocking", "pull_async")
"""Names of the hand-off models; see ``sim.link`` and ``sim.worker``."""


DISPATCHES = ("await", "fire_and_forget")
"""When D is told of a turn that P prefills; see ``core.point.EngineSettings``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """How to run, without effect on results: ``stretch_cap`` 1 is the plain stepper; ``log`` keeps the router's log;
    ``gauge_interval_s`` above 0 keeps every engine's gauges so often (``Cluster.gauges``)."""

    stretch_cap: int = STRETCH_CAP
    keep_gaps: bool = False
    keep_log: bool = False
    gauge_interval_s: float = 0.0


def simulate(
    point: Point, sessions: Sequence[Session], model: ModelProfile, options: SimOptions | None = None
) -> Columns:
    """Simulate a point to its end and return its records by column, in order of (session, turn).

    Raises:
        SpecError: the model does not fit the GPU, or a conversation is longer than ``max_model_len``.
    """
    options = options or SimOptions()
    cluster = run_cluster(point, sessions, model, options)
    return to_columns(point, cluster, keep_gaps=options.keep_gaps)


def simulate_with_gauges(
    point: Point, sessions: Sequence[Session], model: ModelProfile, options: SimOptions
) -> tuple[Columns, GaugeColumns]:
    """``simulate``, and what the engines looked like every ``options.gauge_interval_s``: worker_id, time_s and the gauges'
    names as ``engine_metrics`` has them, with ``busy_s``, the seconds of steps so far."""
    cluster = run_cluster(point, sessions, model, options)
    names = [worker.worker_id for worker in parse_topology(point.topology).workers]
    gauges: GaugeColumns = {
        "worker_id": [names[gauge.worker] for gauge in cluster.gauges],
        "time_s": [gauge.time_s for gauge in cluster.gauges],
        "kv_cache_usage_ratio": [gauge.kv_usage_ratio for gauge in cluster.gauges],
        "n_running": [gauge.n_running for gauge in cluster.gauges],
        "n_waiting": [gauge.n_waiting for gauge in cluster.gauges],
        "busy_s": [gauge.busy_s for gauge in cluster.gauges],
    }
    return to_columns(point, cluster, keep_gaps=options.keep_gaps), gauges


def run_cluster(point: Point, sessions: Sequence[Session], model: ModelProfile, options: SimOptions) -> Cluster:
    """The finished cluster of a point, for those who want more than records (engine state, router log)."""
    _check_lengths(point, sessions)
    topology = parse_topology(point.topology)
    hardware = find_hardware(point.gpu)
    sim = point.sim or SimSettings()
    traffic = point.workload.traffic
    cluster = Cluster(
        workers=_workers(point, topology, hardware, model, sim, options.stretch_cap),
        link=_link(point, topology, hardware),
        policy=make_policy(topology, point.policy, point.placement, point.decision_seed),
        ledger=Ledger(topology),
        settings=ClusterSettings(
            timeout_s=point.timeout_s,
            visit_overhead_s=sim.visit_overhead_s,
            router_overhead_s=sim.router_overhead_s,
            push=point.engine.handoff == "push_blocking",
            dispatch_both=_dispatches_both(point),
            max_inflight_sessions=(traffic.max_inflight_sessions or 0) if traffic is not None else 0,
            gauge_interval_s=options.gauge_interval_s,
            kv_bytes_per_token=model.kv_bytes_per_token,
            kv_lease_s=point.engine.kv_lease_s,
            snapshot_interval_s=sim.snapshot_interval_s,
            snapshot_delay_s=sim.snapshot_delay_s,
        ),
        log=[] if options.keep_log else None,
    )
    cluster.load(tuple(sessions), chains_of(sessions, point.engine.block_size))
    cluster.run()
    return cluster


def _dispatches_both(point: Point) -> bool:
    if point.engine.dispatch not in DISPATCHES:
        raise SpecError(f"engine.dispatch {point.engine.dispatch!r} is not known; allowed: {', '.join(DISPATCHES)}")
    both = point.engine.dispatch == "fire_and_forget"
    if both and point.engine.handoff != "pull_async":
        raise SpecError(
            "engine.dispatch fire_and_forget needs engine.handoff pull_async: a push fixes the moment at which D is told"
        )
    return both


def _check_lengths(point: Point, sessions: Sequence[Session]) -> None:
    limit = point.engine.max_model_len
    for session in sessions:
        longest = max(turn.prompt_tokens + turn.output_tokens for turn in session)
        if longest > limit:
            raise SpecError(
                f"workload {point.workload.name!r}: a conversation reaches {longest} tokens, more than "
                f"engine.max_model_len {limit}"
            )


def _workers(
    point: Point, topology: Topology, hardware: HardwareProfile, model: ModelProfile, sim: SimSettings, stretch_cap: int
) -> list[Worker]:
    engine = point.engine
    cost = make_cost(hardware, model, topology.tensor_parallel_size, sim.cost_model, sim.step_table_json)
    n_blocks = kv_capacity_blocks(hardware, model, engine, sim, topology.tensor_parallel_size)
    return [
        Worker(
            index=index,
            pool=KvPool(n_blocks, engine.prefix_caching),
            cost=cost,
            block_size=engine.block_size,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            step_overhead_s=sim.step_overhead_s,
            sequence_overhead_s=sim.sequence_overhead_s,
            receiver_cost_s=sim.receiver_cost_s,
            stretch_cap=stretch_cap,
        )
        for index in range(topology.n_workers)
    ]


def _link(point: Point, topology: Topology, hardware: HardwareProfile) -> Link:
    kinds: dict[str, Any] = {"push_blocking": SerialLink, "pull_async": SharedLink}
    if point.engine.handoff not in kinds:
        raise SpecError(f"engine.handoff {point.engine.handoff!r} is not known; allowed: {', '.join(kinds)}")
    rate = link_bytes_per_s(point, hardware) * topology.tensor_parallel_size  # every shard has its own link
    emulated = point.engine.emulated_link_bytes_per_s or 0.0
    link: Link = kinds[point.engine.handoff](topology.n_workers, rate, link_latency_s(point), emulated)
    return link


def with_profile_hash(settings: SimSettings, value: str) -> SimSettings:
    """The settings as they go into a Point."""
    return dataclasses.replace(settings, profile_hash=value)
