"""What an answer said, read from its relayed bytes: the next request of its conversation will carry it (ROUTER.md B18)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ppd_bench.engine.stream import EventDecoder
from ppd_bench.router.chain import AnswerMessage

READ_AT_ONCE = 64
"""Pieces that are kept unread, so that reading them is not in the way of the first ones, and memory stays small."""


class AnswerCollector:
    """Text, tool calls and token ids of the first choice, streamed or not, of the completions or the chat API."""

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._pieces: list[bytes] = []
        self._decoder = EventDecoder()
        self._text: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._token_ids: list[int] = []
        self._n_choices = 1

    def feed(self, piece: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(piece)
        if self._streamed and len(self._pieces) >= READ_AT_ONCE:
            self._read()

    def take(self) -> AnswerMessage | None:
        """The answer; null where there were several, of which the client may go on with any."""
        if self._streamed:
            self._read()
        else:
            self._on_event(b"".join(self._pieces))
        if self._n_choices > 1:
            return None
        calls = [_whole(self._calls[index]) for index in sorted(self._calls)]
        return AnswerMessage(content="".join(self._text), tool_calls=calls, token_ids=self._token_ids)

    def _read(self) -> None:
        piece, self._pieces = b"".join(self._pieces), []
        for event in self._decoder.feed(piece):
            if event != b"[DONE]":
                self._on_event(event)

    def _on_event(self, data: bytes) -> None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        for choice in event.get("choices") or () if isinstance(event, dict) else ():
            if choice.get("index"):
                self._n_choices += 1
            else:
                self._on_choice(choice)

    def _on_choice(self, choice: Mapping[str, Any]) -> None:
        said = choice.get("delta") or choice.get("message") or choice
        self._text.append(said.get("content") or choice.get("text") or "")
        self._token_ids += choice.get("token_ids") or ()
        for position, call in enumerate(said.get("tool_calls") or ()):
            self._on_call(call.get("index", position), call)

    def _on_call(self, index: int, call: Mapping[str, Any]) -> None:
        """A tool call, or a piece of one: its arguments come in pieces, the rest once."""
        function = call.get("function") or {}
        known = self._calls.setdefault(index, {"arguments": []})
        known["arguments"].append(function.get("arguments") or "")
        for name, value in (("id", call.get("id")), ("type", call.get("type")), ("name", function.get("name"))):
            if value:
                known[name] = value


def _whole(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as a message of the next request has it."""
    function = {"name": call.get("name"), "arguments": "".join(call["arguments"])}
    return {"id": call.get("id"), "type": call.get("type", "function"), "function": function}
