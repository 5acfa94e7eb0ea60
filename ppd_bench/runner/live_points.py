"""Points on real engines: one launch per layout, caches emptied between points, every path proven, every death survived."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import EngineError, NotReady, SpecError
from ppd_bench.core.point import EngineSettings, Point
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import Topology, parse_topology
from ppd_bench.core.workload import Session
from ppd_bench.engine.caches import PATIENCE_S, reset_caches
from ppd_bench.engine.control import control_client
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint, EndpointSet
from ppd_bench.engine.gpu import PACKAGE, GpuGauges, GpuReader, gpus_of
from ppd_bench.engine.launch_plan import LaunchPlan, ports_per_engine
from ppd_bench.engine.metrics import EngineGauges, EngineScrape, counters_between, scrape
from ppd_bench.engine.ports import free_ports
from ppd_bench.engine.supervisor import Supervisor
from ppd_bench.loadgen.clients import ClientPool, clients_needed
from ppd_bench.loadgen.lateness import ClientLateness
from ppd_bench.loadgen.player import LiveResult, PlaySettings, Target, play_point
from ppd_bench.loadgen.prompts import token_range
from ppd_bench.loadgen.rows import TurnEnd
from ppd_bench.runner.listeners import DetailedListener, Listener, TurnWatch
from ppd_bench.runner.live import LiveOptions, LiveTarget, model_path_of, plan_for, progress_text
from ppd_bench.runner.proof import contradictions
from ppd_bench.runner.traffic import sessions_of
from ppd_bench.sweep.spec import SweepSpec
from ppd_bench.workload.traffic import SourceFile

LEASE_MARGIN_S = 10.0

SAMPLE_INTERVAL_S = 1.0
"""How often every engine's gauges are read through a point."""

WATCH_INTERVAL_S = 1.0
"""How often listeners hear of a point's turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One point: its records, what is against it, and every engine's readings."""

    point: Point
    columns: Columns
    problems: tuple[str, ...]
    lateness: ClientLateness
    n_clients: int
    samples: tuple[dict[str, Any], ...]


def play_points(
    target: LiveTarget,
    spec: SweepSpec,
    points: Sequence[Point],
    folder: Path,
    *,
    listener: Listener,
    take: Callable[[Played], None],
) -> None:
    """Play the points layout by layout; ``take`` gets each as it ends, before the next begins.

    All in one task, which Ctrl-C and SIGTERM cancel: engines and clients are gone when this returns or raises.

    Raises:
        EngineError: engines that cannot be started, or that die again and again.
        PpdBenchError: a client process that died.
    """
    uvloop.run(_play_layouts(target, spec, points, folder, listener, take))


async def _play_layouts(
    target: LiveTarget,
    spec: SweepSpec,
    points: Sequence[Point],
    folder: Path,
    listener: Listener,
    take: Callable[[Played], None],
) -> None:
    most = max((n_clients(target.options, point) for point in points), default=1)
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(ClientPool(most)) if most > 1 else None
        for _, group in itertools.groupby(points, key=lambda point: parse_topology(point.topology).layout.name):
            of_layout = list(group)
            topology = parse_topology(of_layout[0].topology)
            async with _fleet(target, spec, topology, folder, listener, pool) as fleet:
                for point in of_layout:
                    take(await fleet.play(point))


def n_clients(options: LiveOptions, point: Point) -> int:
    """Client processes for the point: as many as asked for, or as it needs, one per core at most."""
    traffic = point.workload.traffic
    if traffic is not None and traffic.max_inflight_sessions is not None:
        return 1  # one process knows how many conversations are under way
    return options.clients or min(clients_needed(point), os.cpu_count() or 1)


@contextlib.asynccontextmanager
async def _fleet(
    target: LiveTarget, spec: SweepSpec, topology: Topology, folder: Path, listener: Listener, pool: ClientPool | None
) -> AsyncIterator[_Fleet]:
    settings = PlaySettings(served_model="", token_ids=token_range(spec.model_profile.vocab_size))
    via = _router_endpoint(target.options.via)
    async with control_client() as control:
        if target.endpoints is not None:
            running = _running(target.endpoints, spec.engine)
            settings = dataclasses.replace(settings, served_model=await _served_model(control, running.endpoints[0]))
            yield _Fleet(control=control, options=target.options, running=running, via=via, settings=settings,
                         listener=listener, pool=pool, sources=spec.sources)  # fmt: skip
            return
        path = model_path_of(target, spec, folder)
        settings = dataclasses.replace(settings, served_model=path)
        plan = plan_for(target, spec, topology, path, free_ports(topology.n_workers, ports_per_engine(topology)))
        async with _started(plan, folder, listener) as supervisor:
            yield _Fleet(control=control, options=target.options, supervisor=supervisor, via=via, settings=settings,
                         listener=listener, pool=pool, gpus=_gpu_reader(plan, listener), sources=spec.sources)  # fmt: skip


def _started(plan: LaunchPlan, folder: Path, listener: Listener) -> Supervisor:
    listener.stage(f"Starting {plan.layout} ({len(plan.commands)} engines)")
    log_folder = folder / "logs" / plan.layout
    log_folder.mkdir(parents=True, exist_ok=True)
    return Supervisor(plan, log_folder=log_folder, on_progress=lambda p: listener.stage(progress_text(p)))


def _gpu_reader(plan: LaunchPlan, listener: Listener) -> GpuReader:
    gpus = gpus_of(plan.commands)
    reader = GpuReader(gpus)
    if gpus and not reader.can_read:
        listener.stage(f"GPU utilisation and memory are not recorded: NVML cannot be read (pip install {PACKAGE})")
    return reader


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


@dataclass(kw_only=True)
class _Fleet:
    """The running engines of one layout. ``supervisor`` is null where ppd-bench did not start them, else ``running`` is."""

    control: httpx.AsyncClient
    options: LiveOptions
    settings: PlaySettings
    listener: Listener
    via: Endpoint | None
    pool: ClientPool | None
    supervisor: Supervisor | None = None
    running: Engines | None = None
    sources: tuple[SourceFile, ...] = ()
    gpus: GpuReader = dataclasses.field(default_factory=lambda: GpuReader({}))

    @property
    def engines(self) -> Engines:
        """As they are now: a restarted engine may have another connector id."""
        if self.supervisor is not None:
            return self.supervisor.engines
        assert self.running is not None
        return self.running

    async def play(self, point: Point) -> Played:
        """One point, from emptied caches to judged records. An engine that dies makes the point invalid and comes back."""
        problems = [f"{worker_id}: cache reset not confirmed" for worker_id in await self._reset(point)]
        before = await self._scrapes()
        samples: list[dict[str, Any]] = []
        sessions = sessions_of(point, self.sources)
        watch = TurnWatch(sum(map(len, sessions)))
        if isinstance(self.listener, DetailedListener):
            self.listener.point_started(point, sum(map(len, sessions)))
        async with _beside(self._sample(point, samples), self._watch(watch)):
            result = await self._play(point, sessions, watch.ended)
        problems += [*misanswered(result), *await self._doubts(point, result, before)]
        await self._bring_back()
        return Played(
            point=point,
            columns=result.columns,
            problems=tuple(problems),
            lateness=result.lateness,
            n_clients=n_clients(self.options, point),
            samples=tuple(samples),
        )

    async def _play(self, point: Point, sessions: Sequence[Session], on_turn: Callable[[TurnEnd], None]) -> LiveResult:
        target: Target = self.via or self.engines
        n, clock, scrape = n_clients(self.options, point), time.monotonic, self._gauges
        if self.pool is None or n == 1:
            return await play_point(
                point, sessions, target, clock=clock, settings=self.settings, scrape=scrape, on_turn=on_turn
            )
        return await self.pool.play_point(
            point, sessions, target, clock=clock, settings=self.settings, n_clients=n, scrape=scrape, on_turn=on_turn
        )

    async def _reset(self, point: Point) -> tuple[str, ...]:
        """After a D has died, P holds the blocks that it never took until their lease ends; till then no reset succeeds."""
        patience_s = max(PATIENCE_S, point.engine.kv_lease_s + LEASE_MARGIN_S)
        return await reset_caches(self.control, self.engines.endpoints, patience_s=patience_s)

    async def _bring_back(self) -> None:
        """Start the engines again that have died."""
        if self.supervisor is not None and (dead := self.supervisor.dead()):
            self.listener.stage(f"{', '.join(dead)} died; starting again")
            await self.supervisor.restart(*dead)

    # -- readings ----------------------------------------------------------------------------------------------------

    async def _scrapes(self) -> dict[str, EngineScrape]:
        endpoints = self.engines.endpoints
        found = await asyncio.gather(*(scrape(self.control, endpoint) for endpoint in endpoints))
        return {endpoint.worker_id: reading for endpoint, reading in zip(endpoints, found, strict=True)}

    async def _gauges(self, endpoint: Endpoint) -> EngineGauges | None:
        try:
            return (await scrape(self.control, endpoint)).gauges
        except EngineError:
            return None

    async def _sample(self, point: Point, samples: list[dict[str, Any]]) -> None:
        began_s = time.monotonic()
        while True:
            for endpoint in self.engines.endpoints:
                with contextlib.suppress(EngineError):  # a dead engine has no readings; the point says that it died
                    reading = await scrape(self.control, endpoint)
                    gpu = await asyncio.to_thread(self.gpus.read, endpoint.worker_id) if self.gpus.can_read else None
                    time_s = time.monotonic() - began_s
                    samples.append(sample_row(point.point_id, endpoint.worker_id, time_s, reading, gpu))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def _watch(self, watch: TurnWatch) -> None:
        if not isinstance(self.listener, DetailedListener):
            return
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.listener.turns(watch.statistics(time.monotonic() - began_s))

    # -- doubts ------------------------------------------------------------------------------------------------------

    async def _doubts(self, point: Point, result: LiveResult, before: dict[str, EngineScrape]) -> list[str]:
        """Deaths, and what the engines' counters say against the records. Behind a router no record has a route to prove."""
        dead = self.supervisor.dead() if self.supervisor is not None else ()
        if dead:
            return [f"{worker_id}: engine died during the point" for worker_id in dead]
        try:
            after = await self._scrapes()
        except EngineError as error:
            return [f"path not proven, an engine is gone: {error}"]
        restarted = [w for w, reading in after.items() if reading.engine_start_s != before[w].engine_start_s]
        if restarted or self.via is not None:
            return [f"{worker_id}: engine was started anew during the point" for worker_id in restarted]
        counters = {worker_id: counters_between(before[worker_id], reading) for worker_id, reading in after.items()}
        return contradictions(
            result.columns,
            counters,
            block_size=point.engine.block_size,
            shares_content=point.workload.traffic is not None,
        )


@contextlib.asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless work beside the block, and end it with the block."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def misanswered(result: LiveResult) -> list[str]:
    """One sentence where answers ended in order and were not what was asked: engines that do that measure another workload."""
    if not result.misanswers:
        return []
    return [f"{len(result.misanswers)} answers were not what was asked (first: {result.misanswers[0]})"]


def sample_row(
    point_id: str, worker_id: str, time_s: float, reading: EngineScrape, gpu: GpuGauges | None
) -> dict[str, Any]:
    """One engine at one instant, for ``engine_metrics``; ``time_s`` since the point's start."""
    return {
        "point_id": point_id,
        "worker_id": worker_id,
        "time_s": time_s,
        **dataclasses.asdict(reading.gauges),
        **dataclasses.asdict(reading.counters),
        **(dataclasses.asdict(gpu) if gpu is not None else {}),
    }
