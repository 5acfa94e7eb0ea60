"""Start the engines of a plan, know when one dies, bring it back, and leave nothing behind.

::

    async with Supervisor(plan, log_folder=..., state_folder=...) as supervisor:
        ...                             # every engine generates, every P x D pair has transferred
        supervisor.check()              # raises WorkerDied
        await supervisor.restart("D0")  # at most ``max_restarts`` times per engine

However the block is left (its end, an exception, Ctrl-C, SIGTERM, SIGHUP), the engines are ended first.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import LaunchError, NotReady, WorkerDied
from ppd_bench.engine.client import Client
from ppd_bench.engine.control import control_client
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.launch_plan import EngineCommand, LaunchPlan
from ppd_bench.engine.orphans import EngineRegister, RegisteredEngine, default_state_folder
from ppd_bench.engine.ports import port_taken
from ppd_bench.engine.processes import EngineProcess, demote_spinners, last_lines, log_tail, spawn
from ppd_bench.engine.readiness import WarmTransfer, failure_to_generate, mooncake_engine_id, pairs, warm_pairs
from ppd_bench.engine.signals import SignalsAsCancel

T = TypeVar("T")

POLL_S = 0.2
DEMOTION_WINDOW_S = 0.5
PROGRESS_S = 5.0
CPU_ENGINES_AT_ONCE = 2
CPU_ENGINE_NICENESS = 10


class Stage(StrEnum):
    """What an engine (or, for ``warming``, a layout) is about to do or has done."""

    STARTING = "starting"
    READY = "ready"
    WARMING = "warming"
    WARM = "warm"
    DIED = "died"
    RESTARTING = "restarting"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """For people: what happens to which engine, ``after_s`` seconds since it was started."""

    worker_id: str
    stage: Stage
    after_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLimits:
    """Bounds, seconds. ``ready_s``: from an engine's start to its first generation; loading large models takes minutes."""

    ready_s: float = 900.0
    warm_s: float = 300.0
    stop_grace_s: float = 20.0
    max_restarts: int = 2


class Supervisor:
    """The running engines of one plan. Used from one event loop, as an async context manager.

    ``startup_s``: seconds from each engine's last start to its first generation. ``transfers``: the pairs of the last warming.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        log_folder: Path,
        state_folder: Path | None = None,
        limits: SupervisorLimits = SupervisorLimits(),
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.plan = plan
        self.startup_s: dict[str, float] = {}
        self.transfers: tuple[WarmTransfer, ...] = ()
        self.n_restarts: dict[str, int] = {command.worker_id: 0 for command in plan.commands}
        self._commands = {command.worker_id: command for command in plan.commands}
        self._processes: dict[str, EngineProcess] = {}
        self._engine_ids: dict[str, str] = {}
        self._log_folder = log_folder
        self._register = EngineRegister(state_folder or default_state_folder())
        self._limits = limits
        self._on_progress = on_progress
        self._started_s: dict[str, float] = {}
        self._nonces = itertools.count(os.getpid())
        self._signals = SignalsAsCancel()

    # -- what runs ---------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> Engines:
        """What a dispatcher needs, by worker index."""
        endpoints = tuple(self._endpoint(command) for command in self.plan.commands)
        addrs = {i: addr for i, c in enumerate(self.plan.commands) if (addr := self._bootstrap_addr(c))}
        lease_s = self.plan.engine.kv_lease_s
        connector = self.plan.connector or self.plan.engine.kv_connector
        return Engines(endpoints=endpoints, connector=connector, lease_s=lease_s, bootstrap_addrs=addrs)

    @property
    def pids(self) -> dict[str, int]:
        """The leader's pid of every started engine."""
        return {worker_id: process.pid for worker_id, process in self._processes.items()}

    def processes(self) -> tuple[EngineProcess, ...]:
        """The engines' processes, in the order of their start."""
        return tuple(self._processes.values())

    def dead(self) -> tuple[str, ...]:
        """Engines whose process has ended."""
        return tuple(w for w, process in self._processes.items() if process.exit_status is not None)

    def check(self) -> None:
        """
        Raises:
            WorkerDied: every dead engine, how it ended, and the last lines of its log.
        """
        if dead := self.dead():
            raise WorkerDied("\n".join(self._death(worker_id) for worker_id in dead))

    async def wait_for_death(self) -> str:
        """Wait until an engine ends; its worker id. Run it beside a measurement, and cancel it afterwards."""
        waits = {asyncio.ensure_future(p.wait()): worker_id for worker_id, p in self._processes.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        worker_id = waits[next(iter(done))]
        self._tell(worker_id, Stage.DIED, self._processes[worker_id].ending())
        return worker_id

    # -- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._signals.install()
        try:
            await self._start()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _leave(self) -> None:
        try:
            await self.stop()
        finally:
            self._signals.uninstall()
        self._signals.raise_if_caught()

    async def stop(self) -> None:
        """End all engines: SIGTERM, the grace, SIGKILL. Cancelled (a second Ctrl-C), it kills at once."""
        for worker_id in self._processes:
            self._tell(worker_id, Stage.STOPPING)
        try:
            await asyncio.gather(*(p.stop(self._limits.stop_grace_s) for p in self._processes.values()))
        finally:
            self._processes.clear()
            self._register.remove()

    async def restart(self, *worker_ids: str) -> None:
        """Bring dead (or stuck) engines back: end what is left of them, start them, warm their pairs.

        Give all that are dead at once: an engine cannot be warmed against one that is not there.

        Raises:
            WorkerDied: one was restarted ``max_restarts`` times already, or an engine dies again.
            NotReady: one does not answer in time.
        """
        given_up = [w for w in worker_ids if self.n_restarts[w] >= self._limits.max_restarts]
        if given_up:
            raise WorkerDied("\n".join(self._given_up(worker_id) for worker_id in given_up))
        for worker_id in worker_ids:
            process = self._processes[worker_id]
            self.n_restarts[worker_id] += 1
            self._tell(worker_id, Stage.RESTARTING, process.ending())
            await process.stop(0.0 if worker_id in self.dead() else self._limits.stop_grace_s)
        await self._start_in_batches([self._commands[worker_id] for worker_id in worker_ids])
        await self._warm(frozenset(worker_ids))

    # -- starting ----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._check_ports()
        await self._start_in_batches(self.plan.commands)
        await self._warm(frozenset(self._commands))

    def _check_ports(self) -> None:
        ports = [(c, port) for c in self.plan.commands for port in (c.port, c.side_channel_port) if port]
        taken = [f"{c.worker_id}: port {port} is taken on {c.host}" for c, port in ports if port_taken(c.host, port)]
        if taken:
            raise LaunchError(
                "\n".join([*taken, "end what listens there ('ppd-bench doctor' finds orphans), or start again"])
            )

    async def _start_in_batches(self, commands: Sequence[EngineCommand]) -> None:
        at_once = CPU_ENGINES_AT_ONCE if self.plan.device == "cpu" else len(commands)
        for first in range(0, len(commands), at_once):
            await self._start_together(commands[first : first + at_once])

    async def _start_together(self, commands: Iterable[EngineCommand]) -> None:
        started = []
        for command in commands:
            self._started_s[command.worker_id] = time.monotonic()
            process = await spawn(command, self._log_folder / f"{command.worker_id}.log", os.environ)
            if self.plan.device == "cpu":  # engines share the client's cores; the client must be on time
                os.setpriority(os.PRIO_PROCESS, process.pid, CPU_ENGINE_NICENESS)
            self._processes[command.worker_id] = process
            self._remember()
            self._tell(command.worker_id, Stage.STARTING, f"pid {process.pid}")
            started.append(process)
        await _all_or_first_error(self._until_ready(process) for process in started)
        self._remember()  # with the worker processes that have come since

    async def _until_ready(self, process: EngineProcess) -> None:
        command = process.command
        what = f"{command.worker_id}: does not generate"
        await self._while_alive(self._becoming_ready(process), [process], self._limits.ready_s, what)
        addr = self._bootstrap_addr(command)
        if addr is not None:
            async with control_client() as control:
                self._engine_ids[command.worker_id] = await mooncake_engine_id(control, command.endpoint, addr)
        self.startup_s[command.worker_id] = time.monotonic() - self._started_s[command.worker_id]
        self._tell(command.worker_id, Stage.READY)

    async def _becoming_ready(self, process: EngineProcess) -> None:
        worker_id = process.command.worker_id
        told_s = time.monotonic()
        async with Client(time.monotonic) as client:
            while await failure_to_generate(client, process.command.endpoint) is not None:
                await self._pause(process)
                if time.monotonic() - told_s >= PROGRESS_S:
                    told_s = time.monotonic()
                    self._tell(worker_id, Stage.STARTING, "".join(last_lines(process.log_path, 1)))
        if self.plan.device == "cpu":
            await demote_spinners(process.group())

    async def _pause(self, process: EngineProcess) -> None:
        """Wait a little. On CPU, use the time to demote a spinning thread as soon as there is one: it delays the others.

        The leader is left out until it idles: it serves HTTP, and a thread of it that is busy now may do so later.
        """
        if self.plan.device == "cpu":
            await demote_spinners(process.group(), DEMOTION_WINDOW_S, skip_pid=process.pid)
        else:
            await asyncio.sleep(POLL_S)

    async def _warm(self, among: frozenset[str]) -> None:
        """Warm every pair with one of these engines."""
        started_s = time.monotonic()
        if not any(among & pair for pair in self._pairs()):
            return
        self._tell(self.plan.layout, Stage.WARMING)
        await self._while_alive(
            self._warm_pairs(among),
            list(self._processes.values()),
            self._limits.warm_s,
            "the warm transfers do not end",
        )
        spent = f"{len(self.transfers)} P x D pairs have transferred in {time.monotonic() - started_s:.1f} s"
        self._tell(self.plan.layout, Stage.WARM, spent)

    def _pairs(self) -> list[frozenset[str]]:
        endpoints = self.engines.endpoints
        return [frozenset((endpoints[p].worker_id, endpoints[d].worker_id)) for p, d in pairs(endpoints)]

    async def _warm_pairs(self, among: frozenset[str]) -> None:
        async with Client(time.monotonic) as client, control_client() as control:
            self.transfers = await warm_pairs(
                client,
                control,
                self.engines,
                block_size=self.plan.engine.block_size,
                nonce=next(self._nonces),
                among=among,
            )

    async def _while_alive(
        self, work: Coroutine[Any, Any, T], processes: list[EngineProcess], limit_s: float, what: str
    ) -> T:
        """The result of ``work``, unless one of the processes ends first or the time is over."""
        task = asyncio.ensure_future(work)
        deaths = {asyncio.ensure_future(process.wait()): process.command.worker_id for process in processes}
        try:
            done, _ = await asyncio.wait({task, *deaths}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            died = [worker_id for wait, worker_id in deaths.items() if wait in done]
            if died:
                raise WorkerDied("\n".join(self._death(worker_id) for worker_id in died))
            if task not in done:
                tails = "\n".join(log_tail(process.log_path) for process in processes)
                raise NotReady(f"{what} after {limit_s:g} s; if it only needs longer, allow more time\n{tails}")
            return task.result()
        finally:
            for wait in (task, *deaths):
                wait.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- words and files ---------------------------------------------------------------------------------------------

    def _death(self, worker_id: str) -> str:
        process = self._processes[worker_id]
        return f"{worker_id} {process.ending()}; {log_tail(process.log_path)}"

    def _given_up(self, worker_id: str) -> str:
        n = self.n_restarts[worker_id]
        return f"{self._death(worker_id)}\n{worker_id} was restarted {n} times already and is given up; find the cause in its log"

    def _tell(self, worker_id: str, stage: Stage, detail: str = "") -> None:
        after_s = time.monotonic() - self._started_s.get(worker_id, time.monotonic())
        self._on_progress(Progress(worker_id=worker_id, stage=stage, after_s=after_s, detail=detail))

    def _remember(self) -> None:
        self._register.write(
            RegisteredEngine(
                worker_id=worker_id, port=process.command.port, log=str(process.log_path), group=process.group()
            )
            for worker_id, process in self._processes.items()
        )

    def _endpoint(self, command: EngineCommand) -> Endpoint:
        at = command.endpoint
        engine_id = self._engine_ids.get(command.worker_id)
        return Endpoint(worker_id=at.worker_id, role=at.role, host=at.host, port=at.port, engine_id=engine_id)

    def _bootstrap_addr(self, command: EngineCommand) -> str | None:
        is_bootstrap = self.plan.connector == "MooncakeConnector" and command.role is Role.PREFILL
        return f"http://{command.host}:{command.side_channel_port}" if is_bootstrap else None


async def _all_or_first_error(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
