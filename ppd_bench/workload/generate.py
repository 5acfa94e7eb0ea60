"""Conversations of a point: when they arrive and what their turns are.

Common random numbers: arrivals depend on the workload, the rate, the window, the seed and the repeat, and on nothing
that differs between the arms of a comparison (topology, policy, placement, executor).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator

from numpy.random import PCG64

from ppd_bench.core.point import canonical_json
from ppd_bench.core.workload import Session, Turn, WorkloadSpec

_BLOCK = 256
_TIME_DIGITS = 9


def generate_sessions(
    workload: WorkloadSpec, *, qps: float, duration_s: float, think_time_s: float, seed: int, repeat: int
) -> tuple[Session, ...]:
    """All conversations that arrive in [0, duration_s) as a Poisson process of rate ``qps``, in order of arrival.

    Turn 1 carries its absolute ``scheduled_s``; later turns carry ``think_time_s``. There may be none: a low
    rate over a short window has empty draws.
    """
    content = dataclasses.asdict(workload)
    del content["traffic"]
    material = {
        "workload": content,
        "qps": float(qps),
        "duration_s": float(duration_s),
        "seed": seed,
        "repeat": repeat,
    }
    entropy = int.from_bytes(hashlib.sha256(canonical_json(material).encode()).digest(), "big")
    arrivals_s = list(poisson_arrivals(float(qps), float(duration_s), uniforms(entropy)))
    session_ids = [f"s{index:05d}" for index in range(len(arrivals_s))]
    turns = [
        _nth_turns(workload, number, session_ids, arrivals_s if number == 1 else None, float(think_time_s))
        for number in range(1, len(workload.turns) + 1)
    ]
    return tuple(zip(*turns, strict=True))


def uniforms(entropy: int) -> Iterator[float]:
    """Doubles in [0, 1) from raw bits: numpy promises that stream for all versions, but not that of distributions."""
    bits = PCG64(entropy)
    while True:
        for raw in bits.random_raw(_BLOCK).tolist():
            yield (raw >> 11) * 2.0**-53


def poisson_arrivals(rate_rps: float, duration_s: float, uniforms: Iterator[float]) -> Iterator[float]:
    """Cumulated exponential gaps, in whole nanoseconds, so that the last bit of a platform's logarithm cannot show."""
    now_s = 0.0
    for uniform in uniforms:
        now_s -= math.log1p(-uniform) / rate_rps
        rounded_s = round(now_s, _TIME_DIGITS)
        if rounded_s >= duration_s:
            return
        yield rounded_s


def _nth_turns(
    workload: WorkloadSpec, number: int, session_ids: list[str], arrivals_s: list[float] | None, think_time_s: float
) -> list[Turn]:
    """The turns of one number of all conversations, of which only ids and instants differ."""
    lengths = workload.turns[number - 1]
    return _turns(
        len(session_ids),
        request_id=[f"{session_id}.t{number}" for session_id in session_ids],
        session_id=session_ids,
        turn=itertools.repeat(number),
        scheduled_s=itertools.repeat(None) if arrivals_s is None else arrivals_s,
        think_time_s=itertools.repeat(None if arrivals_s is not None else think_time_s),
        context_tokens=itertools.repeat(workload.context_tokens(number)),
        input_tokens=itertools.repeat(lengths.input_tokens),
        output_tokens=itertools.repeat(lengths.output_tokens),
        max_output_tokens=itertools.repeat(workload.max_output_tokens),
        block_ids=itertools.repeat(None),
        block_tokens=itertools.repeat(None),
        after=itertools.repeat(None),
    )


def _turns(n: int, **columns: Iterable[object]) -> list[Turn]:
    """``n`` Turns from one column per field.

    Filled through the slots' descriptors, a column at a time in C: the constructor of a frozen class costs three times
    as much, and a sweep makes half a million Turns.
    """
    turns = [Turn.__new__(Turn) for _ in range(n)]
    for field in dataclasses.fields(Turn):
        deque(map(getattr(Turn, field.name).__set__, turns, columns[field.name]), maxlen=0)
    return turns
