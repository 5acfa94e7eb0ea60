"""A smaller trace that keeps what prefix reuse lives on: whole sessions with their ids, and what the sampling changed.

Rows drawn at random break sessions and with them the reuse (on the Mooncake conversation trace 1,000 rows keep 0.07 to 0.14 of
0.374), so there is no such choice here. What sampling costs even so is told: fewer sessions share less with each other, and a
thinned trace asks less per second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppd_bench.analysis.reuse import hit_blocks, hit_tokens, ratio_of, session_hit_blocks
from ppd_bench.analysis.trace_blocks import Flags, Ints, TraceBlocks
from ppd_bench.core.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTarget:
    """What is wanted; null means no such wish. ``duration_s``: sessions that begin in a window of that length, which begins at
    ``start_s`` or, null, where the seed says. ``n_requests`` or ``rate_rps`` (requests per second over the window, or over the
    whole trace) then thin the sessions."""

    n_requests: int | None = None
    rate_rps: float | None = None
    duration_s: float | None = None
    start_s: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFigures:
    """A trace by the figures that sampling may change. ``rate_rps`` and ``duration_s`` are null without arrival times.

    ``duration_s``: from the first arrival to the last. Ratios: see ``analysis.reuse``; null without block ids.
    """

    n_requests: int
    n_sessions: int
    requests_per_session: float
    duration_s: float | None
    rate_rps: float | None
    prompt_mean_tokens: float
    prompt_p50_tokens: float
    prompt_p90_tokens: float
    output_mean_tokens: float
    output_p50_tokens: float
    hit_ratio: float | None
    intra_session_ratio: float | None
    cross_session_ratio: float | None


def sample_sessions(trace: TraceBlocks, target: SampleTarget) -> Ints:
    """The requests of the sample, ascending: every request of each chosen session, those after the window's end included.

    Sessions are taken in an order drawn with the seed until the number of requests is as near to the wanted one as whole sessions
    get; a larger target holds every session of a smaller one with the same seed and window. Where there are neither sessions nor
    block ids, every request stands alone.

    Raises:
        SpecError: no sessions in a trace with block ids, or wishes that cannot be met; all in one error.
    """
    problems = _problems(trace, target)
    if problems:
        raise SpecError(problems)
    rng = np.random.default_rng(target.seed)
    _, first, session = np.unique(trace.session, return_index=True, return_inverse=True)
    allowed = (
        _in_window(trace, target, trace.arrival_s[first], rng) if target.duration_s else np.ones(first.size, np.bool_)
    )
    if not allowed.any():
        raise SpecError(
            "command line: --duration: no session begins in the window; choose another --start or a longer one"
        )
    wanted = target.n_requests
    if target.rate_rps is not None:
        wanted = max(1, round(target.rate_rps * (target.duration_s or _span_s(trace))))
    chosen = allowed if wanted is None else _thinned(np.bincount(session), allowed, wanted, rng)
    return np.flatnonzero(chosen[session])


def sample_figures(trace: TraceBlocks) -> SampleFigures:
    """What a trace or a sample of it looks like."""
    hit, intra = _hit_ratios(trace)
    n_sessions = int(np.unique(trace.session).size)
    span_s = _span_s(trace) if trace.has_arrivals else None
    return SampleFigures(
        n_requests=trace.n_requests,
        n_sessions=n_sessions,
        requests_per_session=trace.n_requests / n_sessions,
        duration_s=span_s,
        rate_rps=trace.n_requests / span_s if span_s else None,
        prompt_mean_tokens=float(trace.prompt_tokens.mean()),
        prompt_p50_tokens=float(np.quantile(trace.prompt_tokens, 0.5)),
        prompt_p90_tokens=float(np.quantile(trace.prompt_tokens, 0.9)),
        output_mean_tokens=float(trace.output_tokens.mean()),
        output_p50_tokens=float(np.quantile(trace.output_tokens, 0.5)),
        hit_ratio=hit,
        intra_session_ratio=intra,
        cross_session_ratio=None if hit is None or intra is None else hit - intra,
    )


def _hit_ratios(trace: TraceBlocks) -> tuple[float, float] | tuple[None, None]:
    """Of all prompts, and of prompts within their session; null without block ids."""
    if not trace.blocks.size:
        return None, None
    total = int(trace.prompt_tokens.sum())
    whole, within = (
        ratio_of(hit_tokens(trace, found), total) for found in (hit_blocks(trace), session_hit_blocks(trace))
    )
    return whole, within


def _problems(trace: TraceBlocks, target: SampleTarget) -> list[str]:
    timed = target.rate_rps is not None or target.duration_s is not None
    wishes = (target.n_requests, target.rate_rps, target.duration_s)
    positive = {"--requests": target.n_requests, "--rate": target.rate_rps, "--duration": target.duration_s}
    checks = {
        "this trace has no sessions, and rows drawn at random would break its reuse; derive sessions (--sessions chain)":
            not trace.has_sessions and trace.blocks.size > 0,
        "command line: one of --requests, --rate and --duration is needed": wishes == (None, None, None),
        "command line: --requests and --rate both thin the sessions; give one of them":
            target.n_requests is not None and target.rate_rps is not None,
        "command line: --start needs --duration": target.start_s is not None and target.duration_s is None,
        "command line: --rate and --duration need arrival times, which this trace lacks": timed and not trace.has_arrivals,
    }  # fmt: skip
    checks |= {
        f"command line: {flag} {value:g}; allowed: above 0": value <= 0 for flag, value in positive.items() if value
    }
    return [problem for problem, is_so in checks.items() if is_so]


def _span_s(trace: TraceBlocks) -> float:
    return float(trace.arrival_s[-1] - trace.arrival_s[0])


def _in_window(trace: TraceBlocks, target: SampleTarget, begins_s: np.ndarray, rng: np.random.Generator) -> Flags:
    """Sessions whose first request lies in the window."""
    duration_s = target.duration_s or 0.0
    latest = max(0.0, _span_s(trace) - duration_s)
    offset = target.start_s if target.start_s is not None else float(rng.uniform(0.0, latest))
    low = trace.arrival_s[0] + offset
    return np.asarray((begins_s >= low) & (begins_s < low + duration_s))


def _thinned(sizes: Ints, allowed: Flags, wanted: int, rng: np.random.Generator) -> Flags:
    """Of the allowed sessions, in a drawn order, the first so many that their requests come nearest to ``wanted``; one at
    least."""
    order = rng.permutation(np.flatnonzero(allowed))
    total = np.cumsum(sizes[order])
    n = int(np.argmin(np.abs(total - wanted))) + 1
    chosen = np.zeros(sizes.size, dtype=np.bool_)
    chosen[order[:n]] = True
    return chosen
