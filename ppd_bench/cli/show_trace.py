"""Terminal tables of traces. Shares are in per cent for people; inside they are ratios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ppd_bench.cli.show import print_rows

if TYPE_CHECKING:  # only for signatures: help should not wait for it
    from rich.console import Console

    from ppd_bench.analysis.trace_stats import Arrivals, Sessions, Spread, TraceStats
    from ppd_bench.core.trace import RowCounts
    from ppd_bench.runner.trace_convert import Converted
    from ppd_bench.runner.trace_describe import Description


def show_description(console: Console, description: Description) -> None:
    """Everything that ``describe`` found, notes last."""
    stats, form = description.stats, description.format
    blocks = f", blocks of {form.block_tokens} tokens ({form.tail})" if form.block_tokens else ", no block ids"
    console.print(f"{description.source}: {form.name}{blocks}", markup=False)
    console.print(rows_line(description.counts))
    console.print(f"token counts are {description.basis}")
    rows = [*_length_rows(stats), *(_session_rows(stats.sessions) if stats.sessions else [("sessions", "none named")])]
    rows += _arrival_rows(stats.arrivals) if stats.arrivals else [("arrivals", "none recorded")]
    print_rows(console, "Traffic", ("what", "value"), rows)
    print_rows(console, "Quantiles", ("what", "mean", "p10", "p50", "p90", "p99", "max"), _spread_rows(stats))
    _show_shares(console, stats)
    show_notes(console, (*description.notes, *_new_tokens_note(stats)))


def _new_tokens_note(stats: TraceStats) -> list[str]:
    if stats.sessions is None or stats.sessions.new_tokens is None or stats.sessions.new_tokens.p10 >= 0:
        return []
    return ["new tokens below 0: the prompt is shorter than the conversation so far, which was cut or rewritten"]


def rows_line(counts: RowCounts) -> str:
    """``12,031 rows read: 12,031 kept, 0 dropped``"""
    return f"{counts.n_read:,} rows read: {counts.n_kept:,} kept, {counts.n_dropped:,} dropped"


def show_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", markup=False)


def show_converted(console: Console, converted: Converted) -> None:
    """Where the rows went, and what reading them met."""
    console.print(rows_line(converted.counts))
    show_notes(console, converted.notes)
    console.print(f"wrote {converted.path} ({converted.n_rows:,} rows)", markup=False)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * ratio:.1f} %"


def _length_rows(stats: TraceStats) -> list[tuple[str, str]]:
    without = [("requests without output", f"{stats.n_without_output:,}")] if stats.n_without_output else []
    return [
        ("requests", f"{stats.n_requests:,}"),
        ("prompt tokens", f"{stats.prompt_tokens_total:,}"),
        ("output tokens", f"{stats.output_tokens_total:,}"),
        *without,
        ("prompt / output, of all", _number(stats.io_ratio)),
        ("prompt / output, median over requests", _number(stats.io_ratio_request_p50)),
        ("prefill's share of tokens", _percent(stats.prefill_token_ratio)),
        ("requests over 32k prompt tokens", _percent(stats.long_request_ratio)),
        ("their share of prompt tokens", _percent(stats.long_token_ratio)),
        ("hit ratio, infinite prefix cache", _percent(stats.hit_ratio)),
    ]


def _session_rows(sessions: Sessions) -> list[tuple[str, str]]:
    return [
        (f"sessions ({sessions.source})", f"{sessions.n_sessions:,}"),
        ("of one turn", _percent(sessions.single_turn_ratio)),
        ("of several turns", f"{sessions.n_multi_turn:,}"),
        ("their mean number of turns", _number(sessions.multi_turn_turns_mean)),
    ]


def _arrival_rows(arrivals: Arrivals) -> list[tuple[str, str]]:
    rows = [
        ("time span (s)", f"{arrivals.span_s:,.0f}"),
        ("requests/s", "–" if arrivals.rate_rps is None else f"{arrivals.rate_rps:.2f}"),
        ("CV of gaps between arrivals (Poisson: 1)", _number(arrivals.gap_cv)),
        *((f"index of dispersion, {w} s windows (Poisson: 1)", _number(v)) for w, v in arrivals.dispersion.items()),
    ]
    if arrivals.tick_s is not None:
        rows.append(
            ("instants are rounded to about", f"{arrivals.tick_s:g} s ({arrivals.n_instants:,} different ones)")
        )
    return rows


def _spread_rows(stats: TraceStats) -> list[tuple[str, ...]]:
    sessions = stats.sessions
    named: list[tuple[str, Spread | None]] = [
        ("prompt tokens", stats.prompt_tokens),
        ("output tokens", stats.output_tokens),
    ]
    if sessions:
        named += [
            ("turns per session", sessions.turns),
            ("new tokens of a follow-up", sessions.new_tokens),
            ("think time (s)", sessions.think_time_s),
            ("arrival to next arrival (s)", sessions.turn_gap_s),
        ]
    return [(name, *map(_number, (s.mean, s.p10, s.p50, s.p90, s.p99, s.max))) for name, s in named if s is not None]


def _show_shares(console: Console, stats: TraceStats) -> None:
    contexts: list[Sequence[str]] = [
        (f"up to {c.max_tokens:,}" if c.max_tokens else "longer", f"{c.n_requests:,}", _percent(c.request_ratio),
         _percent(c.token_ratio)) for c in stats.contexts
    ]  # fmt: skip
    print_rows(console, "Context classes", ("prompt tokens", "requests", "share", "share of prompt tokens"), contexts)
    if stats.profile is None:
        return
    labels = {"warm": "warm (> 90 %)", "50-90": "50-90 %", "1-50": "1-50 %", "cold": "cold (0 %)"}
    profile: list[Sequence[str]] = [
        (labels[b.name], f"{b.n_requests:,}", _percent(b.request_ratio), _number(b.new_tokens_mean),
         _percent(b.new_token_ratio)) for b in stats.profile
    ]  # fmt: skip
    print_rows(console, "After an infinite prefix cache",
               ("cached", "requests", "share", "new tokens, mean", "share of tokens to prefill"), profile)  # fmt: skip
