"""``ppd-bench serve``: engines of one topology, up until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import yaml

from ppd_bench.core.errors import SpecError
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.launch_plan import ports_per_engine
from ppd_bench.engine.ports import free_ports
from ppd_bench.engine.supervisor import Supervisor
from ppd_bench.runner.live import LiveOptions, LiveTarget, inspect_target, model_path_of, plan_for, progress_text
from ppd_bench.runner.sweep import load_spec
from ppd_bench.store.atomic import make_folder, write_bytes
from ppd_bench.sweep.spec import SweepSpec

ENDPOINTS = "endpoints.yaml"


def serve(topology: str, source: str, options: LiveOptions, out: Path, *, tell: Callable[[str], None]) -> None:
    """Launch, warm, write ``out/endpoints.yaml`` and wait; a dead engine is started again.

    Raises:
        SpecError: a topology or sweep that cannot be used.
        EngineError: engines that cannot be started, or that die again and again.
    """
    if options.endpoints is not None:
        raise SpecError("command line: serve launches engines; those of --endpoints run already")
    spec, _ = load_spec(source, {"topologies": [topology]})
    target = inspect_target(options, spec)
    make_folder(out)
    asyncio.run(_serve(target, spec, out, tell))


async def _serve(target: LiveTarget, spec: SweepSpec, out: Path, tell: Callable[[str], None]) -> None:
    topology = parse_topology(spec.topologies[0])
    path = model_path_of(target, spec, out)
    plan = plan_for(target, spec, topology, path, free_ports(topology.n_workers, ports_per_engine(topology)))
    make_folder(out / "logs")
    async with Supervisor(plan, log_folder=out / "logs", on_progress=lambda p: tell(progress_text(p))) as supervisor:
        engines = [{"role": c.role.value, "url": c.endpoint.url} for c in plan.commands]
        content = {"tensor_parallel_size": topology.tensor_parallel_size, "engines": engines}
        write_bytes(out / ENDPOINTS, yaml.safe_dump(content, sort_keys=False).encode())
        tell(f"{plan.layout} is up; endpoints: {out / ENDPOINTS}; Ctrl-C ends it")
        while True:
            worker_id = await supervisor.wait_for_death()
            await supervisor.restart(worker_id)
