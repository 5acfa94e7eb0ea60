"""Takes the usage chunk out of a stream whose client did not ask for it (ROUTER.md B4). No IO: bytes in, bytes out."""

from __future__ import annotations

import re

import orjson

_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_MARK = b'"usage"'
_NO_USAGE = b'"usage":null'
"""What vLLM writes into every event of a completion but the last."""


class UsageFilter:
    """Passes server-sent events on as soon as each is whole, byte for byte, but for the one that only carries usage.

    What follows the last whole event waits for its end: no client can read half an event either.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """What may be passed on now."""
        if not self._rest and piece.endswith(b"\n\n") and not _tells_usage(piece):
            return piece
        events, self._rest = _whole_events(self._rest + piece)
        return b"".join([event for event in events if not _is_usage_only(event)])

    def rest(self) -> bytes:
        """What is left when the stream has ended: an event without its end, or nothing."""
        rest, self._rest = self._rest, b""
        return b"" if _is_usage_only(rest) else rest


def _whole_events(data: bytes) -> tuple[list[bytes], bytes]:
    """Events with their ends, and what follows the last of them."""
    if b"\r" not in data:
        texts = data.split(b"\n\n")
        return [text + b"\n\n" for text in texts[:-1]], texts[-1]
    events, begin = [], 0
    for boundary in _BOUNDARY.finditer(data):
        events.append(data[begin : boundary.end()])
        begin = boundary.end()
    return events, data[begin:]


def _tells_usage(data: bytes) -> bool:
    """Whether anything there may be a usage that is not null."""
    return data.count(_MARK) != data.count(_NO_USAGE)


def _is_usage_only(event: bytes) -> bool:
    """Whether an event carries usage and no choice."""
    if not _tells_usage(event):
        return False
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        content = orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return False
    return isinstance(content, dict) and bool(content.get("usage")) and not content.get("choices")
