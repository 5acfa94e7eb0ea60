"""``sweep --refine`` and sweeps for one goal, on the simulator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ppd_bench.core.errors import SpecError, StoreError
from ppd_bench.runner.artefacts import TableOptions
from ppd_bench.runner.goals import topologies_for
from ppd_bench.runner.plan import plan, prepare_plan
from ppd_bench.runner.refine import RefineOptions, refine_options
from ppd_bench.runner.refine_journal import read_standings
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import stored_deltas
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep
from ppd_bench.store.read import read_records

CLOSE = """
name: close
gpus: 4
gpu: h100-80g
model: llama-3.1-8b
topologies: [4R, 1P_3D, 1P_3pD]
workloads: [small_tiny, large_mid_paste]
qps: [1, 4]
duration: 3s
repeats: 4
"""


@pytest.fixture
def close_file(tmp_path: Path) -> Path:
    path = tmp_path / "close.yaml"
    path.write_text(CLOSE)
    return path


def request(file: Path, out: Path, **options: float | None) -> SweepRequest:
    return SweepRequest(source=str(file), out=out, n_processes=1, with_report=False, refine=RefineOptions(**options))  # type: ignore[arg-type]


def journal(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "refine.jsonl").read_text().splitlines()]


def test_a_refined_run_holds_the_chosen_points_and_says_why_each_was_chosen(close_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(close_file, tmp_path / "run", confidence=0.999999)), quiet)
    lines = journal(tmp_path / "run")
    points = [line for line in lines if line["kind"] == "point"]
    assert points
    assert all("QPS" in str(line["why"]) or "S is" in str(line["why"]) for line in points)
    run = open_run(tmp_path / "run")
    assert len(run.points) == 12 + 2 * len(points)
    assert set(read_records(tmp_path / "run")["point_id"]) <= {p.point_id for p in run.points}
    repeats = {(row["workload"], row["qps"]): row["n_repeats"] for row in stored_deltas(run).to_dict("records")}
    for line in points:
        assert repeats[line["workload"], line["qps"]] >= line["repeat"]
    assert str(lines[-1]["why"]).startswith("stopped:")
    assert list(read_standings(tmp_path / "run")["round"]) == list(range(max(int(str(p["round"])) for p in points) + 1))


def test_a_stopped_refinement_goes_on_to_the_same_points_and_the_same_journal(close_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(close_file, tmp_path / "whole", confidence=0.999999)), quiet)

    class Stops(type(quiet)):  # type: ignore[misc]
        def point_done(self, point: object, n_turns: int, n_ok: int) -> None:
            super().point_done(point, n_turns, n_ok)
            if len(self.done) == 15:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(prepare(request(close_file, tmp_path / "cut", confidence=0.999999)), Stops())
    run_sweep(prepare(request(close_file, tmp_path / "cut", confidence=0.999999)), type(quiet)())
    for name in ("refine.jsonl", "records.parquet", "deltas.parquet"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_going_on_without_weights_searches_under_those_of_the_tables_that_are_there(
    close_file, tmp_path, quiet
) -> None:
    first = dataclasses.replace(
        request(close_file, tmp_path / "run"), with_report=True, tables=TableOptions(w_ttft=1.0, w_tpot=50.0)
    )
    run_sweep(prepare(first), quiet)
    before = journal(tmp_path / "run")
    run_sweep(prepare(request(close_file, tmp_path / "run")), quiet)
    assert journal(tmp_path / "run") == before


def test_a_budget_bounds_what_is_spent_and_more_of_it_goes_on(close_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(close_file, tmp_path / "run", budget_gpu_s=2800.0, confidence=0.999999)), quiet)
    few = journal(tmp_path / "run")
    assert float(str(few[-1]["gpu_s"])) <= 2800
    run_sweep(prepare(request(close_file, tmp_path / "run", confidence=0.999999)), type(quiet)())
    many = journal(tmp_path / "run")
    assert float(str(many[-1]["gpu_s"])) > float(str(few[-1]["gpu_s"]))
    assert [line for line in few if line["kind"] == "point"] == [line for line in many if line["kind"] == "point"][
        : sum(line["kind"] == "point" for line in few)
    ]


def test_what_cannot_be_refined_is_refused_before_anything_runs(close_file, tmp_path, quiet) -> None:
    with pytest.raises(SpecError, match="every cell once costs"):
        run_sweep(prepare(request(close_file, tmp_path / "a", budget_gpu_s=10.0)), quiet)
    with pytest.raises(SpecError, match="--confidence"):
        prepare(request(close_file, tmp_path / "a", confidence=1.5))
    with pytest.raises(SpecError, match="give both"):
        refine_options(False, 100.0, 0.95)
    lonely = tmp_path / "lonely.yaml"
    lonely.write_text(CLOSE.replace("[4R, 1P_3D, 1P_3pD]", "[4R, 1P_3D]"))
    with pytest.raises(SpecError, match="nothing to decide"):
        run_sweep(prepare(request(lonely, tmp_path / "b")), quiet)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_journal_of_another_sweep_is_refused(close_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(close_file, tmp_path / "run", confidence=0.999999)), quiet)
    text = (tmp_path / "run/refine.jsonl").read_text()
    (tmp_path / "run/refine.jsonl").write_text(text.replace("small_tiny", "huge_tiny"))
    with pytest.raises(StoreError, match="does not fit this sweep"):
        run_sweep(prepare(request(close_file, tmp_path / "run")), quiet)


def test_a_goal_keeps_the_topologies_that_it_needs() -> None:
    paper = ("4R", "1P_3D", "1P_2D_1pD", "1P_3pD", "1R_1P_2D", "1R_1P_1D_1pD", "1R_1P_2pD", "2P_2D")
    assert topologies_for(paper, "table") == ("1P_3D", "1P_3pD", "1R_1P_2D", "1R_1P_2pD")
    assert topologies_for(paper, "split") == ("4R", "1P_3D", "1P_3pD", "1R_1P_2D", "1R_1P_1D_1pD", "1R_1P_2pD")


def test_plan_says_what_each_goal_costs_and_a_goal_without_arms_is_refused(close_file, tmp_path) -> None:
    prepared, _ = prepare_plan(SweepRequest(source=str(close_file)))
    table, split = plan(prepared).goals
    assert "--for-table" in table
    assert "2 configurations, 32 points" in table
    assert "3 configurations, 48 points" in split
    kept, _ = prepare_plan(SweepRequest(source=str(close_file), goal="table"))
    assert {p.topology for p in kept.points} == {"1P_3D", "1P_3pD"}
    with pytest.raises(SpecError, match="none of 4R serves it"):
        prepare(SweepRequest(source=str(close_file), goal="table", overrides={"topologies": ["4R"]}))
