"""The engines behind a topology's workers: which are there, which may be sent turns, and what a router is told about them.

Everything happens by timers and needs no traffic (ROUTER.md B39): scrapes, probes (real generations, B15), heartbeats' ends, and
the endpoints file. The Ledger hears of it through events alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from ppd_bench.core.errors import NotReady
from ppd_bench.core.topology import Topology
from ppd_bench.engine.client import Client, Clock
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint, EndpointSet
from ppd_bench.engine.metrics import EngineScrape, scrape
from ppd_bench.engine.readiness import failure_to_generate
from ppd_bench.policy.events import Event, WorkerAvailability, WorkerReset, WorkerSnapshot
from ppd_bench.router.breaker import Breaker, BreakerSettings
from ppd_bench.router.discovery import (
    SILENCE_S,
    EndpointsFile,
    Heartbeat,
    HeartbeatListener,
    Member,
    Registry,
    members_of,
    place,
    process_role,
)
from ppd_bench.router.slot import Slot, is_other, of_the_same

Probe = Callable[[Endpoint], Awaitable[str | None]]
"""Asks an engine for a real generation; null when it came, else why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Durations in seconds. ``probe_s``: an engine that generated nothing for so long is asked to. ``settle_s``: how long engines
    that send heartbeats may still change places after the first was heard of, unless all places are taken before."""

    scrape_s: float = 1.0
    scrape_limit_s: float = 5.0
    probe_s: float = 10.0
    probe_limit_s: float = 30.0
    look_s: float = 0.5
    settle_s: float = 10.0
    silence_s: float = SILENCE_S
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


class Fleet:
    """The engines of a topology, slot by slot in the order of ``Topology.workers``; some may be empty.

    ``clock``: the instants of events, in seconds; ``on_event`` gets them. ``file`` and ``listener``: where engines come from, at
    least one of them; a file must be good when the router starts. ``probe`` replaces ``failure_to_generate``.

    Raises:
        SpecError: the file cannot be used, or is of another layout and there is no listener for what it lacks.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        client: Client,
        control: httpx.AsyncClient,
        clock: Clock,
        on_event: Callable[[Event], None],
        file: EndpointsFile | None = None,
        listener: HeartbeatListener | None = None,
        settings: FleetSettings | None = None,
        connector: str = "NixlConnector",
        lease_s: float = 30.0,
        bootstrap_addrs: Mapping[int, str] | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.settings = settings or FleetSettings()
        self._client, self._control = client, control
        self._clock, self._on_event = clock, on_event
        self._file, self._listener = file, listener
        self._probe = probe or self._ask
        self._registry = Registry(self.settings.silence_s)
        self._slots = [
            Slot(i, worker.worker_id, process_role(worker.role), Breaker(self.settings.breaker))
            for i, worker in enumerate(topology.workers)
        ]
        self._static: tuple[Member, ...] = ()
        self._spares: tuple[Member, ...] = ()
        self._first_heard_s: float | None = None
        self._is_settled = False
        self._hand_off = (connector, lease_s, dict(bootstrap_addrs or {}))
        if file is not None:
            found = file.read()
            self._static = members_of(found if listener is not None else _fitting(found, topology))
            self._settle_static()
        self._engines = self._collect()

    # -- what the router asks ----------------------------------------------------------------------------------------

    def engines(self) -> Engines:
        """The engines as ``dispatch`` wants them; a worker without one has an address that nothing can be reached at."""
        return self._engines

    def available(self, worker: int) -> bool:
        """Whether turns may be sent there."""
        return self._slots[worker].is_available

    def breaker_state(self, worker: int) -> str:
        """closed, open or half_open."""
        return self._slots[worker].breaker.state.value

    @property
    def file_problem(self) -> str | None:
        """Why the endpoints file's present content is not in use; null when it is, or where there is none."""
        return None if self._file is None else self._file.problem

    def where(self, worker: int) -> str:
        """A worker's name, and the address of its engine where it has one."""
        slot = self._slots[worker]
        return f"{slot.endpoint.worker_id} ({'no engine' if slot.member is None else slot.endpoint.url})"

    def problem(self, worker: int) -> str | None:
        """What was wrong with a worker's engine last; null since it generated."""
        return self._slots[worker].problem

    def status(self) -> dict[str, Any]:
        """Everything known, as JSON content."""
        listener, now_s = self._listener, self._clock()
        return {
            "workers": [self._status_of(slot, now_s) for slot in self._slots],
            "spares": [{"role": m.role.value, "url": _url(m)} for m in self._spares],
            "endpoints_file": None
            if self._file is None
            else {"path": str(self._file.path), "problem": self._file.problem},
            "heartbeats": None
            if listener is None
            else {
                "address": f"{listener.host}:{listener.port}",
                "n_messages": listener.n_messages,
                "n_malformed": listener.n_malformed,
                "problem": listener.last_problem,
            },
        }

    # -- what the router tells ---------------------------------------------------------------------------------------

    def on_failure(self, worker: int, failure: str = "") -> None:
        """A leg failed there for a reason that is the engine's (B14): k of these in a row open its breaker."""
        slot = self._slots[worker]
        slot.problem = failure or "a turn failed"
        slot.breaker.failed(self._clock())
        slot.wake.set()
        self._say(slot)

    def on_success(self, worker: int) -> None:
        """A leg succeeded there."""
        slot = self._slots[worker]
        slot.alive_s = self._clock()
        slot.breaker.succeeded()

    def on_cache_reset(self, worker: int) -> None:
        """Somebody emptied the prefix cache of that engine (B24)."""
        self._on_event(WorkerReset(self._clock(), worker))

    # -- by timers ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch the engines until cancelled.

        Raises:
            LaunchError: heartbeats cannot be listened for.
        """
        for slot in self._slots:
            self._say(slot)
        watches = [self._watch(slot) for slot in self._slots]
        listening = [] if self._listener is None else [self._listener.run(self._heard)]
        tasks = [asyncio.ensure_future(work) for work in (self._look(), *listening, *watches)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        """See who has left, and whether the file has changed."""
        while True:
            await asyncio.sleep(self.settings.look_s)
            now_s = self._clock()
            changed = self._registry.expire(now_s)
            found = await asyncio.to_thread(self._file.reread) if self._file is not None else None
            if found is not None:
                self._static, changed = members_of(found), True
            if changed or not self._is_settled:
                self._assign()

    def _heard(self, beat: Heartbeat) -> None:
        now_s = self._clock()
        if self._first_heard_s is None:
            self._first_heard_s = now_s
        if self._registry.heard(beat, now_s):
            self._assign()

    async def _watch(self, slot: Slot) -> None:
        """Scrape one engine, and probe it when that is due."""
        while True:
            if slot.member is not None:
                await self._scrape(slot)
                if self._is_probe_due(slot):
                    await self._try(slot)
            try:
                async with asyncio.timeout(self._pause_s(slot)):
                    await slot.wake.wait()
                await asyncio.sleep(self.settings.scrape_s / 20.0)  # failures come in bursts
            except TimeoutError:
                pass
            slot.wake.clear()

    def _pause_s(self, slot: Slot) -> float:
        return min(self.settings.scrape_s, max(0.0, slot.breaker.probe_at_s() - self._clock()))

    # -- scrapes -----------------------------------------------------------------------------------------------------

    async def _scrape(self, slot: Slot) -> None:
        member = slot.member
        try:
            async with asyncio.timeout(self.settings.scrape_limit_s):
                found = await scrape(self._control, slot.endpoint)
        except (NotReady, TimeoutError, ValueError) as error:  # ValueError: a page that is no metrics
            if slot.member is member and not isinstance(error.__cause__, httpx.HTTPStatusError):
                slot.maybe_new, slot.problem = True, str(error) or "no answer to a scrape in time"
            return
        if slot.member is member:
            self._on_scrape(slot, found)

    def _on_scrape(self, slot: Slot, found: EngineScrape) -> None:
        now_s = self._clock()
        if slot.has_restarted(found):
            self._begin(slot)
        elif slot.has_generated(found):
            slot.alive_s = now_s
        slot.maybe_new, slot.scraped, slot.start_s = False, found, found.engine_start_s
        usage, waiting = found.gauges.kv_cache_usage_ratio, found.gauges.n_waiting_for_capacity or 0.0
        if usage is not None and math.isfinite(usage + waiting):
            self._on_event(WorkerSnapshot(now_s, slot.worker, usage, round(waiting)))

    def _begin(self, slot: Slot) -> None:
        """Another process answers in this place: it holds nothing, and must generate before it gets turns."""
        slot.forget()
        self._on_event(WorkerReset(self._clock(), slot.worker))
        self._say(slot)
        slot.wake.set()

    # -- probes ------------------------------------------------------------------------------------------------------

    def _is_probe_due(self, slot: Slot) -> bool:
        now_s = self._clock()
        if not slot.breaker.is_closed:
            return now_s >= slot.breaker.probe_at_s()
        quiet_s = self.settings.scrape_s if slot.maybe_new else self.settings.probe_s
        return not slot.is_proven or now_s - slot.alive_s >= quiet_s

    async def _try(self, slot: Slot) -> None:
        member = slot.member
        slot.breaker.probing()
        problem = await self._probe(slot.endpoint)
        if slot.member is not member:
            return
        if problem is None:
            self._on_generation(slot)
        else:
            slot.problem = problem
            slot.is_trusted = slot.is_trusted and slot.is_proven
            slot.breaker.probe_failed(self._clock())
        self._say(slot)

    def _on_generation(self, slot: Slot) -> None:
        """It generates. If it could not be reached in between and does not tell when it started, it may hold nothing."""
        now_s = self._clock()
        if slot.maybe_new and slot.is_proven and slot.start_s is None:
            slot.maybe_new = False
            self._on_event(WorkerReset(now_s, slot.worker))
        slot.is_trusted = slot.is_proven = True
        slot.alive_s, slot.problem = now_s, None
        slot.breaker.probed(now_s)

    async def _ask(self, endpoint: Endpoint) -> str | None:
        return await failure_to_generate(self._client, endpoint, limit_s=self.settings.probe_limit_s)

    def _say(self, slot: Slot) -> None:
        """Tell the Ledger, if it does not know yet."""
        if slot.is_available != slot.said:
            slot.said = slot.is_available
            self._on_event(WorkerAvailability(self._clock(), slot.worker, slot.said))

    # -- places ------------------------------------------------------------------------------------------------------

    def _settle_static(self) -> None:
        """A file's engines take the places of their role in the file's order: a file says which is D0."""
        free = list(self._slots)
        for member in self._static:
            slot = next((slot for slot in free if slot.role is member.role), None)
            if slot is not None:
                free.remove(slot)
                slot.take(member)
                slot.is_trusted = True
        self._is_settled = not free

    def _assign(self) -> None:
        """Give places to whoever is there now. Engines keep theirs, once everybody had the time to say that he is there."""
        now_s = self._clock()
        static = {member.address: member for member in self._static}
        heard = {member.address: member for member in self._registry.members}
        told = {address: m for address, m in heard.items() if address not in static or m.role is static[address].role}
        members = tuple({**static, **told}.values())  # of a file's engine a heartbeat tells more
        held = {
            slot.endpoint.worker_id: slot.member.address
            for slot in self._slots
            if slot.member is not None and (self._is_settled or slot.member.address in static)
        }
        slots = [(slot.endpoint.worker_id, slot.role) for slot in self._slots]
        placed = place(members, slots, held)
        for slot in self._slots:
            self._give(slot, placed.get(slot.endpoint.worker_id))
        there = {member.address for member in placed.values()}
        self._spares = tuple(member for member in members if member.address not in there)
        self._engines = self._collect()
        waited = self._first_heard_s is not None and now_s - self._first_heard_s >= self.settings.settle_s
        self._is_settled = self._is_settled or waited or len(placed) == len(self._slots)

    def _give(self, slot: Slot, member: Member | None) -> None:
        before = slot.member
        if before is not None and member is not None:
            member = of_the_same(before, member)
        if member == before:
            return
        slot.take(member)
        if member is None:
            slot.is_trusted = False
            self._say(slot)
        elif before is None or is_other(before, member):
            self._begin(slot)

    def _collect(self) -> Engines:
        connector, lease_s, addrs = self._hand_off
        endpoints = tuple(slot.endpoint for slot in self._slots)
        return Engines(endpoints=endpoints, connector=connector, lease_s=lease_s, bootstrap_addrs=addrs)

    def _status_of(self, slot: Slot, now_s: float) -> dict[str, Any]:
        gauges = slot.scraped.gauges if slot.scraped is not None else None
        member = slot.member
        return {
            "worker_id": slot.endpoint.worker_id,
            "role": slot.role.value,
            "url": None if member is None else slot.endpoint.url,
            "engine_id": slot.endpoint.engine_id,
            "available": slot.is_available,
            "proven": slot.is_proven,
            "breaker": slot.breaker.state.value,
            "n_failures": slot.breaker.n_failures,
            "n_opened": slot.breaker.n_opened,
            "problem": slot.problem,
            "engine_start_unix_s": slot.start_s,
            "kv_usage_ratio": gauges.kv_cache_usage_ratio if gauges else None,
            "n_running": gauges.n_running if gauges else None,
            "n_waiting": gauges.n_waiting if gauges else None,
            "heartbeat_age_s": None if member is None else self._registry.silent_for_s(member.address, now_s),
        }


def _fitting(found: EndpointSet, topology: Topology) -> EndpointSet:
    """A file's engines, if they are what the topology needs."""
    found.serving(topology)
    return found


def _url(member: Member) -> str:
    return Endpoint(worker_id="", role=member.role, host=member.host, port=member.port).url
