"""``ppd-bench trace`` as a user meets it: tables, JSON, files, messages and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppd_bench.cli.errors import guarded
from ppd_bench.cli.trace import trace_app


def trace(*arguments: object) -> int:
    """The exit code; output goes to where pytest looks for it."""
    return guarded(lambda: trace_app([str(a) for a in arguments], standalone_mode=False))


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 500 * i, "input_length": 1030 + i, "output_length": 9, "hash_ids": [1, 2, 100 + i]}
        for i in range(30)
    ]
    path.write_text("\n".join([*map(json.dumps, rows), '{"timestamp": 0}']))
    return path


def test_describe_prints_tables_and_what_they_rest_on(mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("describe", mooncake) == 0
    out = capsys.readouterr().out
    assert "31 rows read: 30 kept, 1 dropped" in out
    assert "note: 1 x dropped: input_length is missing (first at" in out
    assert "token counts are recorded" in out
    assert "sessions (derived)" in out
    assert "After an infinite prefix cache" in out
    assert "prompt tokens" in out


def test_describe_as_json_is_json_alone(mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("describe", mooncake, "--json", "--out", tmp_path / "plots") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["stats"]["n_requests"] == 30
    assert captured.err.count("wrote ") == 3
    assert json.loads((tmp_path / "plots/describe.json").read_text()) == json.loads(captured.out)


def test_convert_and_anonymise_write_traces_that_describe_alike(
    mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace("convert", mooncake, tmp_path / "a.parquet") == 0
    assert trace("anonymise", tmp_path / "a.parquet", tmp_path / "b.jsonl") == 0
    out = capsys.readouterr().out
    assert f"wrote {tmp_path / 'b.jsonl'} (30 rows)".replace("\n", "") in out.replace("\n", "")
    figures = []
    for name in ("a.parquet", "b.jsonl"):
        assert trace("describe", tmp_path / name, "--json") == 0
        figures.append(json.loads(capsys.readouterr().out)["stats"])
    assert figures[0] == figures[1]


def test_a_random_salt_differs_every_time_and_a_given_one_does_not(mooncake: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert trace("anonymise", mooncake, tmp_path / f"{name}.jsonl") == 0
        assert trace("anonymise", mooncake, tmp_path / f"{name}-salted.jsonl", "--salt", "0123456789abcdef") == 0
    assert (tmp_path / "a.jsonl").read_bytes() != (tmp_path / "b.jsonl").read_bytes()
    assert (tmp_path / "a-salted.jsonl").read_bytes() == (tmp_path / "b-salted.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["describe", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["describe", "T", "--format", "csv"], "unknown trace format 'csv'"),
        (["describe", "T", "--block-tokens", "16"], "what fits: --block-tokens 512 --tail ceil"),
        (["describe", "T", "--time-unit", "weeks"], "--time-unit 'weeks' is not known"),
        (["describe", "T", "--tokenizer", "x"], "--tokenizer means nothing for the format mooncake"),
        (["describe", "T", "--sessions", "guess"], "--sessions 'guess' is not known"),
        (["convert", "T", "out.csv"], "allowed: .jsonl, .parquet"),
        (["anonymise", "T", "out.jsonl", "--salt", "short"], "16 to 64 bytes"),
    ],
)
def test_every_mistake_gets_a_message_and_exit_code_2(
    arguments: list[str], told: str, mooncake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(*(mooncake if a == "T" else a for a in arguments)) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mooncake/synthetic_trace.jsonl", "agentic_code", "azure", "chat/sharegpt_conv_128.json",
        "chat/dialogstudio_ShareGPT_original_example.json", "chat/fastchat_dummy_conversation.json",
        "chat/mt_bench_question.jsonl", "agent_sessions/kernel_sessions.replay.jsonl", "agent_sessions/miniswe",
    ],
)  # fmt: skip
def test_every_public_trace_is_described(name: str, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("describe", shared / "data" / name) == 0
    out = capsys.readouterr().out
    assert "0 dropped" in out
    assert ("token counts are estimated" in out) == name.startswith(("chat", "agent_sessions"))
