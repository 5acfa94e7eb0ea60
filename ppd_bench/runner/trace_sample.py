"""``ppd-bench trace sample``: whole sessions of a trace in our own form, and what the sampling changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppd_bench.analysis.sampling import SampleFigures, SampleTarget, sample_figures, sample_sessions
from ppd_bench.analysis.trace_blocks import Flags
from ppd_bench.core.point import plain
from ppd_bench.core.trace import TraceRow
from ppd_bench.runner.trace_convert import refuse_source, write_trace
from ppd_bench.runner.trace_describe import BASIS
from ppd_bench.runner.trace_rows import load_blocks, with_sessions
from ppd_bench.workload.traces import Trace

NOTE = "a sample of whole sessions by ppd-bench trace sample: seed {seed}, {n:,} of {total:,} requests of {source}"

ALONE = "neither sessions nor block ids: every request was drawn by itself, and nothing is said about prefix reuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was written, beside the trace that it was drawn from. ``basis``: where the token counts come from."""

    path: Path
    source: str
    seed: int
    basis: str
    original: SampleFigures
    sample: SampleFigures
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """Both columns of figures; names are those of the dataclasses, units are in the names."""
        content: dict[str, Any] = plain(self) | {"path": str(self.path)}
        return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def sample_trace(trace: Trace, out: Path, target: SampleTarget, *, sessions: str = "chain") -> Sampled:
    """Draw whole sessions and write their rows to ``out`` (.jsonl or .parquet) as they are, but for two fields.

    ``arrival_s`` counts from the sample's first request, and derived sessions have their names and turns. Reads the trace twice.

    Raises:
        SpecError: wishes that cannot be met, a trace with block ids and without sessions, another ending of ``out``, or ``out``
            is the trace itself.
        StoreError: it cannot be written.
    """
    refuse_source(out, trace)
    blocks = load_blocks(trace, sessions, needs_ids=False)
    chosen = sample_sessions(blocks, target)
    part = blocks.select(chosen)
    source_rows = np.zeros(int(blocks.row.max()) + 1, dtype=np.bool_)
    source_rows[part.row] = True
    start_s = float(part.arrival_s.min()) if part.has_arrivals else 0.0
    note = NOTE.format(seed=target.seed, n=chosen.size, total=blocks.n_requests, source=Path(trace.source).name)
    rows = _chosen(trace, source_rows, start_s, sessions)
    write_trace(out, trace.format, rows, (*trace.standing_notes, note))
    alone = [] if blocks.has_sessions else [ALONE]
    return Sampled(
        path=out, source=trace.source, seed=target.seed, basis=BASIS[trace.format.token_count],
        original=sample_figures(blocks), sample=sample_figures(part), notes=(*trace.notes, *alone),
    )  # fmt: skip


def _chosen(trace: Trace, wanted: Flags, start_s: float, sessions: str) -> Iterator[TraceRow]:
    block_tokens = trace.format.block_tokens
    rows = with_sessions(trace.rows(), block_tokens) if sessions == "chain" and block_tokens else trace.rows()
    for row in rows:
        if row.row < wanted.size and wanted[row.row]:
            yield row if row.arrival_s is None else row._replace(arrival_s=row.arrival_s - start_s)


def changes(result: Sampled) -> list[tuple[str, float | None, float | None]]:
    """(figure, original, sample), in the order of ``SampleFigures``."""
    names = [field.name for field in dataclasses.fields(SampleFigures)]
    return [(name, getattr(result.original, name), getattr(result.sample, name)) for name in names]
