"""``--log-json``: what happens in a sweep, for machines. One JSON object per line, written at once.

Every object has ``event`` and ``time_s``, seconds since the program began the sweep. Points are named by ``point_id`` and
``point`` (configuration, workload, qps, repeat, duration_s). Further keys, by event:

- ``started``: ``run`` (its name), ``folder``, ``executor`` (sim, live), ``evidence`` (simulated, measured), ``n_points``,
  ``n_finished`` (there already), ``unix_time_s``.
- ``kept``: ``n_turns`` and ``n_ok`` of the points that were there already.
- ``stage``: ``text``, what comes next, for people.
- ``point_started`` (live): the point, ``n_turns``.
- ``turns`` (live, once a second): ``point_time_s`` and the other fields of ``runner.listeners.TurnStatistics``.
- ``point_done``: the point, ``n_turns``, ``n_ok``, ``success_ratio`` (null without turns), ``valid``, ``problems`` (why it is not
  valid), ``failed`` (success below the sweep's bound). See ``runner.checks`` for what the last three mean.
- ``warning``: ``text``.
- ``finished``: ``folder``, ``artefacts``.
- ``stopped``: ``error``; the sweep ended before its end, and the same command goes on.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ppd_bench.analysis.summary import configuration_name
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.runner.listeners import TurnStatistics
from ppd_bench.runner.sweep import Outcome, Prepared

STANDARD_OUTPUT = "-"


class EventLog:
    """A listener (``runner.listeners``) that writes. ``where`` is a path, which is appended to, or ``-``."""

    def __init__(self, where: str, prepared: Prepared, clock: Callable[[], float] = time.monotonic) -> None:
        self._prepared = prepared
        self._clock = clock
        self._began_s = clock()
        self._problems: tuple[str, ...] = ()
        self._to_close: IO[str] | None = None
        if where == STANDARD_OUTPUT:
            self._file: IO[str] = sys.stdout
        else:
            self._file = self._to_close = _opened(Path(where))

    # -- what is told ------------------------------------------------------------------------------------------------

    def started(self, n_points: int, n_finished: int) -> None:
        executor = self._prepared.choice.executor
        self._write(
            "started",
            run=self._prepared.name,
            folder=str(self._prepared.folder),
            executor=executor.value,
            evidence=executor.evidence,
            n_points=n_points,
            n_finished=n_finished,
            unix_time_s=time.time(),
        )

    def kept(self, n_turns: int, n_ok: int) -> None:
        self._write("kept", n_turns=n_turns, n_ok=n_ok)

    def stage(self, text: str) -> None:
        self._write("stage", text=text)

    def point_started(self, point: Point, n_turns: int) -> None:
        self._write("point_started", **_named(point), n_turns=n_turns)

    def turns(self, statistics: TurnStatistics) -> None:
        # ``time_s`` of a line is the sweep's; that of the point is told apart.
        content = dataclasses.asdict(statistics)
        self._write("turns", point_time_s=content.pop("time_s"), **content)

    def point_judged(self, point: Point, problems: Sequence[str]) -> None:
        self._problems = tuple(problems)

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        problems, self._problems = self._problems, ()
        success_ratio = n_ok / n_turns if n_turns else None
        self._write(
            "point_done",
            **_named(point),
            n_turns=n_turns,
            n_ok=n_ok,
            success_ratio=success_ratio,
            valid=not problems,
            problems=problems,
            failed=success_ratio is not None and success_ratio < self._prepared.spec.success_bound_ratio,
        )

    def finished(self, outcome: Outcome) -> None:
        """The sweep has come to its end."""
        for warning in outcome.warnings:
            self._write("warning", text=warning)
        self._write("finished", folder=str(outcome.folder), artefacts=[str(path) for path in outcome.artefacts])

    # -- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._write("stopped", error=str(error) or type(error).__name__)
        if self._to_close is not None:
            self._to_close.close()

    def _write(self, event: str, **content: object) -> None:
        line = {"event": event, "time_s": round(self._clock() - self._began_s, 6), **content}
        print(json.dumps(line, allow_nan=False), file=self._file, flush=True)


def _opened(path: Path) -> IO[str]:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"command line: --log-json {path} cannot be written ({error.strerror}); allowed: a file, or -"
        ) from error


def _named(point: Point) -> dict[str, object]:
    return {
        "point_id": point.point_id,
        "point": {
            "configuration": configuration_name(point),
            "workload": point.workload.name,
            "qps": point.qps,
            "repeat": point.repeat,
            "duration_s": point.duration_s,
        },
    }
