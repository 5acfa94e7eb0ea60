"""Figures 1, 5 and 10 as parts of ``reproduce``, shrunk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppd_bench.runner.reproduce_parts import Part, PartRequest
from ppd_bench.runner.reproduce_registry import reproduce_part


def silent(text: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduce")


def part(name: str, out: Path) -> Part:
    return reproduce_part(name, PartRequest(quick=True, n_processes=1, out=out), silent)


def test_figure1_places_ten_configurations_and_finds_their_frontier(out: Path) -> None:
    done = part("figure1", out)
    found = done.frames["frontier"]
    assert len(found) == 10
    assert found["on_frontier"].any()
    assert not found.loc[~found["eligible"], "on_frontier"].any()
    assert (done.folder / "figure1.png").exists()
    page = (done.folder / "figure1.html").read_text()
    assert "Assumed: 10,000 tokens in means" in page
    assert "Assumed: --quick: fewer points and shorter arrivals than stated below" in page


def test_figure10_shows_what_p_pays_when_it_forgets(out: Path) -> None:
    turns = part("figure10", out).frames["turns"].set_index("key")
    assert (turns["x1_s"] < turns["x0_s"]).all()
    assert turns.loc[8, "x0_recompute_s"] > 1.2 * turns.loc[8, "x0_s"]
    assert turns.loc[8, "x0_recompute_s"] > turns.loc[2, "x0_recompute_s"]


def test_figure5_slows_x0_with_the_link_and_leaves_local_turns_alone(out: Path) -> None:
    done = part("figure5", out)
    ttft = done.frames["points"].pivot_table(index="link", columns="arm", values="ttft_s")
    order = ["nvlink", "ib_ndr", "ib_hdr", "eth_100g"]
    assert ttft.loc[order, "x0"].is_monotonic_increasing
    assert ttft.loc["eth_100g", "x0"] > ttft.loc["nvlink", "x0"] + 0.002
    assert ttft["x1"].max() == pytest.approx(ttft["x1"].min(), rel=0.05)
    assert all(c.difference != c.difference for c in done.compared)
