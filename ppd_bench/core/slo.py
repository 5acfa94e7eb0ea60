"""Service level objectives. An SLO is judged on stored records, so it is not part of a Point."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Upper bounds per turn, seconds; null means not stated. Used for goodput (GLOSSARY)."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
