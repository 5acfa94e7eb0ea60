"""One client connection: an asyncio protocol on httptools. Requests are answered one after another, in their order.

A handler runs in a task of its own, which is cancelled as soon as the client's connection is lost (ROUTER.md B9, B10). The end
of a client's sending side counts as that too, as it does with uvicorn: nothing else tells of a client that has closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from ppd_bench.router.http_request import HttpRequest, Refusal, error_body
from ppd_bench.router.responder import Responder

Handler = Callable[[HttpRequest, Responder], Awaitable[None]]
"""Answers one request. Cancelled when the client goes before the answer is finished."""

Clock = Callable[[], float]
"""Seconds on a monotonic clock."""

NEVER_S = float("inf")
JSON_HEADERS = (("content-type", "application/json"),)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HIGH_WATER_BYTES = 256 * 1024
"""Unsent bytes of an answer from which its client counts as slow."""
AHEAD_BYTES = 256 * 1024
"""Bytes of whole requests sent ahead (pipelined) from which reading pauses until their turn has come."""
REQUEST_BYTES = 1024
"""What a waiting request counts for beside its headers and body."""
LINGER_S = 2.0
"""How long a refused client may go on sending. A close with bytes unread would be a reset, which may eat the refusal."""
UPGRADE_HEADERS = frozenset({"upgrade", "connection", "http2-settings"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may do. ``head_timeout_s``/``body_timeout_s``: for a whole head and a whole body, from their first byte.

    ``idle_timeout_s``: between requests. ``stall_timeout_s``: how long a client may leave an answer unread while we wait for it.
    ``max_head_bytes`` bounds request line and headers, ``max_body_bytes`` the body (and, chunked, its framing with it).
    """

    max_head_bytes: int
    max_body_bytes: int
    head_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: float
    stall_timeout_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Serving:
    """What all connections of a server share."""

    handler: Handler
    clock: Clock
    limits: HttpLimits
    loop: asyncio.AbstractEventLoop
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    n_refused: Counter[int] = field(default_factory=Counter)
    draining: bool = False


class Connection(asyncio.Protocol):
    """See the module. ``due_s`` is when it is given up as things stand; the server looks at it from time to time."""

    def __init__(self, serving: Serving) -> None:
        self.due_s = serving.clock() + serving.limits.head_timeout_s
        self.responder: Responder | None = None
        self.write: Callable[[bytes], None] = _drop
        self._serving = serving
        self._limits = serving.limits
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[HttpRequest, bool, bool] | Refusal] = deque()
        self._n_ahead_bytes = 0
        self._deaf = False
        self._refused = False
        self._reading_paused = False
        self._stalled_s = NEVER_S
        self._peer: str | None = None
        self._reset()

    def _reset(self) -> None:
        """Before the first byte of a request."""
        self._open = False
        self._head_done = False
        self._owes_continue = False
        self._upgrading = False
        self._n_raw_bytes = 0
        self._n_body_bytes = 0
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._pieces: list[bytes] = []

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.write = self._transport.write
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._serving.connections.add(self)
        if self._serving.draining:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._n_raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(
                400,
                f"the request is not HTTP/1.1: {error.__context__ or error}; send it anew in a connection of its own",
            )
        if self._open and not self._deaf:
            self._check_size()

    def eof_received(self) -> None:
        if self._task is not None and self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._transport = None
        self.write = _drop
        # It refers to this object, and nothing is fed to it any more: without the cycle memory is free at once.
        self._parser = cast(httptools.HttpRequestParser, None)
        self._waiting.clear()
        self._serving.connections.discard(self)
        if self.responder is not None:
            self.responder.lose()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def pause_writing(self) -> None:
        self._stalled_s = self._serving.clock()
        if self.responder is not None:
            self.responder.press()

    def resume_writing(self) -> None:
        self._stalled_s = NEVER_S
        if self.responder is not None:
            self.responder.relieve()

    # -- Channel -----------------------------------------------------------------------------------------------------

    def soon(self, action: Callable[[], None]) -> None:
        self._serving.loop.call_soon(action)

    def answered(self, *, keep: bool) -> None:
        self.responder = self._task = None
        if not keep or self._serving.draining:
            self._close()
            return
        self.due_s = self._serving.clock() + self._next_timeout_s()
        if self._waiting:
            self._begin(self._waiting.popleft())
        if self._owes_continue and self.responder is None:
            self._send_continue()
        if self._reading_paused and not self._is_far_ahead():
            self._reading_paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    def break_off(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- for the server ----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received or answered."""
        return self.responder is None and not self._open and not self._refused

    @property
    def has_unsent(self) -> bool:
        """Whether bytes of an answer have not left yet."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def give_up_when_due(self, now_s: float) -> None:
        """End what has taken too long."""
        if now_s - self._stalled_s > self._limits.stall_timeout_s:
            self.break_off()
        elif self.responder is not None or now_s < self.due_s:
            return
        elif self._open and not self._deaf:
            what = "its body" if self._head_done else "its headers"
            self._refuse(408, f"the request took too long: {what} did not arrive in time; send it at once")
        else:
            self.break_off()

    def close_soon(self) -> None:
        """Serve no further request: close now where idle, else after the answer under way."""
        if self.responder is not None:
            self.responder.close_after()
        elif self.is_idle:
            self._close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _next_timeout_s(self) -> float:
        if not self._open:
            return self._limits.idle_timeout_s
        return self._limits.body_timeout_s if self._head_done else self._limits.head_timeout_s

    def _enqueue(self, item: tuple[HttpRequest, bool, bool] | Refusal) -> None:
        if self.responder is None and not self._waiting:
            self._begin(item)
            return
        self._waiting.append(item)
        if not isinstance(item, Refusal):
            headers = item[0].headers
            self._n_ahead_bytes += REQUEST_BYTES + len(item[0].body) + sum(len(k) + len(v) for k, v in headers)
        if self._is_far_ahead() and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _is_far_ahead(self) -> bool:
        if not self._waiting:
            self._n_ahead_bytes = 0
        return self._n_ahead_bytes > AHEAD_BYTES

    def _begin(self, item: tuple[HttpRequest, bool, bool] | Refusal) -> None:
        if isinstance(item, Refusal):
            self._answer_refusal(item)
            return
        request, version_1_1, keep = item
        serving = self._serving
        keep = keep and not serving.draining
        self.responder = responder = Responder(self, method=request.method, version_1_1=version_1_1, keep=keep)
        if self._stalled_s != NEVER_S:
            responder.pressed = True
        self._task = task = serving.loop.create_task(self._run(request, responder))
        serving.tasks.add(task)
        task.add_done_callback(serving.tasks.discard)

    async def _run(self, request: HttpRequest, responder: Responder) -> None:
        try:
            await self._serving.handler(request, responder)
        except asyncio.CancelledError:
            if self._serving.draining and not responder.started and not responder.gone:
                responder.close_after()
                responder.send(
                    503, JSON_HEADERS, error_body(503, "the router is stopping; send the request to another")
                )
            raise
        except Exception as error:
            self._serving.loop.call_exception_handler(
                {"message": f"the handler of {request!r} raised", "exception": error, "protocol": self}
            )
        finally:
            if not responder.finished and not responder.gone:
                self._end_badly(responder)

    def _end_badly(self, responder: Responder) -> None:
        """The handler left its answer unfinished: it raised, was cancelled, or forgot."""
        if responder.started:
            self.break_off()
            return
        responder.close_after()
        responder.send(500, JSON_HEADERS, error_body(500, "the router failed at this request; its log says why"))

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        if self._deaf:
            return
        self._deaf = True
        self._open = False
        self._pieces = []
        self._enqueue(Refusal(status, message))

    def _answer_refusal(self, refusal: Refusal) -> None:
        responder = Responder(self, method="", version_1_1=True, keep=False)
        self._refused = True
        self._serving.n_refused[refusal.status] += 1
        responder.send(refusal.status, JSON_HEADERS, error_body(refusal.status, refusal.message))

    def _close(self) -> None:
        """Close when everything is written; after a refusal only the sending side, for a moment."""
        transport = self._transport
        if transport is None:
            return
        self._deaf = True
        lingers = self._refused and transport.can_write_eof()
        self.due_s = self._serving.clock() + (LINGER_S if lingers else self._limits.stall_timeout_s)
        if lingers:
            transport.write_eof()
        else:
            transport.close()

    def _check_size(self) -> None:
        limits = self._limits
        if not self._head_done:
            if self._n_raw_bytes > limits.max_head_bytes:
                self._refuse(431, _head_too_long(limits))
        elif self._n_raw_bytes > limits.max_head_bytes + limits.max_body_bytes:
            self._refuse_body()

    def _refuse_body(self) -> None:
        self._refuse(413, _too_long(self._limits))

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        n_raw_bytes = self._n_raw_bytes
        self._reset()
        self._open = True
        self._n_raw_bytes = n_raw_bytes
        self.due_s = self._serving.clock() + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # else a trailer, which must not become a header
            self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1").rstrip(" \t")))

    def on_headers_complete(self) -> None:
        self._upgrading = self._parser.should_upgrade()
        if self._upgrading or self._deaf:
            return
        self._head_done = True
        problem = self._problem_of_head()
        if problem is not None:
            self._refuse(problem.status, problem.message)
            return
        self.due_s = self._serving.clock() + self._limits.body_timeout_s

    def _problem_of_head(self) -> Refusal | None:
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            return Refusal(505, f"HTTP/{version} is not spoken here; use HTTP/1.1")
        found: dict[str, str] = {}
        n_hosts = n_bytes = 0
        for name, value in self._headers:
            n_bytes += len(name) + len(value) + 4
            n_hosts += name == "host"
            if name in _CHECKED:
                found[name] = value
        if n_bytes + len(self._url) > self._limits.max_head_bytes:
            return Refusal(431, _head_too_long(self._limits))
        if n_hosts > 1 or (n_hosts == 0 and version == "1.1"):
            return Refusal(400, "an HTTP/1.1 request needs one Host header")
        return self._problem_of_framing(found, version) if found else None

    def _problem_of_framing(self, found: dict[str, str], version: str) -> Refusal | None:
        coding, length, expect = (found.get(name) for name in _CHECKED)
        if coding is not None and (version == "1.0" or length is not None):
            return Refusal(
                400, "Transfer-Encoding belongs to HTTP/1.1 and never beside Content-Length; send one of the two"
            )
        if coding is not None and coding.strip().lower() != "chunked":
            return Refusal(
                501, "only the transfer coding 'chunked' is understood; send the body so, or with Content-Length"
            )
        if length is not None and int(length) > self._limits.max_body_bytes:
            return Refusal(413, _too_long(self._limits))
        if expect is not None and version == "1.1":
            if expect.strip().lower() != "100-continue":
                return Refusal(417, "only the expectation '100-continue' can be met; leave the Expect header out")
            self._owes_continue = coding is not None or (length is not None and int(length) > 0)
            if self._owes_continue and self.responder is None:
                self._send_continue()
        return None

    def _send_continue(self) -> None:
        self._owes_continue = False
        self.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._n_body_bytes += len(body)
        if self._n_body_bytes > self._limits.max_body_bytes:
            self._refuse_body()
        else:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._upgrading or self._deaf:
            return
        parser = self._parser
        keep = parser.should_keep_alive()
        path, query = _target(self._url)
        request = HttpRequest(
            method=parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=tuple(self._headers),
            body=self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces),
            peer=self._address(),
        )
        version_1_1 = parser.get_http_version() == "1.1"
        self._reset()
        self._deaf = not keep  # what follows a last request is nobody's
        self._enqueue((request, version_1_1, keep))

    def _address(self) -> str:
        if self._peer is None:
            name = self._transport.get_extra_info("peername") if self._transport is not None else None
            self._peer = str(name[0]) if name else ""
        return self._peer

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read a request that offers another protocol (Java's client offers HTTP/2 with every first one) as if it did not.

        The parser stops at such a head and takes the body for the other protocol's, so a fresh one reads the head anew.
        """
        method = self._parser.get_method().decode("latin-1")
        if method == "CONNECT" or self._deaf:
            self._refuse(405, "this is no forward proxy: CONNECT is not served")
            return
        lines = [f"{method} {self._url.decode('latin-1')} HTTP/{self._parser.get_http_version()}"]
        lines += [f"{name}: {value}" for name, value in self._headers if name not in UPGRADE_HEADERS]
        self._parser = httptools.HttpRequestParser(self)
        self._open = False
        self.data_received(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + rest)


def _too_long(limits: HttpLimits) -> str:
    return f"the body exceeds {limits.max_body_bytes} bytes; send a shorter prompt, or raise the router's limit"


def _head_too_long(limits: HttpLimits) -> str:
    return f"request line and headers exceed {limits.max_head_bytes} bytes; send less in headers"


def _drop(data: bytes) -> None:
    """Write to a connection that is not there."""


_CHECKED = ("transfer-encoding", "content-length", "expect")


def _target(url: bytes) -> tuple[str, str]:
    """Path and query of a request's target, whichever form it has."""
    if not url.startswith(b"/"):
        parts = httptools.parse_url(url) if b"://" in url else None
        if parts is not None:
            return (parts.path or b"/").decode("latin-1"), (parts.query or b"").decode("latin-1")
    path, _, query = url.decode("latin-1").partition("?")
    return path, query
