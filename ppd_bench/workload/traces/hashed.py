"""What traces of hash ids share: one full prompt per row, sent at a timestamp, with global ids of its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.checks import (
    TAIL_MISMATCH,
    Clock,
    Sample,
    check_blocks,
    check_unit,
    head_samples,
    origin_of,
)
from ppd_bench.workload.traces.reader import ReadOptions
from ppd_bench.workload.traces.source import BadRow, Entry, Source
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import UNITS_PER_S, block_ids, n_blocks, seconds, tokens

Rows = Callable[[Source, TraceFormat, Clock, Pass], Iterator[TraceRow]]


class HashedPrompt(NamedTuple):
    """The part of a row that all such traces have."""

    prompt_tokens: int
    output_tokens: int
    block_ids: array[int]
    arrival_s: float


def open_hashed(
    source: Source, options: ReadOptions, rows: Rows, *, name: str, time_unit: Literal["s", "ms"], block_tokens: int
) -> Trace:
    """A trace whose unit and block size were checked on its first rows; ``time_unit`` and ``block_tokens`` are the format's own.

    Raises:
        SpecError: the data contradict the unit, the block size or the tail rule.
    """
    unit = options.time_unit or time_unit
    declared = TraceFormat(
        name=name,
        time_unit=unit,
        block_tokens=options.block_tokens or block_tokens,
        tail=options.tail or "ceil",
        id_scope="global",
        row_means="full_prompt",
        loop="timestamps",
        token_count="recorded",
    )
    samples = head_samples(source, _sample)
    check_blocks(samples, declared.block_tokens or 0, declared.tail or "")
    check_unit(samples, unit, stated=options.time_unit is not None)
    origin = origin_of(samples)

    def read(met: Pass) -> Iterator[TraceRow]:
        return rows(source, declared, Clock(origin, UNITS_PER_S[unit]), met)

    return Trace(source=source.shown, format=declared, read=read)


def read_hashed(entry: Entry, declared: TraceFormat, clock: Clock) -> HashedPrompt:
    """Lengths, ids and instant of a row.

    Raises:
        BadRow: one of them is not what the format says.
    """
    n_prompt, n_output = tokens(entry, "input_length", least=1), tokens(entry, "output_length")
    ids = block_ids(entry, "hash_ids")
    if len(ids) != n_blocks(n_prompt, declared.block_tokens or 0, declared.tail or ""):
        raise BadRow(TAIL_MISMATCH)
    return HashedPrompt(n_prompt, n_output, ids, clock.since_start(seconds(entry, "timestamp")))


def _sample(entry: Entry, place: str) -> Sample:
    return Sample(place, seconds(entry, "timestamp"), tokens(entry, "input_length"), len(block_ids(entry, "hash_ids")))
