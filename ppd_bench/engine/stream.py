"""What one completion answer says, read as its bytes arrive. No IO: bytes and instants in, ``StreamOutcome`` out.

The rules for streams that benchmark clients get wrong: a chunk is not a token; tokens are counted by the server (token ids, or
usage), never by retokenising; a 200 is a success only after tokens, a finish reason and ``[DONE]`` (GLOSSARY: first token / last
token, success; ROUTER.md B14, B38).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import chain, repeat
from typing import Any, NamedTuple

import orjson

from ppd_bench.core.enums import Status

HTTP_OK = 200
MESSAGE_LIMIT = 500
"""Characters of a server's error text that are kept."""
ABORTED_REASONS = frozenset({"abort", "error"})
"""Finish reasons with which vLLM ends an answer that it could not complete."""


class Failure(StrEnum):
    """Why an answer is not a success."""

    UNREACHABLE = "unreachable"
    HTTP = "http"
    ERROR_EVENT = "error_event"
    TRUNCATED = "truncated"
    DISCONNECTED = "disconnected"
    EMPTY = "empty"
    MALFORMED = "malformed"
    TIMEOUT = "timeout"
    HANDOFF = "handoff"


class StreamOutcome(NamedTuple):
    """One HTTP exchange, ended in whatever way. Instants are seconds on the clock that the client was given.

    ``sent_s``: the request's bytes were handed to the kernel; null where no connection came about.
    ``chunk_times_s``/``chunk_tokens``: arrivals that carried generated tokens, and how many each. ``exact`` says that
    the server itself vouches for these counts, so that ``token_times_s`` exists. ``n_tokens``: the server's count of generated
    tokens where it gave one, else what was seen. ``cached_tokens`` is what usage says; behind a hand-off it is P's.
    ``error_body``: the body of an answer that was not 200, ``retry_after`` the header of that name.
    """

    status: Status
    failure: Failure | None
    message: str | None
    http_status: int | None
    sent_s: float | None
    first_byte_s: float | None
    end_s: float
    chunk_times_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    exact: bool
    n_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    kv_transfer_params: Mapping[str, Any] | None
    prompt_token_ids: tuple[int, ...] | None
    error_body: bytes = b""
    retry_after: str | None = None

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def first_token_s(self) -> float | None:
        return self.chunk_times_s[0] if self.chunk_times_s else None

    @property
    def last_token_s(self) -> float | None:
        return self.chunk_times_s[-1] if self.chunk_times_s else None

    @property
    def token_times_s(self) -> list[float] | None:
        """Arrival of every token (tokens of one chunk arrive together); null where the server's counts do not tell."""
        if not self.exact:
            return None
        return list(chain.from_iterable(map(repeat, self.chunk_times_s, self.chunk_tokens)))


class EventDecoder:
    """Server-sent events from pieces cut anywhere; only ``data`` matters. Lines end with LF, CRLF or CR."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False

    @property
    def is_between_events(self) -> bool:
        """Whether the last piece ended with an event."""
        return not (self._rest or self._data or self._after_cr)

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that this piece completes."""
        if not piece:  # it would make a cut between CR and LF forgotten
            return []
        if not (self._rest or self._data or self._after_cr) and piece.startswith(b"data: ") and piece.endswith(b"\n\n"):
            body = piece[6:-2]
            if b"\r" not in body:
                events = body.split(b"\n\ndata: ")
                if body.count(b"\n") == 2 * (len(events) - 1):
                    return events
        return self._lines(piece)

    def _lines(self, piece: bytes) -> list[bytes]:
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_cr = piece.endswith(b"\r")
        lines = (self._rest + piece).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\r", b"\n")) else b""
        events = []
        for line in lines:
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class CompletionReader:
    """Collects one answer, streamed (``text/event-stream``) or not, of the completions or the chat API."""

    takes_joined = False
    """Whether pieces that arrived together may be given as one."""

    def __init__(self) -> None:
        self.http_status: int | None = None
        self.first_byte_s: float | None = None
        self.complete = False  # the HTTP message ended as it should
        self._streamed = False
        self._retry_after: str | None = None
        self._decoder = EventDecoder()
        self._body: list[bytes] = []
        self._done = False
        self._problem: tuple[Failure, str] | None = None
        self._times: list[float] = []
        self._counts: list[int] = []
        self._n_seen = 0
        self._estimated = False
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._answer: dict[str, Any] = {}

    @property
    def last_token_s(self) -> float | None:
        """Arrival of the latest generated token so far."""
        return self._times[-1] if self._times else None

    def on_head(self, http_status: int, headers: Mapping[str, str], now_s: float) -> None:
        """Status line and headers (names in lower case) arrived."""
        self.http_status = http_status
        self.first_byte_s = now_s
        self._retry_after = headers.get("retry-after")
        self._streamed = http_status == HTTP_OK and headers.get("content-type", "").startswith("text/event-stream")

    def on_body(self, piece: bytes, now_s: float) -> None:
        """A piece of the body arrived at this instant."""
        if not self._streamed:
            self._body.append(piece)
            return
        for event in self._decoder.feed(piece):
            self._on_event(event, now_s)

    def _on_event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = _json_object(data)
        if event is None:
            self._fail(Failure.MALFORMED, f"an event is not a JSON object: {_shown(data)}")
            return
        if "error" in event or event.get("object") == "error":
            self._fail(Failure.ERROR_EVENT, f"error inside the stream: {_error_text(event)}")
            return
        usage = event.get("usage")
        if usage:
            self._usage = usage
        for choice in event.get("choices") or ():
            self._on_choice(choice, usage, now_s)

    def _on_choice(self, choice: dict[str, Any], usage: dict[str, Any] | None, now_s: float) -> None:
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        if text:
            self._text.append(text)
        token_ids = choice.get("token_ids")
        if token_ids is not None:
            self._token_ids += token_ids
            n = len(token_ids)
        else:
            piece = text or (
                delta and (delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"))
            )
            n = self._count(bool(piece), usage)
        if n:
            self._times.append(now_s)
            self._counts.append(n)
            self._n_seen += n
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _count(self, has_piece: bool, usage: dict[str, Any] | None) -> int:
        """Tokens of a chunk without token ids: by running usage, else one per chunk with content until usage says more.

        Running usage may count a token whose text is held back; a usage that comes only at the end must not.
        """
        if usage and not self._estimated:
            n = int(usage.get("completion_tokens") or 0) - self._n_seen
            if n > 0 or not has_piece:
                return max(0, n)
        self._estimated = self._estimated or has_piece
        return int(has_piece)

    def _fail(self, failure: Failure, message: str) -> None:
        self._problem = self._problem or (failure, message)

    def outcome(self, *, sent_s: float | None, end_s: float, broken: tuple[Failure, str] | None) -> StreamOutcome:
        """The finished exchange. ``broken`` says what ended it where it did not end by itself."""
        if self.complete and self.http_status == HTTP_OK and not self._streamed:
            self._read_body(end_s)
        problem = self._verdict(broken)
        completion = self._usage.get("completion_tokens")
        details = self._usage.get("prompt_tokens_details") or {}
        prompt_token_ids = self._first_choice.get("prompt_token_ids")
        return StreamOutcome(
            status=Status.OK if problem is None else _STATUS.get(problem[0], Status.ERROR),
            failure=problem[0] if problem else None,
            message=problem[1] if problem else None,
            http_status=self.http_status,
            sent_s=sent_s,
            first_byte_s=self.first_byte_s,
            end_s=end_s,
            chunk_times_s=tuple(self._times),
            chunk_tokens=tuple(self._counts),
            exact=self._is_exact(completion),
            n_tokens=self._n_seen if completion is None else completion,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=completion,
            cached_tokens=details.get("cached_tokens"),
            kv_transfer_params=self._answer.get("kv_transfer_params"),
            prompt_token_ids=None if prompt_token_ids is None else tuple(prompt_token_ids),
            error_body=b"".join(self._body) if self.http_status != HTTP_OK else b"",
            retry_after=self._retry_after,
        )

    def _is_exact(self, completion: int | None) -> bool:
        if not self._streamed:
            return False  # everything arrived at once: no token has an instant of its own
        return not self._estimated if completion is None else completion == self._n_seen

    @property
    def _first_choice(self) -> dict[str, Any]:
        choices = self._answer.get("choices")
        return choices[0] if choices else {}

    def _read_body(self, now_s: float) -> None:
        body = b"".join(self._body)
        answer = _json_object(body)
        if answer is None:
            self._fail(*_unreadable(body))
        elif "error" in answer or answer.get("object") == "error":
            self._fail(Failure.ERROR_EVENT, f"error in the answer: {_error_text(answer)}")
        else:
            self._answer = answer
            self._usage = answer.get("usage") or {}
            choice = self._first_choice
            message = choice.get("message") or {}
            self._on_choice({**choice, "text": choice.get("text") or message.get("content")}, self._usage, now_s)
            self._done = True

    def _verdict(self, broken: tuple[Failure, str] | None) -> tuple[Failure, str] | None:
        """The first thing that makes this answer a failure, or null."""
        if broken is not None and broken[0] is Failure.TIMEOUT:
            return broken
        if self.http_status is not None and self.http_status != HTTP_OK:
            return Failure.HTTP, self._http_text()
        if self._problem is not None:
            return self._problem
        if self._done and self._finish_reason:
            return self._judge_end()
        if broken is not None:
            return broken
        if not self._done and not self._times and not self._finish_reason:
            return Failure.EMPTY, "HTTP 200 with no event that carried a token"
        missing = "[DONE]" if not self._done else "a finish_reason"
        return Failure.TRUNCATED, f"the stream ended without {missing} after {self._n_seen} tokens"

    def _judge_end(self) -> tuple[Failure, str] | None:
        if self._finish_reason in ABORTED_REASONS:
            return Failure.TRUNCATED, f"the engine ended the answer with finish_reason {self._finish_reason!r}"
        if not self._times:
            return Failure.EMPTY, f"the answer ended with finish_reason {self._finish_reason!r} and no token"
        return None

    def _http_text(self) -> str:
        body = b"".join(self._body)
        error = _json_object(body)
        text = _error_text(error) if error else _shown(body)
        retry = f" (Retry-After: {self._retry_after})" if self._retry_after else ""
        return f"HTTP {self.http_status}: {text or 'no message'}{retry}"


class RelayReader(CompletionReader):
    """Reads for a relay, which needs the verdict, usage and the times of the first and last token, at a fifth of the cost.

    Between the first token and the end, pieces of whole events that only carry tokens are counted and not parsed. So ``text``
    and ``token_ids`` are empty, an event counts as one token (``n_tokens`` is usage's where it is told), nothing is ``exact``,
    and arrivals that were counted are one arrival: the last of them.
    """

    takes_joined = True

    def __init__(self) -> None:
        super().__init__()
        self._summed = False  # whether the latest arrival is a sum of such

    def on_body(self, piece: bytes, now_s: float) -> None:
        """A piece of the body arrived at this instant."""
        n = _n_token_events(piece) if self._times and self._decoder.is_between_events else 0
        if not n:
            self._summed = False
            super().on_body(piece, now_s)
            return
        if self._summed:
            self._times[-1] = now_s
            self._counts[-1] += n
        else:
            self._times.append(now_s)
            self._counts.append(n)
            self._summed = True
        self._n_seen += n

    def outcome(self, *, sent_s: float | None, end_s: float, broken: tuple[Failure, str] | None) -> StreamOutcome:
        """The finished exchange, without what was not read."""
        if self._streamed:
            self._text.clear()
            self._token_ids.clear()
        return super().outcome(sent_s=sent_s, end_s=end_s, broken=broken)

    def _is_exact(self, completion: int | None) -> bool:
        return False


def _n_token_events(piece: bytes) -> int:
    """How many whole events these are, if they only carry tokens: no end, usage or error as far as bytes tell. 0 in doubt."""
    n = piece.count(b"}\n\n")
    only = (
        piece.endswith(b"}\n\n")
        and piece.startswith(b"data: {")
        and n == piece.count(b"\n\n") == piece.count(b"data: {")
        and b"[DONE]" not in piece
        and b'"error"' not in piece
        and piece.count(b'"finish_reason"') == piece.count(b'"finish_reason":null')
        and piece.count(b'"usage"') == piece.count(b'"usage":null')
    )
    return n if only else 0


_STATUS = {Failure.TIMEOUT: Status.TIMEOUT}


def never_sent(failure: Failure, message: str, now_s: float) -> StreamOutcome:
    """The outcome of an exchange that could not begin."""
    return CompletionReader().outcome(sent_s=None, end_s=now_s, broken=(failure, message))


def _json_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _unreadable(body: bytes) -> tuple[Failure, str]:
    if not body.strip():
        return Failure.EMPTY, "HTTP 200 with an empty body"
    return Failure.MALFORMED, f"the answer is not a JSON object: {_shown(body)}"


def _error_text(event: Mapping[str, Any]) -> str:
    """The server's message, in any of the shapes that OpenAI-like servers use."""
    error = event.get("error", event)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or orjson.dumps(error).decode()
    return str(error)[:MESSAGE_LIMIT]


def _shown(data: bytes) -> str:
    return data[:MESSAGE_LIMIT].decode("utf-8", "replace").strip()
