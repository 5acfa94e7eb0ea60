import math

import pandas as pd
import pytest

from ppd_bench.analysis.summary import SUMMARY_FIELDS, summarise
from ppd_bench.analysis.winners import GOALS, WINNER_FIELDS, cell_values, local_share, winners
from ppd_bench.core.errors import SpecError


def compete(make_point, make_row, make_frame, contenders):
    """Summaries of {topology: changes of its two turns}, one session each."""
    points = [make_point(t) for t in contenders]
    rows = [
        make_row(p, "a", turn, **changes)
        for p, changes in zip(points, contenders.values(), strict=True)
        for turn in (1, 2)
    ]
    return summarise(make_frame(*rows), points)


def won(summaries, goal, **options):
    return winners(summaries, goals=[goal], **options).iloc[0]


@pytest.fixture
def three(make_point, make_row, make_frame):
    contenders = {
        "4R": {"ttft": 0.1, "tpot": 0.03},
        "1P_3D": {"ttft": 0.4, "tpot": 0.01},
        "1P_3pD": {"ttft": 0.2, "tpot": 0.025},
    }
    return compete(make_point, make_row, make_frame, contenders)


@pytest.mark.parametrize(
    ("goal", "winner", "value"),
    [("ttft", "4R", 0.1), ("tpot", "1P_3D", 0.01), ("e2e", "4R", 0.4), ("ttft_p99", "4R", 0.1)],
)
def test_the_smallest_latency_wins(three, goal, winner, value):
    row = won(three, goal)
    assert (row["winner"], row["tied"], row["n_tied"]) == (winner, winner, 1)
    assert row["value"] == pytest.approx(value)
    assert tuple(row.index) == WINNER_FIELDS


def test_the_largest_throughput_wins(three):
    # One session, both turns at instant 0: 22 tokens over the point's span.
    row = won(three, "throughput")
    assert (row["winner"], row["value"]) == ("4R", pytest.approx(22 / 0.4))


def test_a_tie_is_told_and_the_first_of_the_summaries_stands_for_it(make_point, make_row, make_frame):
    same = {"ttft": 0.2}
    summaries = compete(make_point, make_row, make_frame, {"1P_3D": {"ttft": 0.3}, "2P_2pD": same, "4R": same})
    row = won(summaries, "ttft")
    assert (row["winner"], row["category"], row["tied"], row["n_tied"]) == ("2P_2pD", "x1", "2P_2pD, 4R", 2)


def test_ttft_is_judged_on_follow_up_turns_and_tpot_on_all(make_point, make_row, make_frame):
    a, b = make_point("1P_3D"), make_point("1P_3pD")
    frame = make_frame(
        make_row(a, "a", 1, ttft=0.1, tpot=0.01), make_row(a, "a", 2, ttft=0.5, tpot=0.02),
        make_row(b, "a", 1, ttft=0.9, tpot=0.05), make_row(b, "a", 2, ttft=0.4, tpot=0.01),
    )  # fmt: skip
    found = winners(summarise(frame, [a, b]), goals=["ttft", "tpot"])
    assert found["winner"].tolist() == ["1P_3pD", "1P_3D"]


def test_nobody_below_the_success_bound_wins(make_point, make_row, make_frame):
    fast, slow = make_point("4R"), make_point("1P_3D")
    rows = [make_row(fast, f"s{i}", 2, ttft=0.01, status="timeout" if i < 2 else "ok") for i in range(20)]
    rows += [make_row(slow, f"s{i}", 2, ttft=0.50) for i in range(20)]
    summaries = summarise(make_frame(*rows), [fast, slow])
    assert won(summaries, "ttft")["winner"] == "1P_3D"
    assert won(summaries, "ttft", success_bound=0.9)["winner"] == "4R"


def test_a_cell_without_any_eligible_configuration_has_no_winner(make_point, make_row, make_frame):
    row = won(compete(make_point, make_row, make_frame, {"4R": {"status": "timeout"}}), "ttft")
    assert (row["n_tied"], row["tied"], row["workload"]) == (0, "", "small_tiny")
    assert row[["winner", "category", "value"]].isna().all()


def test_an_invalid_point_never_wins(three):
    invalid = three.assign(valid=three["valid"] & (three["topology"] != "4R"))
    assert won(invalid, "ttft")["winner"] == "1P_3pD"


def test_repeats_are_averaged(make_point, make_row, make_frame):
    points = [make_point(t, repeat=r) for t in ("4R", "1P_3D") for r in (0, 1)]
    ttfts = (0.1, 0.9, 0.4, 0.4)
    frame = make_frame(*(make_row(p, "a", 2, ttft=t) for p, t in zip(points, ttfts, strict=True)))
    values = cell_values(summarise(frame, points), GOALS["ttft"])
    assert values["value"].tolist() == pytest.approx([0.5, 0.4])


def test_different_models_do_not_compete(make_point, make_row, make_frame):
    points = [make_point(), make_point(model="Qwen2.5-14B")]
    with pytest.raises(SpecError, match=r"several values of model \(Llama-3.1-8B, Qwen2.5-14B\)"):
        winners(summarise(make_frame(*map(make_row, points)), points))


def test_every_goal_reads_a_column_that_summaries_have():
    assert {goal.column for goal in GOALS.values()} <= set(SUMMARY_FIELDS)


def test_the_share_of_local_falls_as_w_tpot_grows(make_point, make_workload):
    from ppd_bench.analysis.compile_table import compile_table
    from ppd_bench.analysis.pairing import pair_arms

    kinds = ("tiny", "mid_bal", "huge_paste", "big_paste")
    points = [make_point(t, workload=make_workload("small", k)) for t in ("1P_3D", "1P_3pD") for k in kinds]
    # delta_ttft is 0.5 everywhere; delta_tpot is 0.1, 0.25, 0.5, so local needs w_tpot below 5, 2, 1. big_paste failed.
    rows = [
        {
            "baseline": "1P_3D", "candidate": "1P_3pD", "workload": f"small_{k}", "qps": 8.0, "n_pairs": 5,
            "ttft_x0_s": 0.2, "ttft_x1_s": 0.1, "tpot_x0_s": 0.01, "tpot_x1_s": 0.01 * (1 + d),
            "success_x0_ratio": s, "success_x1_ratio": s, "delta_ttft": 0.5, "delta_tpot": d,
        }
        for k, d, s in zip(kinds, (0.1, 0.25, 0.5, 0.5), (1.0, 1.0, 1.0, 0.5), strict=True)
    ]  # fmt: skip
    text = compile_table(pd.DataFrame(rows), points, pair=pair_arms(points)[0], w_ttft=1, w_tpot=1)
    found = local_share(text, [0, 0.9, 1.5, 3, 6])
    assert found["n_cells"].tolist() == [3] * 5
    assert found["n_local"].tolist() == [3, 3, 2, 1, 0]
    assert found["local_ratio"].tolist() == pytest.approx([1, 1, 2 / 3, 1 / 3, 0])
    assert local_share(text, [1.5], types={"huge_paste"})["local_ratio"].tolist() == [0.0]
    assert math.isnan(local_share(text, [1.5], qps={2.0})["local_ratio"].iloc[0])
