"""From a sweep to its points, in the order in which they run."""

from __future__ import annotations

import dataclasses

from ppd_bench.core.enums import Executor
from ppd_bench.core.point import Point
from ppd_bench.core.topology import parse_topology
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.sweep.spec import SweepSpec


def expand(spec: SweepSpec, *, executor: Executor, engine_version: str, profile_hash: str) -> tuple[Point, ...]:
    """All points, those of one layout together so that each layout is launched once.

    Order: layout (by first appearance), topology, repeat, workload, QPS. Repeats are outside of workloads, so that a machine
    that drifts does not drift with one cell. Recorded arrivals have one load, their own. ``profile_hash`` identifies the
    simulator's cost model; live points have none.
    """
    sim = dataclasses.replace(spec.sim, profile_hash=profile_hash) if executor is Executor.SIM else None
    return tuple(
        Point(
            topology=topology,
            model=spec.model,
            gpu=spec.gpu,
            workload=workload,
            qps=qps,
            duration_s=duration_s,
            timeout_s=spec.timeout_s,
            think_time_s=spec.think_time_s,
            seed=spec.seed,
            repeat=repeat,
            executor=executor,
            policy=spec.policy,
            placement=spec.placement,
            engine=spec.engine,
            engine_version=engine_version,
            sim=sim,
        )
        for topology in by_layout(spec.topologies)
        for repeat in range(spec.n_repeats)
        for workload in spec.workloads
        for qps, duration_s in loads(spec, workload)
    )


def loads(spec: SweepSpec, workload: WorkloadSpec) -> tuple[tuple[float, float], ...]:
    """QPS and arrival windows of a workload's points: the sweep's, and for recorded arrivals the one that was recorded."""
    traffic = workload.traffic
    if traffic is not None and traffic.arrivals == "recorded":
        return ((traffic.sessions_per_s, traffic.window_s),)
    return tuple((qps, spec.duration_s) for qps in spec.qps)


def by_layout(topologies: tuple[str, ...]) -> tuple[str, ...]:
    """The same names with those of one layout together, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for name in topologies:
        groups.setdefault(parse_topology(name).layout.name, []).append(name)
    return tuple(name for group in groups.values() for name in group)
