"""The HTTP data path to engines: one asyncio protocol on httptools, for streamed and plain answers.

Bytes are stamped as they are read and parsed afterwards, once all sockets that were ready together have been stamped, so that one
stream's parsing is not another's latency. No retries, no connection cap, no redirects, no proxies. Connections are kept and used
again; an exchange that must not go on is ended by closing its connection at once, on which vLLM aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, cast

import httptools

from ppd_bench.engine.exchange import NO_LIMITS, Clock, Exchange, Flow, Limits, OnHead
from ppd_bench.engine.stream import CompletionReader, Failure, StreamOutcome

__all__ = ["COMPLETIONS", "NO_LIMITS", "Client", "Clock", "Flow", "Limits", "OnHead"]

COMPLETIONS = "/v1/completions"
FIRST_FINAL_STATUS = 200
"""Answers below it announce another one."""
MAX_IDLE_S = 2.0
"""Kept connections are used again within this time: uvicorn closes idle ones after 5 s, and a request that meets that is lost."""


class Client:
    """Sends requests from one event loop. Use as an async context manager, or call ``close``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.n_connections_opened = 0
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._arrived: list[tuple[_Connection, float, bytes]] = []
        self.loop = asyncio.get_running_loop()
        self._reaching: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connections. Exchanges under way are not touched."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    async def post(
        self,
        host: str,
        port: int,
        body: bytes,
        *,
        path: str = COMPLETIONS,
        request_id: str = "",
        headers: Mapping[str, str] | None = None,
        limits: Limits = NO_LIMITS,
        on_sent: Callable[[float], None] | None = None,
        on_head: OnHead | None = None,
        tap: Callable[[bytes], None] | None = None,
        flow: Flow | None = None,
        reader: type[CompletionReader] = CompletionReader,
        release_s: float = 0.0,
    ) -> StreamOutcome:
        """POST a JSON body and read the whole answer. Whatever goes wrong is in the outcome; nothing is raised.

        ``request_id`` goes into ``X-Request-Id``. ``on_sent`` is called when the request is written. For those who relay:
        ``on_head`` gets status and headers, ``tap`` the body's bytes as they arrive, ``flow`` can hold the answer up, and
        ``reader=RelayReader`` reads no more of a stream than they need. What ``on_head`` or ``tap`` raise is raised here.
        Cancelling the caller closes the connection at once; with ``release_s``, that long after the request was sent, and even a
        request that is still to be sent is sent. An answer that is whole by then is returned, and the caller cancelled at its
        next wait: P's answer holds a handle that D must be told of (ROUTER.md B9).
        """
        exchange = Exchange(self, limits, reader(), tap, on_head, flow, on_sent)
        request = _request(host, port, path, body, request_id, headers)
        left = False
        try:
            connection = self._kept(host, port)
            if connection is not None:
                connection.send(request, exchange)
            elif release_s > 0.0:
                await asyncio.shield(self._reach_in_background(host, port, limits, request, exchange))
            else:
                await self._reach(host, port, limits, request, exchange)
            return await exchange.future
        except asyncio.CancelledError:
            if exchange.has_answer:
                _cancel_later()
                return exchange.future.result()
            left = release_s > 0.0 and exchange.leave(release_s)
            raise
        finally:
            if not left:
                exchange.abandon()

    async def _reach(self, host: str, port: int, limits: Limits, request: bytes, exchange: Exchange) -> None:
        connection = await self._connect(host, port, limits, exchange)
        if connection is None:
            return
        if exchange.abandoned:
            connection.abort()
        else:
            connection.send(request, exchange)

    def _reach_in_background(
        self, host: str, port: int, limits: Limits, request: bytes, exchange: Exchange
    ) -> asyncio.Task[None]:
        task = self.loop.create_task(self._reach(host, port, limits, request, exchange))
        self._reaching.add(task)
        task.add_done_callback(self._reaching.discard)
        return task

    def _kept(self, host: str, port: int) -> _Connection | None:
        idle = self._idle.get((host, port), [])
        while idle:
            connection = idle.pop()
            if self.clock() - connection.idle_since_s <= MAX_IDLE_S and not connection.is_closing:
                return connection
            connection.abort()
        return None

    async def _connect(self, host: str, port: int, limits: Limits, exchange: Exchange) -> _Connection | None:
        within_s = min(limits.connect_s, limits.deadline_s - self.clock())
        try:
            async with asyncio.timeout(within_s):
                _, connection = await self.loop.create_connection(lambda: _Connection(self, (host, port)), host, port)
        except TimeoutError:
            late = Failure.TIMEOUT if self.clock() >= limits.deadline_s else Failure.UNREACHABLE
            exchange.finish((late, f"no connection to {host}:{port} within {within_s:.3g} s"))
            return None
        except OSError as error:
            exchange.finish((Failure.UNREACHABLE, f"no connection to {host}:{port}: {error.strerror or error}"))
            return None
        self.n_connections_opened += 1
        return connection

    def keep(self, connection: _Connection) -> None:
        """Take a connection back whose exchange ended well."""
        connection.idle_since_s = self.clock()
        self._idle.setdefault(connection.address, []).append(connection)

    def arrived(self, connection: _Connection, data: bytes) -> None:
        """Stamp now, parse when this round of the event loop has stamped everything."""
        if not self._arrived:
            self.loop.call_soon(self.parse_arrived)
        self._arrived.append((connection, self.clock(), data))

    def parse_arrived(self) -> None:
        """Parse what was stamped."""
        arrived, self._arrived = self._arrived, []
        for connection, now_s, data in arrived:
            connection.parse(data, now_s)


def _request(host: str, port: int, path: str, body: bytes, request_id: str, headers: Mapping[str, str] | None) -> bytes:
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"POST {path} HTTP/1.1", f"Host: {authority}", "Content-Type: application/json"]
    lines.append(f"Content-Length: {len(body)}")
    if request_id:
        lines.append(f"X-Request-Id: {request_id}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def _cancel_later() -> None:
    """Put the cancellation that the current task has just met off until its next wait."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
        task.cancel()


class _Connection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection with at most one exchange at a time."""

    def __init__(self, client: Client, address: tuple[str, int]) -> None:
        self.address = address
        self.idle_since_s = 0.0
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._headers: dict[str, str] = {}
        self._now_s = 0.0
        self._complete = False
        self._n_pieces = 0
        self._keep_alive = False
        self._reading = True
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # the parser's callback, once per chunk: no Python frame for it
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, request: bytes, exchange: Exchange) -> None:
        self._exchange = exchange
        if self._transport is not None:
            self._transport.write(request)
        exchange.sent(self)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._reading and not self.is_closing and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._reading and not self.is_closing and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()

    def let_go(self, reusable: bool) -> None:
        self._exchange = None
        self.resume()
        if reusable and not self.is_closing and self._keep_alive:
            self._client.keep(self)
        else:
            self.abort()

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._client.arrived(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.parse_arrived()
        self._transport = None
        # It refers to this object, and nothing is fed to it any more: without the cycle memory is free at once.
        self._parser = cast(httptools.HttpResponseParser, None)
        exchange = self._exchange
        if exchange is None:
            return
        if exc is None and exchange.reader.http_status is not None and self._ends_with_connection:
            exchange.reader.complete = True
            exchange.finish(None)
            return
        exchange.finish((Failure.DISCONNECTED, f"the connection closed before the answer was complete: {exc or 'EOF'}"))

    @property
    def _ends_with_connection(self) -> bool:
        return "content-length" not in self._headers and "transfer-encoding" not in self._headers

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def parse(self, data: bytes, now_s: float) -> None:
        exchange = self._exchange
        if exchange is None:  # an answer that nobody waits for any more
            self.abort()
            return
        self._now_s = now_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            exchange.fail(cast(Exception, error.__context__ or error))
            return
        except httptools.HttpParserError as error:
            self._pass_on(exchange)
            exchange.finish((Failure.MALFORMED, f"the answer cannot be read: {error.__context__ or error}"))
            return
        self._pass_on(exchange)
        if self._complete:
            self._complete = False
            exchange.reader.complete = True
            exchange.finish(None)

    def _pass_on(self, exchange: Exchange) -> None:
        pieces = self._pieces
        if self._complete:
            del pieces[self._n_pieces :]
        if not pieces:
            return
        try:
            exchange.on_pieces(pieces, self._now_s)
        except Exception as error:
            exchange.fail(error)
        finally:
            pieces.clear()

    def on_message_begin(self) -> None:
        if self._complete:  # bytes after an answer's end belong to nobody
            self._keep_alive = False
        else:
            self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._exchange is not None and not self._complete and status >= FIRST_FINAL_STATUS:
            self._exchange.on_head(status, self._headers, self._now_s)

    def on_message_complete(self) -> None:
        if self._complete or self._parser.get_status_code() < FIRST_FINAL_STATUS:
            return
        self._complete = True
        self._n_pieces = len(self._pieces)
        self._keep_alive = self._parser.should_keep_alive()
