"""Scripts of server answers that benchmark clients get wrong: 5 tokens, the first at 100 ms, then one each 20 ms, unless said
otherwise. A script is (seconds since the request, action, bytes) in order; ``fake_engine`` plays it."""

from __future__ import annotations

import json
from typing import Any

Step = tuple[float, str, bytes]

FIRST_S = 0.1
GAP_S = 0.02
TEXTS = (" one", " two", " thr", " fou", " fiv")
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 2}}


def event(content: dict[str, Any], end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(content)}{end}".encode()


def text_event(text: str, *, finish: str | None = None, end: str = "\n\n", **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}, end)


def delta_event(*, finish: str | None = None, **delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


DONE = b"data: [DONE]\n\n"
USAGE_EVENT = event({"choices": [], "usage": USAGE})


def at(i: int) -> float:
    return FIRST_S + GAP_S * i


def tokens(n: int = 5, *, end: str = "\n\n", start_s: float = 0.0) -> list[Step]:
    """n of the five tokens as completions chunks; the fifth carries the finish_reason."""
    texts = enumerate(TEXTS[:n])
    return [(start_s + at(i), "chunk", text_event(t, finish="length" if i == 4 else None, end=end)) for i, t in texts]


def closing(at_s: float, *pieces: bytes) -> list[Step]:
    return [*((at_s, "chunk", piece) for piece in pieces), (at_s, "end", b"")]


HEAD: Step = (0.0, "head", b"")
LAST_S = at(4)
STALL_S = 60.0


def _chat_role_first() -> list[Step]:
    chunks = [
        (at(i) + 0.01, "chunk", delta_event(content=t, finish="stop" if i == 4 else None)) for i, t in enumerate(TEXTS)
    ]
    return [HEAD, (0.01, "chunk", delta_event(role="assistant", content="")), *chunks]


def _reasoning_first() -> list[Step]:
    deltas = [{"reasoning_content": TEXTS[0]}, {"reasoning": TEXTS[1]}, *({"content": t} for t in TEXTS[2:])]
    finish = [None] * 4 + ["stop"]
    return [HEAD, *((at(i), "chunk", delta_event(finish=finish[i], **d)) for i, d in enumerate(deltas))]


def _usage_in_chunks() -> list[Step]:
    usages = [
        {"prompt_tokens": 3, "completion_tokens": i + 1, "prompt_tokens_details": {"cached_tokens": 2}}
        for i in range(5)
    ]
    finish = [None] * 4 + ["length"]
    return [(at(i), "chunk", text_event(t, finish=finish[i], usage=usages[i])) for i, t in enumerate(TEXTS)]


def _split_and_joined() -> list[Step]:
    """The first event in three segments, the other four in one; the HTTP chunk's own frame is cut too."""
    first = text_event("h\u00e9llo", finish=None).replace(b"\\u00e9", "\u00e9".encode())
    rest = b"".join(text_event(t, finish="length" if t == TEXTS[4] else None) for t in TEXTS[1:])
    frame = b"%x\r\n%b\r\n" % (len(first), first)
    cut = frame.index("\u00e9".encode()) + 1
    pieces = [frame[:1], frame[1:cut], frame[cut:]]
    return [HEAD, *((at(0) - 0.02 * (2 - i), "raw", piece) for i, piece in enumerate(pieces)), (at(1), "chunk", rest)]


def _plain(status: int, body: bytes, extra: str = "") -> list[Step]:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return [(0.0, "raw", head.encode() + body)]


def _with_fields(i: int, piece: bytes) -> bytes:
    return f"event: completion\nid: {i}\n".encode() + piece


_OVERLOADED = b'{"error":{"message":"overloaded"}}'
_TWO = [text_event("".join(TEXTS)), text_event("".join(TEXTS), finish="length")]
_TEN = event({"choices": [], "usage": {**USAGE, "completion_tokens": 10}})
_ERROR = event({"error": {"message": "kv transfer failed", "code": 500}})
_TAIL = closing(LAST_S, USAGE_EVENT, DONE)

SHAPES: dict[str, tuple[Step, ...]] = {
    "1": (*_chat_role_first(), *closing(LAST_S + 0.01, USAGE_EVENT, DONE)),
    "2": (HEAD, (0.01, "chunk", text_event("")), *tokens(start_s=0.01), *closing(LAST_S + 0.01, USAGE_EVENT, DONE)),
    "3": (*_reasoning_first(), *_TAIL),
    "4": (HEAD, (at(0), "chunk", _TWO[0]), (at(5), "chunk", _TWO[1]), *closing(at(5), _TEN, DONE)),
    "4-ids": (
        HEAD,
        (at(0), "chunk", event({"choices": [{"text": "abcde", "token_ids": [1, 2, 3, 4, 5], "finish_reason": None}]})),
        (
            at(5),
            "chunk",
            event({"choices": [{"text": "fghij", "token_ids": [6, 7, 8, 9, 10], "finish_reason": "length"}]}),
        ),
        *closing(at(5), _TEN, DONE),
    ),
    "5": (HEAD, *_usage_in_chunks(), *closing(LAST_S, DONE)),
    "6": (HEAD, *tokens(3), *closing(at(3), _ERROR, DONE)),
    "7": (HEAD, *tokens(3), *closing(at(3))),
    "8": (HEAD, *tokens(3), (at(3), "reset", b"")),
    "8-eof": (HEAD, *tokens(3), (at(3), "close", b"")),
    "9": tuple(_plain(200, b"")),
    "9-stream": (HEAD, *closing(0.01)),
    "10": (
        HEAD,
        *tokens(end="\r\n\r\n"),
        *closing(LAST_S, USAGE_EVENT.replace(b"\n", b"\r\n"), DONE.replace(b"\n", b"\r\n")),
    ),
    "10-cr": (
        HEAD,
        *tokens(end="\r\r"),
        *closing(LAST_S, USAGE_EVENT.replace(b"\n", b"\r"), DONE.replace(b"\n", b"\r")),
    ),
    "11": (HEAD, *((t - d, "chunk", c) for t, _, p in tokens() for d, c in ((0.005, b": ping\n\n"), (0.0, p))), *_TAIL),
    "12": (HEAD, *((t, "chunk", _with_fields(i, p)) for i, (t, _, p) in enumerate(tokens())), *_TAIL),
    "13": (HEAD, *tokens(), *closing(LAST_S + 0.3, USAGE_EVENT, DONE)),
    "14": (*_split_and_joined(), *closing(at(1), USAGE_EVENT, DONE)),
    "15-429": tuple(_plain(429, _OVERLOADED, "Retry-After: 1\r\n")),
    "15-503": tuple(_plain(503, _OVERLOADED, "Retry-After: 1\r\n")),
    "16-silent": ((STALL_S, "reset", b""),),
    "16-stall": (HEAD, *tokens(2), (STALL_S, "reset", b"")),
    "17": (
        HEAD,
        *tokens(2),
        (at(2), "chunk", text_event(TEXTS[2], finish="stop")),
        *closing(at(2), event({"choices": [], "usage": {**USAGE, "completion_tokens": 3}}), DONE),
    ),
}
"""By row of the list of stream shapes; a suffix tells variants of one row apart."""
