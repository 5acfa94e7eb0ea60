"""``ppd-bench doctor``: what a live sweep needs, checked before it starts."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from ppd_bench.core.errors import LaunchError
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.control import control_client
from ppd_bench.engine.doctor import Finding, Wish, endpoint_facts, endpoint_findings, host_facts, host_findings
from ppd_bench.engine.endpoints import EndpointSet
from ppd_bench.engine.orphans import clean_orphans, default_state_folder
from ppd_bench.runner.live import LiveOptions, read_endpoints

GPU_MEMORY_SHARE_RATIO = 0.85
"""What engines claim of each GPU in sweeps/paper.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found, and which orphans were ended."""

    findings: tuple[Finding, ...]
    ended: tuple[str, ...]

    def raise_for_errors(self) -> None:
        """
        Raises:
            LaunchError: something would stop a launch.
        """
        errors = [finding for finding in self.findings if finding.level == "error"]
        if errors:
            raise LaunchError(f"{len(errors)} of {len(self.findings)} checks would stop a live sweep; see above")


def examine(topology: str, options: LiveOptions, *, clean: bool) -> Examination:
    """Check this machine for launching ``topology``, or the engines of an endpoints file.

    Raises:
        SpecError: a topology or endpoints file that cannot be used.
    """
    wanted = parse_topology(topology)
    state_folder = default_state_folder()
    ended = tuple(f"{o.engine.worker_id} (port {o.engine.port})" for o in clean_orphans(state_folder)) if clean else ()
    if options.endpoints is not None:
        endpoints = read_endpoints(options.endpoints)
        return Examination(findings=asyncio.run(_endpoint_findings(endpoints)), ended=ended)
    wish = Wish(topology=wanted, device=options.device, gpu_memory_utilization_ratio=GPU_MEMORY_SHARE_RATIO)
    facts = host_facts(
        python=options.engine_python or Path(sys.executable),
        model_path=options.model_path or "",
        ports=(),
        state_folder=state_folder,
    )
    findings = host_findings(facts, wish)
    if options.model_path is None:
        findings = tuple(f for f in findings if not f.what.startswith("model "))
    return Examination(findings=findings, ended=ended)


async def _endpoint_findings(endpoints: EndpointSet) -> tuple[Finding, ...]:
    async with control_client() as client:
        facts = await asyncio.gather(*(endpoint_facts(client, endpoint) for endpoint in endpoints.endpoints))
    return tuple(endpoint_findings(facts))
