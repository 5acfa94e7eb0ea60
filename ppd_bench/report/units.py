"""How numbers are shown to people: milliseconds, per cent, thousands separators; a dash where nothing is known."""

from __future__ import annotations

import math

UNKNOWN = "–"
NBSP = "\u00a0"
"""Keeps a number and its unit on one line."""


def number(value: float | None) -> str:
    """Three significant digits below 1,000, whole numbers with separators from there on."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):g}"


def ms(value_s: float | None) -> str:
    """Seconds as milliseconds: ``0.0341`` is ``34.1 ms``."""
    return _with_unit(None if value_s is None else value_s * 1000, "ms")


def tokens_per_s(value: float | None) -> str:
    return _with_unit(value, "tokens/s")


def _with_unit(value: float | None, unit: str) -> str:
    text = number(value)
    return text if text == UNKNOWN else f"{text}{NBSP}{unit}"


def percent(ratio: float | None) -> str:
    """A ratio in per cent: one decimal below 10 %, none from there on."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    per_cent = round(100 * ratio, 1) or 0.0  # no -0 %
    return f"{per_cent:.0f}{NBSP}%" if abs(per_cent) >= 10 or per_cent == round(per_cent) else f"{per_cent:.1f}{NBSP}%"


def share(part: int, whole: int, noun: str) -> str:
    """``114 of 180 cells (63 %)``; without the share where there is no whole."""
    return f"{part:,} of {whole:,} {noun}" + (f" ({percent(part / whole)})" if whole else "")


def counted(n: int, noun: str) -> str:
    """``1 workload``, ``18 workloads``."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def listed(names: list[str], *, most: int = 6) -> str:
    """``a, b and c``; long lists end with how many more there are."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
