"""Who is told how a sweep goes on, and what is told of turns while a live point is played."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd

from ppd_bench.analysis.metrics import floats, with_latencies
from ppd_bench.core.enums import Status
from ppd_bench.core.point import Point
from ppd_bench.loadgen.rows import TurnEnd

RECENT_S = 5.0
"""Live latencies are medians over the turns that ended in this last stretch of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStatistics:
    """A live point so far. ``time_s``: since its start. ``n_turns``: scheduled in all; ``n_ended``: of these, ended in whatever
    status. Medians are over the ok turns that ended in the last ``RECENT_S``, null without any; they are for watching only."""

    time_s: float
    n_turns: int
    n_ended: int
    n_failed: int
    ttft_median_s: float | None
    tpot_median_s: float | None


class Listener(Protocol):
    """Who is told how a sweep goes on."""

    def started(self, n_points: int, n_finished: int) -> None:
        """The points are known; ``n_finished`` of them were there already."""

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        """A point has been appended."""

    def stage(self, text: str) -> None:
        """What comes next, in words."""


@runtime_checkable
class DetailedListener(Protocol):
    """A ``Listener`` that is also told of what happens within live points, and of what was there before."""

    def kept(self, n_turns: int, n_ok: int) -> None:
        """After ``started``: the turns of the points that were there already."""

    def point_started(self, point: Point, n_turns: int) -> None:
        """A live point begins."""

    def turns(self, statistics: TurnStatistics) -> None:
        """Once a second through a live point."""

    def point_judged(self, point: Point, problems: Sequence[str]) -> None:
        """Before ``point_done`` of a live point: what makes it invalid; empty where it is valid."""


class Listeners:
    """Several listeners as one. Those that are not detailed hear less."""

    def __init__(self, *listeners: Listener) -> None:
        self._all = listeners
        self._detailed = [one for one in listeners if isinstance(one, DetailedListener)]

    def started(self, n_points: int, n_finished: int) -> None:
        for one in self._all:
            one.started(n_points, n_finished)

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        for one in self._all:
            one.point_done(point, n_turns, n_ok)

    def stage(self, text: str) -> None:
        for one in self._all:
            one.stage(text)

    def kept(self, n_turns: int, n_ok: int) -> None:
        for one in self._detailed:
            one.kept(n_turns, n_ok)

    def point_started(self, point: Point, n_turns: int) -> None:
        for one in self._detailed:
            one.point_started(point, n_turns)

    def turns(self, statistics: TurnStatistics) -> None:
        for one in self._detailed:
            one.turns(statistics)

    def point_judged(self, point: Point, problems: Sequence[str]) -> None:
        for one in self._detailed:
            one.point_judged(point, problems)


class TurnWatch:
    """Counts the turns of a live point as they end, and keeps the recent ones for ``TurnStatistics``."""

    def __init__(self, n_turns: int) -> None:
        self._n_turns = n_turns
        self._n_ended = self._n_failed = 0
        self._recent: deque[TurnEnd] = deque()

    def ended(self, turn: TurnEnd) -> None:
        """A turn has ended."""
        self._n_ended += 1
        self._n_failed += turn.status is not Status.OK
        if turn.status is Status.OK:
            self._recent.append(turn)

    def statistics(self, time_s: float) -> TurnStatistics:
        """As of now, seconds since the point's start."""
        while self._recent and (self._recent[0].end_s or 0.0) < time_s - RECENT_S:
            self._recent.popleft()
        ttft_s, tpot_s = _medians(self._recent)
        return TurnStatistics(
            time_s=time_s,
            n_turns=self._n_turns,
            n_ended=self._n_ended,
            n_failed=self._n_failed,
            ttft_median_s=ttft_s,
            tpot_median_s=tpot_s,
        )


def _medians(turns: Sequence[TurnEnd] | deque[TurnEnd]) -> tuple[float | None, float | None]:
    """Median TTFT and TPOT by the formulas of ``analysis.metrics``."""
    if not turns:
        return None, None
    frame = pd.DataFrame(list(turns), columns=list(TurnEnd._fields)).assign(scheduled_s=np.nan)
    latencies = with_latencies(frame)
    known = [values[~np.isnan(values)] for values in (floats(latencies, "ttft_s"), floats(latencies, "tpot_s"))]
    ttft_s, tpot_s = (float(np.median(values)) if len(values) else None for values in known)
    return ttft_s, tpot_s
