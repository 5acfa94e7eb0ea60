import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.analysis.pareto import PANEL_FIELDS, frontier, panels
from ppd_bench.analysis.summary import summarise


def places(*pairs):
    return pd.DataFrame(pairs, columns=["ttft_p99_s", "throughput_tokens_per_s"])


def test_a_frontier_point_is_beaten_by_no_other():
    # c is slower than b at the same throughput; d is slower and less than a; e equals a.
    pairs = [(1.0, 100.0), (2.0, 200.0), (3.0, 200.0), (1.5, 90.0), (1.0, 100.0)]
    assert frontier(places(*pairs)).tolist() == [True, True, False, False, True]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_the_frontier_is_what_a_scan_from_the_fastest_finds(pairs):
    expected = set()
    top = 0
    for latency in sorted({p[0] for p in pairs}):
        best = max(t for lat, t in pairs if lat == latency)
        if best > top:
            expected.add((latency, best))
            top = best
    kept = frontier(places(*pairs))
    assert {pair for pair, keep in zip(pairs, kept, strict=True) if keep} == expected


@pytest.fixture
def summaries(make_point, make_row, make_frame, make_lengths):
    """Two workloads of one panel; per configuration: TTFT of each workload's turns and how many tokens they have."""
    figures = {"4R": (0.1, 0.3, 11), "1P_3D": (0.5, 0.5, 11), "1P_3pD": (0.4, 0.6, 101), "2P_2D": (0.1, 0.1, 1001)}
    kinds = [make_lengths(name, (8, 8), (8, 8), category="balanced") for name in ("a", "b")]
    points = [make_point(t, workload=w) for t in figures for w in kinds]
    rows = []
    for p in points:
        *ttfts, n = figures[p.topology]
        status = "timeout" if p.topology == "2P_2D" and p.workload.name == "b" else "ok"
        ttft = ttfts[p.workload.name == "b"]
        rows += [make_row(p, "s", turn, ttft=ttft, tpot=(1.0 - ttft) / (n - 1), n=n, status=status) for turn in (1, 2)]
    return summarise(make_frame(*rows), points)


def test_a_panel_averages_its_workloads_and_marks_frontier_and_best(summaries):
    panel = panels(summaries).set_index("configuration")
    assert list(panels(summaries).columns) == list(PANEL_FIELDS)
    np.testing.assert_allclose(panel["ttft_p99_s"].loc[["4R", "1P_3D", "1P_3pD"]], [0.2, 0.5, 0.5])
    # Every point spans 1 s (first send 0, last token 1): throughput is its tokens, 2 * n.
    np.testing.assert_allclose(panel["throughput_tokens_per_s"].loc[["4R", "1P_3D", "1P_3pD"]], [22, 22, 202])
    assert panel["on_frontier"].to_dict() == {"4R": True, "1P_3D": False, "1P_3pD": True, "2P_2D": False}
    # 202 / 0.5 is more than 22 / 0.2.
    assert panel["best"].to_dict() == {"4R": False, "1P_3D": False, "1P_3pD": True, "2P_2D": False}


def test_a_configuration_that_fails_a_workload_is_shown_but_not_on_the_frontier(summaries):
    row = panels(summaries).set_index("configuration").loc["2P_2D"]
    assert (row["success_ratio"], row["eligible"], row["on_frontier"], row["n_workloads"]) == (0.5, False, False, 2)


def test_only_the_asked_categories_take_part(summaries):
    kept = panels(summaries, categories=["replica", "x0"])
    assert kept["configuration"].tolist() == ["4R", "1P_3D", "2P_2D"]
    assert kept.set_index("configuration")["best"].to_dict() == {"4R": True, "1P_3D": False, "2P_2D": False}
