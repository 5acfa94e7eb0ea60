"""One answer, written to the client as it comes: framing, backpressure, and what there is to know of the client's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol

from ppd_bench.router.http_request import FRAMING, HOP_BY_HOP

_SET_BY_US = FRAMING | HOP_BY_HOP
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_BODILESS = frozenset({HTTPStatus.NO_CONTENT.value, HTTPStatus.NOT_MODIFIED.value})
LAST_CHUNK = b"0\r\n\r\n"


class Channel(Protocol):
    """What an answer needs of its connection."""

    def write(self, data: bytes) -> None:
        """Hand bytes to the transport at once."""
        ...

    def soon(self, action: Callable[[], None]) -> None:
        """Have something done in the next round of the event loop."""
        ...

    def answered(self, *, keep: bool) -> None:
        """The answer is whole (``keep``: the connection may serve on)."""
        ...

    def break_off(self) -> None:
        """End the connection so that the client sees that the answer is not whole."""
        ...


class Responder:
    """Writes one answer. Everything is silently dropped once the client has ``gone``, so that a handler may simply end.

    ``started``: the status line is written. ``finished``: the answer is whole. ``gone``: the client's connection is lost.
    ``pressed``: the client reads more slowly than we write; more than the transport's high-water mark waits to be sent.
    """

    __slots__ = (
        "_channel",
        "_chunked",
        "_held_head",
        "_keep",
        "_left",
        "_on_pressed",
        "_on_relieved",
        "_version_1_1",
        "_waiting",
        "_without_body",
        "_write",
        "finished",
        "gone",
        "n_body_bytes",
        "pressed",
        "started",
    )

    def __init__(self, channel: Channel, *, method: str, version_1_1: bool, keep: bool) -> None:
        self.started = False
        self.finished = False
        self.gone = False
        self.pressed = False
        self.n_body_bytes = 0
        self._channel = channel
        self._write = channel.write
        self._version_1_1 = version_1_1
        self._keep = keep
        self._without_body = method == "HEAD"
        self._chunked = False
        self._left: int | None = None
        self._held_head = b""
        self._waiting: asyncio.Future[None] | None = None
        self._on_pressed: Callable[[], None] | None = None
        self._on_relieved: Callable[[], None] | None = None

    # -- for handlers ------------------------------------------------------------------------------------------------

    def start(self, status: int, headers: Sequence[tuple[str, str]], *, length: int | None = None) -> None:
        """Write status and headers. ``length``: bytes of the body; null: chunked (HTTP/1.0: until the connection closes).

        They leave with the body's first piece, in one system call, where that is written at once; else in the loop's next round.
        Headers that frame the message or speak of a connection are set here; those given are ignored.

        Raises:
            ValueError: a header cannot be written (a line break in it, or a character beyond Latin-1).
            RuntimeError: the answer has been started before.
        """
        if self.started:
            raise RuntimeError("the answer has been started already")
        head = self._head(status, headers, length)
        self.started = True
        if not self.gone:
            self._held_head = head
            self._channel.soon(self._release_head)

    def write(self, piece: bytes) -> None:
        """Write a piece of the body to the transport at once. It is one chunk where the answer is chunked.

        Raises:
            RuntimeError: not started, finished, or more than the length that was announced.
        """
        n = len(piece)
        if self.gone or not n:
            return
        if self.finished or not self.started:
            raise RuntimeError("a piece of a body belongs between start and finish")
        self.n_body_bytes += n
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (n, piece)
        elif self._without_body:
            return
        else:
            self._count_down(n)
        if self._held_head:
            head, self._held_head = self._held_head, b""
            piece = head + piece
        self._write(piece)

    def finish(self) -> None:
        """The body is whole. A body shorter than announced ends the connection instead: the client must not take it for whole."""
        if self.finished:
            return
        if not self.started:
            raise RuntimeError("an answer must be started before it can be finished")
        self.finished = True
        if self.gone:
            return
        self._release_head()
        if self._left and not self._without_body:
            self._channel.break_off()
            return
        if self._chunked:
            self._write(LAST_CHUNK)
        self._channel.answered(keep=self._keep)

    def send(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """A whole answer in one write."""
        if self.started:
            raise RuntimeError("the answer has been started already")
        head = self._head(status, headers, len(body))
        self.started = self.finished = True
        if self.gone:
            return
        if self._without_body:
            self._write(head)
        else:
            self.n_body_bytes = len(body)
            self._write(head + body)
        self._channel.answered(keep=self._keep)

    async def drained(self) -> None:
        """Wait while more than the transport's high-water mark is unsent. Returns at once when the client has gone."""
        if not self.pressed or self.gone:
            return
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._waiting)

    def on_pressure(self, pressed: Callable[[], None], relieved: Callable[[], None]) -> None:
        """Have one called when the client falls behind, the other when it has caught up: to pause a source and let it go on."""
        self._on_pressed, self._on_relieved = pressed, relieved
        if self.pressed:
            pressed()

    # -- for the connection ------------------------------------------------------------------------------------------

    def close_after(self) -> None:
        """The connection will close after this answer."""
        self._keep = False

    def press(self) -> None:
        self.pressed = True
        if self._on_pressed is not None:
            self._on_pressed()

    def relieve(self) -> None:
        self.pressed = False
        self._wake()
        if self._on_relieved is not None:
            self._on_relieved()

    def lose(self) -> None:
        self.gone = True
        self._wake()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _release_head(self) -> None:
        head, self._held_head = self._held_head, b""
        if head and not self.gone:
            self._write(head)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _count_down(self, n: int) -> None:
        if self._left is None:
            return
        if n > self._left:
            self._channel.break_off()
            raise RuntimeError(f"the body is longer than announced, by {n - self._left} bytes")
        self._left -= n

    def _head(self, status: int, headers: Sequence[tuple[str, str]], length: int | None) -> bytes:
        if status in _BODILESS:
            self._without_body, framing = True, ""
        elif length is not None:
            self._left, framing = length, f"content-length: {length}\r\n"
        elif self._version_1_1:
            self._chunked, framing = not self._without_body, "transfer-encoding: chunked\r\n"
        else:
            self._keep, framing = False, ""
        if not self._keep:
            framing += "connection: close\r\n"
        elif not self._version_1_1:
            framing += "connection: keep-alive\r\n"
        lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in _SET_BY_US]
        head = (_STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n") + "".join(lines) + framing
        if head.count("\n") != len(lines) + 1 + framing.count("\n") or head.count("\r") != head.count("\n"):
            raise ValueError("a header of the answer holds a line break")
        return (head + "\r\n").encode("latin-1")
