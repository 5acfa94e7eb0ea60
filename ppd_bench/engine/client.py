"""The HTTP data path to engines: one asyncio protocol on httptools, for streamed and plain answers.

Bytes are stamped as they are read and parsed afterwards, once all sockets that were ready together have been stamped, so that one
stream's parsing is not another's latency. No retries, no connection cap, no redirects, no proxies. Connections are kept and used
again; an exchange that must not go on is ended by closing its connection at once, on which vLLM aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

import httptools

from ppd_bench.engine.stream import CompletionReader, Failure, StreamOutcome

Clock = Callable[[], float]
"""Seconds on a monotonic clock."""

COMPLETIONS = "/v1/completions"
MAX_IDLE_S = 2.0
"""Kept connections are used again within this time: uvicorn closes idle ones after 5 s, and a request that meets that is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When an exchange is given up. ``deadline_s`` is an instant on the client's clock, the others are durations.

    ``first_byte_s``: from sending to the first byte of the answer. ``idle_s``: longest silence after that (GLOSSARY: timeout).
    """

    deadline_s: float = float("inf")
    connect_s: float = 10.0
    first_byte_s: float = float("inf")
    idle_s: float = float("inf")


NO_LIMITS = Limits()


class Client:
    """Sends requests from one event loop. Use as an async context manager, or call ``close``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.n_connections_opened = 0
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._arrived: list[tuple[_Connection, float, bytes]] = []
        self._loop = asyncio.get_running_loop()
        self._left: set[asyncio.Task[StreamOutcome]] = set()

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
        tap: Callable[[bytes], None] | None = None,
    ) -> StreamOutcome:
        """POST a JSON body and read the whole answer. Whatever goes wrong is in the outcome; nothing is raised.

        ``request_id`` goes into ``X-Request-Id``. ``on_sent`` is called when the request is written, ``tap`` gets the
        body's bytes as they arrive, for those who relay them.
        Cancelling the caller closes the connection at once.
        """
        exchange = _Exchange(self, limits, tap)
        connection = self._kept(host, port) or await self._connect(host, port, limits, exchange)
        if connection is not None:
            connection.send(_request(host, port, path, body, request_id, headers), exchange)
            if on_sent is not None:
                on_sent(self.clock())
        try:
            return await exchange.future
        finally:
            exchange.abandon()

    def leave(self, exchange: asyncio.Task[StreamOutcome], within_s: float) -> None:
        """Let an exchange that nobody waits for go on for so long, then close its connection."""
        if within_s <= 0.0:
            exchange.cancel()
            return
        self._left.add(exchange)
        exchange.add_done_callback(self._left.discard)
        self._loop.call_later(within_s, exchange.cancel)

    def _kept(self, host: str, port: int) -> _Connection | None:
        idle = self._idle.get((host, port), [])
        while idle:
            connection = idle.pop()
            if self.clock() - connection.idle_since_s <= MAX_IDLE_S and not connection.is_closing:
                return connection
            connection.abort()
        return None

    async def _connect(self, host: str, port: int, limits: Limits, exchange: _Exchange) -> _Connection | None:
        within_s = min(limits.connect_s, limits.deadline_s - self.clock())
        try:
            async with asyncio.timeout(within_s):
                _, connection = await self._loop.create_connection(lambda: _Connection(self, (host, port)), host, port)
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
            self._loop.call_soon(self.parse_arrived)
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


class _Exchange:
    """One request and its answer."""

    def __init__(self, client: Client, limits: Limits, tap: Callable[[bytes], None] | None) -> None:
        self.reader = CompletionReader()
        self.tap = tap
        self.future: asyncio.Future[StreamOutcome] = asyncio.get_running_loop().create_future()
        self._client = client
        self._limits = limits
        self._connection: _Connection | None = None
        self._sent_s: float | None = None
        self._last_byte_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def sent(self, connection: _Connection) -> None:
        self._connection = connection
        self._sent_s = self._last_byte_s = self._client.clock()
        self._watch()

    def on_body(self, piece: bytes, now_s: float) -> None:
        self._last_byte_s = now_s
        self.reader.on_body(piece, now_s)
        if self.tap is not None:
            self.tap(piece)

    def _due(self) -> tuple[float, str]:
        """When this exchange is given up as things stand, and what to say then."""
        limits = self._limits
        if self.reader.first_byte_s is None:
            silence_s, what = limits.first_byte_s, "no byte of an answer"
        else:
            silence_s, what = limits.idle_s, "no further byte"
        if self._last_byte_s + silence_s < limits.deadline_s:
            return self._last_byte_s + silence_s, f"{what} for {silence_s:g} s"
        return limits.deadline_s, "the answer did not end before its deadline"

    def _watch(self) -> None:
        due_s, message = self._due()
        if due_s == float("inf"):
            return
        left_s = due_s - self._client.clock()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._on_timer)
        else:
            self.finish((Failure.TIMEOUT, message))

    def _on_timer(self) -> None:
        self._client.parse_arrived()
        if not self.future.done():
            self._watch()

    def finish(self, broken: tuple[Failure, str] | None) -> None:
        """End the exchange; where it is ``broken``, its connection is closed."""
        if self.future.done():
            return
        now_s = self._client.clock()
        last_token_s = self.reader.last_token_s
        if broken is None and last_token_s is not None and last_token_s > self._limits.deadline_s:
            broken = (Failure.TIMEOUT, "the last token came after the deadline")
        self.future.set_result(self.reader.outcome(sent_s=self._sent_s, end_s=now_s, broken=broken))
        self._release(reusable=broken is None)

    def abandon(self) -> None:
        """The caller has gone or has its answer: nothing may go on in the background."""
        if not self.future.done():
            self.future.cancel()
        self._release(reusable=False)

    def _release(self, *, reusable: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.let_go(reusable)


class _Connection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection with at most one exchange at a time."""

    def __init__(self, client: Client, address: tuple[str, int]) -> None:
        self.address = address
        self.idle_since_s = 0.0
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._now_s = 0.0

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, request: bytes, exchange: _Exchange) -> None:
        self._exchange = exchange
        if self._transport is not None:
            self._transport.write(request)
        exchange.sent(self)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def let_go(self, reusable: bool) -> None:
        self._exchange = None
        if reusable and not self.is_closing and self._parser.should_keep_alive():
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
        if self._exchange is None:  # an answer that nobody waits for any more
            self.abort()
            return
        self._now_s = now_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._exchange is not None:
                self._exchange.finish((Failure.MALFORMED, f"the answer cannot be read: {error.__context__ or error}"))

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.reader.on_head(self._parser.get_status_code(), self._headers, self._now_s)

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_body(body, self._now_s)

    def on_message_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.reader.complete = True
            self._exchange.finish(None)
