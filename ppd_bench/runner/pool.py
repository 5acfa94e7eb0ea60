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
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from ppd_bench.core.errors import PpdBenchError
from ppd_bench.core.point import Point
from ppd_bench.core.profiles import ModelProfile
from ppd_bench.core.record import Columns, RequestRecord
from ppd_bench.core.workload import Session, WorkloadSpec
from ppd_bench.sim.simulate import SimOptions, simulate
from ppd_bench.workload.generate import generate_sessions

QUEUED_PER_PROCESS = 3
"""Points handed to each process ahead: enough to keep it busy, few enough to lose little when the run is stopped."""


def simulated(
    points: Sequence[Point], model: ModelProfile, options: SimOptions, n_processes: int
) -> Iterator[tuple[Point, Columns]]:
    """Run the points; yields each with its records as it finishes. The longest (highest QPS) start first.

    Raises:
        PpdBenchError: a process died (out of memory, killed); what was yielded before is complete.
    """
    ordered = sorted(points, key=lambda p: (-p.qps, p.repeat, p.workload.name))
    if n_processes <= 1 or len(points) <= 1:
        for point in ordered:
            yield point, run_point(point, model, options)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(n_processes, len(points)), mp_context=context, initializer=_follow_parent) as pool:
        try:
            yield from _windowed(pool, ordered, model, options, n_processes * QUEUED_PER_PROCESS)
        except BrokenProcessPool as error:
            raise PpdBenchError(
                "a simulation process died (out of memory, or killed); give the same command again to go on, "
                "with a smaller --jobs if memory is short"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _windowed(
    pool: ProcessPoolExecutor, points: Sequence[Point], model: ModelProfile, options: SimOptions, window: int
) -> Iterator[tuple[Point, Columns]]:
    pending: dict[Future[Columns], Point] = {}
    waiting = iter(points)
    while True:
        for point in waiting:
            pending[pool.submit(run_point, point, model, options)] = point
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


def run_point(point: Point, model: ModelProfile, options: SimOptions) -> Columns:
    """One point, in this process."""
    sessions = _sessions(point.workload, point.qps, point.duration_s, point.think_time_s, point.seed, point.repeat)
    return packed(simulate(point, sessions, model, options))


@functools.lru_cache(maxsize=4)
def _sessions(
    workload: WorkloadSpec, qps: float, duration_s: float, think_time_s: float, seed: int, repeat: int
) -> tuple[Session, ...]:
    """The turns of a (workload, QPS, repeat): the same for every configuration, so they are made once."""
    return generate_sessions(
        workload, qps=qps, duration_s=duration_s, think_time_s=think_time_s, seed=seed, repeat=repeat
    )


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
