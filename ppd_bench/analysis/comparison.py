"""Two runs of the same points: errors of one against the other, by slice, metric and statistic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ppd_bench.analysis.metrics import floats
from ppd_bench.analysis.summary import configuration_name
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point, canonical_json, plain
from ppd_bench.core.results import SLICES
from ppd_bench.core.workload import WorkloadSpec

STATISTICS = ("mean", "p50", "p90", "p99")
COMPARED: tuple[tuple[str, str, str], ...] = (
    *((metric, statistic, f"{metric}_{statistic}_s") for metric in ("ttft", "tpot", "e2e") for statistic in STATISTICS),
    ("throughput", "mean", "throughput_tokens_per_s"),
)
"""Metric, statistic, and the summary's column that holds it."""

PairOfPoints = tuple[Point, Point]

_UNPAIRED = ("topology", "policy", "placement", "executor", "engine_version", "sim")
"""Fields of a point that ``pair_key`` leaves out."""

ERROR_UNITS = {
    **dict.fromkeys(("reference_id", "candidate_id", "configuration", "workload"), ""),
    "qps": "1/s",
    "repeat": "1",
    **dict.fromkeys(("slice", "metric", "statistic"), ""),
    **dict.fromkeys(("n_reference", "n_candidate"), "1"),
    **dict.fromkeys(("reference", "candidate", "error"), "s; throughput: tokens/s"),
    **dict.fromkeys(("error_ratio", "absolute_error_ratio"), "1"),
}
"""Columns of ``errors`` and their units."""


def same_points(reference: Sequence[Point], candidate: Sequence[Point]) -> list[PairOfPoints]:
    """Points that both have, in the reference's order: equal but for executor, engine version and simulator settings.

    Raises:
        SpecError: they have none in common; says which fields differ.
    """
    known = {_arm(point): point for point in candidate}
    pairs = [(point, known[_arm(point)]) for point in reference if _arm(point) in known]
    if pairs:
        return pairs
    if {p.pair_key for p in reference} & {p.pair_key for p in candidate}:
        found = [", ".join(dict.fromkeys(configuration_name(p) for p in points)) for points in (reference, candidate)]
        raise SpecError(
            f"the runs have cells in common but no configuration: the first has {found[0]}; the second has {found[1]} "
            "(or they differ in placement); run the same configurations"
        )
    raise SpecError(
        [
            "the runs have no point in common: nothing can be compared; run both from one sweep",
            *_differences(reference, candidate),
        ]
    )


def _arm(point: Point) -> str:
    return canonical_json([point.pair_key, point.topology, plain(point.policy), plain(point.placement)])


def _differences(reference: Sequence[Point], candidate: Sequence[Point]) -> list[str]:
    """One line per field whose values the runs do not share."""
    ours, theirs = _values(reference), _values(candidate)
    return [
        f"{name} differs: {_listed(ours[name])} in the first, {_listed(theirs[name])} in the second"
        for name in ours
        if not ours[name] & theirs[name]
    ] or ["every field has a common value, but no combination of workload, QPS and repeat is in both"]


def _values(points: Sequence[Point]) -> dict[str, set[str]]:
    """Values of every field that ``pair_key`` holds, as text."""
    found: dict[str, set[str]] = {}
    for point in points:
        content = plain(point)
        engine = content.pop("engine")
        content["workload"] = _workload_words(point.workload)
        content |= {f"engine.{name}": value for name, value in engine.items()}
        for name in content.keys() - set(_UNPAIRED):
            found.setdefault(name, set()).add(canonical_json(content[name]))
    return {name: found[name] for name in sorted(found)}


def _workload_words(workload: WorkloadSpec) -> str:
    lengths = " then ".join(f"{turn.input_tokens}->{turn.output_tokens}" for turn in workload.turns)
    recorded = f"{workload.traffic.source} {workload.traffic.sha256[:8]}" if workload.traffic else ""
    return f"{workload.name} ({lengths or recorded})"


def _listed(values: set[str], limit: int = 4) -> str:
    shown = sorted(values)
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")


def errors(pairs: Sequence[PairOfPoints], reference: pd.DataFrame, candidate: pd.DataFrame) -> pd.DataFrame:
    """One row per (pair, slice, metric, statistic) with the columns of ``ERROR_UNITS``, in that order of rows.

    ``error`` is candidate - reference, ``error_ratio`` that over the reference; NaN where a side is null.

    Args:
        reference, candidate: summaries (``analysis.summary``) of the two runs.
    """
    points = pd.DataFrame(
        {
            "reference_id": [ours.point_id for ours, _ in pairs],
            "candidate_id": [theirs.point_id for _, theirs in pairs],
            "configuration": [configuration_name(ours) for ours, _ in pairs],
            "workload": [ours.workload.name for ours, _ in pairs],
            "qps": [ours.qps for ours, _ in pairs],
            "repeat": [ours.repeat for ours, _ in pairs],
            "pair": range(len(pairs)),
        }
    )
    both = points.merge(_long(reference, "reference"), on="reference_id")
    both = both.merge(_long(candidate, "candidate"), on=["candidate_id", "slice", "figure"])
    both = both.sort_values(["pair", "slice", "figure"], kind="stable", ignore_index=True)
    figure = both["figure"].to_numpy(dtype=np.int64)
    both["metric"] = [COMPARED[k][0] for k in figure]
    both["statistic"] = [COMPARED[k][1] for k in figure]
    both["slice"] = both["slice"].map(dict(enumerate(SLICES)))
    return _with_errors(both)[list(ERROR_UNITS)]


def _long(summaries: pd.DataFrame, side: str) -> pd.DataFrame:
    """One row per (point, slice, compared figure); slices and figures by their number, so that rows can be ordered."""
    names = {column: number for number, (_, _, column) in enumerate(COMPARED)}
    numbered = summaries.assign(slice=summaries["slice"].map({name: k for k, name in enumerate(SLICES)}))
    kept = numbered[["point_id", "slice", "n_ok", *names]]
    long = kept.melt(["point_id", "slice", "n_ok"], var_name="figure", value_name=side)
    long["figure"] = long["figure"].map(names)
    return long.rename(columns={"point_id": f"{side}_id", "n_ok": f"n_{side}"})


def _with_errors(frame: pd.DataFrame) -> pd.DataFrame:
    reference, candidate = floats(frame, "reference"), floats(frame, "candidate")
    error = candidate - reference
    ratio = error / np.where(reference > 0, reference, np.nan)
    return frame.assign(error=error, error_ratio=ratio, absolute_error_ratio=np.abs(ratio))


def error_table(found: pd.DataFrame) -> pd.DataFrame:
    """One row per (slice, metric, statistic): n_points, median signed, median absolute and worst error, and the worst point.

    ``worst_error_ratio`` keeps its sign; ``worst_at`` names configuration, workload and QPS.
    """
    groups = found.groupby(["slice", "metric", "statistic"], sort=False)
    return pd.DataFrame([_error_row(group) for _, group in groups])


def _error_row(group: pd.DataFrame) -> dict[str, object]:
    ratios = floats(group, "error_ratio")
    known = ~np.isnan(ratios)
    row: dict[str, object] = {name: group.iloc[0][name] for name in ("slice", "metric", "statistic")}
    row["n_points"] = int(known.sum())
    if not known.any():
        nothing = dict.fromkeys(("median_error_ratio", "median_absolute_error_ratio", "worst_error_ratio"), np.nan)
        return row | nothing | {"worst_at": ""}
    place = int(np.nanargmax(np.abs(ratios)))
    worst = group.iloc[place]
    return row | {
        "median_error_ratio": float(np.median(ratios[known])),
        "median_absolute_error_ratio": float(np.median(np.abs(ratios[known]))),
        "worst_error_ratio": float(ratios[place]),
        "worst_at": f"{worst['configuration']} {worst['workload']} QPS {worst['qps']:g}",
    }
