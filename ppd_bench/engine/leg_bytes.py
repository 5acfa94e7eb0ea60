"""A leg's body as bytes: the client's own bytes with members added, wherever a leg only adds (ROUTER.md B4). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_ABSENT = object()


def leg_bytes(leg: Mapping[str, Any], body: Mapping[str, Any], raw: bytes | None) -> bytes:
    """``leg`` as JSON. ``raw``: the bytes that ``body`` was read from, null where there are none.

    Where ``leg`` has every member of ``body`` unchanged, its further members are put in front of ``raw``'s: nothing of the
    client's is written anew, so that numbers keep their digits and a long prompt is not encoded again. Else all is encoded.
    """
    if raw is None or not body or _is_changed(leg, body):
        return orjson.dumps(leg)
    added = {name: value for name, value in leg.items() if name not in body}
    if not added:
        return raw
    start = raw.index(b"{") + 1
    return b"%b,%b" % (orjson.dumps(added)[:-1], raw[start:])


def _is_changed(leg: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """Whether a member of ``body`` is missing in ``leg`` or another there. Mostly they are the same objects: a look suffices."""
    for name, value in body.items():
        mine = leg.get(name, _ABSENT)
        if mine is not value and mine != value:
            return True
    return False
