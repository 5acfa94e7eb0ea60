"""The agentic study: its comparison, its mechanisms, its files. Directions are asserted, not levels: those are simulated."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.runner.study import Study, StudyRequest, published_figures, run_study
from ppd_bench.runner.study_points import CAPACITY_MOST, MAIN_ARMS, capacities
from ppd_bench.runner.study_words import differences, main_tables

pytestmark = pytest.mark.slow


def no_word(text: str) -> None:
    """Progress is not for tests."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A small one, in this process."""
    out = tmp_path_factory.mktemp("study")
    return run_study(
        "agentic",
        StudyRequest(n_requests=120, seed=2, time_scale=100.0, n_processes=1, out=out, max_inflight_sessions=12),
        no_word,
    )


def column(study: Study, part: str, arm: str, name: str) -> list[float]:
    frame = study.frames[part]
    return [float(value) for value in frame[frame["arm"] == arm].sort_values("value")[name]]


def test_cache_aware_routing_finds_more_and_answers_sooner_than_round_robin(study: Study) -> None:
    main = study.frames["main"].set_index("arm")
    assert main.loc["8R_cache_aware", "prefix_hit_ratio"] > 1.5 * main.loc["8R_round_robin", "prefix_hit_ratio"]
    assert main.loc["8R_cache_aware", "ttft_p50_s"] < 0.7 * main.loc["8R_round_robin", "ttft_p50_s"]
    assert (main["prefix_hit_ratio"] <= main["possible_hit_ratio"] + 0.02).all()


def test_the_memory_wall_stands_where_kv_is_scarce_and_is_gone_where_it_is_ample(study: Study) -> None:
    for arm in ("6P_2D", "6P_2D_fire_and_forget"):
        waits = column(study, "kv_capacity", arm, "decode_wait_share_ratio")
        usage = column(study, "kv_capacity", arm, "decode_kv_mean_ratio")
        assert waits[0] > waits[-1]
        assert usage[0] > usage[-1]
    told_at_once = column(study, "kv_capacity", "6P_2D_fire_and_forget", "decode_wait_share_ratio")
    assert told_at_once[0] > 0.05
    assert told_at_once[-1] < 0.01


def test_telling_d_at_once_holds_more_of_its_memory(study: Study) -> None:
    for awaited, at_once in zip(
        column(study, "decode_share", "6P_2D", "decode_kv_mean_ratio"),
        column(study, "decode_share", "6P_2D_fire_and_forget", "decode_kv_mean_ratio"),
        strict=True,
    ):
        assert at_once > awaited


def test_fewer_decode_engines_are_fuller(study: Study) -> None:
    usage = column(study, "decode_share", "6P_2D", "decode_kv_mean_ratio")
    assert usage == sorted(usage, reverse=True)


def test_without_reuse_there_is_nothing_to_find_and_more_reuse_is_found_as_far_as_possible(study: Study) -> None:
    found = column(study, "reuse", "8R_cache_aware", "prefix_hit_ratio")
    possible = column(study, "reuse", "8R_cache_aware", "possible_hit_ratio")
    assert found[0] == possible[0] == 0.0
    assert found == sorted(found)
    assert all(one <= most + 0.02 for one, most in zip(found, possible, strict=True))


def test_every_number_says_that_it_is_simulated_and_stands_beside_what_was_published(study: Study) -> None:
    assert "no number below was measured" in study.evidence_line
    assert "generated trace" in study.evidence_line
    for frame in study.frames.values():
        assert set(frame["evidence"]) == {"simulated"}
    for part in study.frames:
        rows = list(csv.DictReader((study.folder / f"{part}.csv").read_text().splitlines()))
        assert {row["evidence"] for row in rows} == {"simulated"}
    results, *_ = main_tables(study)
    assert len(results.rows) == len(MAIN_ARMS)
    assert "(0.731)" in results.rows[1][2]
    assert all(len(row) == len(table.head) for table in main_tables(study) for row in table.rows)
    assert any("--enforce-eager" in sentence for sentence in differences(study))
    page = (study.folder / "study.html").read_text()
    assert "simulated" in page
    assert "0.731" in page
    assert page.count("<img") == 4


def test_all_points_are_in_the_folder_by_value(study: Study) -> None:
    content = json.loads((study.folder / "study.json").read_text())
    assert {entry["part"] for entry in content["points"]} == {
        "main",
        "kv_capacity",
        "decode_share",
        "reuse",
        "in_flight",
    }
    assert all(entry["point"]["executor"] == "sim" for entry in content["points"])


def test_the_same_request_gives_the_same_figures(study: Study, tmp_path: Path) -> None:
    again = run_study(
        "agentic",
        StudyRequest(
            n_requests=120,
            seed=2,
            time_scale=100.0,
            n_processes=1,
            out=tmp_path,
            max_inflight_sessions=12,
            with_sweeps=False,
        ),
        no_word,
    )
    assert (tmp_path / "main.csv").read_bytes() == (study.folder / "main.csv").read_bytes()
    assert set(again.frames) == {"main"}


def test_capacities_go_from_the_longest_request_to_ample_and_hold_the_given_one() -> None:
    found = capacities(276_448, 120_144)
    assert found[0] == 120_144
    assert found[-1] == pytest.approx(CAPACITY_MOST * 276_448, rel=0.01)
    assert 276_448 in found
    assert all(n % 16 == 0 for n in found)


def test_published_figures_are_those_of_the_shared_copy(shared: Path) -> None:
    import yaml

    theirs = yaml.safe_load((shared / "paper" / "published_results.yaml").read_text())["agentic"]
    ours = published_figures()
    names = {
        "8R_cache_aware": "combined_8_cache_aware",
        "8R_round_robin": "combined_8_round_robin",
        "4P_4D": "pd_4p4d_cache_aware",
    }
    for arm, name in names.items():
        for key in ("ttft_p50_s", "tpot_p90_s", "e2e_p50_s", "apc_pct", "n"):
            assert ours["main"][arm][key] == theirs["main"][name][key]
    assert ours["main"]["6P_2D"]["ttft_p50_s"] == theirs["main"]["pd_6p2d_cache_aware"]["ttft_p50_s"]
    assert ours["load"]["6P_2D"]["decode_kv_pct"] == theirs["main"]["pd_6p2d_cache_aware"]["decode_kv_usage_pct"]
    assert ours["changes"]["combined_to_pd"]["ttft_pct"] == theirs["combined_to_pd_pct"]["ttft"]
    assert ours["changes"]["await_to_fire_and_forget"]["ttft_pct"] == theirs["fire_and_forget_vs_await_pct"]["ttft"]


def test_there_is_one_study() -> None:
    with pytest.raises(SpecError, match="there is no study 'chat'; allowed: agentic"):
        run_study("chat", StudyRequest(), no_word)


@pytest.mark.parametrize("name", ["agentic_code", "mooncake/conversation_trace.jsonl"])
def test_the_study_runs_on_recorded_traces(name: str, shared: Path, tmp_path: Path) -> None:
    request = StudyRequest(trace=shared / "data" / name, n_requests=40, with_sweeps=False, n_processes=1, out=tmp_path)
    found = run_study("agentic", request, no_word)
    assert all(figures.summary["n_ok"] > 0 for _, figures in found.main())
    assert name.split("/")[-1] in found.evidence_line
