"""``ppd-bench router``: from files and arguments to a listening router, and from a signal to its clean end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvloop

from ppd_bench import __version__
from ppd_bench.engine.client import Client, Clock
from ppd_bench.engine.control import control_client
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.readiness import failure_to_generate
from ppd_bench.policy.events import Event, WorkerAvailability
from ppd_bench.policy.ledger import Ledger
from ppd_bench.router.app import App
from ppd_bench.router.decision_log import TABLE, DecisionLog
from ppd_bench.router.discovery import EndpointsFile
from ppd_bench.router.fleet import Fleet
from ppd_bench.router.http_server import HttpServer
from ppd_bench.router.identity import Identifier
from ppd_bench.router.metrics import RouterMetrics
from ppd_bench.router.prompt_size import PromptSizer
from ppd_bench.router.state import LogEntry, RouterState
from ppd_bench.router.status import reading_of
from ppd_bench.router.turn_record import Origin
from ppd_bench.runner.router_options import Prepared, RouterOptions, prepare_router

__all__ = ["KEY_VARIABLE", "Prepared", "RouterOptions", "Running", "prepare_router", "route", "running_router"]

WATCH_S = 1.0
"""How often a table's file is looked at."""

GC_THRESHOLDS = (20_000, 20, 100)
"""Turns leave next to no cycles behind: the collector may look for them thirty times less often than it would by default."""

KEY_VARIABLE = "PPD_BENCH_ENGINE_KEY"
"""The environment variable with a key for the router's own generations: it is in no list of processes and in no log."""
WANTS_KEY = ("HTTP 401", "HTTP 403")

Tell = Callable[[str], None]
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A listening router. ``reload`` takes a new table into use, if there is one; ``watches`` end only with an error."""

    state: RouterState
    server: HttpServer
    port: int
    reload: Callable[[], Coroutine[None, None, None]]
    watches: Sequence[asyncio.Task[None]]


def route(options: RouterOptions, *, tell: Tell) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP looks for a new table. A second signal ends it without waiting for streams.

    Raises:
        PpdBenchError: it cannot be started; see ``prepare_router``.
    """
    prepared = prepare_router(options)
    uvloop.run(_route(prepared, tell))


async def _route(prepared: Prepared, tell: Tell) -> None:
    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (at_once if stop.is_set() else stop).set())
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # one that comes before there is anything to reload
    async with running_router(prepared, tell=tell, at_once=at_once) as running:
        loop.add_signal_handler(signal.SIGHUP, lambda: asyncio.ensure_future(running.reload()))
        gc.collect()
        gc.freeze()  # libraries and the table stay: no pass of the cycle collector need look at them again
        gc.set_threshold(*GC_THRESHOLDS)
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([stopped, *running.watches], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for watch in running.watches:
            if watch.done():
                watch.result()
        tell("stopping: no new connections; answers under way may finish")


@contextlib.asynccontextmanager
async def running_router(
    prepared: Prepared,
    *,
    tell: Tell = lambda line: None,
    record: Callable[[LogEntry], None] | None = None,
    at_once: asyncio.Event | None = None,
) -> AsyncIterator[Running]:
    """A router that listens while the context is open; leaving it lets answers under way finish, within bounds (B40).

    ``at_once``, when it is set, cuts that short. ``record`` gets what a replay of its decisions needs (I7).

    Raises:
        EngineError: the address cannot be listened on.
        StoreError: the log cannot be written.
    """
    options, settings = prepared.options, prepared.options.settings
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(time.perf_counter))
        control = await stack.enter_async_context(control_client())
        state = _state(prepared, client, control, tell, record)
        server = HttpServer(App(state, control), clock=state.clock)
        port = await server.start(options.host, options.port, ssl=prepared.tls)
        if state.log is not None:
            state.log.open()
            stack.callback(state.log.close)
        reload = functools.partial(_reload, state, tell)
        watches = [
            asyncio.create_task(state.fleet.run()),
            asyncio.create_task(_watch_engines(state, control, tell)),
        ]
        if options.table is not None:
            watches.append(asyncio.create_task(_watch(options.table, reload)))
        _announce(prepared, port, tell)
        _note_table(state)
        try:
            yield Running(state=state, server=server, port=port, reload=reload, watches=watches)
        finally:
            await _end(server, watches, settings.drain_s, at_once, tell)


def _state(
    prepared: Prepared,
    client: Client,
    control: httpx.AsyncClient,
    tell: Tell,
    record: Callable[[LogEntry], None] | None,
) -> RouterState:
    """The parts of the router, put together."""
    options, settings, topology = prepared.options, prepared.options.settings, prepared.topology
    clock = time.perf_counter
    origin = Origin(
        topology=topology.name, worker_ids=[worker.worker_id for worker in topology.workers], start_s=clock()
    )
    name = f"ppd-{secrets.token_hex(4)}"
    log = None
    if options.log is not None:
        header = {
            "topology": topology.name,
            "router": name,
            "version": __version__,
            "started_unix_s": time.time(),
            "policy": prepared.policies.decider,
            "placement": prepared.policies.placement,
        }
        log = DecisionLog(options.log, header)
    state: RouterState = RouterState(
        name=name,
        settings=settings,
        topology=topology,
        origin=origin,
        clock=clock,
        wall=time.time,
        client=client,
        fleet=_fleet(
            prepared, client, control, lambda: clock() - origin.start_s, lambda event: _on_event(state, tell, event)
        ),
        ledger=Ledger(topology, session_ttl_s=settings.session_ttl_s, max_sessions=settings.max_sessions),
        identifier=Identifier(
            ttl_s=settings.session_ttl_s,
            use_cache_key=settings.use_cache_key,
            max_sessions=settings.max_sessions,
        ),
        sizer=PromptSizer(count=prepared.count_tokens),
        policies=prepared.policies,
        metrics=RouterMetrics(lambda: reading_of(state)),
        log=log,
        record=record,
    )
    return state


def _fleet(prepared: Prepared, client: Client, control: httpx.AsyncClient, clock: Clock, on_event: OnEvent) -> Fleet:
    options = prepared.options
    return Fleet(
        prepared.topology,
        client=client,
        control=control,
        clock=clock,
        on_event=on_event,
        file=EndpointsFile(options.endpoints) if options.endpoints is not None else None,
        listener=prepared.listener,
        settings=options.fleet,
        connector=options.connector,
        lease_s=options.lease_s,
        probe=functools.partial(_probe, client, options.fleet.probe_limit_s, os.environ.get(KEY_VARIABLE)),
    )


async def _probe(client: Client, limit_s: float, key: str | None, endpoint: Endpoint) -> str | None:
    """A generation. Where engines want a key that the router does not have, being refused for it must do."""
    headers = None if key is None else {"Authorization": f"Bearer {key}"}
    problem = await failure_to_generate(client, endpoint, limit_s=limit_s, headers=headers)
    return None if problem is not None and key is None and problem.startswith(WANTS_KEY) else problem


async def _end(
    server: HttpServer, watches: Sequence[asyncio.Task[None]], drain_s: float, at_once: asyncio.Event | None, tell: Tell
) -> None:
    server.stop_accepting()
    drained = asyncio.ensure_future(server.drain(drain_s))
    if at_once is not None:
        hurried = asyncio.ensure_future(at_once.wait())
        await asyncio.wait([drained, hurried], return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not drained.done():
            drained.cancel()
            drained = asyncio.ensure_future(server.drain(0.0))
    if not await drained:
        tell("stopped; answers that had not ended were cut")
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)


async def _watch(table: Path, reload: Callable[[], Coroutine[None, None, None]]) -> None:
    """Take a table's new version into use when its file changes, however it was replaced."""
    before = _version_of(table)
    while True:
        await asyncio.sleep(WATCH_S)
        now = _version_of(table)
        if now != before and now is not None:
            before = now
            await reload()


def _on_event(state: RouterState, tell: Tell, event: Event) -> None:
    """What the fleet found goes to the Ledger; who is not sent turns any more, and who is again, to the operator too."""
    state.observe(event)
    if isinstance(event, WorkerAvailability):
        where = state.fleet.where(event.worker)
        if event.available:
            tell(f"{where} takes turns")
        else:
            problem = state.fleet.problem(event.worker)
            tell(f"warning: {where} gets no turns" + (f": {problem}" if problem else ""))


async def _watch_engines(state: RouterState, control: httpx.AsyncClient, tell: Tell) -> None:
    """Tell of an endpoints file that cannot be used, and once per table of engines that seem to serve another model than its."""
    told, compared = None, ""
    while True:
        await asyncio.sleep(WATCH_S)
        problem = state.fleet.file_problem
        if problem != told:
            told = problem
            tell(
                "the endpoints file can be used again"
                if problem is None
                else f"warning: the new endpoints file was refused, the engines before it stay: {problem}"
            )
        model = state.policies.now.info.get("model", "")
        if model != compared and (served := await _served_models(state, control)):
            compared = model
            if not any(_letters(model) in _letters(name) for name in served):
                tell(
                    f"warning: the table was made for {model} and the engines serve {', '.join(served)}: of another model "
                    "its decisions say nothing"
                )


async def _served_models(state: RouterState, control: httpx.AsyncClient) -> list[str]:
    """What the first engine that is there calls its models; empty when it does not say."""
    endpoints = state.fleet.engines().endpoints
    there = [endpoint for worker, endpoint in enumerate(endpoints) if state.fleet.available(worker)]
    key = os.environ.get(KEY_VARIABLE)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = await control.get(f"{there[0].url}/v1/models", headers=headers)
        return [str(model["id"]) for model in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return []


def _letters(name: str) -> str:
    """A model's name without what people write differently."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; null where there is none, as for an instant while it is replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def _reload(state: RouterState, tell: Tell) -> None:
    box = state.policies
    if await box.reload():
        tell(f"table {box.now.info.get('hash')} is in use now")
        _note_table(state)
    elif box.problem is not None:
        tell(f"warning: {box.problem}")
    elif box.now.table is not None:
        tell(f"table {box.now.table.content_hash} stays in use: its file says the same")
    else:
        tell(f"nothing to reload: policy {box.decider} needs no table")


def _note_table(state: RouterState) -> None:
    """A line in the log, so that its decisions can be read with the table that took them."""
    info = dict(state.policies.now.info)
    if state.log is not None and info:
        line = {"kind": TABLE, "time_unix_s": state.wall(), **info}
        state.log.add(lambda: line)


def _announce(prepared: Prepared, port: int, tell: Tell) -> None:
    options, info = prepared.options, prepared.policies.now.info
    scheme = "https" if prepared.tls is not None else "http"
    host = f"[{options.host}]" if ":" in options.host else options.host
    if info:
        tell(f"table {info['hash']}: {info['evidence']}, for {info['model']} on {info['gpu']}, weights {info['w_ttft']} (TTFT) "
             f"and {info['w_tpot']} (TPOT)")  # fmt: skip
        if info["evidence"] == "simulated":
            tell("warning: this table was simulated, not measured: build one from a live sweep before relying on it")
    tell(f"{prepared.topology.name}, policy {prepared.policies.decider}: listening on {scheme}://{host}:{port}")
