"""Progress of a sweep on the terminal: a bar where there is one, a line now and then where output goes to a file."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ppd_bench.core.point import Point

LINE_INTERVAL_S = 10.0
"""Without a terminal: seconds between two lines."""


class SweepProgress:
    """A ``runner.sweep.Listener`` that draws."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._n_points = self._n_done = self._n_turns = self._n_ok = 0
        self._last_line_s = time.monotonic()

    def started(self, n_points: int, n_finished: int) -> None:
        self._n_points, self._n_done = n_points, n_finished
        if n_finished:
            self._console.print(f"{n_finished:,} of {n_points:,} points were there already and are kept")
        if self._console.is_terminal and n_finished < n_points:
            self._bar = Progress(
                TextColumn("points"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
                TimeRemainingColumn(), TextColumn("{task.fields[told]}"), console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("points", total=n_points, completed=n_finished, told="")
            self._bar.start()

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        self._n_done += 1
        self._n_turns += n_turns
        self._n_ok += n_ok
        told = f"{self._n_turns:,} turns, {self._n_turns - self._n_ok:,} failed"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._n_done, told=told)
        elif not self._console.is_terminal and time.monotonic() - self._last_line_s >= LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            self._console.print(f"{self._n_done:,} of {self._n_points:,} points; {told}")

    def stage(self, text: str) -> None:
        if self._bar is not None and self._n_done < self._n_points:
            self._bar.console.print(text, markup=False)  # above the bar, which goes on
            return
        self._stop()
        self._console.print(text, markup=False)

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
