"""Reuse, samples and the roofline as verbs: what they read, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ppd_bench.analysis.sampling import SampleTarget
from ppd_bench.cli import reuse as reuse_cli
from ppd_bench.cli import roofline as roofline_cli
from ppd_bench.core.errors import SpecError
from ppd_bench.runner.numbers import numbers, seconds_of, whole_numbers
from ppd_bench.runner.roofline import RooflineRequest, run_roofline
from ppd_bench.runner.trace_convert import anonymise_trace, convert_trace
from ppd_bench.runner.trace_reuse import UNTIMED_NOTE, ReuseRequest, trace_reuse, write_reuse
from ppd_bench.runner.trace_sample import sample_trace
from ppd_bench.workload.traces import Trace, open_trace

app = typer.Typer(pretty_exceptions_enable=False)
reuse_cli.register(app)
roofline_cli.register(app)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Four conversations of five turns each, in turns, two blocks of 8 tokens more per turn; all share the first block."""
    path = tmp_path / "conversations.jsonl"
    entries = []
    for turn in range(5):
        for session in range(4):
            ids = [7, *range(100 * session + 10, 100 * session + 10 + 2 * turn + 2)]
            entries.append({"timestamp": 1000 * len(entries), "input_length": 8 * len(ids), "output_length": 5,
                            "hash_ids": ids, "session_id": f"s{session}"})  # fmt: skip
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def opened(path: Path) -> Trace:
    return open_trace(path, block_tokens=8)


def test_reuse_tells_the_trace_its_caches_and_its_policies(conversations: Path, tmp_path: Path) -> None:
    request = ReuseRequest(model="qwen3-30b-a3b", capacities=("80", "10MB"), instances=(2,))
    result = trace_reuse(opened(conversations), request)
    # 20 prompts of 3, 5, 7, 9, 11 blocks; each but a session's first finds all but its last two, and those the shared block.
    assert result.reuse.hit_ratio == pytest.approx((3 * 1 + 4 * (3 + 5 + 7 + 9)) / (4 * (3 + 5 + 7 + 9 + 11)))
    assert result.reuse.n_sessions == 4
    assert result.sessions == "recorded"
    assert result.kv_bytes_per_token == 98_304
    sizes = {point.capacity_tokens for point in result.curve.points}
    assert {80.0, 10_000_000 / 98_304} <= sizes
    assert [(r.policy, r.capacity_tokens) for r in result.instances if r.capacity_tokens is None] == [
        ("round_robin", None), ("session_affinity", None), ("cache_aware", None),
    ]  # fmt: skip
    paths = write_reuse(result, tmp_path / "out")
    assert [path.name for path in paths] == [
        "reuse.json", "cache-size.png", "cache-size.svg", "instances.png", "instances.svg",
    ]  # fmt: skip
    told = json.loads(paths[0].read_text())
    assert told["reuse"]["hit_ratio"] == result.reuse.hit_ratio
    assert told["basis"].startswith("computed from the trace's block ids")


def test_a_sampled_curve_is_drawn_with_its_error_and_no_policy_is_no_plot(conversations: Path, tmp_path: Path) -> None:
    result = trace_reuse(opened(conversations), ReuseRequest(rate=0.5, policies=()))
    assert result.curve.rate == 0.5
    assert all(point.standard_error is not None for point in result.curve.points)
    names = [path.name for path in write_reuse(result, tmp_path)]
    assert names == ["reuse.json", "cache-size.png", "cache-size.svg"]


def test_sessions_are_derived_where_there_are_none_and_that_is_said(shared: Path) -> None:
    trace = open_trace(shared / "data/mooncake/conversation_trace.jsonl")
    result = trace_reuse(trace, ReuseRequest(policies=()))
    assert result.sessions == "derived from block ids by the rule 'chain'"
    assert round(result.reuse.hit_ratio, 4) == 0.3736
    without = trace_reuse(trace, ReuseRequest(policies=(), sessions="none"))
    assert (without.sessions, without.reuse.intra_session_ratio) == ("none", None)


def test_everything_wrong_with_the_request_is_told(conversations: Path) -> None:
    with pytest.raises(SpecError) as raised:
        trace_reuse(opened(conversations), ReuseRequest(capacities=("28GiB", "many", "0")))
    assert raised.value.problems == (
        "command line: --capacity '28GiB': a size in bytes needs --model; or give tokens, such as 500000",
        "command line: --capacity 'many': a size in bytes needs --model; or give tokens, such as 500000",
        "command line: --capacity 0; allowed: above 0",
    )
    with pytest.raises(SpecError) as raised:
        trace_reuse(opened(conversations), ReuseRequest(instances=(0,), rate=2.0))
    assert len(raised.value.problems) == 2
    with pytest.raises(SpecError, match="--router-sees 'all' is not known; allowed: ids, conversations"):
        trace_reuse(opened(conversations), ReuseRequest(sees="all"))
    with pytest.raises(SpecError, match="--sessions 'guess' is not known"):
        trace_reuse(opened(conversations), ReuseRequest(sessions="guess"))


def test_a_trace_without_times_says_that_no_policy_saw_load(shared: Path) -> None:
    trace = open_trace(shared / "data/chat/sharegpt_conv_128.json")
    result = trace_reuse(trace, ReuseRequest(instances=(4,)))
    assert UNTIMED_NOTE in result.notes
    shares = {r.policy: r.share_of_possible_ratio for r in result.instances}
    assert shares["session_affinity"] == shares["cache_aware"] == pytest.approx(1.0)
    assert 0.0 < (shares["round_robin"] or 0.0) < 0.9


def test_a_trace_without_ids_is_refused_with_the_reason(shared: Path) -> None:
    with pytest.raises(SpecError, match="azure has no block ids"):
        trace_reuse(open_trace(shared / "data/azure/AzureLLMInferenceTrace_code.csv"), ReuseRequest())


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_sample_is_a_trace_again_with_whole_sessions(conversations: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"sample.{ending}"
    result = sample_trace(opened(conversations), out, SampleTarget(n_requests=10, seed=3))
    rows = list(open_trace(out).rows())
    assert (result.sample.n_requests, result.sample.n_sessions, len(rows)) == (10, 2, 10)
    originals = {row.row: row for row in opened(conversations).rows()}
    start_s = originals[rows[0].row].arrival_s
    assert start_s is not None
    for row in rows:
        before = originals[row.row]
        assert list(row.block_ids) == list(before.block_ids)
        assert row.arrival_s is not None
        assert before.arrival_s is not None
        assert row.arrival_s == pytest.approx(before.arrival_s - start_s)
        assert (row.session_id, row.turn) == (before.session_id, before.turn)
    assert any("a sample of whole sessions" in note for note in open_trace(out).notes)
    again = trace_reuse(open_trace(out), ReuseRequest(policies=()))
    assert again.reuse.hit_ratio == pytest.approx(result.sample.hit_ratio)


def test_the_roofline_of_the_study_stands_beside_its_figures() -> None:
    told = json.loads(run_roofline(RooflineRequest()).to_json())
    assert told["published"]["intensities"] == [40758, 20610, 8544, 4549, 1.5]
    assert [row["bound"] for row in told["roofline"]["rows"]] == ["compute"] * 4 + ["memory"] * 3
    assert run_roofline(RooflineRequest(gpu="h100-80g")).published is None


def test_the_published_figures_are_those_of_the_study(shared: Path) -> None:
    text = (shared / "seeds/agentic_pd_study.md").read_text()
    for figure in ("40,758", "20,610", "8,544", "4,549"):
        assert figure in text


def test_unknown_profiles_are_both_named() -> None:
    with pytest.raises(SpecError) as raised:
        run_roofline(RooflineRequest(model="gpt", gpu="tpu"))
    assert [problem.split("; ")[0].split(", did")[0] for problem in raised.value.problems] == [
        "command line: --model: unknown model 'gpt'", "command line: --gpu: unknown gpu 'tpu'",
    ]  # fmt: skip


def test_the_verbs_print_tables_json_and_where_files_are(conversations: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    trace = [str(conversations), "--block-tokens", "8"]
    told = run(app, ["reuse", *trace, "--instances", "2", "--out", str(tmp_path / "r")]).output
    assert "full-block hit ratio" in told
    assert "session_affinity" in told
    assert f"wrote {tmp_path / 'r' / 'reuse.json'}" in told
    assert json.loads(run(app, ["reuse", *trace, "--policies", "", "--json"]).stdout)["instances"] == []
    told = run(app, ["sample", *trace, "--out", str(tmp_path / "s.jsonl"), "--requests", "10"]).output
    assert "intra_session_ratio" in told
    assert "40,758" in run(app, ["roofline"]).output
    result = run(app, ["roofline", "--json", "--out", str(tmp_path / "o")])
    assert json.loads(result.stdout)["roofline"]["ridge"] == 37
    assert (tmp_path / "o" / "roofline.svg").exists()


def test_numbers_of_the_command_line() -> None:
    assert numbers("0, 0.5", "--reuse") == (0.0, 0.5)
    assert whole_numbers("2,4", "--instances") == (2, 4)
    assert seconds_of("10min", "--duration") == 600.0
    assert seconds_of(None, "--duration") is None
    with pytest.raises(SpecError, match=r"--reuse: 'x' is no number\n.*'y'"):
        numbers("1,x,y", "--reuse")
    with pytest.raises(SpecError, match=r"2.5 is no whole number"):
        whole_numbers("2.5", "--instances")
    with pytest.raises(SpecError, match=r"--start: .*allowed: a duration such as 30s"):
        seconds_of("soon", "--start")


def test_a_trace_of_lengths_alone_is_sampled_request_by_request(shared: Path, tmp_path: Path) -> None:
    azure = open_trace(shared / "data" / "azure" / "AzureLLMInferenceTrace_code.csv")
    result = sample_trace(azure, tmp_path / "part.jsonl", SampleTarget(n_requests=500, seed=1))
    assert result.sample.n_requests == result.sample.n_sessions == 500
    assert result.sample.hit_ratio is None
    assert result.original.prompt_mean_tokens == pytest.approx(2047.8, abs=0.05)
    assert any("drawn by itself" in note for note in result.notes)
    assert sum(1 for _ in open_trace(result.path).rows()) == 500


def test_a_sample_of_text_says_that_its_token_counts_are_estimated(shared: Path, tmp_path: Path) -> None:
    chat = open_trace(shared / "data" / "chat" / "dialogstudio_ShareGPT_original_example.json")
    result = sample_trace(chat, tmp_path / "part.jsonl", SampleTarget(n_requests=5))
    assert "estimated" in result.basis
    assert "estimated" in json.loads(result.to_json())["basis"]
    assert any("not from a tokenizer" in note for note in result.notes)


def test_a_trace_is_never_written_over(conversations: Path) -> None:
    before = conversations.read_bytes()
    for write in (
        lambda: sample_trace(opened(conversations), conversations, SampleTarget(n_requests=5)),
        lambda: convert_trace(opened(conversations), conversations),
        lambda: anonymise_trace(opened(conversations), conversations.parent / "." / conversations.name, b"s" * 16),
    ):
        with pytest.raises(SpecError, match="is the trace itself"):
            write()
    assert conversations.read_bytes() == before
