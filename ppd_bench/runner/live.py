"""Points on real engines: one launch per layout, caches emptied between points, every path proven, every death survived."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import EngineError, LaunchError, NotReady, SpecError
from ppd_bench.core.point import EngineSettings, Point
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import Topology, parse_topology
from ppd_bench.engine.caches import PATIENCE_S, reset_caches
from ppd_bench.engine.control import control_client
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.doctor import Wish, host_facts, host_findings
from ppd_bench.engine.endpoints import Endpoint, EndpointSet, load_endpoints
from ppd_bench.engine.launch_plan import Device, LaunchPlan, launch_plan, ports_per_engine
from ppd_bench.engine.metrics import EngineCounters, EngineScrape, counters_between, scrape
from ppd_bench.engine.orphans import default_state_folder, find_orphans
from ppd_bench.engine.ports import free_ports
from ppd_bench.engine.supervisor import Progress, Supervisor
from ppd_bench.engine.tiny_model import FLAGS as TINY_FLAGS
from ppd_bench.engine.tiny_model import write_tiny_model
from ppd_bench.engine.vllm_install import VllmInstall, inspect_install
from ppd_bench.loadgen.lateness import ClientLateness
from ppd_bench.loadgen.player import LiveResult, PlaySettings, play_point
from ppd_bench.loadgen.prompts import token_range
from ppd_bench.runner.proof import contradictions
from ppd_bench.sweep.spec import SweepSpec
from ppd_bench.workload.generate import generate_sessions

LEASE_MARGIN_S = 10.0

DETAIL_WIDTH = 110
"""Log lines are cut to this for the terminal."""

SAMPLE_INTERVAL_S = 1.0
"""How often every engine's gauges are read through a point."""

TINY = "tiny-llama"
"""The model that is generated and needs no download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """Where engines come from. ``endpoints``: a file of engines that run already; then nothing is launched.

    ``engine_python`` null means this interpreter; ``model_path`` null means the sweep's model must be the tiny one. ``via``
    sends everything through one router at that URL.
    """

    device: Device = "cuda"
    engine_python: Path | None = None
    model_path: str | None = None
    endpoints: Path | None = None
    via: str | None = None

    @property
    def given(self) -> bool:
        """Whether the command line asked for engines at all."""
        return self.device == "cpu" or self.endpoints is not None


def live_options(
    device: str, engine_python: Path | None, model_path: str | None, endpoints: Path | None, via: str | None
) -> LiveOptions:
    """Options as the command line gives them.

    Raises:
        SpecError: an unknown device.
    """
    devices: dict[str, Device] = {"cuda": "cuda", "cpu": "cpu"}
    if device not in devices:
        raise SpecError(f"command line: --device {device!r} is not known; allowed: {', '.join(devices)}")
    return LiveOptions(
        device=devices[device], engine_python=engine_python, model_path=model_path, endpoints=endpoints, via=via
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTarget:
    """Engines as far as they are known before anything starts. One of ``install`` and ``endpoints`` is null."""

    options: LiveOptions
    install: VllmInstall | None
    endpoints: EndpointSet | None
    engine_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One point: its records, what is against it, and every engine's readings."""

    point: Point
    columns: Columns
    problems: tuple[str, ...]
    lateness: ClientLateness
    samples: tuple[dict[str, Any], ...]


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
        raise LaunchError("\n".join([*lines, "'ppd-bench doctor' shows every check"]))


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


def play_points(
    target: LiveTarget,
    spec: SweepSpec,
    points: Sequence[Point],
    folder: Path,
    *,
    tell: Callable[[str], None],
    take: Callable[[Played], None],
) -> None:
    """Play the points layout by layout; ``take`` gets each as it ends, before the next begins.

    All in one task, which Ctrl-C and SIGTERM cancel: engines are gone when this returns or raises.

    Raises:
        EngineError: engines that cannot be started, or that die again and again.
    """
    uvloop.run(_play_layouts(target, spec, points, folder, tell, take))


async def _play_layouts(
    target: LiveTarget,
    spec: SweepSpec,
    points: Sequence[Point],
    folder: Path,
    tell: Callable[[str], None],
    take: Callable[[Played], None],
) -> None:
    for _, group in itertools.groupby(points, key=lambda point: parse_topology(point.topology).layout.name):
        of_layout = list(group)
        async with _fleet(target, spec, parse_topology(of_layout[0].topology), folder, tell) as fleet:
            for point in of_layout:
                take(await fleet.play(point))


@contextlib.asynccontextmanager
async def _fleet(
    target: LiveTarget, spec: SweepSpec, topology: Topology, folder: Path, tell: Callable[[str], None]
) -> AsyncIterator[_Fleet]:
    settings = PlaySettings(served_model="", token_ids=token_range(spec.model_profile.vocab_size))
    via = _router_endpoint(target.options.via)
    async with control_client() as control:
        if target.endpoints is not None:
            engines = _running(target.endpoints, spec.engine)
            model = await _served_model(control, engines.endpoints[0])
            yield _Fleet(control, None, engines, via, dataclasses.replace(settings, served_model=model), tell)
            return
        path = model_path_of(target, spec, folder)
        ports = free_ports(topology.n_workers, ports_per_engine(topology))
        plan = plan_for(target, spec, topology, path, ports)
        for orphan in find_orphans(default_state_folder()):
            tell(
                f"{orphan.engine.worker_id} on port {orphan.engine.port} was left behind by a ppd-bench that was killed "
                f"(process {orphan.owner_pid}); 'ppd-bench doctor --clean' ends it"
            )
        tell(f"Starting {plan.layout} ({len(plan.commands)} engines)")
        log_folder = folder / "logs" / plan.layout
        log_folder.mkdir(parents=True, exist_ok=True)
        async with Supervisor(plan, log_folder=log_folder, on_progress=lambda p: tell(progress_text(p))) as supervisor:
            yield _Fleet(control, supervisor, None, via, dataclasses.replace(settings, served_model=path), tell)


def progress_text(progress: Progress) -> str:
    """One line for people."""
    told = textwrap.shorten(progress.detail, DETAIL_WIDTH, placeholder=" ...")
    detail = f": {told}" if told else ""
    after = f" after {progress.after_s:.0f} s" if progress.after_s >= 1.0 else ""
    return f"{progress.worker_id} {progress.stage.value}{after}{detail}"


def _running(endpoints: EndpointSet, engine: EngineSettings) -> Engines:
    return Engines(endpoints=endpoints.endpoints, connector=engine.kv_connector, lease_s=engine.kv_lease_s)


async def _served_model(control: httpx.AsyncClient, endpoint: Endpoint) -> str:
    try:
        answer = await control.get(f"{endpoint.url}/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise NotReady(f"{endpoint.worker_id} ({endpoint.url}): does not list its model; is a vLLM there?") from error


def _router_endpoint(via: str | None) -> Endpoint | None:
    if via is None:
        return None
    url = httpx.URL(via)
    if url.scheme != "http" or not url.host or url.port is None:
        raise SpecError(f"command line: --via {via!r} is not usable; allowed: http://HOST:PORT")
    return Endpoint(worker_id="router", role=Role.REPLICA, host=url.host, port=url.port)


class _Fleet:
    """The running engines of one layout. ``supervisor`` is null where ppd-bench did not start them."""

    def __init__(
        self,
        control: httpx.AsyncClient,
        supervisor: Supervisor | None,
        engines: Engines | None,
        via: Endpoint | None,
        settings: PlaySettings,
        tell: Callable[[str], None],
    ) -> None:
        self._control = control
        self._supervisor = supervisor
        self._engines = engines
        self._via = via
        self._settings = settings
        self._tell = tell

    @property
    def engines(self) -> Engines:
        """As they are now: a restarted engine may have another connector id."""
        if self._supervisor is not None:
            return self._supervisor.engines
        assert self._engines is not None
        return self._engines

    async def play(self, point: Point) -> Played:
        """One point, from emptied caches to judged records. An engine that dies makes the point invalid and comes back."""
        problems = [f"{worker_id}: cache reset not confirmed" for worker_id in await self._reset(point)]
        before = await self._scrapes()
        samples: list[dict[str, Any]] = []
        sampler = asyncio.create_task(self._sample(point, samples))
        try:
            result = await self._play(point)
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
        dead = self._supervisor.dead() if self._supervisor is not None else ()
        problems += [f"{worker_id}: engine died during the point" for worker_id in dead]
        if not dead and self._via is None:
            problems += await self._contradictions(point, result, before)
        if dead and self._supervisor is not None:
            self._tell(f"{', '.join(dead)} died; starting again")
            await self._supervisor.restart(*dead)
        return Played(
            point=point,
            columns=result.columns,
            problems=tuple(problems),
            lateness=result.lateness,
            samples=tuple(samples),
        )

    async def _play(self, point: Point) -> LiveResult:
        sessions = generate_sessions(
            point.workload,
            qps=point.qps,
            duration_s=point.duration_s,
            think_time_s=point.think_time_s,
            seed=point.seed,
            repeat=point.repeat,
        )
        return await play_point(
            point,
            sessions,
            self._via or self.engines,
            clock=time.monotonic,
            settings=self._settings,
            scrape=self._kv_usage,
        )

    async def _reset(self, point: Point) -> tuple[str, ...]:
        """After a D has died, P holds the blocks that it never took until their lease ends; till then no reset succeeds."""
        patience_s = max(PATIENCE_S, point.engine.kv_lease_s + LEASE_MARGIN_S)
        return await reset_caches(self._control, self.engines.endpoints, patience_s=patience_s)

    async def _scrapes(self) -> dict[str, EngineScrape]:
        endpoints = self.engines.endpoints
        found = await asyncio.gather(*(scrape(self._control, endpoint) for endpoint in endpoints))
        return {endpoint.worker_id: reading for endpoint, reading in zip(endpoints, found, strict=True)}

    async def _kv_usage(self, endpoint: Endpoint) -> float | None:
        try:
            return (await scrape(self._control, endpoint)).gauges.kv_cache_usage_ratio
        except EngineError:
            return None

    async def _sample(self, point: Point, samples: list[dict[str, Any]]) -> None:
        began_s = time.monotonic()
        while True:
            for endpoint in self.engines.endpoints:
                with contextlib.suppress(EngineError):  # a dead engine has no readings; the point says that it died
                    reading = await scrape(self._control, endpoint)
                    samples.append(
                        {
                            "point_id": point.point_id,
                            "worker_id": endpoint.worker_id,
                            "time_s": time.monotonic() - began_s,
                            **dataclasses.asdict(reading.gauges),
                            **dataclasses.asdict(reading.counters),
                        }
                    )
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def _contradictions(self, point: Point, result: LiveResult, before: dict[str, EngineScrape]) -> list[str]:
        try:
            after = await self._scrapes()
        except EngineError as error:
            return [f"path not proven: {error}"]
        counters: dict[str, EngineCounters] = {
            worker_id: counters_between(before[worker_id], reading) for worker_id, reading in after.items()
        }
        return contradictions(result.columns, counters, block_size=point.engine.block_size)
