"""What a client asks, as far as a router must understand it. Everything else in the body is passed on as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from ppd_bench.engine.handoff import unsplittable
from ppd_bench.router.http_request import Headers, HttpRequest, end_to_end_headers

OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
KEY_HEADERS = ("authorization", "x-api-key", "api-key")
NOT_FORWARDED = frozenset({"content-type", "x-request-id", "accept-encoding"})
"""Headers that a leg sets itself, and the one after which an engine might compress what must be read here."""


class BadRequest(NamedTuple):
    """A request that no engine should see: what to tell its client."""

    status: int
    message: str
    param: str | None = None


class Asked(NamedTuple):
    """A request that can be routed. ``counter``: why it cannot go through P and D as one unit (B3), null where it can.

    ``withhold_usage``: engines are asked for usage that the client did not ask for. ``max_output_tokens``: what the client
    declared, null where it did not.
    """

    body: Mapping[str, Any]
    streamed: bool
    withhold_usage: bool
    max_output_tokens: int | None
    counter: str | None


def read_asked(raw: bytes) -> Asked | BadRequest:
    """The body of a chat or completion request."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return BadRequest(400, f"the body is not JSON: {error}")
    if not isinstance(body, dict):
        return BadRequest(400, "the body must be a JSON object")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return BadRequest(400, "must be an object or null", "stream_options")
    for name in ("n", "best_of"):
        if not isinstance(body.get(name), int | None):
            return BadRequest(400, "must be a whole number or null", name)
    return Asked(
        body=body,
        streamed=bool(body.get("stream")),
        withhold_usage=not (options or {}).get("include_usage"),
        max_output_tokens=_declared(body),
        counter=unsplittable(body),
    )


def _declared(body: Mapping[str, Any]) -> int | None:
    declared = [body[name] for name in OUTPUT_FIELDS if type(body.get(name)) is int and body[name] > 0]
    return min(declared, default=None)


def tenant_of(request: HttpRequest) -> str:
    """A name for whoever holds the request's key, from which the key cannot be had; empty without one."""
    keys = [value for name, value in request.headers if name in KEY_HEADERS]
    return hashlib.blake2b("\n".join(keys).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if keys else ""


def forwarded_headers(headers: Headers) -> dict[str, str]:
    """The headers that engines get, keys among them; a repeated one as a list (RFC 9110, section 5.3)."""
    forwarded: dict[str, str] = {}
    for name, value in end_to_end_headers(headers):
        if name not in NOT_FORWARDED:
            forwarded[name] = f"{forwarded[name]}, {value}" if name in forwarded else value
    return forwarded
