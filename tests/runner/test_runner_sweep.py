"""The sweep verb end to end, on the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from ppd_bench.core.errors import LaunchError, SpecError, StoreError, WrongDomain
from ppd_bench.runner.artefacts import TableOptions, write_tables
from ppd_bench.runner.executors import choose_executor
from ppd_bench.runner.plan import plan, prepare_plan
from ppd_bench.runner.reproduce import paper_comparison, published_figures
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.runner.sweep import SweepRequest, evidence_line, prepare, run_sweep
from ppd_bench.runner.tables import diff, load_table
from ppd_bench.store.read import read_records


def request(file: Path, out: Path, **more: object) -> SweepRequest:
    options: dict[str, object] = {"n_processes": 1, "with_report": False, **more}
    return SweepRequest(source=str(file), out=out, **options)  # type: ignore[arg-type]


def test_a_sweep_leaves_every_artefact_and_each_says_that_it_is_simulated(small_file, tmp_path, quiet) -> None:
    prepared = prepare(request(small_file, tmp_path / "run", with_report=True))
    assert evidence_line(prepared).startswith("executor: sim")
    outcome = run_sweep(prepared, quiet)
    assert quiet.begun == (12, 0)
    assert len(quiet.done) == 12
    assert all(path.exists() for path in outcome.artefacts)
    assert json.loads((tmp_path / "run/manifest.json").read_text())["executor"] == "sim"
    assert set(read_records(tmp_path / "run")["executor"]) == {"sim"}
    assert load_table(tmp_path / "run/tables/1P_3D.json").domain.executor == "simulated"
    assert "simulated" in (tmp_path / "run/report.html").read_text()
    assert {p.suffix for p in (tmp_path / "run/plots").iterdir()} == {".png", ".svg"}


def test_tables_that_a_sweep_leaves_as_they_were_are_said_to_be_old(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run", with_report=True)), quiet)
    more = request(small_file, tmp_path / "run", overrides={"repeats": 2})
    assert any("of an earlier state" in warning for warning in run_sweep(prepare(more), quiet).warnings)
    fresh = run_sweep(prepare(request(small_file, tmp_path / "other")), quiet)
    assert not any("of an earlier state" in warning for warning in fresh.warnings)


def test_records_do_not_depend_on_how_many_processes_ran_them(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "one", n_processes=1)), quiet)
    run_sweep(prepare(request(small_file, tmp_path / "two", n_processes=2)), quiet)
    assert (tmp_path / "one/records.parquet").read_bytes() == (tmp_path / "two/records.parquet").read_bytes()


def test_all_arms_of_a_cell_saw_the_same_turns(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run")), quiet)
    records = read_records(tmp_path / "run")
    first_turns = records[records["turn"] == 1]
    seen = first_turns.groupby(["workload", "qps", "topology"], observed=True)["scheduled_s"].agg(tuple).unstack()
    assert (seen.nunique(axis=1) == 1).all()


def test_a_finished_sweep_is_not_run_again_and_gives_the_same_artefacts(small_file, tmp_path, quiet) -> None:
    prepared = prepare(request(small_file, tmp_path / "run"))
    run_sweep(prepared, quiet)
    before = (tmp_path / "run/summaries.parquet").read_bytes()
    again = type(quiet)()
    run_sweep(prepared, again)
    assert again.begun == (12, 12)
    assert again.done == []
    assert (tmp_path / "run/summaries.parquet").read_bytes() == before


def test_more_repeats_keep_what_is_there_and_a_changed_sweep_is_refused(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run")), quiet)
    more = type(quiet)()
    run_sweep(prepare(request(small_file, tmp_path / "run", overrides={"repeats": 2})), more)
    assert more.begun == (24, 12)
    with pytest.raises(StoreError, match="timeout"):
        run_sweep(prepare(request(small_file, tmp_path / "run", overrides={"timeout": "20s"})), type(quiet)())


def test_summaries_and_tables_can_be_deleted_and_rebuilt(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run")), quiet)
    run = open_run(tmp_path / "run")
    before = summaries_of(run)
    table = write_tables(run, TableOptions())[0]
    text = table.read_bytes()
    for name in ("summaries.parquet", "deltas.parquet", "tables/1P_3D.json"):
        (tmp_path / "run" / name).unlink()
    assert_frame_equal(summaries_of(run), before)
    assert write_tables(run, TableOptions())[0].read_bytes() == text


def test_weights_change_a_table_without_a_sweep_exactly_as_a_new_one(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run")), quiet)
    run = open_run(tmp_path / "run")
    plain = write_tables(run, TableOptions(), tmp_path / "plain")[0]
    heavy = write_tables(run, TableOptions(w_tpot=50.0), tmp_path / "heavy")[0]
    assert load_table(plain, w_tpot=50.0) == load_table(heavy)
    assert all(c.decision_a == "local" and c.decision_b == "pd" for c in diff(plain, heavy))


def test_a_table_policy_runs_in_a_sweep_of_its_layout_and_nowhere_else(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run")), quiet)
    table = write_tables(open_run(tmp_path / "run"), TableOptions())[0]
    policy = {"policy": {"decider": "table", "table": str(table)}}
    run_sweep(prepare(request(small_file, tmp_path / "t", overrides={"topologies": ["1P_3D"], **policy})), quiet)
    reasons = read_records(tmp_path / "t")
    followups = reasons[reasons["turn"] > 1]
    assert followups["reason"].str.contains(r"table \w+ \w+/\w+/[\d.]+ simulated").all()
    with pytest.raises(WrongDomain, match="2P_2D"):
        prepare(request(small_file, tmp_path / "u", overrides={"topologies": ["2P_2D"], **policy}))


def test_request_level_x_is_realised_and_recorded(small_file, tmp_path, quiet) -> None:
    overrides = {"topologies": ["1P_3D"], "policy": {"decider": "fraction", "x": 0.5}, "duration": "60s", "qps": [4]}
    run_sweep(prepare(request(small_file, tmp_path / "run", overrides=overrides)), quiet)
    summaries = summaries_of(open_run(tmp_path / "run"))
    followups = summaries[summaries["slice"] == "turn2plus"]
    assert (followups["request_x_ratio"] == 0.5).all()
    assert (followups["node_x_ratio"] == 0.0).all()
    # about 240 turns: four standard errors of a fair coin
    assert ((followups["realised_x_ratio"] - 0.5).abs() < 4 * 0.5 / 240**0.5).all()


@pytest.mark.parametrize(
    "policy",
    [
        {"decider": "fraction", "x": 0.5},
        {"decider": "always_pd"},
        {"decider": "always_local"},
        {"decider": "threshold"},
    ],
)
def test_every_policy_ends_in_plots_and_a_page(policy, small_file, tmp_path, quiet) -> None:
    """Nothing of the paper compares with these; that must not keep anybody from a report."""
    overrides = {"topologies": ["2P_2D"], "workloads": ["small_tiny"], "policy": policy}
    outcome = run_sweep(prepare(request(small_file, tmp_path / "run", overrides=overrides, with_report=True)), quiet)
    assert (tmp_path / "run/report.html").exists()
    assert any("no decision table" in warning for warning in outcome.warnings)


def test_request_level_x_sends_other_conversations_in_every_cell(small_file, tmp_path, quiet) -> None:
    overrides = {
        "topologies": ["2P_2D"], "workloads": ["small_tiny", "small_small_bal"], "qps": [4, 6], "repeats": 4,
        "duration": "8s", "policy": {"decider": "fraction", "x": 0.5},
    }  # fmt: skip
    run_sweep(prepare(request(small_file, tmp_path / "run", overrides=overrides)), quiet)
    records = read_records(tmp_path / "run")
    followups = records[records["turn"] > 1]
    local = (followups["route"] == "local").groupby(followups["point_id"], observed=True).mean()
    n = len(followups)
    assert abs((followups["route"] == "local").mean() - 0.5) < 4 * 0.5 / n**0.5
    one_id = followups[followups["session_id"] == "s00001"]
    assert {"local", "pd"} <= set(one_id["route"])
    assert local.nunique() > 4


def test_weights_are_kept_when_a_finished_sweep_is_given_again(small_file, tmp_path, quiet) -> None:
    whole = request(small_file, tmp_path / "run", with_report=True)
    run_sweep(prepare(whole), quiet)
    write_tables(open_run(tmp_path / "run"), TableOptions(w_tpot=3.0))
    run_sweep(prepare(whole), type(quiet)())
    assert load_table(tmp_path / "run/tables/1P_3D.json").weights.w_tpot == 3.0


def test_weights_and_names_that_cannot_be_used_are_refused_before_anything_runs(small_file, tmp_path) -> None:
    for options in (TableOptions(w_ttft=0.0, w_tpot=0.0), TableOptions(w_ttft=float("inf"))):
        with pytest.raises(SpecError, match="w_ttft"):
            prepare(request(small_file, tmp_path / "run", tables=options))
    with pytest.raises(SpecError, match="a/b"):
        prepare(request(small_file, tmp_path / "run", name="a/b"))
    with pytest.raises(SpecError, match="stickyy"):
        prepare(request(small_file, tmp_path / "run", overrides={"placement": {"stickyy": True}}))


def test_a_request_far_from_anything_measured_is_told_apart(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run")), quiet)
    table = load_table(write_tables(open_run(tmp_path / "run"), TableOptions())[0])
    seen = {"context_tokens": 256, "input_tokens": 16, "output_tokens": 32, "qps": 1.0}
    assert table.covers(**seen)
    for far in ({"qps": 1e9}, {"qps": float("nan")}, {"input_tokens": 10**6}, {"output_tokens": 0}, {"context_tokens": -1},
                {"context_tokens": 10**6}):  # fmt: skip
        table.lookup(**{**seen, **far})
        assert not table.covers(**{**seen, **far}), far


def test_a_model_that_does_not_fit_is_refused_before_anything_runs(small_file, tmp_path) -> None:
    with pytest.raises(SpecError, match=r"leaves room for 0 KV tokens"):
        prepare(
            request(
                small_file,
                tmp_path / "run",
                overrides={"model": "qwen3-30b-a3b", "engine": {"gpu_memory_utilization": 0.7}},
            )
        )
    assert not (tmp_path / "run").exists()


def test_a_step_table_of_ones_own_replaces_the_built_in_one_and_a_bad_one_is_refused(
    small_file, tmp_path, quiet
) -> None:
    table = tmp_path / "steps.json"
    slow = {
        "name": "slow",
        "source": "made up",
        "knots": [[1, 0.1], [8192, 0.1]],
        "decode": [0, 0, 0],
        "prefill": [0, 0],
    }
    table.write_text(json.dumps(slow))
    overrides = {"simulator": {"step_table": str(table)}, "topologies": ["4R"], "workloads": ["small_tiny"], "qps": [1]}
    prepared = prepare(request(small_file, tmp_path / "run", overrides=overrides))
    run_sweep(prepared, quiet)
    summaries = summaries_of(open_run(tmp_path / "run"))
    # every step takes 100 ms of kernel, 1.2 ms of overhead and 7.5 us per sequence
    assert summaries["tpot_mean_s"].between(0.1012074, 0.10125).all()
    assert prepared.stored["profile_hash"] != prepare(request(small_file, tmp_path / "x")).stored["profile_hash"]
    table.write_text(json.dumps({**slow, "knots": [[2, 0.1], [1, 0.1]]}))
    with pytest.raises(SpecError, match="ascending"):
        prepare(request(small_file, tmp_path / "bad", overrides=overrides))
    table.write_text("{}")
    with pytest.raises(SpecError, match="needed keys"):
        prepare(request(small_file, tmp_path / "bad", overrides=overrides))


def test_auto_means_live_where_there_are_gpus_or_engines_and_simulated_elsewhere() -> None:
    def nothing() -> tuple[str, ...]:
        return ()

    assert choose_executor("auto", gpus=nothing).executor == "sim"
    assert choose_executor("auto", gpus=lambda: ("GPU 0", "GPU 1")).executor == "live"
    assert choose_executor("sim", gpus=lambda: ("GPU 0",)).executor == "sim"
    assert choose_executor("sim", engines_given=True, gpus=nothing).executor == "sim"
    for asked in ("auto", "live"):
        assert choose_executor(asked, engines_given=True, gpus=nothing).executor == "live"
    with pytest.raises(LaunchError, match="--executor sim") as caught:
        choose_executor("live", gpus=nothing)
    assert caught.value.exit_code == 3


def test_the_papers_plan_has_3060_points_and_7_launches() -> None:
    prepared, here = prepare_plan(SweepRequest())
    made = plan(prepared)
    assert (made.estimate.n_points, made.estimate.n_configurations, made.estimate.n_layouts) == (3060, 17, 7)
    assert made.estimate.expected_turns == pytest.approx(486_540)
    assert len(made.served["1P_3D"]) == 4
    assert here.startswith(("sim", "none"))


def test_the_shipped_published_figures_are_those_of_the_paper(shared: Path) -> None:
    import yaml

    theirs = yaml.safe_load((shared / "paper/published_results.yaml").read_text())["ppd"]
    ours = published_figures()
    assert ours["table2_winner_pct"] == theirs["table2_winner_pct"]
    assert ours["table5_failure_pct"] == theirs["table5_failure_pct"]
    assert ours["table1_ttft_change_pct"] == {
        row: values for row, values in theirs["table1_ttft_change_pct"].items() if row != "bands"
    }
    key = "cells_with_different_ttft_and_tpot_winner_pct"
    assert ours[key] == theirs[key]


def test_a_comparison_has_every_published_figure_and_the_signed_difference(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run")), quiet)
    run = open_run(tmp_path / "run")
    rows = paper_comparison(run, summaries_of(run))
    assert len(rows) == 9 + 19 + 20 + 1
    known = rows.dropna(subset="computed")
    assert ((known["computed"] - known["published"]) - known["difference"]).abs().max() < 1e-9
    table1 = rows[rows["table"].str.startswith("Table 1") & (rows["row"] == "1P_3D") & (rows["column"] == "low")]
    summaries = summaries_of(run)
    means = summaries[(summaries["slice"] == "turn2plus") & (summaries["qps"] == 1)].set_index(["topology", "workload"])
    change = means.loc["1P_3pD", "ttft_mean_s"] / means.loc["1P_3D", "ttft_mean_s"] - 1
    assert table1["computed"].item() == pytest.approx(100 * change.mean())


def test_a_comparison_with_another_model_is_refused(small_file, tmp_path, quiet) -> None:
    run_sweep(prepare(request(small_file, tmp_path / "run", overrides={"gpu": "h200"})), quiet)
    run = open_run(tmp_path / "run")
    with pytest.raises(SpecError, match="h200"):
        paper_comparison(run, pd.DataFrame())
