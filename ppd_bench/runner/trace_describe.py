"""``ppd-bench trace describe``: Section 1 of the agentic study for any trace, in one pass over it."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppd_bench.analysis.reuse import hit_blocks, hit_tokens
from ppd_bench.analysis.trace_blocks import number_blocks
from ppd_bench.analysis.trace_sessions import RULES, ChainSessions, Rule
from ppd_bench.analysis.trace_stats import SessionSource, TraceColumns, TraceStats, describe
from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import RowCounts, TraceFormat, TraceRow
from ppd_bench.store.atomic import make_folder, write_bytes
from ppd_bench.workload.traces import Trace

Ints = NDArray[np.int64]

BASIS = {
    "recorded": "recorded in the trace",
    "tokenizer": "counted with the given tokenizer from the recorded text",
    "estimated": "estimated: not from a tokenizer (see notes)",
}
NO_BLOCKS_NOTE = "no block ids: nothing is said about prefix reuse"
NOT_IN_ORDER_NOTE = (
    "requests are not in order of arrival in the source: "
    "rates and reuse take them in order, derived sessions as they stand"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a trace looks like, with what it rests on."""

    source: str
    format: TraceFormat
    counts: RowCounts
    basis: str
    notes: tuple[str, ...]
    stats: TraceStats

    def to_json(self) -> str:
        """All figures; names are those of the dataclasses, units are in the names."""
        content: dict[str, Any] = dataclasses.asdict(self)
        return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def describe_trace(trace: Trace, sessions: str = "chain") -> Description:
    """Read a trace once and describe it.

    Args:
        sessions: what to do where it names no sessions: ``chain`` derives them from block ids (``analysis.trace_sessions``),
            ``none`` leaves them out.

    Raises:
        SpecError: an unknown rule, or what the reader raises.
    """
    rule = _rule(sessions)
    pass_ = _Columns(block_tokens=trace.format.block_tokens if rule == "chain" else None)
    hits = _hits(trace, pass_)
    columns = pass_.finish(hits)
    stats = describe(columns)
    notes = list(trace.notes)
    if hits is None:
        notes.append(NO_BLOCKS_NOTE)
    if columns.session_source == "derived":
        notes.append("sessions are derived from block ids by the rule 'chain', not recorded")
    if stats.arrivals and not stats.arrivals.in_order:
        notes.append(NOT_IN_ORDER_NOTE)
    return Description(
        source=trace.source,
        format=trace.format,
        counts=trace.counts,
        basis=BASIS[trace.format.token_count],
        notes=tuple(notes),
        stats=stats,
    )


def _rule(name: str) -> Rule:
    for rule in RULES:
        if rule == name:
            return rule
    raise SpecError(f"command line: --sessions {name!r} is not known; allowed: {', '.join(RULES)}")


def _hits(trace: Trace, pass_: _Columns) -> Ints | None:
    """Hit tokens in an infinite cache, in the order read; null without block ids. Fills ``pass_``."""
    rows = pass_.watched(trace.rows())
    if trace.format.block_tokens is None:
        for _ in rows:
            pass
        return None
    try:
        blocks = number_blocks(rows, block_tokens=trace.format.block_tokens)
    except SpecError:
        if pass_.n_ids or not pass_.row:
            raise
        return np.zeros(len(pass_.row), dtype=np.int64)  # every prompt is shorter than a block
    # Blocks are in order of arrival; the columns are as read.
    place = np.argsort(np.frombuffer(pass_.row, dtype=np.int64), kind="stable")
    hits = np.empty(blocks.n_requests, dtype=np.int64)
    hits[place[np.argsort(np.argsort(blocks.row, kind="stable"), kind="stable")]] = hit_tokens(
        blocks, hit_blocks(blocks)
    )
    return hits


@dataclass(slots=True)
class _Columns:
    """What one pass leaves of the rows."""

    block_tokens: int | None
    row: array[int] = field(default_factory=lambda: array("q"))
    n_ids: int = 0
    _prompt: array[int] = field(default_factory=lambda: array("q"))
    _output: array[int] = field(default_factory=lambda: array("q"))
    _arrival: array[float] = field(default_factory=lambda: array("d"))
    _delay: array[float] = field(default_factory=lambda: array("d"))
    _session: array[int] = field(default_factory=lambda: array("q"))
    _names: dict[str, int] = field(default_factory=dict)
    _derived: ChainSessions | None = None

    def watched(self, rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
        """The rows as they are; their columns are kept."""
        if self.block_tokens is not None:
            self._derived = ChainSessions(self.block_tokens)
        unknown = float("nan")
        for row in rows:
            self.row.append(row.row)
            self.n_ids += len(row.block_ids)
            self._prompt.append(row.prompt_tokens)
            self._output.append(row.output_tokens)
            self._arrival.append(unknown if row.arrival_s is None else row.arrival_s)
            self._delay.append(unknown if row.delay_s is None else row.delay_s)
            if row.session_id is not None:
                self._session.append(self._names.setdefault(row.session_id, len(self._names)))
            else:
                self._session.append(-len(self.row))
                if self._derived is not None:
                    self._derived.add(row)
            yield row

    def finish(self, hits: Ints | None) -> TraceColumns:
        source = _source(bool(self._names), self._derived, self.n_ids)
        derived = self._derived if source == "derived" else None
        session = self._session if derived is None else derived.session
        return TraceColumns(
            prompt_tokens=np.frombuffer(self._prompt, dtype=np.int64),
            output_tokens=np.frombuffer(self._output, dtype=np.int64),
            arrival_s=np.frombuffer(self._arrival, dtype=np.float64),
            delay_s=np.frombuffer(self._delay, dtype=np.float64),
            session=np.frombuffer(session, dtype=np.int64),
            session_source=source,
            hit_tokens=hits,
            parent=None if derived is None else np.frombuffer(derived.parent, dtype=np.int64),
        )


def _source(has_names: bool, derived: ChainSessions | None, n_ids: int) -> SessionSource:
    if has_names:
        return "recorded"
    return "derived" if derived is not None and n_ids else "none"


def write_description(description: Description, folder: Path) -> list[Path]:
    """``describe.json`` and the plots in a folder, which is made.

    Raises:
        StoreError: it cannot be written.
    """
    from ppd_bench.report.style import save  # matplotlib takes a second; only what draws should pay for it
    from ppd_bench.report.trace_plots import figure_trace

    make_folder(folder)
    path = folder / "describe.json"
    write_bytes(path, description.to_json().encode())
    figure = figure_trace(description.stats, name=Path(description.source).name, basis=description.basis)
    return [path, *save(figure, folder / "describe")]
