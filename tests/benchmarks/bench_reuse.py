"""Prefix reuse of a trace of production size: wall time and memory.

The generator makes a trace of the shape of the agentic study's Section 1 (2,114,220 requests, 33.6k prompt tokens on average,
1.3 million sessions of which 90 % have one turn, 47 % of the distinct 512-token blocks shared, one hot system prompt): seeded,
and made piece by piece, so that it takes little memory itself. What came out is printed beside what was wanted.

    python tests/benchmarks/bench_reuse.py                          the whole trace, in one process
    python tests/benchmarks/bench_reuse.py --requests 100000        a small one
    python tests/benchmarks/bench_reuse.py --write trace.parquet    a file for 'ppd-bench trace reuse'
"""

from __future__ import annotations

import argparse
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ppd_bench.analysis.reuse import reuse
from ppd_bench.analysis.reuse_distance import lru_curve
from ppd_bench.analysis.reuse_instances import instance_reuse
from ppd_bench.analysis.trace_blocks import number_blocks
from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.runner.trace_convert import write_trace

T = TypeVar("T")
Ints = NDArray[np.int64]

STUDY_REQUESTS = 2_114_220
SPAN_S = 7200.0
BLOCK_TOKENS = 512
FAMILY_SHARE = 0.031
"""Share of the requests that begin with the hottest system prompt: 64,754 of 2,114,220."""
FORK_SHARE = 0.45
"""Share of the single-turn sessions that begin as another session does: retries, forks, templates."""
WANTED = {
    "prompt mean (tokens)": 33_600, "prompt p50": 20_000, "prompt p90": 88_000, "output mean": 445, "output p50": 80,
    "requests per session": 1.63, "single-turn sessions": 0.90, "hit, no bound": 0.71, "intra-session": 0.57,
    "shared of distinct blocks": 0.47, "hottest block / requests": FAMILY_SHARE,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One entry per request in order of arrival; blocks are made from these when they are needed."""

    arrival_s: NDArray[np.float64]
    session: Ints
    family_start: Ints
    n_family: Ints
    own_start: Ints
    n_own: Ints
    prompt_tokens: Ints
    output_tokens: Ints


def plan(n_requests: int, seed: int = 0) -> Plan:
    """Sessions that begin with one of many system prompts and shared files (a Zipf-like choice) and grow with every turn."""
    rng = np.random.default_rng(seed)
    turns = _turns(rng, n_requests)
    n_sessions = turns.size
    session = np.repeat(np.arange(n_sessions), turns)
    first_request = np.cumsum(turns) - turns
    begins = np.repeat(first_request, turns)
    turn = np.arange(session.size) - begins
    family, family_start, family_size = _families(rng, n_sessions)
    first_own = np.where(turns == 1, _lengths(rng, n_sessions, 7_500, 1.25), _lengths(rng, n_sessions, 16_000, 0.9))
    forks = (turns == 1) & (rng.random(n_sessions) < FORK_SHARE)
    like = np.where(forks, rng.integers(n_sessions, size=n_sessions), np.arange(n_sessions))
    like = np.where(forks[like], np.arange(n_sessions), like)  # no fork of a fork, which may have another system prompt
    first_own = np.where(forks, first_own[like], first_own)
    grown = _lengths(rng, session.size, 2_300, 1.25) * (turn > 0)
    own_tokens = np.repeat(first_own, turns) + _sums_within(grown, begins)
    room = np.cumsum(own_tokens // BLOCK_TOKENS + 1)
    family = family[like]
    own_start = (room - own_tokens // BLOCK_TOKENS - 1)[first_request][like][session]
    gaps = rng.exponential(40.0, session.size) * (turn > 0)
    arrival = np.repeat(rng.uniform(0, SPAN_S, n_sessions), turns)
    arrival += _sums_within(gaps, begins)
    order = np.argsort(arrival, kind="stable")
    n_family = family_size[family][session]
    return Plan(
        arrival_s=arrival[order],
        session=session[order],
        family_start=family_start[family][session][order],
        n_family=n_family[order],
        own_start=(own_start + family_size.sum())[order],
        n_own=-(-own_tokens[order] // BLOCK_TOKENS),
        prompt_tokens=(n_family * BLOCK_TOKENS + own_tokens)[order],
        output_tokens=_lengths(rng, session.size, 80, 1.85)[order],
    )


def _turns(rng: np.random.Generator, n_requests: int) -> Ints:
    """Nine sessions of ten have one turn, the others 7.3 on average."""
    n_sessions = max(1, round(n_requests / 1.63))
    turns = np.where(rng.random(n_sessions) < 0.9, 1, 1 + rng.geometric(1 / 6.3, n_sessions))
    return turns[np.cumsum(turns) <= n_requests]


def _families(rng: np.random.Generator, n_sessions: int) -> tuple[Ints, Ints, Ints]:
    """Per session its family; per family where its blocks begin and how many they are."""
    n = max(10, n_sessions // 12)
    weights = 1.0 / (np.arange(n) + 4.0) ** 0.95
    weights[0] = 0.0
    weights *= (1 - FAMILY_SHARE) / weights.sum()
    weights[0] = FAMILY_SHARE
    sizes = np.maximum(1, rng.lognormal(np.log(3.5), 1.0, n)).astype(np.int64)
    return rng.choice(n, n_sessions, p=weights), np.cumsum(sizes) - sizes, sizes


def _lengths(rng: np.random.Generator, n: int, median: float, sigma: float) -> Ints:
    return np.clip(rng.lognormal(np.log(median), sigma, n), 1, 190_000).astype(np.int64)


def _sums_within(values: NDArray[np.float64] | Ints, starts: Ints) -> NDArray[np.float64] | Ints:
    """Sums from each session's beginning to here."""
    total = np.cumsum(values)
    return total - (total[starts] - values[starts])


def rows(made: Plan, at_a_time: int = 20_000) -> Iterator[TraceRow]:
    """The requests with their blocks. Ids are scrambled to 64 bits, so that nothing gains from their order."""
    for start in range(0, made.arrival_s.size, at_a_time):
        part = slice(start, min(made.arrival_s.size, start + at_a_time))
        counts = made.n_family[part] + made.n_own[part]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        n_family = np.repeat(made.n_family[part], counts)
        own = np.repeat(made.own_start[part], counts) + at - n_family
        ids = np.where(at < n_family, np.repeat(made.family_start[part], counts) + at, own)
        ids[offsets[1:] - 1] = (1 << 40) + np.arange(part.start, part.stop)  # a partial last block is nobody else's
        scrambled = array("q", _scrambled(ids).tobytes())
        for k in range(part.start, part.stop):
            low, high = int(offsets[k - start]), int(offsets[k - start + 1])
            yield TraceRow(
                k, f"r{k}", f"s{made.session[k]}", None, float(made.arrival_s[k]), None,
                int(made.prompt_tokens[k]), int(made.output_tokens[k]), scrambled[low:high],
            )  # fmt: skip


def _scrambled(ids: Ints) -> Ints:
    mixed = ids.view(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(32))).view(np.int64)


def write(made: Plan, path: Path) -> None:
    """Our own form: .jsonl or .parquet."""
    declared = TraceFormat(
        name="generated", time_unit="s", block_tokens=BLOCK_TOKENS, tail="ceil", id_scope="global",
        row_means="full_prompt", loop="timestamps", token_count="recorded",
    )  # fmt: skip
    write_trace(path, declared, rows(made), ("generated by tests/benchmarks/bench_reuse.py",))


def timed(what: str, run: Callable[[], T]) -> T:
    start, cpu = time.perf_counter(), time.process_time()
    result = run()
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(f"{what}: {wall_s:.1f} s ({cpu_s:.1f} s of CPU), peak memory so far {peak:.2f} GiB", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=STUDY_REQUESTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--policies", default="round_robin,cache_aware")
    options = parser.parse_args()
    made = timed("plan", lambda: plan(options.requests, options.seed))
    if options.write:
        timed(f"wrote {options.write}", lambda: write(made, options.write))
        return
    trace = timed("made rows, numbered their blocks", lambda: number_blocks(rows(made), block_tokens=BLOCK_TOKENS))
    print(f"{trace.n_requests:,} requests, {trace.prompt_tokens.sum():,} prompt tokens, {trace.blocks.size:,} block ids, "
          f"{trace.n_blocks:,} distinct")  # fmt: skip
    found = timed("reuse without bound, exact", lambda: reuse(trace))
    sizes = np.unique(trace.session, return_counts=True)[1]
    got = {
        "prompt mean (tokens)": trace.prompt_tokens.mean(), "prompt p50": np.quantile(trace.prompt_tokens, 0.5),
        "prompt p90": np.quantile(trace.prompt_tokens, 0.9), "output mean": trace.output_tokens.mean(),
        "output p50": np.quantile(trace.output_tokens, 0.5), "requests per session": sizes.mean(),
        "single-turn sessions": (sizes == 1).mean(), "hit, no bound": found.hit_ratio,
        "intra-session": found.intra_session_ratio or 0.0, "shared of distinct blocks": found.shared_block_ratio,
        "hottest block / requests": found.hottest[0].n_requests / trace.n_requests,
    }  # fmt: skip
    for name, wanted in WANTED.items():
        print(f"  {name}: study {wanted:,}, made {float(got[name]):,.4g}")
    curve = timed("LRU curve", lambda: lru_curve(trace))
    error = max(p.standard_error or 0.0 for p in curve.points)
    print(f"  sampled at {curve.rate:.4f} of the blocks, standard error at most {error:.4f}")
    print("  " + ", ".join(f"{p.capacity_tokens:,.0f}: {p.hit_ratio:.3f}" for p in curve.points))
    for policy in options.policies.split(",") if options.policies else ():
        results = timed(
            f"{policy} over {options.instances}",
            lambda policy=policy: instance_reuse(
                trace, policy, options.instances, possible_ratio=found.hit_ratio, capacities_tokens=(2.0**18,)
            ),
        )
        print("  " + ", ".join(f"{r.capacity_tokens or 'no bound'}: {r.hit_ratio:.3f}" for r in results))


if __name__ == "__main__":
    main()
