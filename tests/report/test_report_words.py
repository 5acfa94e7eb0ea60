"""The summary in words: every claim follows from the data."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest

from ppd_bench.policy.table import DecisionTable
from ppd_bench.report.findings import find
from ppd_bench.report.words import in_words

Build = Callable[..., pd.DataFrame]


def text_of(summaries: pd.DataFrame, deltas: pd.DataFrame | None = None, tables: list[str] | None = None) -> str:
    passages = in_words(find(summaries), deltas, [DecisionTable.from_json(t) for t in tables or []])
    lines = [line for passage in passages for line in (f"# {passage.title}", *passage.sentences)]
    return "\n".join(lines).replace("\u00a0", " ")


@pytest.fixture
def two(build: Build) -> pd.DataFrame:
    """4R is faster to the first token, 1P_3D faster per token and in all; both work."""
    rows = build(("4R", "1P_3D"), ("small_tiny",), (4.0, 8.0))
    rows["success_ratio"], rows["valid"], rows["invalid_reasons"] = 1.0, True, ""
    figures = {"4R": (0.030, 0.010, 900.0), "1P_3D": (0.060, 0.008, 1000.0)}
    for column, index in (("ttft_mean_s", 0), ("tpot_mean_s", 1), ("throughput_tokens_per_s", 2)):
        rows[column] = [figures[t][index] for t in rows["topology"]]
    return rows


def test_choices_and_their_prices_are_told_with_figures_and_units(two: pd.DataFrame) -> None:
    text = text_of(two)
    assert "Best mean TTFT, turn 2+: 4R, which wins 2 of 2 cells (100 %)." in text
    assert "Best throughput: 1P_3D, which wins 2 of 2 cells (100 %)." in text
    assert "Balanced: 4R. In its median cell none of the three goals is more than 25 % from the best" in text
    assert (
        "4R (chosen for TTFT and balance): in its median cell TPOT is 25 % above the best and throughput is 10 % below "
        "the best; it fails nowhere. Its medians: TTFT 30 ms, TPOT 10 ms, throughput 900 tokens/s." in text
    )
    assert (
        "1P_3D (chosen for TPOT and throughput): in its median cell TTFT is 2 times the best; it fails nowhere." in text
    )
    assert "TTFT and TPOT have different winners in 100 % of the cells" in text


def test_the_winner_by_load_is_told_only_where_load_changes_it(two: pd.DataFrame) -> None:
    assert "Most frequent by load" not in text_of(two)
    changed = two.copy()
    changed.loc[(changed["qps"] == 8.0) & (changed["topology"] == "4R"), "ttft_mean_s"] = 0.5
    assert "Most frequent by load: 4R at QPS 4 and 1P_3D at QPS 8." in text_of(changed)


def test_failures_name_the_configuration_and_the_load(two: pd.DataFrame) -> None:
    assert "Nothing: every configuration had at least 95 % successful turns in every cell." in text_of(two)
    two.loc[(two["qps"] == 8.0) & (two["topology"] == "1P_3D"), "success_ratio"] = 0.9
    text = text_of(two)
    assert "1P_3D: fails in 1 of 2 cells (50 %), first at QPS 8 (1 of 1 workload)." in text
    assert "Without failures: 4R." in text


def test_a_run_in_which_nothing_works_chooses_nothing(
    two: pd.DataFrame, fail: Callable[[pd.DataFrame], pd.DataFrame]
) -> None:
    text = text_of(fail(two))
    assert "No configuration reached 95 % successful turns in any cell, so nothing can be chosen." in text
    assert "There is nothing to compare" in text
    assert "4 of 4 points (100 %) are invalid and win nothing: no turn succeeded (4)." in text


def test_doubts_follow_from_executor_repeats_size_and_closeness(two: pd.DataFrame, build: Build) -> None:
    text = text_of(two)
    assert "These numbers come from a simulator" in text
    assert "Every point ran once." in text
    assert "conversations" not in text
    few = text_of(build(("4R",), ("small_tiny",), (0.5, 4.0), n_repeats=2).assign(executor="live"))
    assert "simulator" not in few
    assert "ran once" not in few
    assert "At QPS 0.5 points have fewer than 30 conversations (as few as 5)" in few
    two.loc[two["topology"] == "4R", "throughput_tokens_per_s"] = 990.0
    assert "less than 2 %: throughput in 2 of 2 cells (100 %)" in text_of(two)


def test_ties_are_told(two: pd.DataFrame) -> None:
    two["ttft_mean_s"] = 0.03
    assert "2 of 6 wins (33 %) are exact ties" in text_of(two)


def test_pairs_are_told_with_signs_and_only_over_cells_in_which_both_work(two: pd.DataFrame) -> None:
    deltas = pd.DataFrame(
        {
            "baseline": "1P_3D",
            "candidate": "1P_3pD",
            "workload": ["a", "b", "c"],
            "qps": 1.0,
            "success_x0_ratio": [1.0, 1.0, 0.2],
            "success_x1_ratio": [1.0, 1.0, 1.0],
            "delta_ttft": [0.6, 0.7, 0.99],
            "delta_tpot": [0.02, 0.04, -0.9],
        }
    )
    assert "1P_3D to 1P_3pD: TTFT −65 %, TPOT +3 % (2 cells)." in text_of(two, deltas)
    assert "The run holds no pair" in text_of(two)


def test_tables_tell_their_decisions_and_what_they_do_not_know(
    paired_summaries: pd.DataFrame, paired_deltas: pd.DataFrame, table_texts: list[str]
) -> None:
    text = text_of(paired_summaries, paired_deltas, table_texts)
    table = DecisionTable.from_json(table_texts[0])
    unknown = sum(c.visited and c.evidence == "insufficient" for c in table.cells)
    decided = 9 - unknown
    assert 0 < unknown < 9
    assert f"of {decided} decided cells" in text
    assert f"1P_3D / 1P_3pD {unknown} of 9, answered pd" in text
    # 3 contexts x 3 types x 3 levels in each table; each type was visited in one context, so two borrow what is known.
    borrowed = sum(c.evidence == "extrapolated" for t in table_texts for c in DecisionTable.from_json(t).cells)
    assert f"No workload of the sweep visits {borrowed} of 54 table cells" in text


def test_an_empty_run_has_nothing_to_say(two: pd.DataFrame) -> None:
    assert text_of(two.iloc[:0]) == "# Nothing to summarise\nThe run holds no points."


def test_a_run_that_contradicts_the_published_study_says_so_first(paper_summaries: pd.DataFrame) -> None:
    published = pd.DataFrame(
        [
            ("Table 2: winners", "replica", "tpot", 0.6, 85.3),
            ("Table 1: change", "1P_3D", "low", -57.8, -50.6),
            ("Table 5: failures", "3P_1D_x0", "20", 89.0, float("nan")),
        ],
        columns=["table", "row", "column", "published", "computed"],
    )
    first = in_words(find(paper_summaries), None, [], published)[0]
    assert first.title == "Before you act on this"
    assert "1 of 2 comparable figures" in first.sentences[0]
    assert "Table 2, replica tpot: 0.6 % published, 85.3 % here" in first.sentences[0]
    close = published.assign(computed=published["published"] + 5)
    assert in_words(find(paper_summaries), None, [], close)[0].title == "Which split for which goal"


def test_a_run_on_a_cpu_says_that_it_decides_nothing(paper_summaries: pd.DataFrame) -> None:
    told = in_words(find(paper_summaries.assign(gpu="cpu")), None, [])[-1]
    assert told.title == "What is uncertain"
    assert "decides nothing about GPUs" in told.sentences[0]
