"""``capacity`` on the simulator, and its search on made-up loads."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.analysis.capacity import Bracket, Limits, bracket_of, capacities
from ppd_bench.core.errors import SpecError
from ppd_bench.runner.capacity import CapacityRequest, capacity
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.sweep import SweepRequest
from ppd_bench.store import layout
from ppd_bench.store.journal import append_entry

SWEEP = """
name: capable
gpus: 4
gpu: h100-80g
model: llama-3.1-8b
topologies: [2P_2D, 2P_2pD]
workloads: [small_huge_paste]
qps: [1]
duration: 2s
"""


@given(true=st.floats(0.2, 100.0), start=st.floats(0.2, 100.0))
def test_a_search_ends_with_a_narrow_bracket_around_the_truth(true: float, start: float) -> None:
    bracket, looked_at = Bracket(), []
    while (qps := bracket.next_qps(start, 0.1, 128.0, 0.1)) is not None:
        assert qps not in looked_at
        looked_at.append(qps)
        loads = pd.DataFrame({"qps": looked_at, "met": [q <= true for q in looked_at]})
        bracket = bracket_of(loads)
        assert len(looked_at) < 25
    assert bracket.met is not None
    assert bracket.missed is not None
    assert bracket.met <= true < bracket.missed <= bracket.met * 1.11


def test_a_search_stops_at_the_ends_of_its_range() -> None:
    assert Bracket(met=128.0).next_qps(2.0, 0.1, 128.0, 0.1) is None
    assert Bracket(missed=0.1).next_qps(2.0, 0.1, 128.0, 0.1) is None


def test_a_rate_met_above_one_that_is_missed_does_not_count() -> None:
    loads = pd.DataFrame({"qps": [1.0, 2.0, 4.0], "met": [True, False, True]})
    assert bracket_of(loads) == Bracket(met=1.0, missed=2.0)


def test_the_frontier_leaves_out_what_another_configuration_beats() -> None:
    rows = [("a", 8.0, 4.0), ("b", 4.0, 2.0), ("c", 4.0, 5.0), ("d", 0.5, 9.0)]
    loads = pd.DataFrame(
        [
            {"configuration": n, "topology": n, "workload": "w", "qps": q, "n_gpus": 4, "met": n != "d", "broken": "",
             "goodput_per_gpu_rps": g}
            for n, q, g in rows
        ]
    )  # fmt: skip
    found = capacities(loads).set_index("configuration")
    assert dict(found["on_frontier"]) == {"a": True, "b": False, "c": True, "d": False}
    assert math.isnan(found.loc["d", "capacity_qps"])


def request(file: Path, out: Path, **more: object) -> CapacityRequest:
    base = CapacityRequest(
        sweep=SweepRequest(source=str(file), out=out, n_processes=1),
        limits=Limits(ttft_s=0.2, tpot_s=0.03),
        start_qps=16.0,
        tolerance_ratio=0.3,
        n_repeats=2,
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


@pytest.fixture
def capable(tmp_path: Path) -> Path:
    path = tmp_path / "capable.yaml"
    path.write_text(SWEEP)
    return path


def test_a_stopped_search_goes_on_to_the_same_result_and_keeps_its_loads(capable, tmp_path, quiet) -> None:
    whole = capacity(request(capable, tmp_path / "whole"), quiet)
    assert (whole.table["capacity_qps"] < whole.table["missed_qps"]).all()
    assert (whole.table["missed_qps"] <= 1.31 * whole.table["capacity_qps"]).all()
    assert whole.headline.startswith("simulated")
    run = open_run(tmp_path / "whole")
    assert len(run.points) == 2 * len(whole.loads)

    class Stops(type(quiet)):  # type: ignore[misc]
        def point_done(self, point: object, n_turns: int, n_ok: int) -> None:
            super().point_done(point, n_turns, n_ok)
            if len(self.done) == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capacity(request(capable, tmp_path / "cut"), Stops())
    again = capacity(request(capable, tmp_path / "cut"), quiet)
    pd.testing.assert_frame_equal(again.table, whole.table)
    assert (tmp_path / "cut/records.parquet").read_bytes() == (tmp_path / "whole/records.parquet").read_bytes()


def test_a_load_that_ends_before_the_engines_are_full_is_called_too_high(capable, tmp_path, quiet) -> None:
    told = capacity(request(capable, tmp_path / "short"), quiet)
    assert "capacities may be far TOO HIGH" in told.notice
    asked = request(capable, tmp_path / "long", highest_qps=16.0, n_repeats=1)
    longer = dataclasses.replace(asked.sweep, overrides={"duration": "8s"})
    assert "TOO HIGH" not in capacity(dataclasses.replace(asked, sweep=longer), quiet).notice


def test_points_that_did_not_measure_what_they_should_are_named(capable, tmp_path, quiet) -> None:
    asked = request(capable, tmp_path / "run")
    assert "invalid" not in capacity(asked, quiet).notice
    point = open_run(tmp_path / "run").points[0]
    append_entry(
        tmp_path / "run" / layout.CHECKS,
        {"point_id": point.point_id, "problems": ["an engine died"], "lateness": {}},
    )
    assert (
        f"warning: 1 point invalid, and the loads may be misjudged by them: {point.topology}"
        in capacity(asked, quiet).notice
    )


def test_unequal_numbers_of_gpus_and_missing_objectives_are_refused(capable, tmp_path, quiet) -> None:
    unequal = request(capable, tmp_path / "a")
    sweep = dataclasses.replace(unequal.sweep, overrides={"topologies": ["2P_2D", "1P_1D"]})
    with pytest.raises(SpecError, match="equal numbers of GPUs"):
        capacity(dataclasses.replace(unequal, sweep=sweep), quiet)
    with pytest.raises(SpecError, match="give --ttft or --tpot"):
        capacity(request(capable, tmp_path / "b", limits=Limits()), quiet)
    with pytest.raises(SpecError, match="in this order"):
        capacity(request(capable, tmp_path / "c", start_qps=0.01), quiet)
    assert not (tmp_path / "a").exists()
