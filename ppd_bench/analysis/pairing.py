"""Pairs of arms (x=0 against x=1 of one layout), the deltas of Equation 1 between them, and how sure these are.

Both arms of a pair must have seen the same turns (I8); that is checked on every pair of points, not assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppd_bench.analysis.confidence import covariance_of_deviations, half_width, leave_one_out
from ppd_bench.analysis.grouping import Groups, counts, ratio, sums
from ppd_bench.analysis.metrics import Floats, delta_tpot, delta_ttft, floats, labels, with_latencies
from ppd_bench.core.errors import SpecError, StoreError
from ppd_bench.core.point import Point
from ppd_bench.core.results import PairedDelta
from ppd_bench.core.topology import Topology, parse_topology

Pair = tuple[Topology, Topology]
"""(x=0 arm, x=1 arm) of one layout."""

DELTA_FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(PairedDelta))
_CELL = ["workload", "qps", "repeat"]
_TALLIES = ["n_turns", "n_ok", "n_ttft", "ttft_sum_s", "n_tpot", "tpot_sum_s"]
_TOPS, _BOTTOMS = ["ttft_sum_s", "tpot_sum_s", "n_ok"], ["n_ttft", "n_tpot", "n_turns"]


def pair_arms(points: Sequence[Point]) -> list[Pair]:
    """Every (x=0, x=1) pair of one layout that the points hold, in order of first appearance of the x=0 arm.

    Arms are decided by node-level x: only points whose decider is ``node`` count. A paper run holds six pairs.
    """
    names = dict.fromkeys(p.topology for p in points if p.policy.decider == "node")
    arms = [parse_topology(name) for name in names]
    return [(t, t.all_local) for t in arms if t.n_decode and not t.n_decode_local and t.all_local in arms]


def deltas(records: pd.DataFrame, points: Sequence[Point]) -> pd.DataFrame:
    """One row of ``core.results.PairedDelta`` per (pair, workload, QPS) that has a point in either arm.

    Takes records, not summaries, because ``n_pairs`` counts (repeat, session, turn) that are ok on both sides. Repeats
    are pooled: means stay 'over ok turn-2+ turns' (GLOSSARY). A repeat that one arm lacks is left out of both. Success
    ratios are over all turns. Null (NaN) where a side has no such turn. Standard errors and intervals take the repeat as
    the unit (``analysis.confidence``).

    Raises:
        SpecError: a topology has several points in one (workload, QPS, repeat), or the arms differ in more than x.
        StoreError: the arms of a pair saw different turns (I8).
    """
    pairs = pair_arms(points)
    arms = {t.name for pair in pairs for t in pair}
    used = [p for p in points if p.policy.decider == "node" and p.topology in arms]
    if not used:
        return pd.DataFrame(columns=list(DELTA_FIELDS))
    frame = _point_frame(used)
    turns = _Turns(records, frame)
    frame = frame.join(turns.tallies)
    return pd.concat([_pair_deltas(pair, frame, turns) for pair in pairs], ignore_index=True)[list(DELTA_FIELDS)]


def _point_frame(points: Sequence[Point]) -> pd.DataFrame:
    """One row per point: identity, cell and pair key; the index is the point's number."""
    frame = pd.DataFrame(
        {
            "point_id": [p.point_id for p in points],
            "topology": [p.topology for p in points],
            "workload": [p.workload.name for p in points],
            "qps": [float(p.qps) for p in points],
            "repeat": [p.repeat for p in points],
            "pair_key": [p.pair_key for p in points],
        }
    )
    # The cell's number, in order of first appearance, orders the result as the sweep was ordered.
    frame["cell"] = frame.groupby(["workload", "qps"], sort=False).ngroup()
    frame["cell_repeat"] = frame.groupby(_CELL, sort=False).ngroup()
    twice = frame[frame.duplicated(["topology", *_CELL])]
    if len(twice):
        first = twice.iloc[0]
        raise SpecError(
            f"{len(twice)} points share topology, workload, QPS and repeat with another (first: {first['topology']}, "
            f"{first['workload']}, QPS {first['qps']:g}, repeat {first['repeat']}): they differ in executor, model, "
            "GPU or settings; pass the points of one such choice at a time"
        )
    return frame


class _Turns:
    """Per point: tallies, a fingerprint of its turns, and the keys of its ok turn-2+ turns."""

    def __init__(self, records: pd.DataFrame, frame: pd.DataFrame) -> None:
        number = pd.Index(frame["point_id"]).get_indexer(pd.Index(records["point_id"]))
        kept = with_latencies(records[number >= 0])
        group: Groups = number[number >= 0].astype(np.int64)
        n = len(frame)
        turn = floats(kept, "turn").astype(np.int64)
        session = pd.factorize(kept["session_id"])[0].astype(np.int64)
        ok = labels(kept, "status", "ok")
        follow_up = ok & (turn >= 2)
        self.tallies = _tallies(kept, group, n, ok, follow_up)
        self.fingerprint = _fingerprints(kept, session, turn, group, n)
        cell_repeat = frame["cell_repeat"].to_numpy()[group]
        key = (cell_repeat * (session.max(initial=0) + 1) + session) * (turn.max(initial=0) + 1) + turn
        self.ok_group, self.ok_key = group[follow_up], key[follow_up]

    def pairs_per_cell(self, x0: pd.DataFrame, x1: pd.DataFrame, n_cells: int) -> Groups:
        """Turns that are ok in both arms, per cell; both frames are indexed by point number."""
        cell = np.full(len(self.tallies), -1)
        cell[x0.index] = x0["cell"]
        in_x0 = np.isin(self.ok_group, x0.index)
        in_x1 = np.isin(self.ok_group, x1.index)
        both = in_x0 & np.isin(self.ok_key, self.ok_key[in_x1])
        return counts(cell[self.ok_group[both]], n_cells)


def _tallies(
    kept: pd.DataFrame, group: Groups, n: int, ok: npt.NDArray[np.bool_], follow_up: npt.NDArray[np.bool_]
) -> pd.DataFrame:
    tallies: dict[str, Groups | Floats] = {"n_turns": counts(group, n), "n_ok": counts(group[ok], n)}
    for name in ("ttft", "tpot"):
        values = np.where(follow_up, floats(kept, f"{name}_s"), np.nan)
        tallies[f"n_{name}"] = counts(group[~np.isnan(values)], n)
        tallies[f"{name}_sum_s"] = np.nan_to_num(sums(values, group, n))
    return pd.DataFrame(tallies)


def _fingerprints(kept: pd.DataFrame, session: Groups, turn: Groups, group: Groups, n: int) -> npt.NDArray[np.uint64]:
    """An order-independent hash of each point's turns: session, turn, lengths asked, and turn 1's scheduled instant.

    Later instants follow from the answers and may differ; so may the history of a live turn.
    """
    identity = pd.DataFrame(
        {
            "session": session,
            "turn": turn,
            "input": floats(kept, "input_tokens"),
            "output": floats(kept, "output_tokens"),
            "scheduled": np.where(turn == 1, floats(kept, "scheduled_s"), 0.0),
        }
    )
    out = np.zeros(n, dtype=np.uint64)
    np.add.at(out, group, pd.util.hash_pandas_object(identity, index=False).to_numpy())
    return out


def _pair_deltas(pair: Pair, frame: pd.DataFrame, turns: _Turns) -> pd.DataFrame:
    x0, x1 = (frame[frame["topology"] == arm.name] for arm in pair)
    cells = pd.concat([x0, x1]).drop_duplicates("cell").set_index("cell").sort_index()[["workload", "qps"]]
    x0, x1 = _matched(pair, x0, x1, turns)
    n_cells = int(frame["cell"].max()) + 1
    sides = [_side(arm, n_cells).loc[cells.index] for arm in (x0, x1)]
    n_pairs = turns.pairs_per_cell(x0, x1, n_cells)[cells.index]
    return _with_intervals(_delta_rows(pair, cells, sides, n_pairs), _spread(x0, x1, n_cells).loc[cells.index])


def _matched(pair: Pair, x0: pd.DataFrame, x1: pd.DataFrame, turns: _Turns) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Points of both arms whose (workload, QPS, repeat) has records in both, after checking that the turns agree."""
    present0, present1 = x0[x0["n_turns"] > 0], x1[x1["n_turns"] > 0]
    both = present0.reset_index().merge(present1.reset_index(), on="cell_repeat", suffixes=("", "_x1"))
    if (both["pair_key"] != both["pair_key_x1"]).any():
        raise SpecError(
            f"{pair[0].name} and {pair[1].name} differ in more than x (model, settings, seed, duration or timeout): "
            "their points cannot be paired; run both arms from one sweep"
        )
    differ = turns.fingerprint[both["index"]] != turns.fingerprint[both["index_x1"]]
    if differ.any():
        first = both[differ].iloc[0]
        raise StoreError(
            f"{pair[0].name} and {pair[1].name} saw different turns in {int(differ.sum())} points (first: "
            f"{first['workload']}, QPS {first['qps']:g}, repeat {first['repeat']}): their deltas would compare "
            "different traffic; run both arms again from one sweep"
        )
    return x0.loc[both["index"]], x1.loc[both["index_x1"]]


def _side(arm: pd.DataFrame, n_cells: int) -> pd.DataFrame:
    """Pooled means and success of one arm, indexed by cell number; NaN where undefined."""
    pooled = arm.groupby("cell")[_TALLIES].sum().reindex(range(n_cells), fill_value=0)
    return pd.DataFrame(
        {
            "ttft": ratio(pooled["ttft_sum_s"], pooled["n_ttft"]),
            "tpot": ratio(pooled["tpot_sum_s"], pooled["n_tpot"]),
            "success": ratio(pooled["n_ok"], pooled["n_turns"]),
        },
        index=pooled.index,
    )


def _delta_rows(pair: Pair, cells: pd.DataFrame, sides: list[pd.DataFrame], n_pairs: Groups) -> pd.DataFrame:
    x0, x1 = sides
    return pd.DataFrame(
        {
            "baseline": pair[0].name,
            "candidate": pair[1].name,
            "workload": cells["workload"],
            "qps": cells["qps"],
            "ttft_x0_s": x0["ttft"],
            "ttft_x1_s": x1["ttft"],
            "tpot_x0_s": x0["tpot"],
            "tpot_x1_s": x1["tpot"],
            "success_x0_ratio": x0["success"],
            "success_x1_ratio": x1["success"],
            "delta_ttft": delta_ttft(floats(x0, "ttft"), floats(x1, "ttft")),
            "delta_tpot": delta_tpot(floats(x0, "tpot"), floats(x1, "tpot")),
            "n_pairs": n_pairs,
        }
    )


def figures_with_covariance(tops: Floats, bottoms: Floats, groups: Groups, n_groups: int) -> tuple[Floats, Floats]:
    """Both deltas and both success ratios of each group of repeats, and the covariance of their errors.

    Args:
        tops, bottoms: shape (n_repeats, 6): per repeat, of x=0 then of x=1, sums and counts of TTFT, TPOT and successes.
        groups: each row's group number in [0, n_groups).

    Returns:
        Shapes (n_groups, 4) and (n_groups, 4, 4): delta_ttft, delta_tpot, success at x=0, success at x=1.
    """
    pooled, without = leave_one_out(tops, bottoms, groups, n_groups)
    figures = _figures(pooled)
    return figures, covariance_of_deviations(_figures(without) - figures[groups], groups, n_groups)


def _figures(means: Floats) -> Floats:
    ttft0, tpot0, success0, ttft1, tpot1, success1 = means.T
    return np.stack([delta_ttft(ttft0, ttft1), delta_tpot(tpot0, tpot1), success0, success1], axis=1)


def _spread(x0: pd.DataFrame, x1: pd.DataFrame, n_cells: int) -> pd.DataFrame:
    """Standard errors over repeats, indexed by cell number. Row i of one arm is the same repeat as row i of the other."""
    cell: Groups = x0["cell"].to_numpy(dtype=np.int64)
    tops, bottoms = (
        np.concatenate([arm[names].to_numpy(dtype=np.float64) for arm in (x0, x1)], axis=1)
        for names in (_TOPS, _BOTTOMS)
    )
    _, covariance = figures_with_covariance(tops, bottoms, cell, n_cells)
    se = np.sqrt(np.einsum("cii->ci", covariance))
    both = se[:, 0] * se[:, 1]
    correlation = np.where(both == 0, 0.0, covariance[:, 0, 1] / np.where(both == 0, 1.0, both))
    names = ("delta_ttft_se", "delta_tpot_se", "success_x0_se", "success_x1_se")
    columns = dict(zip(names, se.T, strict=True))
    return pd.DataFrame({"n_repeats": counts(cell, n_cells), **columns, "delta_correlation": correlation.clip(-1, 1)})


def _with_intervals(rows: pd.DataFrame, spread: pd.DataFrame) -> pd.DataFrame:
    rows = rows.join(spread)
    for name in ("delta_ttft", "delta_tpot"):
        half = half_width(rows[f"{name}_se"], rows["n_repeats"])
        rows = rows.assign(**{f"{name}_low": rows[name] - half, f"{name}_high": rows[name] + half})
    return rows
