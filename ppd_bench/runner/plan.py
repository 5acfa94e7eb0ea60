"""``ppd-bench plan``: what a sweep would cost."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from ppd_bench.core.errors import LaunchError
from ppd_bench.core.topology import parse_topology
from ppd_bench.runner.executors import choose_executor
from ppd_bench.runner.sweep import Prepared, SweepRequest, load_spec, prepare
from ppd_bench.sim.kernel import compiled
from ppd_bench.sweep.estimate import Estimate, estimate

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
        choice = choose_executor(asked)
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
