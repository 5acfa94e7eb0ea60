"""Values of recorded rows: lengths, block ids, instants; each checked, with the reason by which a bad row is counted."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from datetime import UTC, datetime

from ppd_bench.workload.traces.source import BadRow

UNITS_PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6}
_WRAP = 1 << 64
_TOP = 1 << 63


def tokens(entry: Mapping[str, object], key: str, *, least: int = 0) -> int:
    """
    Raises:
        BadRow: missing, or not a whole number of at least ``least``.
    """
    value = entry.get(key)
    if type(value) is int and value >= least:
        return value
    if isinstance(value, float) and value.is_integer() and value >= least:
        return int(value)
    if value is None:
        raise BadRow(f"{key} is missing")
    raise BadRow(f"{key} is not a whole number of at least {least}")


def tokens_in(text: str, key: str, *, least: int = 0) -> int:
    """The same for a cell of a CSV file."""
    try:
        value: object = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = text
    return tokens({key: value}, key, least=least)


def seconds(entry: Mapping[str, object], key: str, units_per_s: float = 1.0) -> float:
    """
    Raises:
        BadRow: missing or not a finite number.
    """
    value = entry.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value / units_per_s
    raise BadRow(f"{key} is missing" if value is None else f"{key} is not a number")


def block_ids(entry: Mapping[str, object], key: str) -> array[int]:
    """Ids as signed 64-bit integers; unsigned ones keep their bits.

    Raises:
        BadRow: missing, or not a list of integers of 64 bits.
    """
    value = entry.get(key)
    if not isinstance(value, list):
        raise BadRow(f"{key} is missing" if value is None else f"{key} is not a list")
    try:
        return array("q", value)
    except OverflowError:
        if all(type(v) is int and -_TOP <= v < _WRAP for v in value):
            return array("q", [v - _WRAP if v >= _TOP else v for v in value])
        raise BadRow(f"{key} holds a number of more than 64 bits") from None
    except TypeError:
        raise BadRow(f"{key} holds something that is not an integer") from None


def n_blocks(n_tokens: int, block_tokens: int, tail: str) -> int:
    """How many ids a prompt has under a tail rule."""
    return -(-n_tokens // block_tokens) if tail == "ceil" else n_tokens // block_tokens


def date_seconds(text: str) -> tuple[int, int]:
    """Whole seconds since 1970 and the fraction in units of 100 ns, of ``2023-11-16 18:17:03.9799600``; UTC unless it says
    otherwise.

    Raises:
        BadRow: not such a date.
    """
    whole, _, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(whole + rest[len(digits) :])
    except ValueError:
        raise BadRow("the time is not a date") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp()), int(f"{digits[:7]:0<7}")
