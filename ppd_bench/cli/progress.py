"""Progress of a sweep on the terminal: a bar where there is one, a line now and then where output goes to a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ppd_bench.cli.show import duration
from ppd_bench.core.point import Point
from ppd_bench.runner.listeners import TurnStatistics
from ppd_bench.runner.sweep import point_words

LINE_INTERVAL_S = 10.0
"""Without a terminal: seconds between two lines."""


class SweepProgress:
    """A listener (``runner.listeners``) that draws. Counts of turns are those of the whole run, resumed points included."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._n_points = self._n_kept = self._n_done = self._n_turns = self._n_ok = 0
        self._point = ""
        self._now: TurnStatistics | None = None
        self._started_s = self._last_line_s = clock()

    # -- what is told ------------------------------------------------------------------------------------------------

    def started(self, n_points: int, n_finished: int) -> None:
        self._n_points, self._n_kept, self._n_done = n_points, n_finished, n_finished
        self._started_s = self._last_line_s = self._clock()
        if n_finished:
            self._console.print(f"{n_finished:,} of {n_points:,} points were there already and are kept")
        if self._console.is_terminal and n_finished < n_points:
            self._bar = Progress(
                TextColumn("points"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[told]}"), console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("points", total=n_points, completed=n_finished, told="")
            self._bar.start()

    def kept(self, n_turns: int, n_ok: int) -> None:
        self._n_turns, self._n_ok = n_turns, n_ok

    def point_started(self, point: Point, n_turns: int) -> None:
        self._point, self._now = point_words(point), None
        self._draw()

    def turns(self, statistics: TurnStatistics) -> None:
        self._now = statistics
        self._draw()

    def point_judged(self, point: Point, problems: Sequence[str]) -> None:
        """The runner says it in words."""

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        self._n_done += 1
        self._n_turns += n_turns
        self._n_ok += n_ok
        self._point, self._now = "", None
        self._draw()

    def stage(self, text: str) -> None:
        if self._bar is not None and self._n_done < self._n_points:
            self._bar.console.print(text, markup=False)  # above the bar, which goes on
            return
        self._stop()
        self._console.print(text, markup=False)

    # -- words -------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._bar is not None:
            told = "; ".join(filter(None, (self._left(), self._turns(), self._current())))
            self._bar.update(self._task, completed=self._n_done, told=told)
        elif not self._console.is_terminal and self._clock() - self._last_line_s >= LINE_INTERVAL_S:
            self._last_line_s = self._clock()
            parts = (f"{self._n_done:,} of {self._n_points:,} points", self._turns(), self._left(), self._current())
            self._console.print("; ".join(filter(None, parts)), markup=False)

    def _turns(self) -> str:
        return f"{self._n_turns:,} turns, {self._n_turns - self._n_ok:,} failed" if self._n_turns else ""

    def _left(self) -> str:
        """By the mean time of the points of this start; nothing is said before the first is done."""
        n_here = self._n_done - self._n_kept
        if not n_here or self._n_done == self._n_points:
            return ""
        left_s = (self._clock() - self._started_s) / n_here * (self._n_points - self._n_done)
        return f"about {duration(left_s)} left"

    def _current(self) -> str:
        """The point that is being played."""
        if not self._point or self._now is None:
            return f"now {self._point}" if self._point else ""
        now = self._now
        failed = f", {now.n_failed:,} failed" if now.n_failed else ""
        return (
            f"now {self._point}: {now.n_ended:,} of {now.n_turns:,} turns{failed}"
            f"{_latency('TTFT', now.ttft_median_s)}{_latency('TPOT', now.tpot_median_s)}"
        )

    # -- life --------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()


def _latency(name: str, seconds: float | None) -> str:
    return "" if seconds is None else f", {name} {seconds * 1e3:.3g} ms"
