"""How often the intervals of decision tables hold the truth, on the simulator under load.

    python tests/benchmarks/bench_coverage.py [--repeats 400] [--trials 2000] [--compare] [--tables]

The truth of a cell is what all of its simulated repeats say together (``--repeats``); a trial draws a few of them, as a user
would run, and asks whether the interval holds it. Printed, all simulated: coverage of the 95 % intervals of delta_ttft,
delta_tpot and S by number of repeats and length of the points; then how decisions fare. ``--compare`` adds bootstrap intervals
(scipy's BCa over repeats, percentiles over repeats, and over repeats with conversations within them). ``--tables`` draws whole
tables and counts decisions that are wrong. ``--survey`` looks at 40 cells taken at random from the paper's grid.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from ppd_bench.analysis.confidence import MIN_REPEATS, discoveries, half_width, probability_above_zero, score_se
from ppd_bench.analysis.metrics import delta_tpot, delta_ttft
from ppd_bench.analysis.pairing import figures_with_covariance
from ppd_bench.core.enums import Executor
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.axes import PAPER_QPS
from ppd_bench.sim.simulate import simulate
from ppd_bench.workload.generate import generate_sessions
from ppd_bench.workload.library import PAPER_WORKLOADS, find_workload

Floats = npt.NDArray[np.float64]

REPEATS = (2, 3, 5, 8, 10, 20)
DURATIONS_S = (5.0, 10.0, 30.0)
TABLE_QPS = (1.0, 4.0, 8.0, 12.0)
TABLE_WEIGHTS = (4.0, 12.0, 40.0)
"""Of TPOT, for tables as a user would have them."""

NEAR = (-0.1, 0.1, -0.05, 0.05)
"""True scores of a table whose every cell is hard to decide."""


class CellOf(NamedTuple):
    """A (layout, workload, QPS) whose two arms are compared, and the weight of TPOT that puts S near 0."""

    baseline: str
    workload: str
    qps: float
    duration_s: float = 10.0
    gpu: str = "h100-80g"
    w_tpot: float = 3.0

    @property
    def name(self) -> str:
        return f"{self.baseline} {self.workload} QPS {self.qps:g} {self.duration_s:g} s {self.gpu}"


LIGHT = CellOf(baseline="2P_2D", workload="large_huge_paste", qps=2.0)
SATURATED = CellOf(baseline="1P_3D", workload="large_huge_paste", qps=16.0)
"""Its x=0 arm is near the capacity of its one P: queues that grow for as long as a point lasts."""


class Pool(NamedTuple):
    """Repeats of one cell. ``tops`` and ``bottoms``: shape (n, 6), see ``figures_with_covariance``; ``turns``: per repeat the
    follow-up turns' TTFT and TPOT at x=0 and x=1, shape (n_turns, 4), NaN where one failed."""

    tops: Floats
    bottoms: Floats
    turns: list[Floats]

    @property
    def truth(self) -> Floats:
        """delta_ttft and delta_tpot of all repeats together."""
        m = self.tops.sum(axis=0) / self.bottoms.sum(axis=0)
        return np.array([delta_ttft(float(m[0]), float(m[3])), delta_tpot(float(m[1]), float(m[4]))])


def point_of(cell: CellOf, topology: str, repeat: int) -> Point:
    return Point(
        topology=topology,
        model="llama-3.1-8b",
        gpu=cell.gpu,
        workload=find_workload(cell.workload),
        qps=cell.qps,
        duration_s=cell.duration_s,
        timeout_s=30.0,
        think_time_s=0.0,
        seed=0,
        repeat=repeat,
        executor=Executor.SIM,
        policy=PolicySpec(),
        placement=PlacementSpec(),
        engine=EngineSettings(),
        engine_version="bench",
        sim=SimSettings(),
    )


def pool_of(cell: CellOf, n_repeats: int) -> Pool:
    """Simulate ``n_repeats`` repeats of both arms; repeats without conversations are left out, as pairing does."""
    arms = (cell.baseline, parse_topology(cell.baseline).all_local.name)
    tops, bottoms, turns = [], [], []
    for repeat in range(n_repeats):
        points = [point_of(cell, arm, repeat) for arm in arms]
        first = points[0]
        sessions = generate_sessions(
            first.workload, qps=cell.qps, duration_s=cell.duration_s, think_time_s=0.0, seed=0, repeat=repeat
        )
        if not sessions:
            continue
        tallies, follow_ups = zip(*(_tally(simulate(p, sessions, MODELS[p.model])) for p in points), strict=True)
        tops.append(np.concatenate([t[0] for t in tallies]))
        bottoms.append(np.concatenate([t[1] for t in tallies]))
        turns.append(np.concatenate(follow_ups, axis=1))
    return Pool(np.array(tops), np.array(bottoms), turns)


def _tally(columns: Columns) -> tuple[tuple[Floats, Floats], Floats]:
    """Sums and counts of TTFT, TPOT and successes, and the follow-up turns' values in order of (session, turn)."""
    sent, first, last, tokens, turn = (
        np.array([np.nan if v is None else v for v in columns[name]], dtype=float)
        for name in ("sent_s", "first_token_s", "last_token_s", "generated_tokens", "turn")
    )
    ok = np.array([status == "ok" for status in columns["status"]])
    later = turn >= 2
    ttft = np.where(ok & later, first - sent, np.nan)
    tpot = np.where(ok & later & (tokens >= 2), (last - first) / np.where(tokens >= 2, tokens - 1, 1), np.nan)
    top = np.array([np.nansum(ttft), np.nansum(tpot), ok.sum()], dtype=float)
    bottom = np.array([(~np.isnan(ttft)).sum(), (~np.isnan(tpot)).sum(), len(ok)], dtype=float)
    return (top, bottom), np.stack([ttft[later], tpot[later]], axis=1)


class Trials(NamedTuple):
    """Drawn figures of many trials: estimates and standard errors of delta_ttft, delta_tpot and S, shape (n_trials, 3)."""

    estimates: Floats
    errors: Floats


def draw(
    pool: Pool, n: int, n_trials: int, rng: np.random.Generator, w_tpot: float
) -> tuple[Trials, npt.NDArray[np.int64]]:
    """Trials of ``n`` repeats each, drawn without replacement, and which they were, shape (n_trials, n)."""
    chosen = np.argsort(rng.random((n_trials, len(pool.tops))), axis=1)[:, :n]
    groups = np.repeat(np.arange(n_trials), n)
    rows = chosen.ravel()
    figures, covariance = figures_with_covariance(pool.tops[rows], pool.bottoms[rows], groups, n_trials)
    ttft_se, tpot_se = np.sqrt(covariance[:, 0, 0]), np.sqrt(covariance[:, 1, 1])
    both = ttft_se * tpot_se
    correlation = np.where(both > 0, covariance[:, 0, 1] / np.where(both > 0, both, 1.0), 0.0)
    s = figures[:, 0] - w_tpot * figures[:, 1]
    errors = np.stack([ttft_se, tpot_se, score_se(ttft_se, tpot_se, correlation, 1.0, w_tpot)], axis=1)
    return Trials(np.stack([figures[:, 0], figures[:, 1], s], axis=1), errors), chosen


def truth_of(pool: Pool, w_tpot: float) -> Floats:
    """The pool's delta_ttft, delta_tpot and S."""
    ttft, tpot = pool.truth
    return np.array([ttft, tpot, ttft - w_tpot * tpot])


def coverage(pool: Pool, n: int, n_trials: int, rng: np.random.Generator, w_tpot: float) -> Floats:
    """Share of trials whose intervals hold the truth: delta_ttft, delta_tpot, S."""
    trials, _ = draw(pool, n, n_trials, rng, w_tpot)
    half = half_width(trials.errors, np.full(trials.errors.shape, n), min_repeats=2)
    return np.asarray((np.abs(trials.estimates - truth_of(pool, w_tpot)) <= half).mean(axis=0))


def decisions(pool: Pool, n: int, n_trials: int, rng: np.random.Generator, w_tpot: float) -> tuple[float, float]:
    """Shares of trials that decide this one cell rightly and wrongly; the rest are ties."""
    trials, _ = draw(pool, n, n_trials, rng, w_tpot)
    p = probability_above_zero(trials.estimates[:, 2], trials.errors[:, 2], np.full(n_trials, n))
    truth = truth_of(pool, w_tpot)[2]
    up, down = (p > 0.975).mean(), (p < 0.025).mean()
    return (float(up), float(down)) if truth > 0 else (float(down), float(up))


def percentiles_hold(drawn: Floats, truth: Floats) -> npt.NDArray[np.bool_]:
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return np.asarray((low <= truth) & (truth <= high))


def _score(means: Floats, w_tpot: float) -> Floats:
    """S from x=0 TTFT, x=0 TPOT, x=1 TTFT, x=1 TPOT along the last axis."""
    return 1 - means[..., 2] / means[..., 0] - w_tpot * (means[..., 3] / means[..., 1] - 1)


_DELTAS = [0, 1, 3, 4]


def by_percentiles(pool: Pool, chosen: npt.NDArray[np.int64], rng: np.random.Generator, w_tpot: float) -> Floats:
    """S of bootstrap draws of whole repeats."""
    n = len(chosen)
    weights = rng.multinomial(n, np.full(n, 1 / n), 999)
    tops, bottoms = pool.tops[chosen][:, _DELTAS], pool.bottoms[chosen][:, _DELTAS]
    return _score((weights @ tops) / (weights @ bottoms), w_tpot)


def by_hierarchy(pool: Pool, chosen: npt.NDArray[np.int64], rng: np.random.Generator, w_tpot: float) -> Floats:
    """S of bootstrap draws of repeats and, within each, of conversations."""
    n_draws, n = 299, len(chosen)
    tops, bottoms = np.zeros((n_draws, 4)), np.zeros((n_draws, 4))
    weights = rng.multinomial(n, np.full(n, 1 / n), n_draws)
    for place, repeat in enumerate(chosen):
        turns = pool.turns[repeat][:, [0, 1, 2, 3]]
        size = len(turns)
        for _ in range(int(weights[:, place].max())):
            times = rng.multinomial(size, np.full(size, 1 / size), n_draws)
            used = (weights[:, place] > 0)[:, None]
            tops += used * (times @ np.nan_to_num(turns))
            bottoms += used * (times @ ~np.isnan(turns))
            weights[:, place] -= weights[:, place] > 0
    return _score(tops / bottoms, w_tpot)


def bca_holds(pool: Pool, chosen: npt.NDArray[np.int64], rng: np.random.Generator, w_tpot: float, truth: float) -> bool:
    """Whether scipy's BCa interval of S over repeats holds the truth."""
    sums = np.concatenate([pool.tops[chosen][:, _DELTAS], pool.bottoms[chosen][:, _DELTAS]], axis=1)

    def statistic(*columns: Floats, axis: int = -1) -> Floats:
        totals = [column.sum(axis=axis) for column in columns]
        return _score(np.stack([t / b for t, b in zip(totals[:4], totals[4:], strict=True)], axis=-1), w_tpot)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            tuple(sums.T), statistic, paired=True, vectorized=True, n_resamples=999, method="BCa", rng=rng
        ).confidence_interval
    return bool(found.low <= truth <= found.high)


SCORES = (0.0, 0.05, 0.1)
"""True scores at which decisions are counted; the weight of TPOT is chosen to give them. At 0 every decision is an error."""


def print_coverage(cell: CellOf, pool: Pool, n_trials: int) -> None:
    truth = truth_of(pool, cell.w_tpot)
    n_conversations = np.mean([len(t) for t in pool.turns])
    print(f"\n{cell.name}: truth of {len(pool.tops)} repeats, {n_conversations:.1f} conversations each: delta_ttft "
          f"{truth[0]:.4f}, delta_tpot {truth[1]:.4f}, S {truth[2]:.4f} (w_tpot {cell.w_tpot:g})")  # fmt: skip
    print("  repeats   coverage of delta_ttft  delta_tpot       S   decided rightly/wrongly at true S of "
          + ", ".join(f"{s:g}" for s in SCORES))  # fmt: skip
    rng = np.random.default_rng(0)
    for n in REPEATS:
        found = 100 * coverage(pool, n, n_trials, rng, cell.w_tpot)
        told = "   ".join(_decided(pool, n, n_trials, rng, s) for s in SCORES) if n >= MIN_REPEATS else "no interval"
        print(f"  {n:7d} {found[0]:23.1f} {found[1]:11.1f} {found[2]:7.1f}   {told}", flush=True)


def _decided(pool: Pool, n: int, n_trials: int, rng: np.random.Generator, s: float) -> str:
    ttft, tpot = pool.truth
    right, wrong = (100 * share for share in decisions(pool, n, n_trials, rng, (ttft - s) / tpot))
    return f"{right:.1f}/{wrong:.1f}" if s else f"  -/{right + wrong:.1f}"


def print_comparison(cell: CellOf, pool: Pool, n_trials: int = 200) -> None:
    print("  coverage of S by other means: repeats   percentile   BCa   repeats then conversations")
    truth = truth_of(pool, cell.w_tpot)[2]
    for n in (5, 8, 10, 20):
        rng = np.random.default_rng(1)
        _, chosen = draw(pool, n, n_trials, rng, cell.w_tpot)
        plain = [percentiles_hold(by_percentiles(pool, rows, rng, cell.w_tpot), truth) for rows in chosen]
        nested = [percentiles_hold(by_hierarchy(pool, rows, rng, cell.w_tpot), truth) for rows in chosen]
        bca = [bca_holds(pool, rows, rng, cell.w_tpot, float(truth)) for rows in chosen]
        shares = (100 * np.mean(held) for held in (plain, bca, nested))
        print(f"  {n:37d} " + " ".join(f"{share:10.1f}" for share in shares), flush=True)


def table_cells() -> Iterator[CellOf]:
    """24 cells of one layout."""
    for index, workload in enumerate(PAPER_WORKLOADS):
        for qps in TABLE_QPS[index % 3 :: 3]:
            yield CellOf(baseline="3P_1D", workload=workload, qps=qps)


def print_tables(pools: list[Pool], weights: list[float], title: str, n_trials: int = 400) -> None:
    """Decisions of whole tables: by sign alone, and by certainty beside all other cells."""
    truth = np.array([truth_of(pool, w)[2] for pool, w in zip(pools, weights, strict=True)])
    print(f"\ntables of {len(pools)} cells, {title}: {np.mean(truth > 0):.0%} truly local")
    print("  repeats   wrong by sign alone   decided   wrong among the decided")
    rng = np.random.default_rng(2)
    for n in (1, *REPEATS[2:]):
        drawn = [draw(pool, n, n_trials, rng, w)[0] for pool, w in zip(pools, weights, strict=True)]
        s = np.stack([t.estimates[:, 2] for t in drawn], axis=1)
        wrong = (s > 0) != (truth > 0)
        told = f"  {n:7d} {100 * wrong.mean():21.1f}"
        if n >= MIN_REPEATS:
            se = np.stack([t.errors[:, 2] for t in drawn], axis=1)
            p = probability_above_zero(s, se, np.full(s.shape, n))
            sure = np.stack([discoveries(row) for row in p])
            told += f" {100 * sure.mean():9.1f} {100 * (wrong & sure).sum() / max(1, sure.sum()):25.2f}"
        print(told, flush=True)


SURVEYED = ("1P_3D", "2P_2D", "3P_1D", "1R_1P_2D", "2R_1P_1D")


def survey_cells(n: int = 40) -> Iterator[CellOf]:
    """Cells taken at random from the paper's grid."""
    rng = random.Random(7)
    for _ in range(n):
        yield CellOf(rng.choice(SURVEYED), rng.choice(PAPER_WORKLOADS), rng.choice(PAPER_QPS), w_tpot=1.0)


def print_survey(n_repeats: int, n_trials: int) -> None:
    """How coverage of S differs from cell to cell."""
    pools = [pool_of(cell, n_repeats) for cell in survey_cells()]
    print(f"\nS of {len(pools)} cells of the paper's grid, {n_repeats} repeats each, w_tpot 1")
    print("  repeats   mean coverage   lowest   5 % of cells below   median   cells from 93 to 97 %")
    rng = np.random.default_rng(3)
    for n in REPEATS[1:]:
        held = np.array([100 * coverage(pool, n, n_trials, rng, 1.0)[2] for pool in pools])
        low, median = np.quantile(held, [0.05, 0.5])
        inside = np.mean((held >= 93) & (held <= 97))
        print(f"  {n:7d} {held.mean():15.1f} {held.min():8.1f} {low:20.1f} {median:8.1f} {inside:22.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--survey", action="store_true")
    options = parser.parse_args()
    if options.repeats < 4 * max(REPEATS):
        parser.error(f"--repeats: {4 * max(REPEATS)} or more, or the truth is no better known than a trial")
    print("everything below is simulated")
    for cell in (LIGHT, SATURATED):
        for duration_s in DURATIONS_S:
            timed = cell._replace(duration_s=duration_s)
            pool = pool_of(timed, options.repeats)
            print_coverage(timed, pool, options.trials)
            if options.compare and duration_s == cell.duration_s:
                print_comparison(timed, pool)
    if options.tables:
        pools = [pool_of(cell, options.repeats // 2) for cell in table_cells()]
        for w_tpot in TABLE_WEIGHTS:
            print_tables(pools, [w_tpot] * len(pools), f"w_tpot {w_tpot:g}")
        near = [(p.truth[0] - NEAR[i % len(NEAR)]) / p.truth[1] for i, p in enumerate(pools)]
        print_tables(pools, near, f"each cell's weight such that its true S is one of {NEAR}")
    if options.survey:
        print_survey(options.repeats // 2, options.trials)


if __name__ == "__main__":
    main()
