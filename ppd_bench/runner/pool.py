"""Simulated points over several processes, in whatever order they finish."""

from __future__ import annotations

import dataclasses
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import numpy as np

from ppd_bench.core.errors import PpdBenchError
from ppd_bench.core.point import Point
from ppd_bench.core.profiles import ModelProfile
from ppd_bench.core.record import Columns, RequestRecord
from ppd_bench.runner.traffic import sessions_of
from ppd_bench.sim.simulate import SimOptions, simulate
from ppd_bench.workload.traffic import SourceFile

T = TypeVar("T")

QUEUED_PER_PROCESS = 3
"""Points handed to each process ahead: enough to keep it busy, few enough to lose little when the run is stopped."""


def simulated(
    points: Sequence[Point],
    model: ModelProfile,
    options: SimOptions,
    n_processes: int,
    sources: tuple[SourceFile, ...] = (),
) -> Iterator[tuple[Point, Columns]]:
    """Run the points; yields each with its records as it finishes. The longest (highest QPS) start first.

    Raises:
        SpecError: recorded traffic that is not among ``sources``.
        PpdBenchError: a process died (out of memory, killed); what was yielded before is complete.
    """
    ordered = sorted(points, key=lambda p: (-p.qps, p.repeat, p.workload.name))
    work = functools.partial(run_point, model=model, options=options, sources=sources)
    return spread(work, ordered, n_processes)


def spread(work: Callable[[Point], T], points: Sequence[Point], n_processes: int) -> Iterator[tuple[Point, T]]:
    """``work`` on every point, over processes; yields each with what came of it as it finishes. ``work`` must pickle.

    Raises:
        PpdBenchError: a process died (out of memory, killed); what was yielded before is complete.
    """
    if n_processes <= 1 or len(points) <= 1:
        for point in points:
            yield point, work(point)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(n_processes, len(points)), mp_context=context, initializer=_follow_parent) as pool:
        try:
            yield from _windowed(pool, work, points, n_processes * QUEUED_PER_PROCESS)
        except BrokenProcessPool as error:
            raise PpdBenchError(
                "a simulation process died (out of memory, or killed); give the same command again to go on, "
                "with a smaller --jobs if memory is short"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _windowed(
    pool: ProcessPoolExecutor, work: Callable[[Point], T], points: Sequence[Point], window: int
) -> Iterator[tuple[Point, T]]:
    pending: dict[Future[T], Point] = {}
    waiting = iter(points)
    while True:
        for point in waiting:
            pending[pool.submit(work, point)] = point
            if len(pending) >= window:
                break
        if not pending:
            return
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            yield pending.pop(future), future.result()


def packed(columns: Columns) -> Columns:
    """The same records with columns of numbers as arrays: they cross between processes, and become Parquet, at less cost."""
    return {name: np.asarray(values, _DTYPES[name]) if name in _DTYPES else values for name, values in columns.items()}


_DTYPES: dict[str, type] = {
    **{f.name: np.float64 for f in dataclasses.fields(RequestRecord) if f.type in ("float", "float | None")},
    **{f.name: np.int64 for f in dataclasses.fields(RequestRecord) if f.type == "int"},
}


def run_point(point: Point, model: ModelProfile, options: SimOptions, sources: tuple[SourceFile, ...] = ()) -> Columns:
    """One point, in this process."""
    return packed(simulate(point, sessions_of(point, sources), model, options))


def _follow_parent() -> None:
    """In a pool process: leave Ctrl-C to the parent, and end when the parent ends, kill -9 included.

    A simulated point makes no reference cycles, and the cycle collector took an eighth of its time.
    """
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
