"""What recorded traffic looks like: lengths, sessions and turns, think time, arrivals, context classes, and what a prefix
cache leaves.

The figures of Section 1 of the agentic study. Every formula is here; quantiles interpolate linearly (numpy's default). What is
not known is null, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SessionSource = Literal["recorded", "derived", "none"]

CONTEXT_EDGES_TOKENS = (2_048, 8_192, 32_768, 131_072)
"""Inclusive upper edges of the context classes; the last class is open."""
LONG_TOKENS = 32_768
"""The study's 32k."""
WINDOWS_S = (1.0, 10.0, 60.0)
MIN_WINDOWS = 20
TICK_SPREAD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceColumns:
    """One entry per request, in the order in which they were read.

    ``arrival_s``, ``delay_s``: NaN where unknown. ``session``: a number per session, each request its own where there are none.
    ``parent``: the position of the request that each goes on from, -1 for the first of a session; null takes the one before it in
    its session. ``hit_tokens``: prompt tokens that an infinite prefix cache holds (``analysis.reuse``); null without block ids.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    arrival_s: Floats
    delay_s: Floats
    session: Ints
    session_source: SessionSource
    hit_tokens: Ints | None
    parent: Ints | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, quantiles and extremes of a quantity in its unit; ``n`` values."""

    n: int
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """``new_tokens`` of a follow-up: prompt - (prompt + output of the turn before); negative where history was cut.

    ``turn_gap_s``: from the arrival of a turn to that of the next, the answer's time included. ``think_time_s``: from the end of
    the answer, where it is recorded.
    """

    source: SessionSource
    n_sessions: int
    n_multi_turn: int
    single_turn_ratio: float
    turns: Spread
    multi_turn_turns_mean: float | None
    new_tokens: Spread | None
    turn_gap_s: Spread | None
    think_time_s: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """``gap_cv``: standard deviation / mean of the gaps between arrivals (Poisson: 1). ``dispersion``: variance / mean of counts
    in windows of so many seconds (Poisson: 1). ``tick_s``: the step to which instants are rounded, where it can be seen.
    """

    span_s: float
    rate_rps: float | None
    gap_cv: float | None
    dispersion: dict[str, float]
    n_instants: int
    tick_s: float | None
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextClass:
    """Requests whose prompt is longer than the class before and at most ``max_tokens`` (null: open)."""

    max_tokens: int | None
    n_requests: int
    request_ratio: float
    token_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileBucket:
    """Requests by hit tokens / prompt tokens in an infinite prefix cache: warm above 0.9, 50-90, 1-50 (above 0), cold 0."""

    name: str
    n_requests: int
    request_ratio: float
    new_tokens_mean: float | None
    new_token_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """Section 1 of the study for any trace. ``io_ratio``: prompt tokens / output tokens, of all and as a median over requests."""

    n_requests: int
    prompt_tokens_total: int
    output_tokens_total: int
    prompt_tokens: Spread
    output_tokens: Spread
    n_without_output: int
    io_ratio: float | None
    io_ratio_request_p50: float | None
    prefill_token_ratio: float
    long_request_ratio: float
    long_token_ratio: float
    sessions: Sessions | None
    arrivals: Arrivals | None
    contexts: tuple[ContextClass, ...]
    profile: tuple[ProfileBucket, ...] | None
    hit_ratio: float | None


def describe(columns: TraceColumns) -> TraceStats:
    """Every figure, of a trace with at least one request."""
    prompt, output = columns.prompt_tokens, columns.output_tokens
    n_prompt, n_output = int(prompt.sum()), int(output.sum())
    generating = output > 0
    is_long = prompt > LONG_TOKENS
    hits = columns.hit_tokens
    return TraceStats(
        n_requests=prompt.size,
        prompt_tokens_total=n_prompt,
        output_tokens_total=n_output,
        prompt_tokens=spread(prompt),
        output_tokens=spread(output),
        n_without_output=int((~generating).sum()),
        io_ratio=n_prompt / n_output if n_output else None,
        io_ratio_request_p50=float(np.median(prompt[generating] / output[generating])) if generating.any() else None,
        prefill_token_ratio=n_prompt / (n_prompt + n_output),
        long_request_ratio=float(is_long.mean()),
        long_token_ratio=float(prompt[is_long].sum() / n_prompt),
        sessions=_sessions(columns) if columns.session_source != "none" else None,
        arrivals=arrivals(columns.arrival_s),
        contexts=contexts(prompt),
        profile=profile(prompt, hits) if hits is not None else None,
        hit_ratio=float(hits.sum() / n_prompt) if hits is not None else None,
    )


def spread(values: Ints | Floats) -> Spread:
    """Of at least one value."""
    p10, p50, p90, p99 = (float(q) for q in np.quantile(values, (0.1, 0.5, 0.9, 0.99)))
    return Spread(n=values.size, mean=float(values.mean()), p10=p10, p50=p50, p90=p90, p99=p99, max=float(values.max()))


def _spread_of_known(values: Floats) -> Spread | None:
    known = values[~np.isnan(values)]
    return spread(known) if known.size else None


def _sessions(columns: TraceColumns) -> Sessions:
    parent = _parents(columns) if columns.parent is None else columns.parent
    follow_up = np.flatnonzero(parent >= 0)
    before = parent[follow_up]
    n_turns = np.unique(columns.session, return_counts=True)[1]
    multi = n_turns[n_turns > 1]
    new = columns.prompt_tokens[follow_up] - columns.prompt_tokens[before] - columns.output_tokens[before]
    return Sessions(
        source=columns.session_source,
        n_sessions=n_turns.size,
        n_multi_turn=multi.size,
        single_turn_ratio=float((n_turns == 1).mean()),
        turns=spread(n_turns),
        multi_turn_turns_mean=float(multi.mean()) if multi.size else None,
        new_tokens=spread(new) if new.size else None,
        turn_gap_s=_spread_of_known(columns.arrival_s[follow_up] - columns.arrival_s[before]),
        think_time_s=_spread_of_known(columns.delay_s[follow_up]),
    )


def _parents(columns: TraceColumns) -> Ints:
    """The request before in the session, in order of arrival, and in the order read where that is equal or unknown."""
    arrival_s = np.nan_to_num(columns.arrival_s)
    order = np.lexsort((np.arange(arrival_s.size), arrival_s, columns.session))
    same = columns.session[order[1:]] == columns.session[order[:-1]]
    parent = np.full(order.size, -1, dtype=np.int64)
    parent[order[1:][same]] = order[:-1][same]
    return parent


def arrivals(arrival_s: Floats) -> Arrivals | None:
    """Of the requests whose arrival is known; null where that is none."""
    known = arrival_s[~np.isnan(arrival_s)]
    if not known.size:
        return None
    in_order = bool((np.diff(known) >= 0).all())
    known = known if in_order else np.sort(known)
    gaps = np.diff(known)
    span_s = float(known[-1] - known[0])
    tick_s = tick(gaps)
    return Arrivals(
        span_s=span_s,
        rate_rps=known.size / span_s if span_s > 0 else None,
        gap_cv=float(gaps.std() / gaps.mean()) if span_s > 0 else None,
        dispersion={
            f"{w:g}": dispersion(known - known[0], w)
            for w in WINDOWS_S
            if span_s >= MIN_WINDOWS * w and w > (tick_s or 0.0)
        },
        n_instants=1 + int((gaps > 0).sum()),
        tick_s=tick_s,
        in_order=in_order,
    )


def tick(gaps: Floats) -> float | None:
    """The median step between different instants, if at least half of the requests share an instant with the one before and
    nine tenths of the steps are within 5 % of a multiple of it."""
    steps = gaps[gaps > 0]
    if not steps.size or steps.size > gaps.size / 2:
        return None
    step = float(np.median(steps))
    off = np.abs(steps / step - np.round(steps / step))
    return step if float((off <= TICK_SPREAD).mean()) >= 0.9 else None


def dispersion(times_s: Floats, window_s: float) -> float:
    """Variance / mean of the number of arrivals in the whole windows of a span that begins at 0."""
    n_windows = int(times_s[-1] // window_s)
    counts = np.bincount((times_s // window_s).astype(np.int64), minlength=n_windows)[:n_windows]
    return float(counts.var() / counts.mean()) if counts.any() else float("nan")


def contexts(prompt_tokens: Ints) -> tuple[ContextClass, ...]:
    """The prompt's length by class: share of requests and of prompt tokens."""
    edges = np.array(CONTEXT_EDGES_TOKENS)
    index = np.searchsorted(edges, prompt_tokens, side="left")
    total = prompt_tokens.sum()
    return tuple(
        ContextClass(
            max_tokens=limit,
            n_requests=int((index == i).sum()),
            request_ratio=float((index == i).mean()),
            token_ratio=float(prompt_tokens[index == i].sum() / total),
        )
        for i, limit in enumerate((*CONTEXT_EDGES_TOKENS, None))
    )


def profile(prompt_tokens: Ints, hit_tokens: Ints) -> tuple[ProfileBucket, ...]:
    """Requests by how much of them an infinite prefix cache holds, and the mean of what is left to prefill."""
    ratio = hit_tokens / prompt_tokens
    new = prompt_tokens - hit_tokens
    buckets = {
        "warm": ratio > 0.9,
        "50-90": (ratio >= 0.5) & (ratio <= 0.9),
        "1-50": (ratio > 0) & (ratio < 0.5),
        "cold": ratio == 0,
    }
    return tuple(
        ProfileBucket(
            name=name,
            n_requests=int(of.sum()),
            request_ratio=float(of.mean()),
            new_tokens_mean=float(new[of].mean()) if of.any() else None,
            new_token_ratio=float(new[of].sum() / max(1, new.sum())),
        )
        for name, of in buckets.items()
    )
