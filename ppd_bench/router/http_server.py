"""An HTTP/1 server for a relay: asyncio (uvloop's loop where it runs), httptools, one handler task per request.

Chosen by measurement over server frameworks; see DESIGN.md. It binds, watches the clock for slow clients, and drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from ssl import SSLContext

from ppd_bench.core.errors import EngineError
from ppd_bench.router.http_connection import Clock, Connection, Handler, HttpLimits, Serving
from ppd_bench.router.http_request import Headers, HttpRequest, end_to_end_headers, error_body
from ppd_bench.router.responder import Responder

__all__ = [
    "Handler",
    "Headers",
    "HttpRequest",
    "HttpServer",
    "Responder",
    "end_to_end_headers",
    "error_body",
]

BACKLOG = 4096
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024
DRAIN_LOOK_S = 0.01
LOOKS_PER_TIMEOUT = 4
"""Timeouts are seen by a sweep over all connections, this many times per shortest timeout: cheaper than a timer per request."""


class HttpServer:
    """Serves one handler on any number of addresses."""

    def __init__(
        self,
        handler: Handler,
        *,
        clock: Clock,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_head_bytes: int = MAX_HEAD_BYTES,
        head_timeout_s: float = 10.0,
        body_timeout_s: float = 60.0,
        idle_timeout_s: float = 75.0,
        stall_timeout_s: float = 60.0,
    ) -> None:
        self._limits = HttpLimits(
            max_head_bytes=max_head_bytes,
            max_body_bytes=max_body_bytes,
            head_timeout_s=head_timeout_s,
            body_timeout_s=body_timeout_s,
            idle_timeout_s=idle_timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
        self._serving = Serving(handler=handler, clock=clock, limits=self._limits, loop=asyncio.get_running_loop())
        self._listeners: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def n_open_requests(self) -> int:
        """Requests whose handler runs."""
        return len(self._serving.tasks)

    @property
    def n_refused(self) -> Mapping[int, int]:
        """Requests that were answered before any handler saw them, by status."""
        return self._serving.n_refused

    @property
    def n_connections(self) -> int:
        return len(self._serving.connections)

    async def start(self, host: str, port: int, *, ssl: SSLContext | None = None) -> int:
        """Listen; returns the port, which the system chooses where ``port`` is 0.

        Raises:
            EngineError: the address cannot be bound.
        """
        handshake_s = None if ssl is None else self._limits.head_timeout_s
        try:
            listener = await self._serving.loop.create_server(
                lambda: Connection(self._serving),
                host,
                port,
                backlog=BACKLOG,
                ssl=ssl,
                ssl_handshake_timeout=handshake_s,
            )
        except OSError as error:
            raise EngineError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
            ) from error
        self._listeners.append(listener)
        if self._sweep is None:
            self._arm()
        return int(listener.sockets[0].getsockname()[1])

    def stop_accepting(self) -> None:
        """Close the listening sockets; open connections go on."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def drain(self, within_s: float) -> bool:
        """Let the answers under way finish and reach their clients, for so long, then cut what is left. True when all finished.

        Handlers that have answered may still do their bookkeeping in that time. Idle connections are closed at once.
        """
        self.stop_accepting()
        serving = self._serving
        serving.draining = True
        end_s = serving.clock() + within_s
        for connection in list(serving.connections):
            connection.close_soon()
        while self._is_busy() and serving.clock() < end_s:
            await asyncio.sleep(DRAIN_LOOK_S)
        all_finished = not self._is_busy()
        await self._cut()
        return all_finished

    def _is_busy(self) -> bool:
        return bool(self._serving.tasks) or any(connection.has_unsent for connection in self._serving.connections)

    async def _cut(self) -> None:
        """Cancel what runs, and end every connection."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        tasks = list(self._serving.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in list(self._serving.connections):
            connection.break_off()
        await asyncio.sleep(0)  # connection_lost is called in the next round of the loop

    def _arm(self) -> None:
        limits = self._limits
        shortest_s = min(limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s, limits.stall_timeout_s)
        self._sweep = self._serving.loop.call_later(min(1.0, shortest_s / LOOKS_PER_TIMEOUT), self._look)

    def _look(self) -> None:
        now_s = self._serving.clock()
        for connection in list(self._serving.connections):
            connection.give_up_when_due(now_s)
        self._arm()
