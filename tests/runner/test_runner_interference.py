"""The interference study, simulated and on a fake engine over a real socket."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from live_cases import Fakes

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import EngineSettings, SimSettings
from ppd_bench.runner.interference import UNITS, InterferenceRequest, InterferenceResult, run_interference
from ppd_bench.runner.reproduce_parts import PartRequest
from ppd_bench.runner.reproduce_registry import reproduce_part
from ppd_bench.sim.profile import find_hardware, find_model, make_cost
from ppd_bench.store.schema import decoded_metadata


def silent(text: str) -> None:
    """Nobody listens."""


SMALL = InterferenceRequest(batches=(4, 40), budgets=(512, 8192), n_processes=1)


def test_a_study_of_other_axes_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = InterferenceRequest(batches=(4,), n_prefills=(1,), budgets=(512,), n_processes=1)
    more = dataclasses.replace(few, batches=(8,))
    folders = [run_interference(request, silent).folder for request in (few, more, few)]
    assert folders[0] == folders[2] != folders[1]
    assert all(folder.parent == Path("results/interference") and folder.name.startswith("sim-") for folder in folders)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> InterferenceResult:
    return run_interference(dataclasses.replace(SMALL, out=tmp_path_factory.mktemp("interference")), silent)


def test_every_cell_is_told_and_labelled_simulated(result: InterferenceResult) -> None:
    assert not result.missing
    assert len(result.frame) == 2 * 2 * 2 * 2
    assert set(result.frame["evidence"]) == {"simulated"}
    assert not result.frame.isna().any(axis=None)
    assert {path.suffix for path in result.paths} == {".parquet", ".png", ".svg"}


def test_a_step_costs_what_the_cost_model_says_of_its_mix(result: InterferenceResult) -> None:
    """One full prefill of 1,024 beside four decodes in one step, against the cost model asked directly."""
    row = result.frame.set_index(["max_num_batched_tokens", "name"]).loc[(8192, "full1-b4-c1024")]
    sim, cost = SimSettings(), make_cost(find_hardware("h100-80g"), find_model("llama-3.1-8b"), 1, "auto")
    overhead = sim.step_overhead_s + 4 * sim.sequence_overhead_s
    context = 4 * 290  # prompts of 256 and what was generated since: a token more or less is nanoseconds
    before = overhead + cost.decode_line(4).at(context)
    mixed = overhead + sim.sequence_overhead_s + cost.mixed_s(1024, 1, 1024 * 1024 / 2, 1024, 4, context)
    assert row["baseline_tpot_s"] == pytest.approx(before, rel=0.01)
    assert row["step_slowdown_ratio"] == pytest.approx(mixed / before - 1, rel=0.02)


def test_full_prefills_cost_more_than_appends_and_a_small_budget_spreads_them(result: InterferenceResult) -> None:
    cells = result.frame.set_index(["max_num_batched_tokens", "n_prefills", "n_decode", "kind"])
    for budget in (512, 8192):
        for n_prefills in (1, 4):
            for batch in (4, 40):
                full, append = (cells.loc[(budget, n_prefills, batch, kind)] for kind in ("full", "append"))
                assert full["step_slowdown_ratio"] > 2 * append["step_slowdown_ratio"]
                assert full["excess_s"] > 3 * append["excess_s"]
    small, large = (cells.loc[(budget, 1, 40, "full")] for budget in (512, 8192))
    assert small["step_slowdown_ratio"] < large["step_slowdown_ratio"]
    assert small["n_carrying_steps"] == 3
    assert large["n_carrying_steps"] == 1


def test_the_table_is_parquet_with_units(result: InterferenceResult) -> None:
    import pyarrow.parquet as pq

    schema = pq.read_schema(result.folder / "interference.parquet")
    assert decoded_metadata(schema)["executor"] == "sim"
    assert {field.name: field.metadata[b"unit"].decode() for field in schema} == UNITS


def test_a_second_call_plays_nothing_again(result: InterferenceResult) -> None:
    import dataclasses

    told: list[str] = []
    again = run_interference(dataclasses.replace(SMALL, out=result.folder), told.append)
    assert not told
    assert again.frame.equals(result.frame)


def test_what_no_engine_can_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="leave no token of a step"):
        run_interference(InterferenceRequest(batches=(600,), out=tmp_path), silent)
    with pytest.raises(SpecError, match="needs a context"):
        run_interference(InterferenceRequest(append_tokens=2000, out=tmp_path), silent)
    with pytest.raises(SpecError) as error:
        run_interference(InterferenceRequest(batches=(0,), n_prefills=(1, 1), totals=(), out=tmp_path), silent)
    assert [problem.split()[2] for problem in error.value.problems] == ["--batches:", "--totals:", "--prefills:"]
    with pytest.raises(SpecError, match="one step budget"):
        run_interference(InterferenceRequest(endpoints=tmp_path / "e.yaml", out=tmp_path), silent)


def test_a_live_engine_is_measured_by_the_same_definitions(tmp_path: Path) -> None:
    """The fake engine's steps take the same time whatever they carry: nothing slows its decodes but its own unsteadiness."""
    with Fakes("R") as fakes:
        request = InterferenceRequest(
            batches=(2,), totals=(128,), n_prefills=(1,), append_tokens=16, decode_context_tokens=32, budgets=(512,),
            window_tokens=8, gpu="cpu", model="tiny-llama", endpoints=fakes.write(tmp_path / "endpoints.yaml"),
            out=tmp_path / "live",
        )  # fmt: skip
        result = run_interference(request, silent)
    assert result.evidence == "measured"
    assert sorted(result.frame["kind"]) == ["append", "full"]
    assert (result.frame["n_streams"] == 2).all()
    assert (result.frame["baseline_tpot_s"] > 0).all()
    assert (result.frame["excess_s"].abs() < 1.0).all()


def test_figures_2_and_7_share_their_runs(tmp_path: Path) -> None:
    request = PartRequest(quick=True, n_processes=1, out=tmp_path)
    first = reproduce_part("figure2", request, silent)
    told: list[str] = []
    second = reproduce_part("figure7", request, told.append)
    assert not told
    assert set(first.frames["slowdowns"]["n_prefills"]) == {1}
    assert set(second.frames["slowdowns"]["n_prefills"]) == {4}
    assert all(c.difference != c.difference for c in (*first.compared, *second.compared))
    assert {c.published for c in second.compared} == {(57.0,), (21.0,)}


@pytest.mark.slow
def test_figure8_grows_with_the_context(tmp_path: Path) -> None:
    part = reproduce_part("figure8", PartRequest(quick=True, n_processes=1, out=tmp_path), silent)
    full = (
        part.frames["slowdowns"].query("kind == 'full' and max_num_batched_tokens == 512").set_index("context_tokens")
    )
    assert full["carrying_slowdown_ratio"].is_monotonic_increasing
    assert EngineSettings().max_num_batched_tokens == 8192  # the second budget is vLLM's default
