"""``ppd-bench plan``: what a sweep would cost."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ppd_bench.core.errors import LaunchError
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.launch_plan import plan_text, ports_per_engine
from ppd_bench.engine.ports import free_ports
from ppd_bench.runner.executors import choose_executor
from ppd_bench.runner.goals import Goal, topologies_for
from ppd_bench.runner.live import TINY, LiveOptions, inspect_target, plan_for
from ppd_bench.runner.sweep import Prepared, SweepRequest, default_source, load_spec, prepare
from ppd_bench.sim.kernel import compiled
from ppd_bench.sweep.estimate import Estimate, estimate
from ppd_bench.sweep.spec import SweepSpec

TURNS_PER_CPU_S = {True: 8000.0, False: 3000.0}
"""Simulated turns per second and core, compiled and interpreted: rough figures of one small machine, for planning only.
tests/benchmarks/bench_sim.py measures yours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The estimate, the configurations that each layout serves, and what a part of the sweep would cost, in words."""

    estimate: Estimate
    served: dict[str, list[str]]
    goals: tuple[str, ...] = ()


def prepare_plan(request: SweepRequest) -> tuple[Prepared, str]:
    """A sweep made ready for counting, and which executor 'sweep' would take here (a plan needs none)."""
    asked = request.overrides.get("executor") or "auto"
    source = request.source
    try:
        source = source or default_source(asked, request.live)
        choice = choose_executor(load_spec(source, request.overrides)[0].executor, engines_given=request.live.given)
        here = f"{choice.executor.value} ({choice.reason})"
    except LaunchError as error:
        here = f"none: {error}"
    overrides = {**request.overrides, "executor": "sim"}
    return prepare(dataclasses.replace(request, source=source, overrides=overrides)), here


def plan(prepared: Prepared) -> Plan:
    """Estimate a prepared sweep."""
    served: dict[str, list[str]] = {}
    for name in dict.fromkeys(point.topology for point in prepared.points):
        served.setdefault(parse_topology(name).layout.name, []).append(name)
    n_processes = prepared.request.n_processes or os.cpu_count() or 1
    cost = estimate(prepared.points, simulated_turns_per_cpu_s=TURNS_PER_CPU_S[compiled()], n_processes=n_processes)
    return Plan(estimate=cost, served=served, goals=tuple(_goal_lines(prepared, cost.gpu_seconds)))


def _goal_lines(prepared: Prepared, all_gpu_s: float) -> Iterator[str]:
    """What a table alone and a split alone would cost of it."""
    if prepared.spec.policy.decider != "node":
        return
    wishes: tuple[tuple[Goal, str], ...] = (("table", "a decision table"), ("split", "a choice of split"))
    for goal, what in wishes:
        kept = set(topologies_for(prepared.spec.topologies, goal))
        points = [point for point in prepared.points if point.topology in kept]
        if points:
            gpu_s = estimate(points, simulated_turns_per_cpu_s=1.0).gpu_seconds
            yield (
                f"--for-{goal}: {what} needs {len(kept)} configurations, {len(points):,} points and {gpu_s:,.0f} "
                f"GPU-seconds ({gpu_s / all_gpu_s:.0%} of the above)"
            )


def launch_texts(spec: SweepSpec, options: LiveOptions) -> list[str]:
    """The engines' commands for every layout of a sweep, ready for a shell. Ports are those that are free now.

    Raises:
        LaunchError: no usable vLLM, or a layout that it cannot run.
    """
    target = inspect_target(options, spec)
    model_path = options.model_path or TINY
    layouts = dict.fromkeys(parse_topology(name).layout for name in spec.topologies)
    return [
        plan_text(plan_for(target, spec, layout, model_path, free_ports(layout.n_workers, ports_per_engine(layout))))
        for layout in layouts
    ]
