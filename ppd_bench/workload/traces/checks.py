"""What a format declares, held against the first rows: block size and tail rule, unit of time. Refuses rather than guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ppd_bench.core.errors import SpecError
from ppd_bench.workload.traces.reader import Unit
from ppd_bench.workload.traces.source import HEAD_ROWS, BadRow, Entry, Source
from ppd_bench.workload.traces.trace import Pass
from ppd_bench.workload.traces.values import UNITS_PER_S, n_blocks

MIN_ROWS_FOR_RATE = 100
MIN_RATE_RPS, MAX_RATE_RPS = 0.02, 2000.0
"""Outside of these a trace is more likely to be in another unit: published ones of whole clusters have 3 to 300 requests/s."""
BLOCK_SIZES = tuple(2**power for power in range(13))
EPOCH_S = (1.0e9, 4.2e9)
"""Dates from 2001 to 2103 in seconds since 1970."""

TAIL_MISMATCH = "number of block ids does not match the prompt's length"


class Sample(NamedTuple):
    """One of the first rows: where it is, its instant in the source's unit, prompt tokens and how many block ids it has."""

    place: str
    time: float | None
    n_tokens: int
    n_ids: int | None


def head_samples(source: Source, sample: Callable[[Entry, str], Sample]) -> list[Sample]:
    """Samples of the first usable rows of every file; what is wrong with others is counted when rows are read."""
    found: list[Sample] = []
    for file in source.files:
        one = Source(shown=source.shown, files=(file,))
        for _, number, entry in islice(one.mappings(Pass()), HEAD_ROWS):
            try:
                found.append(sample(entry, file.place(number)))
            except BadRow:
                continue
    return found


def origin_of(samples: Iterable[Sample]) -> float:
    """The earliest instant of the first rows, 0 without any."""
    return min((s.time for s in samples if s.time is not None), default=0.0)


def check_blocks(samples: Sequence[Sample], block_tokens: int, tail: str) -> None:
    """
    Raises:
        SpecError: at least half of the rows have another number of ids than their length asks for; says what would fit.
    """
    counted = [s for s in samples if s.n_ids is not None]
    wrong = [s for s in counted if s.n_ids != n_blocks(s.n_tokens, block_tokens, tail)]
    if len(wrong) * 2 < len(counted) or not counted:
        return
    first = wrong[0]
    fitting = [f"--block-tokens {size} --tail {rule}" for size, rule in _fitting(counted)]
    advice = (
        f"what fits: {' or '.join(fitting)}" if fitting else "no block size from 1 to 4096 fits; is it another format?"
    )
    raise SpecError(
        f"{first.place}: {first.n_ids} block ids for a prompt of {first.n_tokens:,} tokens, but blocks of {block_tokens} tokens "
        f"(tail rule {tail}) would be {n_blocks(first.n_tokens, block_tokens, tail)}; so in {len(wrong):,} of the first "
        f"{len(counted):,} rows; {advice}"
    )


def _fitting(samples: Sequence[Sample]) -> Iterator[tuple[int, str]]:
    """What more than half of the rows agree with."""
    for size in BLOCK_SIZES:
        for rule in ("ceil", "floor"):
            if 2 * sum(s.n_ids == n_blocks(s.n_tokens, size, rule) for s in samples) > len(samples):
                yield size, rule


def check_unit(samples: Sequence[Sample], unit: Unit, *, stated: bool) -> None:
    """Whether the times can be in this unit; a unit that the user has stated is believed.

    Raises:
        SpecError: dates that are none in this unit but are in another, or a rate of arrivals that no trace has.
    """
    timed = [s for s in samples if s.time is not None]
    if stated or not timed:
        return
    times = [s.time for s in timed if s.time is not None]
    others = [u for u in UNITS_PER_S if u != unit and _is_date(min(times), u)]
    if others and not _is_date(min(times), unit):
        raise SpecError(
            f"{timed[0].place}: time {times[0]:g} is no date in {unit}, but one in {others[0]}; "
            f"give --time-unit {others[0]}, or --time-unit {unit} if it is a duration"
        )
    span = max(times) - min(times)
    if len(times) < MIN_ROWS_FOR_RATE or span <= 0:
        return
    rates = {name: len(times) * per_s / span for name, per_s in UNITS_PER_S.items()}
    if MIN_RATE_RPS <= rates[unit] <= MAX_RATE_RPS:
        return
    likely = [name for name, rate in rates.items() if MIN_RATE_RPS <= rate <= MAX_RATE_RPS]
    hint = f"in {likely[0]} {rates[likely[0]]:.4g}; give --time-unit {likely[0]}, or" if likely else "give"
    raise SpecError(
        f"{timed[0].place}: the first {len(times):,} times span {span:g}, which in {unit} would be {rates[unit]:.4g} requests/s; "
        f"{hint} --time-unit {unit} if it is right"
    )


def _is_date(time: float, unit: str) -> bool:
    return EPOCH_S[0] <= time / UNITS_PER_S[unit] <= EPOCH_S[1]


class Clock:
    """Instants in a source's unit as seconds since the trace's first request."""

    EARLY = "arrives before the trace's first rows"
    BACK = "arrives earlier than the row before it (rows are given in file order)"

    def __init__(self, origin: float, units_per_s: float) -> None:
        self._origin = origin
        self._units_per_s = units_per_s
        self._latest = origin
        self.went_back = False

    def since_start(self, time: float) -> float:
        """
        Raises:
            BadRow: earlier than the first rows of the trace, among which the origin was taken.
        """
        if time < self._origin:
            raise BadRow(self.EARLY)
        self.went_back = time < self._latest
        self._latest = time
        return (time - self._origin) / self._units_per_s
