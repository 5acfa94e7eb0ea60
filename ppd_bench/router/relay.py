"""The generating leg's answer on its way to the client: status and headers, pieces of a stream as they come, a whole body at
once, and an error where the answer is none.

An answer is started at the first byte of its body, not at its head: engines send the head of a stream before they have worked on
it, and until the client has seen something another engine may be tried (ROUTER.md B13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto

import orjson

from ppd_bench.engine.dispatch import Dispatched
from ppd_bench.engine.stream import HTTP_OK, Failure, StreamOutcome
from ppd_bench.router.answer import AnswerCollector
from ppd_bench.router.http_request import Headers, end_to_end_headers, error_body
from ppd_bench.router.responder import Responder
from ppd_bench.router.usage_filter import UsageFilter

EVENT_STREAM = "text/event-stream"
JSON_TYPE = ("content-type", "application/json")
TEXT_TYPE = ("content-type", "text/plain; charset=utf-8")
NOT_PASSED_ON = frozenset({"x-request-id", "server", "date"})
"""Headers of an engine's answer that speak of the engine: the request's own id is set by the router (B8)."""
EVENT_END = b"\n\n"
DONE = b"data: [DONE]"

CLIENT_CLOSED = 499
"""The status under which a turn is recorded whose client went away; nobody receives it."""


class Told(Enum):
    """What a client was told in the end."""

    ANSWER = auto()
    ERROR = auto()
    ERROR_IN_STREAM = auto()


class AnswerRelay:
    """Relays one answer. ``headers`` are added to it; ``first_byte_s`` is when the first byte of its body went to the client.

    ``collect``: keep what the answer says; see ``collected`` when it has ended.
    """

    def __init__(
        self, responder: Responder, *, clock: Callable[[], float], withhold_usage: bool, collect: bool
    ) -> None:
        self.headers: Headers = ()
        self.first_byte_s: float | None = None
        self.collected: AnswerCollector | None = None
        self._responder = responder
        self._clock = clock
        self._withhold_usage = withhold_usage
        self._collect = collect
        self._streamed = False
        self._pieces: list[bytes] = []
        self._filter: UsageFilter | None = None
        self._inside_event = False
        self._last_event = b""
        self._engine_headers: Headers = ()

    # -- the generating leg ------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """A leg began to answer; what an earlier one said, which the client has not seen, is forgotten."""
        self._pieces.clear()
        self._streamed = status == HTTP_OK and headers.get("content-type", "").startswith(EVENT_STREAM)
        self._filter = UsageFilter() if self._streamed and self._withhold_usage else None
        self.collected = AnswerCollector(streamed=self._streamed) if self._collect else None
        self._engine_headers = tuple(
            item for item in end_to_end_headers(tuple(headers.items())) if item[0] not in NOT_PASSED_ON
        )

    def tap(self, piece: bytes) -> None:
        """A piece of the body arrived."""
        if self.collected is not None:
            self.collected.feed(piece)
        if not self._streamed:
            self._pieces.append(piece)
            return
        if self._filter is not None:
            piece = self._filter.feed(piece)
        piece = self._without_done(piece)
        if not piece:
            return
        if self.first_byte_s is None:
            self.first_byte_s = self._clock()
            self._responder.start(HTTP_OK, (*self._engine_headers, *self.headers))
        self._inside_event = not piece.endswith(EVENT_END)
        self._responder.write(piece)

    def _without_done(self, piece: bytes) -> bytes:
        """``[DONE]`` waits for the end of the engine's answer, which follows at once: many clients close their connection or send
        their next turn on seeing it, and would else be taken for gone, or overtake what is learnt from this turn."""
        if DONE not in piece:
            return piece
        begin = piece.rindex(DONE)
        if begin and piece[begin - 1 : begin] not in (b"\n", b"\r"):
            return piece
        self._last_event = piece[begin:]
        return piece[:begin]

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, went: Dispatched, *, complete: bool) -> tuple[int, Told]:
        """Give the client the end of its answer, or an error; the status it got, and what that was."""
        if self._responder.started:
            return HTTP_OK, self._end_stream(went.outcome, complete=complete)
        self.first_byte_s = self._clock()
        if complete and not self._streamed:
            self._responder.send(HTTP_OK, (*self._engine_headers, *self.headers), b"".join(self._pieces))
            return HTTP_OK, Told.ANSWER
        status, headers, body = self._error(went)
        self._responder.send(status, (*headers, *self.headers), body)
        return status, Told.ERROR

    def _end_stream(self, outcome: StreamOutcome, *, complete: bool) -> Told:
        responder = self._responder
        told = Told.ANSWER if complete else Told.ERROR_IN_STREAM
        if complete or self._last_event:
            rest = self._filter.rest() if self._filter is not None else b""
            responder.write(rest + self._last_event)
        elif outcome.failure is not Failure.ERROR_EVENT:
            self.cut_short(*judge_failure(outcome))
        responder.finish()
        return told

    def cut_short(self, status: int, message: str) -> None:
        """End a stream that has begun with an error event: the end of the connection alone says nothing (B13)."""
        if self._responder.started and not self._responder.finished:
            begin = EVENT_END if self._inside_event else b""
            self._responder.write(begin + b"data: " + error_body(status, message) + EVENT_END)
            self._responder.finish()

    def _error(self, went: Dispatched) -> tuple[int, Headers, bytes]:
        """Status, headers and body of a failure of which the client has seen nothing yet (B12, B13, B16)."""
        outcome = went.outcome
        status = outcome.http_status
        generating = went.decode_sent_s is not None
        retry: Headers = (("retry-after", outcome.retry_after),) if outcome.retry_after else ()
        if status is not None and status != HTTP_OK and (generating or status < 500):
            kind = JSON_TYPE if outcome.error_body.lstrip().startswith(b"{") else TEXT_TYPE
            return status, (kind, *retry), outcome.error_body
        if outcome.failure is Failure.ERROR_EVENT and self._pieces and not self._streamed:
            body = b"".join(self._pieces)
            return _status_inside(body), (JSON_TYPE, *retry), body
        told, message = judge_failure(outcome)
        return told, (JSON_TYPE, *retry), error_body(told, message)


def judge_failure(outcome: StreamOutcome) -> tuple[int, str]:
    """The status and the words for a failure that no engine worded for the client."""
    what = outcome.message or outcome.status.value
    if outcome.failure is Failure.TIMEOUT:
        return 504, f"an engine did not answer in time: {what}"
    if outcome.failure is Failure.UNREACHABLE:
        return (
            503,
            "the engine chosen for this request cannot be reached",
        )  # the message names its address: for the log alone
    if outcome.failure is Failure.HANDOFF:
        return 503, f"no engine could take the request: {what}"
    if outcome.failure is Failure.HTTP:
        return 503, f"prefill failed: {what}"
    return 502, f"the engine's answer is not whole: {what}"


def _status_inside(body: bytes) -> int:
    """The status that an error inside a 200 speaks of (B14)."""
    content = orjson.loads(body)
    error = content.get("error")
    code = (error if isinstance(error, dict) else content).get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 502
