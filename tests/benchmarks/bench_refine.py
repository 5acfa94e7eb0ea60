"""Right decisions against GPU-seconds: repeats where they matter, beside the whole grid repeated, on simulated truth.

    python tests/benchmarks/bench_refine.py [--repeats 30] [--trials 40] [--jobs 2] [--keep POOL.npz] [--out FOLDER]

The truth of a cell is what all of its simulated repeats say together. A trial draws an order of each cell's repeats and spends
GPU-seconds on them as ``sweep --refine`` would, and as a grid of 1, 2, ... repeats would. A decision is right where its side is
the truth's. Cells whose true S lies within 0.01 of 0 are counted too; they are shown apart, for there a wrong side costs next to
nothing. GPU-seconds are those that ``plan`` states, launches of every round included. Written: refine.csv and refine.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from bench_coverage import CellOf, Floats, _tally, point_of

from ppd_bench.analysis.pairing import figures_with_covariance
from ppd_bench.analysis.refine import Candidate, Standing, next_round, round_allotment, standing
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import Point
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.axes import PAPER_QPS
from ppd_bench.runner.pool import spread
from ppd_bench.sim.simulate import simulate
from ppd_bench.sweep.estimate import LAUNCH_S, point_gpu_seconds
from ppd_bench.workload.generate import generate_sessions
from ppd_bench.workload.library import PAPER_WORKLOADS

BASELINES = ("2P_2D", "3P_1D")
W_TPOT = (1.0, 4.0, 12.0)
BUDGETS = (0.22, 0.25, 0.28, 0.35, 0.45, 0.6)
"""Shares of the GPU-seconds of the grid with 5 repeats."""
FULL_REPEATS = 5
MAX_REPEATS = 20
SUCCESS_BOUND = 0.95
NEAR_ZERO = 0.01


class Pool(NamedTuple):
    """Sums and counts of every (cell, repeat), shape (n_cells, n_repeats, 6); see ``figures_with_covariance``."""

    tops: Floats
    bottoms: Floats


def cells() -> list[CellOf]:
    return [CellOf(baseline=b, workload=w, qps=q) for b in BASELINES for w in PAPER_WORKLOADS for q in PAPER_QPS]


def arm_tally(point: Point) -> tuple[Floats, Floats]:
    sessions = generate_sessions(
        point.workload, qps=point.qps, duration_s=point.duration_s, think_time_s=0.0, seed=0, repeat=point.repeat
    )
    if not sessions:
        return np.zeros(3), np.zeros(3)
    return _tally(simulate(point, sessions, MODELS[point.model]))[0]


def simulated_pool(n_repeats: int, n_processes: int) -> Pool:
    grid = [(cell, repeat) for cell in cells() for repeat in range(n_repeats)]
    points = {}
    for i, (cell, repeat) in enumerate(grid):
        for arm, name in enumerate((cell.baseline, parse_topology(cell.baseline).all_local.name)):
            points[point_of(cell, name, repeat)] = (i, arm)
    tops, bottoms = np.zeros((len(grid), 2, 3)), np.zeros((len(grid), 2, 3))
    for point, (top, bottom) in spread(arm_tally, list(points), n_processes):
        tops[points[point]], bottoms[points[point]] = top, bottom
    shape = (len(cells()), n_repeats, 6)
    return Pool(tops.reshape(shape), bottoms.reshape(shape))


def kept_pool(keep: Path | None, n_repeats: int, n_processes: int) -> Pool:
    if keep is not None and keep.exists():
        with np.load(keep) as stored:
            return Pool(stored["tops"], stored["bottoms"])
    pool = simulated_pool(n_repeats, n_processes)
    if keep is not None:
        np.savez_compressed(keep, tops=pool.tops, bottoms=pool.bottoms)
    return pool


def deltas_of(pool: Pool, order: np.ndarray, n_repeats: np.ndarray) -> pd.DataFrame:
    """The rows that ``analysis.pairing.deltas`` would make of the first ``n_repeats[c]`` repeats of each cell's order."""
    n_cells = len(n_repeats)
    groups = np.repeat(np.arange(n_cells), n_repeats)
    rows = np.concatenate([order[c, :n] for c, n in enumerate(n_repeats)])
    tops, bottoms = pool.tops[groups, rows], pool.bottoms[groups, rows]
    used = (bottoms[:, 2] > 0) & (bottoms[:, 5] > 0)  # a repeat without conversations is left out, as pairing does
    groups = groups[used]
    figures, covariance = figures_with_covariance(tops[used], bottoms[used], groups, n_cells)
    se = np.sqrt(np.einsum("cii->ci", covariance))
    both = se[:, 0] * se[:, 1]
    names = ("delta_ttft", "delta_tpot", "success_x0_ratio", "success_x1_ratio")
    errors = ("delta_ttft_se", "delta_tpot_se", "success_x0_se", "success_x1_se")
    pooled = [
        np.bincount(groups, weights=values[used][:, i], minlength=n_cells)
        for i in (0, 1, 3, 4)
        for values in (tops, bottoms)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ttft0, tpot0, ttft1, tpot1 = (pooled[2 * i] / pooled[2 * i + 1] for i in range(4))
    return pd.DataFrame(
        {
            "baseline": [cell.baseline for cell in cells()],
            "workload": [cell.workload for cell in cells()],
            "ttft_x0_s": ttft0,
            "ttft_x1_s": ttft1,
            "tpot_x0_s": tpot0,
            "tpot_x1_s": tpot1,
            "qps": [cell.qps for cell in cells()],
            "n_repeats": np.bincount(groups, minlength=n_cells),
            **dict(zip(names, figures.T, strict=True)),
            **dict(zip(errors, se.T, strict=True)),
            "delta_correlation": np.where(both > 0, covariance[:, 0, 1] / np.where(both > 0, both, 1.0), 0.0),
        }
    )


def judged(pool: Pool, order: np.ndarray, n_repeats: np.ndarray, w_tpot: float) -> Standing:
    return standing(deltas_of(pool, order, n_repeats), w_ttft=1.0, w_tpot=w_tpot, success_bound=SUCCESS_BOUND)


class Spent(NamedTuple):
    """What one way of spending reached: GPU-seconds, share of right sides (all cells, and those not near 0), mean loss in S."""

    gpu_s: float
    right: float
    right_far: float
    lost: float


class Scale:
    """Right and wrong, and what things cost."""

    def __init__(self, pool: Pool, w_tpot: float) -> None:
        n_cells, n_repeats = pool.tops.shape[:2]
        everything = np.tile(np.arange(n_repeats), (n_cells, 1))
        self.truth = judged(pool, everything, np.full(n_cells, n_repeats), w_tpot)
        self.far = np.abs(np.nan_to_num(self.truth.score, nan=1.0)) >= NEAR_ZERO
        self.costs = np.array([2 * point_gpu_seconds(point_of(c, c.baseline, 0)) for c in cells()])
        self.launch = np.array([LAUNCH_S * parse_topology(b).n_gpus for b in BASELINES])

    def spent(self, gpu_s: float, found: Standing) -> Spent:
        right = found.side == self.truth.side
        both = np.isin(found.side, ("pd", "local")) & np.isin(self.truth.side, ("pd", "local"))
        lost = np.where(~right & both, np.abs(np.nan_to_num(self.truth.score, nan=1.0)), 0.0)
        return Spent(gpu_s, float(right.mean()), float(right[self.far].mean()), float(lost.mean()))

    def full(self, n_repeats: int) -> float:
        return float(n_repeats * self.costs.sum() + self.launch.sum())


def refined(pool: Pool, order: np.ndarray, w_tpot: float, scale: Scale, budget: float) -> Spent:
    """Spend as ``sweep --refine --budget`` does."""
    n = np.ones(len(scale.costs), dtype=np.int64)
    spent = scale.full(1)
    allotment = round_allotment(spent, float(scale.launch.sum()), budget)
    found = judged(pool, order, n, w_tpot)
    while spent + allotment <= budget + 1e-6:
        open_cells = [
            Candidate(c, float(scale.costs[c])) for c in range(len(n)) if n[c] < min(MAX_REPEATS, pool.tops.shape[1])
        ]
        chosen = next_round(
            found, n.astype(float), open_cells, confidence=0.99, allotment_gpu_s=allotment - scale.launch.sum()
        )
        if not chosen:
            break
        n[[c.row for c in chosen]] += 1
        spent += sum(c.cost_gpu_s for c in chosen) + float(scale.launch.sum())
        found = judged(pool, order, n, w_tpot)
    return scale.spent(spent, found)


def trials(pool: Pool, w_tpot: float, n_trials: int) -> Iterator[tuple[str, float, Spent]]:
    scale = Scale(pool, w_tpot)
    n_cells, n_repeats = pool.tops.shape[:2]
    rng = np.random.default_rng(5)
    for _ in range(n_trials):
        order = np.argsort(rng.random((n_cells, n_repeats)), axis=1)
        for n in range(1, min(8, n_repeats) + 1):
            yield "grid", n, scale.spent(scale.full(n), judged(pool, order, np.full(n_cells, n), w_tpot))
        for share in BUDGETS:
            yield "refine", share, refined(pool, order, w_tpot, scale, share * scale.full(FULL_REPEATS))


def curve(pool: Pool, w_tpot: float, n_trials: int) -> pd.DataFrame:
    """Means over trials: one row per way of spending."""
    full = Scale(pool, w_tpot).full(FULL_REPEATS)
    rows = [{"way": way, "setting": at, **spent._asdict()} for way, at, spent in trials(pool, w_tpot, n_trials)]
    frame = pd.DataFrame(rows).groupby(["way", "setting"], as_index=False).mean()
    return frame.assign(w_tpot=w_tpot, cost_share=frame["gpu_s"] / full)


def print_curve(frame: pd.DataFrame) -> None:
    print(f"\nw_tpot {frame['w_tpot'].iloc[0]:g}: right decisions against GPU-seconds (simulated)")
    print("  way      setting   GPU-seconds   of 5 repeats   right   right where |S| >= 0.01   lost S per cell")
    for row in frame.to_dict("records"):
        print(f"  {row['way']:7} {row['setting']:8g} {row['gpu_s']:13,.0f} {row['cost_share']:14.1%} {row['right']:7.2%} "
              f"{row['right_far']:25.2%} {row['lost']:17.5f}", flush=True)  # fmt: skip


def draw(frame: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    levels = sorted(set(frame["w_tpot"]))
    for axes, w_tpot in zip(np.atleast_1d(figure.subplots(1, len(levels), sharey=True)), levels, strict=True):
        for way, mark in (("grid", "s--"), ("refine", "o-")):
            rows = frame[(frame["w_tpot"] == w_tpot) & (frame["way"] == way)].sort_values("cost_share")
            axes.plot(100 * rows["cost_share"], 100 * rows["right"], mark, label=way, markersize=4)
        axes.set_title(f"w_tpot {w_tpot:g}, simulated", fontsize=8)
        axes.set_xlabel("GPU-seconds, % of 5 repeats", fontsize=8)
        axes.axvline(35, color="#999999", linewidth=0.8)
    axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("right decisions, %", fontsize=8)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where the simulated truth is kept, and read from where it is there")
    parser.add_argument("--out", type=Path, default=Path("results/bench-refine"))
    options = parser.parse_args()
    pool = kept_pool(options.keep, options.repeats, options.jobs)
    print(f"simulated truth: {pool.tops.shape[0]} cells, {pool.tops.shape[1]} repeats each")
    frames = []
    for w_tpot in W_TPOT:
        frames.append(curve(pool, w_tpot, options.trials))
        print_curve(frames[-1])
    options.out.mkdir(parents=True, exist_ok=True)
    everything = pd.concat(frames)
    everything.to_csv(options.out / "refine.csv", index=False)
    draw(everything, options.out / "refine.png")
    print(f"wrote {options.out}/refine.csv and refine.png")


if __name__ == "__main__":
    main()
