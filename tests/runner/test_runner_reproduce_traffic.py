"""Figures 4 and 11 and Table 3 as parts of ``reproduce``, shrunk."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from ppd_bench.core.errors import SpecError, TableError
from ppd_bench.runner.reproduce_parts import Compared, Part, PartRequest, data_of
from ppd_bench.runner.reproduce_registry import reproduce_part


def silent(text: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture(scope="module")
def table3(out: Path) -> Part:
    return reproduce_part("table3", PartRequest(quick=True, n_processes=1, out=out), silent)


def sharegpt(folder: Path, n: int = 12) -> Path:
    """Conversations of the paper's format: half of them have two turns, half one."""
    rows = []
    for i in range(n):
        said = [{"from": who, "value": f"words of {i} " * 40} for who in ("human", "gpt") * (1 + i % 2)]
        rows.append({"id": f"c{i}", "conversations": said})
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(rows))
    return path


def test_table3_counts_every_point_and_is_labelled(table3: Part) -> None:
    won = table3.frames["wins"]
    assert (won["n_points"] == 6).all()
    assert won["n_ttft"].sum() == won["n_tpot"].sum() == pytest.approx(6)
    assert table3.evidence.startswith("simulated")
    assert "not the paper's data" in table3.evidence
    assert all(c.difference != c.difference for c in table3.compared)
    assert table3.frames["comparison"]["difference"].isna().all() if "comparison" in table3.frames else True
    assert pd.read_csv(table3.folder / "comparison.csv")["difference"].isna().all()


def test_a_tables_cells_and_regret_are_told(table3: Part) -> None:
    cells = table3.frames["visited_cells"]
    assert set(cells["layout"]) == {"1P_3D", "2P_2D", "3P_1D"}
    assert cells.groupby("layout")["share_ratio"].sum().to_list() == pytest.approx([1.0, 1.0, 1.0])
    assert set(table3.frames["regret"]["metric"]) == {"ttft", "tpot", "e2e"}
    assert (table3.folder / "table3.html").read_text().count("Regret of the table") >= 1


def test_figure4_takes_the_runs_that_are_there(table3: Part, out: Path) -> None:
    told: list[str] = []
    part = reproduce_part("Figure 4", PartRequest(quick=True, n_processes=1, out=out), told.append)
    assert not told  # everything was simulated for Table 3
    assert {path.suffix for path in part.paths} == {".csv", ".png", ".svg", ".html"}
    assert (part.frames["reductions"]["ttft_ratio"] > 0.2).all()


def test_figure11_adds_a_tighter_time_out(table3: Part, out: Path) -> None:
    part = reproduce_part("figure11", PartRequest(quick=True, n_processes=1, out=out), silent)
    assert [c.what.rsplit(" ", 2)[-2] for c in part.compared] == ["30"] * 3 + ["10"] * 3
    assert {"points_30s", "points_10s"} <= set(part.frames)


def test_a_dataset_is_the_papers_only_by_name_and_format(tmp_path: Path) -> None:
    path = sharegpt(tmp_path)
    papers = data_of(PartRequest(datasets=(f"sharegpt={path}",), out=tmp_path))
    other = data_of(PartRequest(datasets=(str(path),), out=tmp_path))
    assert papers.papers == ("sharegpt",)
    assert papers.label == "sharegpt"
    assert other.papers == ()
    assert "not the paper's data" in other.label
    assert any("12 conversations read, 6 of two turns or more kept" in note for note in papers.notes)
    with pytest.raises(SpecError, match="is read as sharegpt, so it is not the paper's wildchat"):
        data_of(PartRequest(datasets=(f"wildchat={path}",), out=tmp_path))
    with pytest.raises(SpecError, match="this part takes wildchat"):
        data_of(PartRequest(datasets=(f"sharegpt={path}",), out=tmp_path), ("wildchat",))


def test_a_dataset_takes_the_place_of_the_workloads(table3: Part, out: Path, tmp_path: Path) -> None:
    request = PartRequest(
        quick=True,
        n_processes=1,
        out=out,
        datasets=(f"sharegpt={sharegpt(tmp_path)}",),
        tables=out / "quick" / "grid" / "tables",
    )
    part = reproduce_part("figure4", request, silent)
    assert set(part.frames["points"]["workload"]) == {"sharegpt"}
    of_the_paper = [c for c in part.compared if c.papers_data]
    assert of_the_paper
    assert all(c.difference == c.difference for c in of_the_paper if c.published)


def test_missing_tables_and_unknown_parts_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="build-table"):
        reproduce_part("table3", PartRequest(quick=True, tables=tmp_path, out=tmp_path), silent)
    with pytest.raises(SpecError, match=r"did you mean 'figure4'.*allowed: paper, "):
        reproduce_part("figre4", PartRequest(), silent)


def test_a_difference_is_told_to_the_nearer_end_of_a_range() -> None:
    def compared(simulated: float, papers_data: bool = True) -> float:
        return Compared(what="", unit="%", published=(15, 25), simulated=simulated, papers_data=papers_data).difference

    assert compared(20) == 0
    assert compared(12) == -3
    assert compared(30) == 5
    assert pd.isna(compared(30, papers_data=False))
