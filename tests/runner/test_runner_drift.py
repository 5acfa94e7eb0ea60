"""``table check`` on simulated traffic: the same, a slow link, doubled contexts; and the sweeps that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppd_bench.core.errors import SpecError, WrongDomain
from ppd_bench.runner.drift import CheckRequest, CheckResult, check_table
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep

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


def run(folder: Path, name: str, workload: str, *, seed: int, repeats: int, engine: str = "") -> Path:
    text = SWEEP.replace("WORKLOADS", workload).replace("REPEATS", str(repeats)).replace("SEED", str(seed)) + engine
    file = folder / f"{name}.yaml"
    file.write_text(text)

    class Quiet:
        def started(self, n_points: int, n_finished: int) -> None: ...
        def point_done(self, point: object, n_turns: int, n_ok: int) -> None: ...
        def stage(self, text: str) -> None: ...

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


def test_what_cannot_be_checked_is_refused(base: Path) -> None:
    table = base / f"base/tables/{LAYOUT}.json"
    with pytest.raises(SpecError, match="either --records"):
        check_table(CheckRequest(table=table))
    other = base / "other.yaml"
    other.write_text(
        (base / "base.yaml").read_text().replace("[1P_3D, 1P_3pD]", "[2P_2D]").replace("repeats: 8", "repeats: 1")
    )

    class Quiet:
        def started(self, n_points: int, n_finished: int) -> None: ...
        def point_done(self, point: object, n_turns: int, n_ok: int) -> None: ...
        def stage(self, text: str) -> None: ...

    run_sweep(prepare(SweepRequest(source=str(other), out=base / "other", n_processes=1, with_report=False)), Quiet())
    with pytest.raises(WrongDomain, match="holds no point of layout"):
        check(base, base / "other")
