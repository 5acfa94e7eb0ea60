"""What an HTTP/1 server and its handlers say to each other: a request, a refusal, and which headers a relay passes on. No IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import orjson

Headers = tuple[tuple[str, str], ...]
"""Names in lower case, in the order in which they came; a name may occur more than once."""

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
    }
)
"""Headers that speak of one connection (RFC 9110, section 7.6.1)."""

FRAMING = frozenset({"content-length", "host", "expect"})
"""Headers that whoever sends the message sets, or that have been answered already."""

_NEVER_RELAYED = HOP_BY_HOP | FRAMING


@dataclass(slots=True, kw_only=True, repr=False)
class HttpRequest:
    """One whole request. ``path`` and ``query`` are as the client wrote them (not decoded); ``peer`` is the client's address.

    Its representation shows neither headers nor body: they hold keys and prompts.
    """

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes
    peer: str

    def header(self, name: str) -> str | None:
        """The first value of a header; ``name`` in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def __repr__(self) -> str:
        return f"HttpRequest({self.method} {self.path}, {len(self.body)} bytes)"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the server answers itself, and then closes the connection: where its next request begins is not certain."""

    status: int
    message: str


def end_to_end_headers(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that a relay passes on: none that speak of one connection, none named by ``Connection``, no framing.

    Names must be in lower case. The sender of the relayed message sets ``Host`` and ``Content-Length`` itself.
    """
    kept = [item for item in headers if item[0] not in _NEVER_RELAYED]
    named = {name.strip().lower() for key, value in headers if key == "connection" for name in value.split(",")}
    return [item for item in kept if item[0] not in named] if named else kept


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    """An error as OpenAI's API and vLLM write it: ``{"error": {"message", "type", "param", "code"}}``."""
    kind = HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")
    name = kind if kind.endswith("Error") else f"{kind}Error"
    return orjson.dumps({"error": {"message": message, "type": name, "param": param, "code": status}})
