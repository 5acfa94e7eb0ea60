"""How late the client itself was: a live point's figures are only as good as the event loop that stamped them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ppd_bench.engine.client import Clock

PROBE_INTERVAL_S = 0.01
"""How often the loop's lateness is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Quantiles over samples, seconds; null without any. Linear interpolation, as everywhere."""

    n: int
    median_s: float | None
    p99_s: float | None
    max_s: float | None


NO_LATENESS = Lateness(n=0, median_s=None, p99_s=None, max_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLateness:
    """``send``: sent - scheduled of every sent turn (GLOSSARY: send lag). ``loop``: oversleep of the event loop, which is
    how much later than their arrival bytes may have been stamped. ``decision``: how long turns waited for their route, where
    another process decides; it is part of their TTFT."""

    send: Lateness
    loop: Lateness
    decision: Lateness


def lateness_of(samples_s: Sequence[float]) -> Lateness:
    """Median, p99 and maximum."""
    if not samples_s:
        return NO_LATENESS
    median, p99 = np.quantile(samples_s, (0.5, 0.99)).tolist()
    return Lateness(n=len(samples_s), median_s=median, p99_s=p99, max_s=max(samples_s))


def worst_of(several: Iterable[Lateness]) -> Lateness:
    """Of several processes the one with the highest p99: its turns were stamped as late as that, however good the others are."""
    known = [(one.p99_s, number, one) for number, one in enumerate(several) if one.p99_s is not None]
    return max(known)[2] if known else NO_LATENESS


class LoopProbe:
    """Samples how late the event loop wakes up. ``async with`` it around what is to be judged."""

    def __init__(self, clock: Clock) -> None:
        self.samples_s: list[float] = []
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    async def __aenter__(self) -> LoopProbe:
        self._arm()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._due_s = self._clock() + PROBE_INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(PROBE_INTERVAL_S, self._on_timer)

    def _on_timer(self) -> None:
        self.samples_s.append(max(0.0, self._clock() - self._due_s))
        self._arm()
