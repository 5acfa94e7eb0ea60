"""A trace's rows with sessions: recorded ones, or derived where the trace names none."""

from __future__ import annotations

from collections.abc import Iterator

from ppd_bench.analysis.trace_blocks import TraceBlocks, number_blocks
from ppd_bench.analysis.trace_sessions import RULES, ChainSessions
from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceRow
from ppd_bench.workload.traces import Trace


def load_blocks(trace: Trace, sessions: str, *, needs_ids: bool = True) -> TraceBlocks:
    """Read a trace into memory for reuse figures and samples. ``sessions``: ``chain`` derives them where there are none.

    ``needs_ids``: a trace without block ids is refused; else its blocks are empty, and no session is derived.

    Raises:
        SpecError: an unknown rule, a trace without block ids, or what the reader raises.
    """
    if sessions not in RULES:
        raise SpecError(f"command line: --sessions {sessions!r} is not known; allowed: {', '.join(RULES)}")
    block_tokens = trace.format.block_tokens
    if block_tokens is None:
        if not needs_ids:
            return number_blocks(trace.rows(), block_tokens=1, needs_ids=False)
        raise SpecError(
            f"{trace.source}: the format {trace.format.name} has no block ids, so nothing can be said about prefix reuse; "
            "'ppd-bench trace describe' tells its lengths and arrivals"
        )
    rows = with_sessions(trace.rows(), block_tokens) if sessions == "chain" else trace.rows()
    return number_blocks(rows, block_tokens=block_tokens, needs_ids=needs_ids)


def with_sessions(rows: Iterator[TraceRow], block_tokens: int) -> Iterator[TraceRow]:
    """Rows without a session get a derived one (``analysis.trace_sessions``) and their turn in it."""
    derived = ChainSessions(block_tokens)
    turns: dict[int, int] = {}
    for row in rows:
        if row.session_id is None:
            session = derived.add(row)
            turns[session] = turns.get(session, 0) + 1
            row = row._replace(session_id=f"chain-{session}", turn=turns[session])
        yield row
