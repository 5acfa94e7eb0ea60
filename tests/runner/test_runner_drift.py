"""``table check`` on simulated traffic: the same, a slow link, doubled contexts; and the sweeps that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppd_bench.analysis.drift import DriftOptions, check_drift
from ppd_bench.core.errors import SpecError, TableError, WrongDomain
from ppd_bench.policy.table import DecisionTable
from ppd_bench.runner.drift import CheckRequest, CheckResult, check_table, products, turns_of_run
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import write_summaries
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep
from ppd_bench.runner.tables import load_table
from ppd_bench.store import layout
from ppd_bench.store.journal import append_entry

LAYOUT = "1P_3D"
SWEEP = """
name: drifting
gpus: 4
gpu: h100-80g
model: llama-3.1-8b
topologies: [1P_3D, 1P_3pD]
workloads: [WORKLOADS]
qps: [4]
duration: 5s
repeats: REPEATS
seed: SEED
"""
CHAT = """
name: NAME
category: balanced
turns:
  - {input_tokens: FIRST, output_tokens: 64}
  - {input_tokens: 256, output_tokens: 64}
"""


class Quiet:
    def started(self, n_points: int, n_finished: int) -> None: ...
    def point_done(self, point: object, n_turns: int, n_ok: int) -> None: ...
    def stage(self, text: str) -> None: ...


def run(folder: Path, name: str, workload: str, *, seed: int, repeats: int, engine: str = "") -> Path:
    text = SWEEP.replace("WORKLOADS", workload).replace("REPEATS", str(repeats)).replace("SEED", str(seed)) + engine
    file = folder / f"{name}.yaml"
    file.write_text(text)

    run_sweep(
        prepare(SweepRequest(source=str(file), out=folder / name, n_processes=1, with_report=name == "base")), Quiet()
    )
    return folder / name


def workload(folder: Path, name: str, first: int) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(CHAT.replace("NAME", name).replace("FIRST", str(first)))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drift")
    run(folder, "base", workload(folder, "chat", 2400), seed=0, repeats=8)
    return folder


def check(base: Path, source: Path) -> CheckResult:
    return check_table(CheckRequest(table=base / f"base/tables/{LAYOUT}.json", records=source))


def test_the_same_traffic_under_other_seeds_is_no_drift_and_asks_for_nothing(base: Path) -> None:
    done = check(base, run(base, "quiet", str(base / "chat.yaml"), seed=9, repeats=12))
    assert done.report.drifted_cells == ()
    assert not done.report.outside.drifted
    assert [path.name for path in done.paths] == ["drift.json"]
    assert json.loads(done.paths[0].read_text())["cells"]


def test_a_slower_link_is_found_in_the_cell_that_uses_it_and_its_sweep_can_be_run(base: Path) -> None:
    slow = "engine: {kv_link_bandwidth: 1GB/s}\n"
    done = check(base, run(base, "slow", str(base / "chat.yaml"), seed=5, repeats=12, engine=slow))
    drifted = done.report.cells[done.report.cells["drifted"]]
    assert set(drifted["metric"]) >= {"ttft"}
    assert 0 in set(drifted["x"])
    assert (drifted["seen_s"] > drifted["table_s"]).all()
    sweep = next(path for path in done.paths if path.name == "remeasure-1.yaml")
    prepared = prepare(SweepRequest(source=str(sweep), out=base / "again", overrides={"executor": "sim"}))
    assert {(p.topology, p.qps) for p in prepared.points} == {("1P_3D", 4.0), ("1P_3pD", 4.0)}
    assert len(prepared.points) == 2 * 5


def test_doubled_contexts_are_outside_the_domain_and_their_sweep_can_be_run(base: Path) -> None:
    done = check(base, run(base, "long", workload(base, "longer", 4800), seed=6, repeats=12))
    assert done.report.outside.drifted
    assert set(done.report.unmeasured) == {"huge/256to64/4"} or len(done.report.unmeasured) == 1
    sweep = next(path for path in done.paths if path.name == "remeasure-1.yaml")
    prepared = prepare(SweepRequest(source=str(sweep), out=base / "again", overrides={"executor": "sim"}))
    assert {p.workload.context_tokens(2) for p in prepared.points} == {4864}


def share_of_alarms(table: DecisionTable, folder: Path, n_windows: int, n_trials: int = 60) -> float:
    """Of orders of windows drawn from a run, those with any alarm at any of the looks."""
    turns = turns_of_run(open_run(folder), table, 30.0)
    rng = np.random.default_rng(8)
    n_alarms = 0
    for _ in range(n_trials):
        order = {int(w): i for i, w in enumerate(rng.permutation(turns["window"].unique())[:n_windows])}
        drawn = turns[turns["window"].isin(list(order))]
        drawn = drawn.assign(window=drawn["window"].map(order)).sort_values("window", kind="stable")
        report = check_drift(table, drawn, DriftOptions())
        n_alarms += bool(report.drifted_cells or report.outside.drifted)
    return n_alarms / n_trials


def test_false_alarms_stay_below_the_stated_rate_and_drifts_are_found(base: Path) -> None:
    table = DecisionTable.from_json((base / f"base/tables/{LAYOUT}.json").read_text())
    chat = str(base / "chat.yaml")
    slow = "engine: {kv_link_bandwidth: 1GB/s}\n"
    quiet = run(base, "quiet-rate", chat, seed=31, repeats=12)
    assert share_of_alarms(table, quiet, 20) <= 0.05
    assert share_of_alarms(table, run(base, "slow-rate", chat, seed=32, repeats=12, engine=slow), 20) >= 0.9
    longer = workload(base, "longest", 4800)
    assert share_of_alarms(table, run(base, "long-rate", longer, seed=33, repeats=12), 10) >= 0.9


def test_every_finding_says_which_turns_it_is_about_and_what_they_are(base: Path) -> None:
    done = check(base, base / "base")
    assert f"of {LAYOUT}, simulated, against turns of run drifting-sim, simulated: " in done.lines[0]


def test_points_that_are_invalid_are_no_evidence_of_drift_and_are_said(base: Path) -> None:
    source = run(base, "half", str(base / "chat.yaml"), seed=9, repeats=2)
    opened = open_run(source)
    whole = check(base, source).report.n_turns
    broken = [point.point_id for point in opened.points if point.repeat == 0]

    def doubt(point_ids: list[str]) -> None:
        for point_id in point_ids:
            append_entry(source / layout.CHECKS, {"point_id": point_id, "problems": ["an engine died"], "lateness": {}})
        write_summaries(opened)

    doubt(broken)
    done = check(base, source)
    assert 0 < done.report.n_turns < whole
    assert any("2 of 4 points left out" in line for line in done.lines)
    doubt([point.point_id for point in opened.points])
    with pytest.raises(SpecError, match="every point of layout"):
        check(base, source)


def test_the_false_alarm_rate_is_of_the_whole_table_and_of_conversations_not_turns(base: Path) -> None:
    table = DecisionTable.from_json((base / f"base/tables/{LAYOUT}.json").read_text())
    turns = turns_of_run(open_run(base / "base"), table, 30.0)
    n_visited = sum(cell.visited for cell in table.cells)
    # Two latencies, two arms per cell, and the share outside.
    for alpha in (0.05, 0.01):
        assert check_drift(table, turns, DriftOptions(alpha=alpha)).threshold == pytest.approx(
            (2 * 2 * n_visited + 1) / alpha
        )
    talkative = pd.concat([turns.iloc[:60], turns.iloc[[60] * 60].assign(covered=False)])
    outside = check_drift(table, talkative, DriftOptions()).outside
    assert (outside.n, outside.n_outside, outside.drifted) == (61, 1, False)


def test_a_router_log_is_checked_by_the_cells_that_its_router_named(base: Path, tmp_path: Path) -> None:
    path = base / f"base/tables/{LAYOUT}.json"
    table = DecisionTable.from_json(path.read_text())
    cell = next(cell for cell in table.cells if cell.visited)
    assert cell.tpot_x1_s is not None
    lines: list[dict[str, object]] = [{"kind": "router-log", "schema": 1, "topology": LAYOUT}]
    for i in range(120):
        # TPOT is three times what the table has; TTFT is the table's.
        first_s = i + float(cell.ttft_x1_s or 0)
        last_s = first_s + 63 * 3 * cell.tpot_x1_s * (1 + i % 3 / 9)
        lines.append({
            "time_unix_s": 1e9 + 5 * i, "t_recv_s": float(i), "t_done_s": last_s, "session_id": f"s{i}",
            "request_id": f"r{i}", "turn": 2, "status": "ok", "x": 1,
            "route": "local", "table_hash": table.content_hash, "cell": cell.key, "evidence": "simulated", "rule": "equation1",
            "context_tokens": 2464, "input_tokens": 256, "output_tokens": 64, "generated_tokens": 64, "sent_s": float(i),
            "scheduled_s": float(i), "first_token_s": first_s, "last_token_s": last_s,
        })  # fmt: skip
    (tmp_path / "decisions-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = check_table(CheckRequest(table=path, router_log=tmp_path))
    assert set(done.report.cells.query("drifted")["metric"]) == {"tpot"}
    assert not done.report.outside.drifted
    assert any("mean TPOT" in line for line in done.lines)
    # A turn that failed after its first token is in no mean, and is said.
    failed = {**lines[1], "status": "timeout", "first_token_s": 1e4, "last_token_s": 1e4 + 1, "request_id": "rx"}
    (tmp_path / "decisions-000001.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, failed]) + "cut of"
    )
    again = check_table(CheckRequest(table=path, router_log=tmp_path))
    assert (again.report.n_turns, again.report.n_failed) == (121, 1)
    assert again.report.cells.query("metric == 'ttft'")["seen_s"].max() < 1
    assert any(line.startswith("1 of the 121 turns failed") for line in again.lines)
    assert "1 line of the log left out, because unreadable" in again.lines
    # A router that was given weights beside its table decides under the hash of the table so weighed.
    weighed = load_table(path, w_ttft=1.0, w_tpot=9.0).content_hash
    own = [lines[0], *({**line, "table_hash": weighed} for line in lines[1:])]
    (tmp_path / "decisions-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    assert check_table(CheckRequest(table=path, w_tpot=9.0, router_log=tmp_path)).report.n_turns == 120
    with pytest.raises(WrongDomain, match=f"decided by {weighed}; give the table .* --w-tpot"):
        check_table(CheckRequest(table=path, router_log=tmp_path))
    # Turns that another table decided say nothing of this one.
    others = [{**line, "table_hash": "0" * 16} for line in lines[1:]]
    (tmp_path / "decisions-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *others]))
    assert check_table(CheckRequest(table=path, router_log=tmp_path)).report.n_turns == done.report.n_turns == 120
    other = base / "base/tables/none.json"
    with pytest.raises(TableError, match="cannot be read"):
        check_table(CheckRequest(table=other, router_log=tmp_path))
    (tmp_path / "decisions-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:1]))
    with pytest.raises(WrongDomain, match="no follow-up turn that table"):
        check_table(CheckRequest(table=path, router_log=tmp_path))


def test_wanted_cells_become_few_full_products_and_nothing_more() -> None:
    wanted = [("a", 1.0), ("a", 2.0), ("b", 1.0), ("b", 2.0), ("c", 4.0)]
    assert products(wanted) == [(["a", "b"], [1.0, 2.0]), (["c"], [4.0])]
    assert products([("a", 1.0), ("b", 1.0), ("b", 2.0)]) in (
        [(["a"], [1.0]), (["b"], [1.0, 2.0])],
        [(["a", "b"], [1.0]), (["b"], [2.0])],
    )
    assert products([]) == []


def test_what_cannot_be_checked_is_refused(base: Path) -> None:
    table = base / f"base/tables/{LAYOUT}.json"
    with pytest.raises(SpecError) as error:
        check_table(CheckRequest(table=table, window_s=0.0, options=DriftOptions(alpha=0.0)))
    assert [problem.split()[2] for problem in error.value.problems] == ["--alpha", "give", "--window"]
    other = base / "other.yaml"
    other.write_text(
        (base / "base.yaml").read_text().replace("[1P_3D, 1P_3pD]", "[2P_2D]").replace("repeats: 8", "repeats: 1")
    )

    run_sweep(prepare(SweepRequest(source=str(other), out=base / "other", n_processes=1, with_report=False)), Quiet())
    with pytest.raises(WrongDomain, match="holds no point of layout"):
        check(base, base / "other")
