"""Figure 6 and the comparison of hand-off models as parts of ``reproduce``, shrunk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppd_bench.runner.reproduce_parts import PartRequest
from ppd_bench.runner.reproduce_registry import reproduce_part


def silent(text: str) -> None:
    """Nobody listens."""


def test_figure6_goes_from_all_local_to_none_as_the_weight_of_tpot_rises(tmp_path: Path) -> None:
    part = reproduce_part("figure6", PartRequest(quick=True, n_processes=1, out=tmp_path), silent)
    surface = part.frames["surface"].set_index("arm")
    assert surface.loc["x = 1", "local_ratio"] == 1.0
    assert surface.loc["x = 0", "local_ratio"] == 0.0
    weighed = surface[surface["w_tpot"].notna()].sort_values("w_tpot")
    assert weighed["local_ratio"].is_monotonic_decreasing
    assert surface.loc["x = 1", "ttft_reduction_ratio"] > 0.2
    assert surface.loc["x = 0", "ttft_reduction_ratio"] == pytest.approx(0.0)


@pytest.mark.slow
def test_every_hand_off_model_stands_beside_every_table(tmp_path: Path) -> None:
    part = reproduce_part("handoff", PartRequest(quick=True, n_processes=1, out=tmp_path), silent)
    scores = part.frames["agreement"]
    assert set(scores["model"]) == {"push_blocking", "pull_async", "push_blocking, receiver 0.1 s"}
    assert scores["table"].nunique() == 4
    cells = part.frames["cells"]
    table1 = cells[cells["table"].str.startswith("Table 1")].dropna(subset=["computed"])
    assert table1.groupby("model")["computed"].first().nunique() == 3  # the models do differ
    assert len(part.differences) == 5
    assert part.differences[-1].startswith("Explained, by the rule")
