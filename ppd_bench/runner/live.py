"""Where a live sweep's engines come from: what the command line says, what is there, and what would be launched."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from ppd_bench.core.errors import LaunchError, NotReady, SpecError
from ppd_bench.core.topology import Topology, parse_topology
from ppd_bench.engine.control import control_client
from ppd_bench.engine.doctor import Wish, host_facts, host_findings
from ppd_bench.engine.endpoints import Endpoint, EndpointSet, load_endpoints
from ppd_bench.engine.launch_plan import Device, LaunchPlan, launch_plan
from ppd_bench.engine.orphans import Orphan, clean_orphans, default_state_folder, find_orphans
from ppd_bench.engine.supervisor import Progress
from ppd_bench.engine.tiny_model import FLAGS as TINY_FLAGS
from ppd_bench.engine.tiny_model import write_tiny_model
from ppd_bench.engine.vllm_install import VllmInstall, inspect_install
from ppd_bench.sweep.spec import SweepSpec

DETAIL_WIDTH = 110
"""Log lines are cut to this for the terminal."""

TINY = "tiny-llama"
"""The model that is generated and needs no download."""


AUTO = "auto"
"""For ``--clients``: as many as a point needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """Where engines come from. ``endpoints``: a file of engines that run already; then nothing is launched.

    ``engine_python`` null means this interpreter; ``model_path`` null means the sweep's model must be the tiny one. ``via``
    sends everything through one router at that URL. ``clients``: processes that send; 0 means as many as a point needs.
    """

    device: Device = "cuda"
    engine_python: Path | None = None
    model_path: str | None = None
    endpoints: Path | None = None
    via: str | None = None
    clients: int = 1

    @property
    def given(self) -> bool:
        """Whether the command line asked for engines at all."""
        return self.device == "cpu" or self.endpoints is not None


def live_options(
    device: str,
    engine_python: Path | None,
    model_path: str | None,
    endpoints: Path | None,
    via: str | None,
    clients: str = "1",
) -> LiveOptions:
    """Options as the command line gives them.

    Raises:
        SpecError: an unknown device, or a number of clients that is none.
    """
    devices: dict[str, Device] = {"cuda": "cuda", "cpu": "cpu"}
    if device not in devices:
        raise SpecError(f"command line: --device {device!r} is not known; allowed: {', '.join(devices)}")
    if clients != AUTO and not (clients.isdecimal() and int(clients)):
        raise SpecError(f"command line: --clients {clients!r} is no number of processes; allowed: 1 or more, {AUTO}")
    return LiveOptions(
        device=devices[device],
        engine_python=engine_python,
        model_path=model_path,
        endpoints=endpoints,
        via=via,
        clients=0 if clients == AUTO else int(clients),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTarget:
    """Engines as far as they are known before anything starts. One of ``install`` and ``endpoints`` is null."""

    options: LiveOptions
    install: VllmInstall | None
    endpoints: EndpointSet | None
    engine_version: str


def inspect_target(options: LiveOptions, spec: SweepSpec) -> LiveTarget:
    """Find out what engines there are to be, before anything starts.

    Raises:
        LaunchError: no usable vLLM, no model, or engines of ``endpoints`` that do not answer.
        SpecError: an endpoints file that cannot be used, or a sweep whose topologies it does not serve.
    """
    if options.endpoints is not None:
        endpoints = read_endpoints(options.endpoints)
        for name in spec.topologies:
            endpoints.serving(parse_topology(name))
        return LiveTarget(
            options=options,
            install=None,
            endpoints=endpoints,
            engine_version=asyncio.run(_version(endpoints.endpoints)),
        )
    install = inspect_install(options.engine_python or Path(sys.executable))
    if options.model_path is None and spec.model != TINY:
        raise LaunchError(
            f"engines need the weights of {spec.model}: give --model-path FOLDER (or a Hugging Face name), or take model "
            f"{TINY}, which is generated"
        )
    _check_host(options, spec, install)
    version = f"{install.package} {install.version}"
    return LiveTarget(options=options, install=install, endpoints=None, engine_version=version)


def _check_host(options: LiveOptions, spec: SweepSpec, install: VllmInstall) -> None:
    """What ``doctor`` would call an error stops a sweep before it starts: busy GPUs, too little memory, a missing model."""
    largest = max((parse_topology(name) for name in spec.topologies), key=lambda t: t.n_gpus)
    share = spec.engine.gpu_memory_utilization_ratio
    wish = Wish(topology=largest, device=options.device, gpu_memory_utilization_ratio=share)
    facts = host_facts(
        python=Path(install.python),
        model_path=options.model_path or "",
        ports=(),
        state_folder=default_state_folder(),
        install=install,
    )
    errors = [f for f in host_findings(facts, wish) if f.level == "error"]
    if options.model_path is None:  # the tiny model is written when it is needed
        errors = [f for f in errors if not f.what.startswith("model ")]
    if errors:
        lines = [f"{finding.what}; {finding.advice}" for finding in errors]
        if facts.orphans:
            lines.append(f"{len(facts.orphans)} engines of a killed ppd-bench still run here: --clean ends them")
        raise LaunchError("\n".join([*lines, "'ppd-bench doctor' shows every check"]))


def clear_orphans(
    end_them: Callable[[tuple[Orphan, ...]], bool], state_folder: Path | None = None
) -> tuple[Orphan, ...]:
    """Engines that a killed ppd-bench left behind on this machine: ``end_them`` gets those there are, if any, and says whether
    to end them. Returns the ended ones. Only processes of our own records are ended, by pid and start time."""
    folder = state_folder or default_state_folder()
    orphans = find_orphans(folder)
    return clean_orphans(folder) if orphans and end_them(orphans) else ()


def read_endpoints(path: Path) -> EndpointSet:
    """The engines of an endpoints file.

    Raises:
        SpecError: it cannot be read or used.
    """
    try:
        return load_endpoints(path.read_text(encoding="utf-8"), file=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read ({error}); allowed: a YAML file of running engines") from error


async def _version(endpoints: Sequence[Endpoint]) -> str:
    """The version that running engines report; all must report the same."""
    async with control_client() as client:
        versions = {await _version_of(client, endpoint) for endpoint in endpoints}
    if len(versions) > 1:
        raise LaunchError(f"the engines run different vLLM versions: {', '.join(sorted(versions))}; use one")
    return f"vllm {versions.pop()}"


async def _version_of(client: httpx.AsyncClient, endpoint: Endpoint) -> str:
    try:
        answer = await client.get(f"{endpoint.url}/version")
        answer.raise_for_status()
        return str(answer.json()["version"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise NotReady(f"{endpoint.worker_id} ({endpoint.url}): does not tell its version; is a vLLM there?") from error


def plan_for(
    target: LiveTarget, spec: SweepSpec, topology: Topology, model_path: str, ports: Sequence[int]
) -> LaunchPlan:
    """The commands of a topology's layout on this target, which must not be of endpoints."""
    if target.install is None:
        raise SpecError("engines of --endpoints run already: there is nothing to launch")
    return launch_plan(
        topology,
        model_path=model_path,
        engine=spec.engine,
        install=target.install,
        device=target.options.device,
        ports=ports,
        seed=spec.seed,
        extra_flags=TINY_FLAGS if model_path.endswith(TINY) else {},
        visible_gpus=tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))),
    )


def model_path_of(target: LiveTarget, spec: SweepSpec, folder: Path) -> str:
    """Where engines find the model; the tiny one is written below ``folder``."""
    if target.options.model_path is not None:
        return target.options.model_path
    path = folder / TINY
    write_tiny_model(path)
    return str(path.resolve())


def progress_text(progress: Progress) -> str:
    """One line for people."""
    told = textwrap.shorten(progress.detail, DETAIL_WIDTH, placeholder=" ...")
    detail = f": {told}" if told else ""
    after = f" after {progress.after_s:.0f} s" if progress.after_s >= 1.0 else ""
    return f"{progress.worker_id} {progress.stage.value}{after}{detail}"
