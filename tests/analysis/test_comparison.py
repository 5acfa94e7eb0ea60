"""Two runs of the same points: errors by hand, and refusals that say what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ppd_bench.analysis.comparison import COMPARED, ERROR_UNITS, error_table, errors, same_points
from ppd_bench.analysis.summary import SUMMARY_FIELDS
from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import EngineSettings, Point, SimSettings
from ppd_bench.core.results import SLICES

Make = Callable[..., Point]


def live(point: Point) -> Point:
    return dataclasses.replace(point, executor=Executor.LIVE, engine_version="vllm", sim=None)


def summaries(points: list[Point], ttft_s: list[float], n_ok: int = 10) -> pd.DataFrame:
    """Every figure of a point and slice is the point's number, times the slice's place."""
    rows = [
        {"point_id": p.point_id, "slice": name, "n_ok": n_ok, **{column: value * (1 + k) for _, _, column in COMPARED}}
        for p, value in zip(points, ttft_s, strict=True)
        for k, name in enumerate(SLICES)
    ]
    return pd.DataFrame(rows)


def test_errors_are_signed_and_absolute_and_relative_to_the_first_run(make_point: Make) -> None:
    points = [make_point(qps=qps) for qps in (1.0, 2.0, 4.0)]
    measured = [live(point) for point in points]
    pairs = same_points(measured, points)
    found = errors(pairs, summaries(measured, [1.0, 2.0, 4.0]), summaries(points, [1.1, 1.0, 4.0]))
    assert list(found.columns) == list(ERROR_UNITS)
    assert len(found) == 3 * len(SLICES) * len(COMPARED)
    first = found[(found["slice"] == "turn1") & (found["metric"] == "ttft") & (found["statistic"] == "mean")]
    assert first["error"].tolist() == pytest.approx([0.2, -2.0, 0.0])
    assert first["error_ratio"].tolist() == pytest.approx([0.1, -0.5, 0.0])
    assert first["absolute_error_ratio"].tolist() == pytest.approx([0.1, 0.5, 0.0])
    table = error_table(found)
    row = table[(table["slice"] == "all") & (table["metric"] == "tpot") & (table["statistic"] == "p99")].iloc[0]
    assert row["median_error_ratio"] == pytest.approx(0.0)
    assert row["median_absolute_error_ratio"] == pytest.approx(0.1)
    assert row["worst_error_ratio"] == pytest.approx(-0.5)
    assert row["worst_at"] == "1P_3D small_tiny QPS 2"


def test_rows_keep_the_order_of_points_slices_and_figures(make_point: Make) -> None:
    points = [make_point(qps=qps) for qps in (4.0, 1.0)]
    found = errors([(p, p) for p in points], summaries(points, [1, 1]), summaries(points, [1, 1]))
    assert list(dict.fromkeys(found["qps"])) == [4.0, 1.0]
    assert list(dict.fromkeys(found["slice"])) == list(SLICES)
    assert list(zip(found["metric"], found["statistic"], strict=True))[: len(COMPARED)] == [c[:2] for c in COMPARED]


def test_what_a_side_lacks_is_no_error(make_point: Make) -> None:
    points = [make_point(qps=qps) for qps in (1.0, 2.0)]
    found = errors([(p, p) for p in points], summaries(points, [np.nan, 1.0]), summaries(points, [1.0, 1.2]))
    table = error_table(found)
    assert set(table["n_points"]) == {1}
    assert table["median_error_ratio"].tolist() == pytest.approx([0.2] * len(table))
    nothing = error_table(errors([(points[0], points[0])], summaries(points, [np.nan, 1]), summaries(points, [1, 1])))
    assert set(nothing["n_points"]) == {0}
    assert nothing["worst_error_ratio"].isna().all()


def test_every_compared_column_is_a_column_of_summaries() -> None:
    assert {column for _, _, column in COMPARED} <= set(SUMMARY_FIELDS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"duration_s": 60.0}, "duration_s differs: 10.0 in the first, 60.0 in the second"),
        ({"seed": 4}, "seed differs: 0 in the first, 4 in the second"),
        ({"engine": EngineSettings(max_num_seqs=8)}, "engine.max_num_seqs differs: 256 in the first, 8 in the second"),
        ({"gpu": "cpu"}, 'gpu differs: "H100-80G" in the first, "cpu" in the second'),
    ],
)
def test_runs_without_a_common_point_are_told_what_differs(
    make_point: Make, changes: dict[str, Any], told: str
) -> None:
    point = make_point()
    with pytest.raises(SpecError) as refused:
        same_points([live(point)], [dataclasses.replace(point, **changes)])
    assert refused.value.problems[1:] == (told,)
    assert "run both from one sweep" in refused.value.problems[0]


def test_a_workload_that_differs_is_shown_with_its_lengths(make_point: Make, make_lengths: Any) -> None:
    first, second = (make_point(workload=make_lengths("chat", turns)) for turns in ((8, 8), (8, 16)))
    with pytest.raises(SpecError) as refused:
        same_points([first], [second])
    assert refused.value.problems[1] == (
        'workload differs: "chat (8->8)" in the first, "chat (8->16)" in the second'
    )  # fmt: skip


def test_common_cells_without_a_common_configuration_are_refused_with_both_lists(make_point: Make) -> None:
    with pytest.raises(SpecError, match="no configuration: the first has 1P_3D; the second has 4R"):
        same_points([make_point("1P_3D")], [make_point("4R")])


def test_values_in_common_but_no_combination_is_said_so(make_point: Make) -> None:
    first = [make_point(qps=1.0, repeat=0), make_point(qps=2.0, repeat=1)]
    second = [make_point(qps=1.0, repeat=1), make_point(qps=2.0, repeat=0)]
    with pytest.raises(SpecError, match="no combination"):
        same_points(first, second)


def test_simulator_settings_and_versions_may_differ(make_point: Make) -> None:
    point = make_point(sim=SimSettings())
    other = dataclasses.replace(point, sim=SimSettings(step_overhead_s=0.1), engine_version="sim-9")
    assert same_points([point], [other]) == [(point, other)]
