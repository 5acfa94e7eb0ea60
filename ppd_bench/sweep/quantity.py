"""Numbers with units, as people write them in a sweep file, to seconds, bytes and bytes per second."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from decimal import Decimal

DURATION_UNITS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600)}
SIZE_UNITS = {
    "B": Decimal(1),
    **{f"{prefix}B": Decimal(1000) ** power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": Decimal(1024) ** power for power, prefix in enumerate("KMGT", start=1)},
}
BANDWIDTH_UNITS = {f"{unit}/s": factor for unit, factor in SIZE_UNITS.items()}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([^\d\s.,+-].*?)?\s*", re.ASCII)


def parse_duration(value: object) -> float:
    """Seconds of ``10``, ``"10s"``, ``"500ms"``. Raises ValueError with what is wrong."""
    return float(_parse(value, DURATION_UNITS, "duration"))


def parse_bandwidth(value: object) -> float:
    """Bytes per second of ``1.5e11`` or ``"150GB/s"``. Raises ValueError with what is wrong."""
    return float(_parse(value, BANDWIDTH_UNITS, "bandwidth"))


def parse_size(value: object) -> int:
    """Bytes of ``2000000000`` or ``"2GB"``. Raises ValueError with what is wrong."""
    size = _parse(value, SIZE_UNITS, "size")
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def _parse(value: object, units: Mapping[str, Decimal], noun: str) -> Decimal:
    """Decimal, so that ``7.5us`` and ``7.5e-6`` are the same double and give the same point_id."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be a {noun}, got {reprlib.repr(value)}")
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"must be a {noun}, got {reprlib.repr(value)}")
    number, unit = match[1], match[2]
    if unit is not None and unit not in units:
        raise ValueError(f"{value!r} has an unknown unit {unit!r}")
    return Decimal(number) * (units[unit] if unit else 1) + 0
