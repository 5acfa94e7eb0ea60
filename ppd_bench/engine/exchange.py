"""One request to an engine and its answer, from sending to its end: deadlines, tap, backpressure, and who may still be waiting.

No sockets here: a connection feeds an exchange (``Link``), and a client owns it (``Owner``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from ppd_bench.engine.stream import CompletionReader, Failure, StreamOutcome

Clock = Callable[[], float]
"""Seconds on a monotonic clock."""

OnHead = Callable[[int, Mapping[str, str]], None]
"""Gets an answer's status and headers (names in lower case)."""


class Limits(NamedTuple):
    """When an exchange is given up. ``deadline_s`` is an instant on the client's clock, the others are durations.

    ``first_byte_s``: from sending to the first byte of the answer. ``idle_s``: longest silence after that (GLOSSARY: timeout).
    """

    deadline_s: float = float("inf")
    connect_s: float = 10.0
    first_byte_s: float = float("inf")
    idle_s: float = float("inf")


NO_LIMITS = Limits()


class Link(Protocol):
    """The connection that carries an exchange."""

    def pause(self) -> None:
        """Read no more."""
        ...

    def resume(self) -> None:
        """Read on."""
        ...

    def let_go(self, reusable: bool) -> None:
        """The exchange is over; a connection that is not ``reusable`` is closed."""
        ...


class Owner(Protocol):
    """What an exchange needs of its client."""

    loop: asyncio.AbstractEventLoop
    clock: Clock

    def parse_arrived(self) -> None:
        """Parse the bytes that have been stamped."""
        ...


class Flow:
    """Lets whoever relays an answer hold up its source while the receiver is slow: bytes then wait in the kernel and at the
    engine.

    One per request, whatever connections it comes to use. While ``paused``, silence is not the engine's: only the deadline
    counts.
    """

    __slots__ = ("_exchange", "paused")

    def __init__(self) -> None:
        self.paused = False
        self._exchange: Exchange | None = None

    def pause(self) -> None:
        """Read no more from the engine."""
        self.paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        """Read on."""
        self.paused = False
        if self._exchange is not None:
            self._exchange.resume()

    def attach(self, exchange: Exchange | None) -> None:
        """This exchange is the one to hold up from now on."""
        self._exchange = exchange


class Exchange:
    """One request and its answer."""

    def __init__(
        self,
        owner: Owner,
        limits: Limits,
        reader: CompletionReader,
        tap: Callable[[bytes], None] | None,
        on_head: OnHead | None,
        flow: Flow | None,
        on_sent: Callable[[float], None] | None,
    ) -> None:
        self.reader = reader
        self.tap = tap
        self._on_head = on_head
        self._flow = flow
        self._on_sent = on_sent
        self._loop = owner.loop
        self.future: asyncio.Future[StreamOutcome] = owner.loop.create_future()
        self.abandoned = False
        self._owner = owner
        self._limits = limits
        self._connection: Link | None = None
        self._sent_s: float | None = None
        self._last_byte_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def sent(self, connection: Link) -> None:
        self._connection = connection
        self._sent_s = self._last_byte_s = self._owner.clock()
        if self._flow is not None:
            self._flow.attach(self)
            if self._flow.paused:
                connection.pause()
        self._watch()
        if self._on_sent is not None:
            self._on_sent(self._sent_s)

    def on_head(self, status: int, headers: Mapping[str, str], now_s: float) -> None:
        self.reader.on_head(status, headers, now_s)
        self._last_byte_s = now_s
        if self._limits.idle_s < self._limits.first_byte_s or self._timer is None:
            self._rewatch()  # from here on the other silence counts, and it may end earlier
        if self._on_head is not None:
            self._on_head(status, headers)

    def on_pieces(self, pieces: list[bytes], now_s: float) -> None:
        """Pieces of the body that arrived together: one by one, or as one where the reader may have it so."""
        self._last_byte_s = now_s
        if self.reader.takes_joined and len(pieces) > 1:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            try:
                self.reader.on_body(piece, now_s)
            except Exception as error:  # JSON of a shape that no rule foresaw
                self.finish((Failure.MALFORMED, f"the answer cannot be read: {error}"))
                return
            if self.tap is not None:
                self.tap(piece)

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._last_byte_s = self._owner.clock()
        if self._connection is not None:
            self._connection.resume()
        self._rewatch()

    def _due(self) -> tuple[float, str]:
        """When this exchange is given up as things stand, and what to say then."""
        limits = self._limits
        if self._flow is not None and self._flow.paused:
            silence_s, what = float("inf"), ""
        elif self.reader.first_byte_s is None:
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
        left_s = due_s - self._owner.clock()
        if left_s > 0.0:
            self._timer = self._loop.call_later(left_s, self._on_timer)
        else:
            self.finish((Failure.TIMEOUT, message))

    def _rewatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.future.done():
            self._watch()

    def _on_timer(self) -> None:
        self._owner.parse_arrived()
        if not self.future.done():
            self._watch()

    def finish(self, broken: tuple[Failure, str] | None) -> None:
        """End the exchange; where it is ``broken``, its connection is closed."""
        if self.future.done():
            return
        now_s = self._owner.clock()
        last_token_s = self.reader.last_token_s
        if broken is None and last_token_s is not None and last_token_s > self._limits.deadline_s:
            broken = (Failure.TIMEOUT, "the last token came after the deadline")
        self.future.set_result(self.reader.outcome(sent_s=self._sent_s, end_s=now_s, broken=broken))
        self._release(reusable=broken is None)

    def fail(self, error: Exception) -> None:
        """What was called with this answer raised: the caller shall know."""
        if not self.future.done():
            self.future.set_exception(error)
        self._release(reusable=False)

    @property
    def has_answer(self) -> bool:
        """Whether the outcome is there, whoever has been told."""
        return self.future.done() and not self.future.cancelled()

    def leave(self, release_s: float) -> bool:
        """The caller has gone: go on until so long after the request was sent. False where there is nothing to go on with."""
        if self.reader.complete:
            return False
        now_s = self._owner.clock()
        left_s = (now_s if self._sent_s is None else self._sent_s) + release_s - now_s
        if left_s > 0.0:
            self._loop.call_later(left_s, self.abandon)
        return left_s > 0.0

    def abandon(self) -> None:
        """The caller has gone or has its answer: nothing may go on in the background."""
        self.abandoned = True
        if not self.future.done():
            self.future.cancel()
        self._release(reusable=False)

    def _release(self, *, reusable: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flow is not None:
            self._flow.attach(None)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.let_go(reusable)
