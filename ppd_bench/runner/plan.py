"""``ppd-bench plan``: what a sweep would cost."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from ppd_bench.core.errors import LaunchError
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.launch_plan import plan_text, ports_per_engine
from ppd_bench.engine.ports import free_ports
from ppd_bench.runner.executors import choose_executor
from ppd_bench.runner.live import TINY, LiveOptions, inspect_target, plan_for
from ppd_bench.runner.sweep import Prepared, SweepRequest, load_spec, prepare
from ppd_bench.sim.kernel import compiled
from ppd_bench.sweep.estimate import Estimate, estimate
from ppd_bench.sweep.spec import SweepSpec

TURNS_PER_CPU_S = {True: 8000.0, False: 3000.0}
"""Simulated turns per second and core, compiled and interpreted: rough figures of one small machine, for planning only.
tests/benchmarks/bench_sim.py measures yours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The estimate, and the configurations that each layout serves."""

    estimate: Estimate
    served: dict[str, list[str]]


def prepare_plan(request: SweepRequest) -> tuple[Prepared, str]:
    """A sweep made ready for counting, and which executor 'sweep' would take here (a plan needs none)."""
    asked = load_spec(request.source, request.overrides)[0].executor
    try:
        choice = choose_executor(asked, engines_given=request.live.given)
        here = f"{choice.executor.value} ({choice.reason})"
    except LaunchError as error:
        here = f"none: {error}"
    return prepare(dataclasses.replace(request, overrides={**request.overrides, "executor": "sim"})), here


def plan(prepared: Prepared) -> Plan:
    """Estimate a prepared sweep."""
    served: dict[str, list[str]] = {}
    for name in dict.fromkeys(point.topology for point in prepared.points):
        served.setdefault(parse_topology(name).layout.name, []).append(name)
    n_processes = prepared.request.n_processes or os.cpu_count() or 1
    cost = estimate(prepared.points, simulated_turns_per_cpu_s=TURNS_PER_CPU_S[compiled()], n_processes=n_processes)
    return Plan(estimate=cost, served=served)


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
