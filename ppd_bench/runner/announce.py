"""``ppd-bench announce``: heartbeats for an engine that sends none itself, for as long as it answers (paper, B.4)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import NotReady, SpecError
from ppd_bench.engine.control import control_client
from ppd_bench.engine.endpoints import URL_ALLOWED, Endpoint
from ppd_bench.engine.metrics import scrape
from ppd_bench.router.discovery import HEARTBEAT_S, ROLES, Address, read_address, send_heartbeats

LOOK_LIMIT_S = 5.0
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceOptions:
    """What the command line says. ``router``: where it listens for heartbeats, HOST:PORT. ``url``: as the router reaches it."""

    router: str
    role: str
    url: str
    engine_id: str | None = None
    token: str = ""
    every_s: float = HEARTBEAT_S


def announce(options: AnnounceOptions, *, tell: Tell) -> None:
    """Announce until SIGTERM or Ctrl-C, and say goodbye then.

    Raises:
        SpecError: an argument that cannot be used; all of them at once.
        LaunchError: the packages pyzmq and msgpack are missing.
    """
    asyncio.run(_announce(options, *_checked(options), tell))


def _checked(options: AnnounceOptions) -> tuple[Address, Address]:
    router, engine = read_address(options.router), read_address(options.url)
    problems = []
    if router is None:
        problems.append(f"command line: the router's address must be HOST:PORT, got {options.router!r}; such as "
                        "127.0.0.1:30001")  # fmt: skip
    if options.role not in ROLES:
        problems.append(f"command line: --role {options.role!r} is not known; allowed: {', '.join(ROLES)} (pD is a D)")
    if engine is None:
        problems.append(f"command line: --url is not an engine's address, got {options.url!r}; allowed: {URL_ALLOWED}")
    if router is None or engine is None or problems:
        raise SpecError(problems)
    return router, engine


async def _announce(options: AnnounceOptions, router: Address, engine: Address, tell: Tell) -> None:
    beat: dict[str, Any] = {"type": options.role, "http_address": options.url}
    if options.engine_id is not None:
        beat["engine_id"] = options.engine_id
    if options.token:
        beat["token"] = options.token
    tell(f"announcing {options.role} at {options.url} to {options.router} every {options.every_s:g} s")
    async with control_client(LOOK_LIMIT_S) as control:
        look = _Look(control, ROLES[options.role], engine, tell)
        await _until_signal(send_heartbeats(router, beat, every_s=options.every_s, look=look))
    tell("stopped; the router was told that the engine is leaving")


class _Look:
    """Whether the engine answers, and since when its process runs. Changes are told once."""

    def __init__(self, control: httpx.AsyncClient, role: Role, address: Address, tell: Tell) -> None:
        host, port = address
        self._endpoint = Endpoint(worker_id=role.value, role=role, host=host, port=port)
        self._control, self._tell = control, tell
        self._was_there: bool | None = None

    async def __call__(self) -> Mapping[str, Any] | None:
        try:
            found = await scrape(self._control, self._endpoint)
        except (NotReady, ValueError) as error:
            self._note(False, f"no heartbeats until the engine answers: {error}")
            return None
        self._note(True, "the engine answers; heartbeats are sent")
        return {} if found.engine_start_s is None else {"start_time": found.engine_start_s}

    def _note(self, there: bool, line: str) -> None:
        if there != self._was_there:
            self._was_there = there
            self._tell(line)


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run something until SIGTERM or Ctrl-C, which are its clean end."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
