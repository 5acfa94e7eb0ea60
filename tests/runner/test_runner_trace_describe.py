"""``trace describe``: known values of public traces, what is labelled, and that order and missing parts do no harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.text import Text

from ppd_bench.analysis.trace_sessions import ChainSessions
from ppd_bench.core.errors import SpecError
from ppd_bench.runner.trace_describe import describe_trace, write_description
from ppd_bench.workload.traces import open_trace

MOONCAKE = "data/mooncake/conversation_trace.jsonl"


def hashed(path: Path, rows: list[tuple[float, int, list[int]]]) -> Path:
    keys = ("timestamp", "input_length", "hash_ids")
    path.write_text("\n".join(json.dumps({**dict(zip(keys, row, strict=True)), "output_length": 4}) for row in rows))
    return path


def test_the_conversation_trace_has_its_known_values(shared: Path) -> None:
    described = describe_trace(open_trace(shared / MOONCAKE))
    stats = described.stats
    assert stats.prompt_tokens.mean == pytest.approx(12_035.1, abs=0.05)
    assert (stats.prompt_tokens.p50, stats.prompt_tokens.p90) == (6_909, 27_367)
    assert stats.output_tokens.mean == pytest.approx(342.6, abs=0.05)
    assert stats.hit_ratio == pytest.approx(0.3736, abs=5e-5)
    assert stats.arrivals is not None
    assert stats.arrivals.rate_rps == pytest.approx(3.40, abs=0.005)
    assert stats.arrivals.span_s == pytest.approx(3_537, abs=0.5)
    assert stats.arrivals.tick_s == pytest.approx(3.0, abs=0.01)
    sessions = stats.sessions
    assert sessions is not None
    assert (sessions.source, sessions.n_multi_turn) == ("derived", 1_984)
    assert sessions.multi_turn_turns_mean == pytest.approx(2.97, abs=0.005)
    assert sessions.new_tokens is not None
    assert sessions.new_tokens.p50 == 28
    assert any("derived from block ids" in note for note in described.notes)


def test_a_parent_of_one_block_would_give_733_sessions(shared: Path) -> None:
    chains = ChainSessions(512, min_blocks=1)
    for row in open_trace(shared / MOONCAKE).rows():
        chains.add(row)
    assert chains.n_sessions == 733


def test_estimated_tokens_and_recorded_sessions_are_called_so(shared: Path) -> None:
    described = describe_trace(open_trace(shared / "data/chat/sharegpt_conv_128.json"))
    assert described.basis.startswith("estimated")
    assert described.stats.n_requests == 544
    assert described.stats.sessions is not None
    assert (described.stats.sessions.source, described.stats.sessions.n_sessions) == ("recorded", 128)
    assert described.stats.arrivals is None


def test_agent_sessions_have_think_times_and_no_arrivals(shared: Path) -> None:
    stats = describe_trace(open_trace(shared / "data/agentic_code")).stats
    assert stats.n_requests == 913 + 174
    assert stats.arrivals is None
    assert stats.sessions is not None
    assert stats.sessions.n_sessions == 40 + 15
    assert stats.sessions.think_time_s is not None
    assert stats.hit_ratio is not None
    assert stats.hit_ratio > 0.8


def test_traces_without_blocks_say_nothing_about_reuse(shared: Path) -> None:
    described = describe_trace(open_trace(shared / "data/azure/AzureLLMInferenceTrace_code.csv"))
    assert described.stats.profile is None
    assert described.stats.sessions is None
    assert described.stats.n_requests == 8_819
    assert any("no block ids" in note for note in described.notes)


def test_requests_read_out_of_order_have_the_figures_of_those_in_order(tmp_path: Path) -> None:
    rows = [(1000.0 * i, 512 * (1 + i % 4), [7, 100 + i % 3, 200 + i, 300 + i][: 1 + i % 4]) for i in range(40)]
    ordered = describe_trace(open_trace(hashed(tmp_path / "a.jsonl", rows)), sessions="none")
    mixed = describe_trace(open_trace(hashed(tmp_path / "b.jsonl", rows[20:] + rows[:20])), sessions="none")
    assert mixed.stats.profile == ordered.stats.profile
    assert mixed.stats.hit_ratio == ordered.stats.hit_ratio
    assert mixed.stats.sessions is None
    assert any("not in order of arrival" in note for note in mixed.notes)


def test_prompts_below_a_block_are_all_cold(shared: Path) -> None:
    described = describe_trace(open_trace(shared / "data/chat/fastchat_dummy_conversation.json", block_tokens=4096))
    assert described.stats.hit_ratio == 0
    assert described.stats.profile is not None
    assert described.stats.profile[-1].request_ratio == 1


def test_an_unknown_rule_for_sessions_is_refused(tmp_path: Path) -> None:
    trace = open_trace(hashed(tmp_path / "a.jsonl", [(0.0, 512, [1])]))
    with pytest.raises(SpecError, match="--sessions 'guess' is not known; allowed: chain, none"):
        describe_trace(trace, sessions="guess")


def test_a_folder_gets_the_figures_and_the_plots(tmp_path: Path) -> None:
    described = describe_trace(open_trace(hashed(tmp_path / "a.jsonl", [(0.0, 1024, [1, 2]), (9.0, 1500, [1, 2, 3])])))
    paths = write_description(described, tmp_path / "out")
    assert [p.name for p in paths] == ["describe.json", "describe.png", "describe.svg"]
    content = json.loads(paths[0].read_text())
    assert content["stats"]["n_requests"] == 2
    assert content["counts"] == {"n_read": 2, "n_kept": 2, "dropped": {}}
    assert content["format"]["token_count"] == "recorded"
    before = [p.read_bytes() for p in paths]
    assert [p.read_bytes() for p in write_description(described, tmp_path / "out")] == before


def test_the_figure_is_legible_and_says_what_it_rests_on(shared: Path) -> None:
    from ppd_bench.report.trace_plots import figure_trace

    for name in ("azure/AzureLLMInferenceTrace_code.csv", "chat/mt_bench_question.jsonl"):
        described = describe_trace(open_trace(shared / "data" / name))
        figure = figure_trace(described.stats, name="demo", basis=described.basis)
        texts = [t for t in figure.findobj(Text) if isinstance(t, Text) and t.get_text().strip() and t.get_visible()]
        assert min(t.get_fontsize() for t in texts) >= 8
        words = "\n".join(t.get_text() for t in texts)
        assert f"token counts {described.format.token_count}" in words
        assert ("no block ids" in words) == (described.stats.profile is None)
