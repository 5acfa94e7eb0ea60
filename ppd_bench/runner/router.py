"""``ppd-bench router``: from files and arguments to a listening router, and from a signal to its clean end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import secrets
import signal
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvloop

from ppd_bench import __version__
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Params, PlacementSpec, PolicySpec
from ppd_bench.core.topology import Topology, parse_topology
from ppd_bench.engine.client import Client, Clock
from ppd_bench.engine.control import control_client
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.handoff import find_connector
from ppd_bench.engine.readiness import failure_to_generate
from ppd_bench.policy.deciders import DECIDERS
from ppd_bench.policy.events import Event, WorkerAvailability
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.placements import PLACEMENTS
from ppd_bench.policy.policy import GUARD_PARAM
from ppd_bench.router.app import App
from ppd_bench.router.decision_log import TABLE, DecisionLog, LogSettings
from ppd_bench.router.discovery import EndpointsFile, HeartbeatListener
from ppd_bench.router.fleet import Fleet, FleetSettings
from ppd_bench.router.http_server import HttpServer
from ppd_bench.router.identity import Identifier
from ppd_bench.router.metrics import RouterMetrics
from ppd_bench.router.prompt_size import PromptSizer, load_tokenizer
from ppd_bench.router.settings import RouterSettings
from ppd_bench.router.state import LogEntry, RouterState
from ppd_bench.router.status import reading_of
from ppd_bench.router.tables import PolicyBox
from ppd_bench.router.token_model import CountTokens
from ppd_bench.router.turn_record import Origin

WATCH_S = 1.0
"""How often a table's file is looked at."""
DECISION_SEED = 0
"""Of hashed choices: the same in every process, so that a restart, or a second router, places conversations alike (B21)."""

GC_THRESHOLDS = (20_000, 20, 100)
"""Turns leave next to no cycles behind: the collector may look for them thirty times less often than it would by default."""

KEY_VARIABLE = "PPD_BENCH_ENGINE_KEY"
"""The environment variable with a key for the router's own generations: it is in no list of processes and in no log."""
WANTS_KEY = ("HTTP 401", "HTTP 403")
MAX_PORT = 65535

Tell = Callable[[str], None]
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """What the command line says. ``decider`` null: ``table`` where there is a table, else ``node``.

    ``table`` is a file, looked at again while the router runs. ``model`` and ``gpu``: what the table must be made for; null takes
    what the first one says. ``certificate``/``key``: PEM files, which turn TLS on.
    """

    topology: str
    endpoints: Path | None = None
    discovery: str | None = None
    discovery_token: str = ""
    fleet: FleetSettings = field(default_factory=FleetSettings)
    table: Path | None = None
    w_ttft: float | None = None
    w_tpot: float | None = None
    max_unknown_ratio: float | None = None
    model: str | None = None
    gpu: str | None = None
    decider: str | None = None
    x: float | None = None
    max_uncached_tokens: int | None = None
    placement: str = PlacementSpec().decode
    prefill_placement: str = PlacementSpec().prefill
    sticky: bool = True
    alpha: float | None = None
    max_kv_usage_ratio: float | None = None
    connector: str = "NixlConnector"
    lease_s: float = 30.0
    tokenizer: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    key: Path | None = None
    log: LogSettings | None = None
    settings: RouterSettings = field(default_factory=RouterSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A router that could be started: everything that can be checked without engines has been."""

    options: RouterOptions
    topology: Topology
    policies: PolicyBox
    listener: HeartbeatListener | None
    count_tokens: CountTokens | None
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A listening router. ``reload`` takes a new table into use, if there is one; ``watches`` end only with an error."""

    state: RouterState
    server: HttpServer
    port: int
    reload: Callable[[], Coroutine[None, None, None]]
    watches: Sequence[asyncio.Task[None]]


def prepare_router(options: RouterOptions) -> Prepared:
    """Check what can be checked before anything listens (B33).

    Raises:
        SpecError: arguments or files that cannot be used.
        TableError: a table that cannot be read, was made for something else, or knows too little.
        LaunchError: no hand-off is known for the connector.
    """
    topology = parse_topology(options.topology)
    if topology.n_prefill:
        find_connector(options.connector)
    _check_company(options)
    listener = _listener(options)
    policy, placement = _policy_spec(options), _placement_spec(options)
    load = None
    if options.table is not None:
        from ppd_bench.runner.tables import (
            table_text,
        )  # here, for it brings pandas, and a router may do without a table

        load = functools.partial(table_text, options.table, w_ttft=options.w_ttft, w_tpot=options.w_tpot)
    policies = PolicyBox(
        topology,
        policy,
        placement,
        seed=DECISION_SEED,
        load=load,
        model=options.model,
        gpu=options.gpu,
        max_unknown_ratio=options.max_unknown_ratio,
    )
    count_tokens = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    return Prepared(
        options=options,
        topology=topology,
        policies=policies,
        listener=listener,
        count_tokens=count_tokens,
        tls=_tls(options),
    )


def _check_company(options: RouterOptions) -> None:
    """Refuse options that would silently do nothing without another one."""
    is_scored = "cache_aware" in (options.placement, options.prefill_placement)
    table = "--table FILE, whose cells and domain it judges"
    rules = (
        (
            options.settings.shed and options.max_kv_usage_ratio is None,
            "--shed",
            "--max-kv-usage RATIO, above which it sheds",
        ),
        (options.alpha is not None and not is_scored, "--alpha", "--placement cache_aware, whose score it weighs"),
        (bool(options.discovery_token) and options.discovery is None, "--discovery-token", "--discovery HOST:PORT"),
        (options.model is not None and options.table is None, "--model", table),
        (options.gpu is not None and options.table is None, "--gpu", table),
        (options.max_unknown_ratio is not None and options.table is None, "--max-unknown", table),
    )
    problems = [f"command line: {option} needs {needed}" for is_alone, option, needed in rules if is_alone]
    if problems:
        raise SpecError(problems)


def _listener(options: RouterOptions) -> HeartbeatListener | None:
    if options.discovery is None:
        if options.endpoints is None:
            raise SpecError(
                "command line: where are the engines? give --endpoints FILE, or --discovery HOST:PORT, or both"
            )
        return None
    host, _, port = options.discovery.rpartition(":")
    if not host or not port.isdigit() or int(port) > MAX_PORT:
        raise SpecError(
            f"command line: --discovery must be HOST:PORT, got {options.discovery!r}; such as 127.0.0.1:30001"
        )
    return HeartbeatListener(host=host.strip("[]"), port=int(port), token=options.discovery_token)


def _policy_spec(options: RouterOptions) -> PolicySpec:
    given = {"table": options.table, "fraction": options.x, "threshold": options.max_uncached_tokens}
    implied = [name for name, value in given.items() if value is not None]
    decider = options.decider or (implied[0] if implied else PolicySpec().decider)
    problems = [
        f"command line: {_OPTIONS[name]} is of no use to --policy {decider}; leave one of them out"
        for name in implied
        if name != decider
    ]
    if decider not in DECIDERS:
        problems = [f"command line: --policy {decider!r} is not known; allowed: {', '.join(DECIDERS)}"]
    if decider == "table" and options.table is None:
        problems.append("command line: --policy table needs --table FILE; 'ppd-bench build-table' writes one")
    if decider == "fraction" and options.x is None:
        problems.append("command line: --policy fraction needs --x SHARE, 0 to 1")
    if options.table is None and (options.w_ttft is not None or options.w_tpot is not None):
        problems.append("command line: --w-ttft and --w-tpot weigh a table; give --table FILE with them")
    if problems:
        raise SpecError(problems)
    params = {"x": options.x, "max_uncached_tokens": options.max_uncached_tokens}
    return PolicySpec(decider=decider, params=_params(params))


_OPTIONS = {"table": "--table", "fraction": "--x", "threshold": "--max-uncached-tokens"}


def _placement_spec(options: RouterOptions) -> PlacementSpec:
    problems = [
        f"command line: {option} {name!r} is not known; allowed: {', '.join(PLACEMENTS)}"
        for option, name in (("--placement", options.placement), ("--prefill-placement", options.prefill_placement))
        if name not in PLACEMENTS
    ]
    if problems:
        raise SpecError(problems)
    return PlacementSpec(
        prefill=options.prefill_placement,
        decode=options.placement,
        replica=options.placement,
        sticky=options.sticky,
        params=_params({"alpha": options.alpha, GUARD_PARAM: options.max_kv_usage_ratio}),
    )


def _params(values: dict[str, float | None]) -> Params:
    return tuple(sorted((name, value) for name, value in values.items() if value is not None))


def _tls(options: RouterOptions) -> ssl.SSLContext | None:
    if options.certificate is None:
        if options.key is not None:
            raise SpecError("command line: --tls-key needs --tls-cert FILE")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.certificate, options.key)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(
            f"command line: --tls-cert {options.certificate} and its key cannot be used ({error}); give PEM files"
        ) from error
    return context


# -- running -----------------------------------------------------------------------------------------------------------


def route(options: RouterOptions, *, tell: Tell) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP looks for a new table. A second signal ends it without waiting for streams.

    Raises:
        PpdBenchError: it cannot be started; see ``prepare_router``.
    """
    prepared = prepare_router(options)
    uvloop.run(_route(prepared, tell))


async def _route(prepared: Prepared, tell: Tell) -> None:
    stop, at_once = asyncio.Event(), asyncio.Event()
    async with running_router(prepared, tell=tell, at_once=at_once) as running:
        gc.collect()
        gc.freeze()  # libraries and the table stay: no pass of the cycle collector need look at them again
        gc.set_threshold(*GC_THRESHOLDS)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: (at_once if stop.is_set() else stop).set())
        loop.add_signal_handler(signal.SIGHUP, lambda: asyncio.ensure_future(running.reload()))
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
        watches = [asyncio.create_task(state.fleet.run())]
        if options.endpoints is not None:
            watches.append(asyncio.create_task(_tell_of_endpoints(state.fleet, tell)))
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


async def _tell_of_endpoints(fleet: Fleet, tell: Tell) -> None:
    told: str | None = None
    while True:
        await asyncio.sleep(WATCH_S)
        problem = fleet.file_problem
        if problem != told:
            told = problem
            tell("the endpoints file can be used again" if problem is None else
                 f"warning: the new endpoints file was refused, the engines before it stay: {problem}")  # fmt: skip


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; null where there is none, as for an instant while it is replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def _reload(state: RouterState, tell: Tell) -> None:
    if await state.policies.reload():
        tell(f"table {state.policies.now.info.get('hash')} is in use now")
        _note_table(state)
    elif state.policies.problem is not None:
        tell(f"warning: {state.policies.problem}")


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
